"""Forecasts: what is measured early or late in a run, its limit, and how well the small sizes tell the largest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.analysis.curves import points
from lab.analysis.forecast import fits
from lab.analysis.forecast.fits import Bend, Line, Threshold, calibrate
from lab.analysis.sensitivity import judge
from lab.core.errors import RequestError
from lab.records.store import Records


class ForecastQuantity(NamedTuple):
    """One number per run whose growth with size is fitted.

    Trouble, called ``trouble``, lies above its limit for ``sign`` 1 and below it for -1; ``look`` is the part of the
    run after which it is known.
    """

    name: str
    trouble: str
    probe: str
    where: str
    look: float
    sign: int
    measure: Callable[[Records], pd.Series]


# A tenth into a run: earlier the learning rates do not differ yet, later the unstable ones have saturated.
LOOK = 0.1
LOGIT = ForecastQuantity(
    "Max attention logit of block 0, a tenth into the run",
    "unstable",
    "attention_logit_max",
    "block0",
    LOOK,
    1,
    lambda records: probe_values.near(records, "attention_logit_max", "block0", LOOK),
)
GRADIENT = ForecastQuantity(
    "Gradient RMS of block0.mlp_up, mean of the last tenth of the run",
    "meets epsilon",
    "grad_rms",
    "block0.mlp_up",
    1.0,
    -1,
    lambda records: probe_values.late(records, "grad_rms", "block0.mlp_up"),
)


class Score(NamedTuple):
    """Lines fitted without the largest size, and what became of them there.

    ``table`` has a row per learning rate: ``error`` (log10, predicted minus the geometric mean over seeds), ``inside``
    of ``runs`` in the interval, ``right`` of ``judged`` runs on the predicted side of the limit.
    """

    size: int
    limit: float
    lines: dict[float, Line]
    table: pd.DataFrame


class Forecast(NamedTuple):
    """One arm's growth with size.

    ``runs`` has the columns of ``judge`` and ``value`` (NaN where there is none) and ``beyond`` (in trouble);
    ``lines`` and ``bends`` are by learning rate, over all sizes; ``threshold`` is None where nothing was to calibrate,
    and ``limit`` then NaN; ``borrowed`` says that it comes from the runs of all arms; ``score`` is None with two sizes.
    """

    arm: str
    runs: pd.DataFrame
    limit: float
    threshold: Threshold | None
    borrowed: bool
    lines: dict[float, Line]
    bends: dict[float, Bend | None]
    score: Score | None

    @property
    def sizes(self) -> list[int]:
        """From small to large."""
        return sorted(self.runs["size"].unique())

    def way(self, lr: float) -> int:
        """Which way growth bends away from the line, as ``Bend.sign``; 0 where it cannot be told."""
        bend = self.bends[lr]
        return bend.sign if bend else 0


def observe(records: Records, quantity: ForecastQuantity) -> pd.DataFrame:
    """``judge(points)`` with ``value``: NaN where it is no positive number, or the run had diverged by then.

    Raises:
        RequestError: no run ended, none recorded it, or none has a value.
    """
    runs = judge(points(records.runs))
    if runs.empty:
        raise RequestError("nothing to fit: no run ended")
    heard = quantity.measure(records)
    if heard.empty:
        raise RequestError(f"nothing to fit: no run recorded {quantity.probe} of {quantity.where}")
    value = runs["id"].map(heard).to_numpy(dtype=float)
    about = records.runs.set_index("id").loc[runs["id"]]
    lost = about["diverged_at"].to_numpy(dtype=float, na_value=math.nan) <= quantity.look * about["steps"].to_numpy()
    usable = np.isfinite(value) & (value > 0) & ~lost
    if not usable.any():
        raise RequestError(f"nothing to fit: {quantity.probe} of {quantity.where} is no positive number in any run")
    return runs.assign(value=np.where(usable, value, np.nan), eps=about["optimizer.eps"].to_numpy(dtype=float))


def make_forecasts(records: Records, quantity: ForecastQuantity) -> list[Forecast]:
    """A forecast for every arm with two sizes or more.

    Raises:
        RequestError: nothing was recorded, or no arm has two sizes.
    """
    runs = observe(records, quantity)
    largest = runs.groupby("arm")["size"].transform("max")
    arms = [arm for arm in runs["arm"].unique() if runs.loc[runs["arm"] == arm, "size"].nunique() > 1]
    if not arms:
        fits.check_sizes(runs["size"][:1])
    return [_forecast(runs, runs[runs["size"] < largest], arm, quantity) for arm in arms]


def _forecast(runs: pd.DataFrame, small: pd.DataFrame, arm: str, quantity: ForecastQuantity) -> Forecast:
    own = runs[runs["arm"] == arm]
    limit, threshold, borrowed = _limit(runs, arm, quantity)
    bends = {lr: fits.bend(some["size"], some["value"]) for lr, some in _by_lr(own).items()}
    own = own.assign(beyond=_trouble(own, limit, quantity))
    score = None
    if own["size"].nunique() > 2:
        before = _limit(small, arm, quantity)[0]
        score = _score(own, small[small["arm"] == arm], before, quantity)
    return Forecast(arm, own, limit, threshold, borrowed, _lines(own), bends, score)


def _limit(runs: pd.DataFrame, arm: str, quantity: ForecastQuantity) -> tuple[float, Threshold | None, bool]:
    """Adam's epsilon, or the threshold: of the arm's own runs, and where these are of one kind, of all runs."""
    own = runs[runs["arm"] == arm]
    if quantity.sign < 0:
        return float(own["eps"].iloc[0]), None, False
    mine, all_arms = (calibrate(some["value"], some["fate"] != "") for some in (own, runs))
    found = mine or all_arms
    return found.value if found else math.nan, found, mine is None and found is not None


def _trouble(runs: pd.DataFrame, limit: float, quantity: ForecastQuantity) -> pd.Series:
    return runs["fate"] != "" if quantity.sign > 0 else runs["value"] <= limit


def _by_lr(runs: pd.DataFrame) -> dict[float, pd.DataFrame]:
    return {lr: runs[runs["lr"] == lr] for lr in sorted(runs["lr"].unique().tolist())}


def _lines(runs: pd.DataFrame) -> dict[float, Line]:
    by_lr = _by_lr(runs[runs["value"].notna()])
    return {lr: fits.fit(some["size"], some["value"]) for lr, some in by_lr.items() if some["size"].nunique() > 1}


def _score(runs: pd.DataFrame, small: pd.DataFrame, limit: float, quantity: ForecastQuantity) -> Score:
    size = int(runs["size"].max())
    lines, rows = _lines(small), {}
    for lr, some in _by_lr(runs[runs["size"] == size]).items():
        if lr not in lines:
            continue
        middle, low, high = map(float, lines[lr].predict(size))
        seen = np.log10(some["value"].dropna())
        judged = some if quantity.sign > 0 else some[some["value"].notna()]
        beyond = quantity.sign * (middle - math.log10(limit)) >= 0 if limit > 0 else False
        rows[lr] = {
            "error": middle - seen.mean(),
            "inside": int(seen.between(low, high).sum()),
            "runs": len(seen) if math.isfinite(low) else 0,
            "right": int((judged["beyond"] == beyond).sum()) if not math.isnan(limit) else 0,
            "judged": len(judged) if not math.isnan(limit) else 0,
        }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["error", "inside", "runs", "right", "judged"])
    return Score(size, limit, lines, table)
