"""What a probe heard, as one number per run."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from lab.records.store import Records


def near(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """The value at the recorded step nearest to this part of the run (0 its start, 1 its end); indexed by run id."""
    heard = _heard(records, probe, where)
    heard["off"] = (heard["step"] - part * (heard["steps"] - 1)).abs()
    return heard.sort_values(["id", "off", "step"]).drop_duplicates("id").set_index("id")["value"]


def late(records: Records, probe: str, where: str, part: float = 0.1) -> pd.Series:
    """Mean over the recorded steps in the last part of the run, NaN where one of them is; indexed by run id.

    The paper takes the last 500 of 1e5 steps (Wortsman et al. 2023, sec. 3.4); so short runs record but a few.
    """
    heard = _heard(records, probe, where)
    heard = heard[heard["step"] >= (1 - part) * (heard["steps"] - 1)]
    return heard.groupby("id")["value"].agg(lambda values: float(np.mean(values.to_numpy())))


def peak(records: Records, probe: str, where: str) -> pd.Series:
    """The largest value over the recorded steps, what is no number left out; indexed by run id."""
    return _heard(records, probe, where).groupby("id")["value"].max()


def growth(records: Records, probe: str) -> pd.Series:
    """Log10 of the largest value anywhere over that at the first recorded step; indexed by run id.

    What is no number, or none above zero, is left out; infinity counts as the largest number of 32 bits.
    """
    heard = records.metrics[(records.metrics["probe"] == probe) & (records.metrics["value"] > 0)]
    heard = heard.assign(value=heard["value"].clip(upper=float(np.finfo(np.float32).max)))
    steps = heard.groupby(["id", "step"])["value"].max().groupby("id")
    return pd.Series(np.log10(steps.max() / steps.first()))


def places(records: Records, probe: str) -> list[str]:
    """Where it was heard, in the order of blocks (``block2`` before ``block10``)."""
    known = records.metrics.loc[records.metrics["probe"] == probe, "where"].unique()
    return sorted(known, key=lambda name: [int(bit) if bit.isdigit() else bit for bit in re.split(r"(\d+)", name)])


def _heard(records: Records, probe: str, where: str) -> pd.DataFrame:
    metrics = records.metrics
    some = metrics.loc[(metrics["probe"] == probe) & (metrics["where"] == where), ["id", "step", "value"]]
    return some.merge(records.runs[["id", "steps"]], on="id")
