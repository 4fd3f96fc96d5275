"""Interventions: changes of a model, and terms of its loss; the presence of its config key switches one on."""
