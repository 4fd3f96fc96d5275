"""Sources of a mixture of texts, ranked by the gradient-norm spikes of the batches that hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lab.analysis.events.detectors import gradient_spikes
from lab.analysis.events.scores import PER_STEPS
from lab.core.detectors import Numbers
from lab.records.store import Records
from lab.studies.spikes.own_spikes import START

WITHOUT, ALL = "data.without", "none"
WHOLE = "whole mixture"  # what runs are called from which nothing was left out
GRADIENT, ROWS = "grad_norm", "source_rows"
COUNTS = ("spikes", "batches", "norm")  # columns of each source


def source_traits(records: Records) -> pd.DataFrame:
    """Spikes of the gradient norm of each run that recorded the sources of its batches, indexed by the run's id.

    A spike is that of the alarm: a norm above five times the running mean; those within 20 steps are one.  All counts
    are from step 500 on.

    Returns:
        Columns ``rate``, spikes in 1000 steps, and for each source ``NAME.spikes``, those that begin in a batch with a
        row of it, ``NAME.batches``, the batches with one, and ``NAME.norm``, the sum over these of the log of the norm.
    """
    rows = {}
    metrics = records.metrics[records.metrics["probe"].isin([GRADIENT, ROWS])]
    for run, of_run in metrics.groupby("id", observed=True):
        is_norm = of_run["probe"] == GRADIENT
        norms = of_run[is_norm].set_index("step")["value"].sort_index()
        held = of_run[~is_norm].pivot(index="step", columns="where", values="value").reindex(norms.index) > 0
        if len(held.columns) and len(norms):
            rows[str(run)] = _traits(norms, held)
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def _traits(norms: pd.Series, held: pd.DataFrame) -> dict[str, float]:
    norm_n: Numbers = norms.to_numpy(dtype=float)
    step_n = norms.index.to_numpy()
    begins_n = np.array([span.first for span in gradient_spikes(norm_n)], dtype=int)
    begins_n = begins_n[step_n[begins_n] >= START]
    counted_n = (step_n >= START) & np.isfinite(norm_n) & (norm_n > 0)
    traits = {"rate": PER_STEPS * len(begins_n) / max(1, int((step_n >= START).sum()))}
    for name in held:
        is_held_n = held[name].to_numpy()
        traits[f"{name}.spikes"] = float(is_held_n[begins_n].sum())
        traits[f"{name}.batches"] = float((is_held_n & (step_n >= START)).sum())
        traits[f"{name}.norm"] = float(np.log(norm_n[is_held_n & counted_n]).sum())
    return traits


def ranked(counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of sources, the one that causes most spikes first: by spikes per batch that holds the source.

    Of sources with equally many, the one whose batches have the larger gradient norm comes first, in the mean of its
    log.

    Args:
        counts: of each source ``spikes``, ``batches`` and ``norm``, the sums of those of ``source_traits`` over runs.
    """

    def score(name: str) -> tuple[float, float]:
        of_source = counts[name]
        batches = max(1.0, of_source["batches"])
        return of_source["spikes"] / batches, of_source["norm"] / batches

    return sorted(counts, key=score, reverse=True)
