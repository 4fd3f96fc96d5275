"""Interventions: changes of a model, and terms of its loss; importing this package registers all of them."""

import lab.interventions.attention
import lab.interventions.attention_weights
import lab.interventions.blocks
import lab.interventions.embedding
import lab.interventions.experts
import lab.interventions.fp16
import lab.interventions.loss_terms
import lab.interventions.ngpt
import lab.interventions.norms
import lab.interventions.weights  # noqa: F401
