"""Quantities that questions about low precision ask for."""

from __future__ import annotations

import pandas as pd

from lab.analysis.contrasts import Measure, by_rate, valued
from lab.analysis.sensitivity import Study
from lab.studies.precision.measures import spike_rate


def _spikes(study: Study) -> pd.DataFrame:
    return valued(study, spike_rate(study.records))


MEASURES = (Measure("Loss spikes in 1000 updates", "", _spikes, by_rate, "lower", asked_by=("loss_scale",)),)
