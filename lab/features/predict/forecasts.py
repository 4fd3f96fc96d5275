"""Make forecasts: measure a quantity per run, fit it over sizes, find its limit, and score it on the largest size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

import lab.analysis.laws.fits as fits
import lab.analysis.probe_values as probe_values
from lab.analysis.curves import EPSILON, points
from lab.analysis.laws.fits import Crossing, Line, Threshold, calibrate
from lab.analysis.runaway import read_runaways
from lab.analysis.sensitivity import judge
from lab.core.errors import RequestError
from lab.records.store import Records


class ForecastQuantity(NamedTuple):
    """A number per run whose growth with size is fitted.

    Attributes:
        name: the name of the quantity for readers.
        trouble: what happens beyond the limit, for readers.
        probe: the probe that measures it.
        where: the part of the model where the probe measures.
        look: the share of the run after which it is measured, 1 at the end.
        sign: 1 if trouble lies above the limit, -1 if below it.
        measure: makes one number per run of the records, indexed by run id.
        limit: the limit, from the runs of an arm; None where it is calibrated on which runs are unstable.
        limit_means: what the limit is, for readers.
    """

    name: str
    trouble: str
    probe: str
    where: str
    look: float
    sign: int
    measure: Callable[[Records], pd.Series]
    limit: Callable[[pd.DataFrame], float] | None = None
    limit_means: str = ""


# A tenth into a run: earlier, learning rates do not differ yet; later, the logits of unstable runs saturate.
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
    limit=lambda runs: float(runs["eps"].iloc[0]),
    limit_means="Adam's epsilon",
)
RULER = read_runaways()["output_logits"]
OUTPUT_LOGIT = ForecastQuantity(
    "Largest output logit |log Z| of the run",
    "costly",
    RULER.probe,
    "any token",
    1.0,
    1,
    RULER.of_runs,
    limit=lambda runs: RULER.level,
    limit_means=RULER.means,
)
QUANTITIES = (LOGIT, GRADIENT, OUTPUT_LOGIT)


class ForecastScore(NamedTuple):
    """The score of lines fitted without the largest size, on the runs of that size.

    Attributes:
        size: the largest size (parameters), held out.
        limit: the limit calibrated on the smaller sizes.
        lines: the lines fitted to the smaller sizes, by learning rate.
        table: a row per learning rate. ``error`` is log10 of the prediction minus that of the geometric mean over
            seeds. ``inside`` of ``runs`` lie in the interval, and ``right`` of ``judged`` runs on the predicted side of
            the limit.
    """

    size: int
    limit: float
    lines: dict[float, Line]
    table: pd.DataFrame


class Forecast(NamedTuple):
    """The growth of a quantity with size in one arm.

    Attributes:
        quantity: the quantity.
        arm: the label of the arm.
        runs: the runs as ``observe`` makes them, with ``beyond``: whether a run lies beyond the limit.
        limit: that of the quantity, or the threshold; NaN if none could be calibrated.
        threshold: None if the quantity has a limit, or if none could be calibrated.
        borrowed: whether the threshold was calibrated on the runs of all arms.
        lines: the lines fitted to all sizes, by learning rate.
        bends: by learning rate the sign of the bend of all sizes, see ``bend_sign``.
        score: the score on the largest size; None with two sizes.
    """

    quantity: ForecastQuantity
    arm: str
    runs: pd.DataFrame
    limit: float
    threshold: Threshold | None
    borrowed: bool
    lines: dict[float, Line]
    bends: dict[float, int]
    score: ForecastScore | None

    @property
    def sizes(self) -> list[int]:
        """Sizes (parameters), in rising order."""
        return sorted(self.runs["size"].unique())

    @property
    def scored(self) -> list[float]:
        """Learning rates whose line was compared with runs of the largest size; forecasts are quoted for these only."""
        if self.score is None:
            return []
        table = self.score.table
        return table.index[table["error"].notna() | (table["judged"] > 0)].tolist()

    def fails_from_size(self, lr: float) -> Crossing | None:
        """The size from which runs of a learning rate lie beyond the limit; None if nothing foretells it."""
        if lr not in self.scored or math.isnan(self.limit):
            return None
        return fits.size_beyond(self.lines[lr], self.limit, self.quantity.sign, self.sizes[0], self.sizes[-1])

    def fails_from_lr(self, size: float) -> Crossing:
        """The learning rate from which runs of a size lie beyond the limit."""
        lines = {lr: self.lines[lr] for lr in self.scored}
        return fits.lr_beyond(lines, self.limit, self.quantity.sign, size)


def observe(records: Records, quantity: ForecastQuantity) -> pd.DataFrame:
    """Measure a quantity: ``judge(points)`` with ``value`` and ``eps``.

    The value is NaN if it is not a positive number, or if the run diverged before it was measured.

    Raises:
        RequestError: no run ended, none recorded the quantity, or none has a value.
    """
    runs = judge(points(records.runs))
    if runs.empty:
        raise RequestError("nothing to fit: no run ended")
    values = quantity.measure(records)
    if values.empty:
        raise RequestError(f"nothing to fit: no run recorded {quantity.probe} of {quantity.where}")
    value = runs["id"].map(values).to_numpy(dtype=float)
    cards = records.runs.set_index("id").loc[runs["id"]]
    diverged_at = cards["diverged_at"].to_numpy(dtype=float, na_value=math.nan)
    updates = probe_values.updates(records.runs).loc[runs["id"]].to_numpy(dtype=float)
    usable = np.isfinite(value) & (value > 0) & ~(diverged_at <= quantity.look * updates)
    if not usable.any():
        raise RequestError(f"nothing to fit: {quantity.probe} of {quantity.where} is no positive number in any run")
    return runs.assign(value=np.where(usable, value, np.nan), eps=cards[EPSILON].to_numpy(dtype=float))


def every_forecast(records: Records) -> tuple[list[Forecast], dict[str, RequestError]]:
    """The forecasts of every quantity, and by its name why there is none of another.

    Raises:
        RequestError: there is none at all.
    """
    made, refusals = list[Forecast](), dict[str, RequestError]()
    for quantity in QUANTITIES:
        try:
            made += make_forecasts(records, quantity)
        except RequestError as refusal:
            refusals[quantity.name] = refusal
    if not made:
        raise refusals[LOGIT.name]
    return made, refusals


def make_forecasts(records: Records, quantity: ForecastQuantity) -> list[Forecast]:
    """Make a forecast for every arm with two sizes or more.

    Raises:
        RequestError: the quantity was not recorded, or no arm has two sizes.
    """
    runs = observe(records, quantity)
    largest = runs.groupby("arm")["size"].transform("max")
    arms = [arm for arm in runs["arm"].unique() if runs.loc[runs["arm"] == arm, "size"].nunique() > 1]
    if not arms:
        fits.check_sizes(runs["size"][:1])
    return [_forecast(runs, runs[runs["size"] < largest], arm, quantity) for arm in arms]


def _forecast(runs: pd.DataFrame, small: pd.DataFrame, arm: str, quantity: ForecastQuantity) -> Forecast:
    own_runs = runs[runs["arm"] == arm]
    limit, threshold, borrowed = _limit(runs, arm, quantity)
    bends = {lr: fits.bend_sign(of_lr["size"], of_lr["value"]) for lr, of_lr in _by_lr(own_runs).items()}
    is_beyond = quantity.sign * (own_runs["value"] - limit) >= 0 if quantity.limit else own_runs["outcome"] != ""
    own_runs = own_runs.assign(beyond=is_beyond)
    score = None
    if own_runs["size"].nunique() > 2:
        small_limit = _limit(small, arm, quantity)[0]
        score = _score(own_runs, small[small["arm"] == arm], small_limit, quantity)
    return Forecast(quantity, arm, own_runs, limit, threshold, borrowed, _lines(own_runs), bends, score)


def _limit(runs: pd.DataFrame, arm: str, quantity: ForecastQuantity) -> tuple[float, Threshold | None, bool]:
    """The limit, its threshold, and whether that is borrowed from other arms.

    A limit that the quantity does not have by itself is the threshold of the arm's own runs, or else of the runs of all
    arms.
    """
    own_runs = runs[runs["arm"] == arm]
    if quantity.limit:
        return quantity.limit(own_runs), None, False
    own, common = (calibrate(group["value"], group["outcome"] != "") for group in (own_runs, runs))
    threshold = own or common
    return threshold.value if threshold else math.nan, threshold, own is None and threshold is not None


def _by_lr(runs: pd.DataFrame) -> dict[float, pd.DataFrame]:
    return {lr: runs[runs["lr"] == lr] for lr in sorted(runs["lr"].unique().tolist())}


def _lines(runs: pd.DataFrame) -> dict[float, Line]:
    by_lr = _by_lr(runs[runs["value"].notna()])
    return {lr: fits.fit(group["size"], group["value"]) for lr, group in by_lr.items() if group["size"].nunique() > 1}


def _score(runs: pd.DataFrame, small: pd.DataFrame, limit: float, quantity: ForecastQuantity) -> ForecastScore:
    size = int(runs["size"].max())
    lines, rows = _lines(small), {}
    for lr, held_out in _by_lr(runs[runs["size"] == size]).items():
        if lr not in lines:
            continue
        middle, low, high = map(float, lines[lr].predict(size))
        measured = np.log10(held_out["value"].dropna())
        judged = held_out[held_out["value"].notna()] if quantity.limit else held_out
        beyond = quantity.sign * (middle - math.log10(limit)) >= 0 if limit > 0 else False
        rows[lr] = {
            "error": middle - measured.mean(),
            "inside": int(measured.between(low, high).sum()),
            "runs": len(measured) if math.isfinite(low) else 0,
            "right": int((judged["beyond"] == beyond).sum()) if not math.isnan(limit) else 0,
            "judged": len(judged) if not math.isnan(limit) else 0,
        }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["error", "inside", "runs", "right", "judged"])
    return ForecastScore(size, limit, lines, table)
