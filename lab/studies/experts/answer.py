"""Quantities that questions about experts ask for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.contrasts import Measures, by_rate, valued
from lab.analysis.sensitivity import Study
from lab.studies.experts.measures import routing

MEASURES = Measures()


@MEASURES.add("Dead experts of a block", "", by_rate, "lower", asked_by=("experts_collapse", "experts_z_alone"))
def _dead(study: Study) -> pd.DataFrame:
    return valued(study, routing(study.records)["dead"])


@MEASURES.add("Variation of batch loads over experts", "", by_rate, "lower", asked_by=("experts_bias",))
def _batch_loads(study: Study) -> pd.DataFrame:
    return valued(study, routing(study.records)["batch_cv"])


@MEASURES.add("Largest router logit", "", by_rate, "lower", is_log=True, asked_by=("experts_router_z",))
def _logits(study: Study) -> pd.DataFrame:
    return valued(study, np.log10(routing(study.records)["logit"]))


@MEASURES.add("Share of routes that rounding to bf16 flips", "", by_rate, "lower", asked_by=("experts_bf16",))
def _flips(study: Study) -> pd.DataFrame:
    return valued(study, routing(study.records)["flips"])
