"""Functions that reduce the records of a probe to one number per run, or order them by step."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from lab.records.store import Records

TRAIN = "train_loss"


def updates(runs: pd.DataFrame) -> pd.Series:
    """Updates that each run made, by run id: its steps, or fewer if it chose its own batches; 1 if unknown."""
    by_id = runs[["id", "updates"]].set_index("id")["updates"]
    steps = runs["steps"].to_numpy() if "steps" in runs else np.ones(len(runs))
    return by_id.fillna(pd.Series(steps, by_id.index)).astype(int)


def near(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Value at the recorded step nearest to a share of the run (0 its start, 1 its end); indexed by run id."""
    values = recorded(records, probe, where)
    values["distance"] = (values["step"] - part * (values["updates"] - 1)).abs()
    return values.sort_values(["id", "distance", "step"]).drop_duplicates("id").set_index("id")["value"]


def late(records: Records, probe: str, where: str, part: float = 0.1) -> pd.Series:
    """Mean over the recorded steps in the last ``part`` of the run, NaN if one of them is; indexed by run id.

    The paper averages the last 500 of 1e5 steps (Wortsman et al. 2023, sec. 3.4). Runs here are short and record few
    steps, so the share is larger.
    """
    values = recorded(records, probe, where)
    values = values[values["step"] >= (1 - part) * (values["updates"] - 1)]
    value, indices = values["value"].to_numpy(), values.groupby("id").indices
    return pd.Series({run: float(np.mean(value[rows])) for run, rows in indices.items()}, name="value", dtype=float)


def peak(records: Records, probe: str, where: str) -> pd.Series:
    """Largest value over the recorded steps, without NaN; indexed by run id."""
    return recorded(records, probe, where).groupby("id")["value"].max()


def growth(records: Records, probe: str) -> pd.Series:
    """Log10 of the largest value anywhere in a run over that at its first recorded step; indexed by run id.

    NaN and values that are not positive are left out; infinity counts as the largest number of fp32.
    """
    largest = _positive(records, probe).groupby(["id", "step"])["value"].max().groupby("id")
    return pd.Series(np.log10(largest.max() / largest.first()))


def log_largest(records: Records, probe: str) -> pd.Series:
    """Log10 of the largest value anywhere in a run, with values left out as in ``growth``; indexed by run id."""
    return pd.Series(np.log10(_positive(records, probe).groupby("id")["value"].max()))


def log_last(records: Records, probe: str) -> pd.Series:
    """Log10 of the last recorded value, a mean over parts of the model, as in ``growth``; indexed by run id."""
    last = _positive(records, probe).sort_values("step").drop_duplicates(["id", "where"], keep="last")
    return pd.Series(np.log10(last.set_index("id")["value"]).groupby("id").mean())


def _positive(records: Records, probe: str) -> pd.DataFrame:
    values = records.metrics[(records.metrics["probe"] == probe) & (records.metrics["value"] > 0)]
    return values.assign(value=values["value"].clip(upper=float(np.finfo(np.float32).max)))


def places(records: Records, probe: str) -> list[str]:
    """Parts of the model where a probe was recorded, blocks in order (``block2`` before ``block10``)."""
    names = records.metrics.loc[records.metrics["probe"] == probe, "where"].unique()
    return sorted(names, key=lambda name: [int(bit) if bit.isdigit() else bit for bit in re.split(r"(\d+)", name)])


def recorded(records: Records, probe: str, where: str) -> pd.DataFrame:
    """The values of a probe in a part of the model: ``id``, ``step``, ``value`` and ``updates`` (that the run made)."""
    metrics = records.metrics
    values = metrics.loc[(metrics["probe"] == probe) & (metrics["where"] == where), ["id", "step", "value"]]
    return values.merge(updates(records.runs).reset_index(), on="id")
