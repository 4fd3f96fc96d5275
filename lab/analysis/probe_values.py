"""Functions that reduce the records of a probe to one number per run, or order them by step."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from lab.core.windows import Numbers
from lab.records.store import Records

TRAIN = "train_loss"

# The probe of the distance from initialization, and the part of the model where it measures learned positions.
DISTANCE, POSITIONS = "distance_from_init", "embedding.learned_positions"
FEW = 20  # measurements over which ``rise`` takes means


def updates(runs: pd.DataFrame) -> pd.Series:
    """Updates that each run made, by run id: its steps, or fewer if it chose its own batches; 1 if unknown."""
    by_id = runs[["id", "updates"]].set_index("id")["updates"]
    steps = runs["steps"].to_numpy() if "steps" in runs else np.ones(len(runs))
    return by_id.fillna(pd.Series(steps, by_id.index)).astype(int)


def training_losses(records: Records) -> dict[str, Numbers]:
    """Training losses ``[n]`` in the order of steps, by run id, of the runs that recorded them at every step."""
    runs = records.runs.reindex(columns=["id", "probes.every", "steps"])
    lengths = runs[runs["probes.every"] == 1].set_index("id")["steps"]
    metrics = records.metrics[(records.metrics["probe"] == TRAIN) & records.metrics["id"].isin(lengths.index)]
    ordered = metrics.sort_values("step", kind="stable")
    values = {str(run): rows.to_numpy(dtype=float) for run, rows in ordered.groupby("id", observed=True)["value"]}
    return {run: loss_n for run, loss_n in values.items() if len(loss_n) == lengths[run]}


def near(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Value at the recorded step nearest to a share of the run (0 its start, 1 its end); indexed by run id."""
    values = _recorded(records, probe, where)
    values["distance"] = (values["step"] - part * (values["updates"] - 1)).abs()
    return values.sort_values(["id", "distance", "step"]).drop_duplicates("id").set_index("id")["value"]


def late(records: Records, probe: str, where: str, part: float = 0.1) -> pd.Series:
    """Mean over the recorded steps in the last ``part`` of the run, NaN if one of them is; indexed by run id.

    The paper averages the last 500 of 1e5 steps (Wortsman et al. 2023, sec. 3.4). Runs here are short and record few
    steps, so the share is larger.
    """
    values = _recorded(records, probe, where)
    values = values[values["step"] >= (1 - part) * (values["updates"] - 1)]
    value, indices = values["value"].to_numpy(), values.groupby("id").indices
    return pd.Series({run: float(np.mean(value[rows])) for run, rows in indices.items()}, name="value", dtype=float)


def peak(records: Records, probe: str, where: str) -> pd.Series:
    """Largest value over the recorded steps, without NaN; indexed by run id."""
    return _recorded(records, probe, where).groupby("id")["value"].max()


def rise(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Mean of the last 20 values up to a share of the run, minus the lowest mean of 20 consecutive ones; by run id."""
    values = _recorded(records, probe, where).sort_values(["id", "step"], kind="stable")
    values = values[values["step"] < part * values["updates"]]
    return values.groupby("id")["value"].agg(_rise)


def _rise(values: pd.Series) -> float:
    means = values.rolling(FEW).mean()
    return float(means.iloc[-1] - means.min())


def late_excess(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Largest value after a share of the run minus the median after it; indexed by run id."""
    values = _recorded(records, probe, where)
    late_values = values[values["step"] >= part * values["updates"]].groupby("id")["value"]
    return late_values.max() - late_values.median()


def recovery(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Updates from a share of the run until a value is no higher than the last one before it; by run id.

    If none is, the number of all updates that are left.
    """
    values = _recorded(records, probe, where).sort_values(["id", "step"], kind="stable")
    start = part * values["updates"]
    is_late = values["step"] >= start
    before = values[~is_late].groupby("id")["value"].last()
    is_back = is_late & (values["value"] <= values["id"].map(before).astype(float))
    later = values[is_back].drop_duplicates("id").set_index("id")["step"]
    ends = values.drop_duplicates("id").set_index("id")["updates"]
    return later.reindex(ends.index).fillna(ends) - part * ends


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


def embedding_share(records: Records) -> pd.DataFrame:
    """Norm of the embedding's gradient over the norm of all other gradients; columns ``id``, ``step``, ``value``.

    The gradient of a tied embedding comes from both its uses. NaN if either norm is, or if no other weight has one.
    """
    runs = records.runs.set_index("id")
    tables = 2 - runs["intervention"].str.contains("tied_head", regex=False).astype(int)
    entries = (runs["parameters"] - runs["parameters_without_embeddings"]) / tables
    squares = _recorded(records, "grad_rms", "embedding")
    squares["value"] = squares["value"] ** 2 * squares["id"].map(entries).astype(float)
    whole = _recorded(records, "grad_norm_clipped", "")
    both = squares.merge(whole, on=["id", "step"], suffixes=("", "_whole"))
    rest = both["value_whole"] ** 2 - both["value"]
    return both[["id", "step"]].assign(value=np.sqrt(both["value"] / rest.where(rest > 0)))


def _positive(records: Records, probe: str) -> pd.DataFrame:
    values = records.metrics[(records.metrics["probe"] == probe) & (records.metrics["value"] > 0)]
    return values.assign(value=values["value"].clip(upper=float(np.finfo(np.float32).max)))


def places(records: Records, probe: str) -> list[str]:
    """Parts of the model where a probe was recorded, blocks in order (``block2`` before ``block10``)."""
    names = records.metrics.loc[records.metrics["probe"] == probe, "where"].unique()
    return sorted(names, key=lambda name: [int(bit) if bit.isdigit() else bit for bit in re.split(r"(\d+)", name)])


def _recorded(records: Records, probe: str, where: str) -> pd.DataFrame:
    """Columns ``id``, ``step``, ``value`` and ``updates`` (how many the run made)."""
    metrics = records.metrics
    values = metrics.loc[(metrics["probe"] == probe) & (metrics["where"] == where), ["id", "step", "value"]]
    return values.merge(updates(records.runs).reset_index(), on="id")
