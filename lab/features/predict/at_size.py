"""What the forecasts of a folder say at one size, and at one learning rate: the values there, and what lies between."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import lab.analysis.laws.fits as fits
import lab.analysis.laws.optimum as optimum
import lab.features.predict.sizes as sizes
from lab.analysis.curves import named_axis, points
from lab.analysis.laws.fits import Crossing, Line, Prediction, crossing_text, with_ends
from lab.analysis.sensitivity import judge
from lab.analysis.text import count, few, format_value, listed
from lab.core.errors import RequestError
from lab.features.predict.answer import said_of_experts
from lab.features.predict.forecasts import LOGIT, Forecast, every_forecast
from lab.features.predict.limits import read_limits
from lab.records.imported import is_imported
from lab.records.store import Records
from lab.report.answer import Answer, Section

UNKNOWN = Crossing(math.nan, math.nan, math.nan)


class AtSize(NamedTuple):
    """What a forecast says at a size.

    Attributes:
        quantity: its name for readers.
        arm: the label of the arm.
        largest: the largest size that ran (parameters).
        n: the runs that were fitted.
        value: at the size and the learning rate, with the ends of its 95 % interval for one new run; NaN where the
            learning rate is beyond those that ran.
        limit: beyond which runs fail; NaN if none is known.
        decades_left: of the value up to the limit, with the interval; negative beyond it.
        fails_from_lr: the learning rate from which runs of the size lie beyond the limit.
        fails_from_size: the size from which runs of the learning rate lie beyond it.
        lrs: the lowest and the highest learning rate that ran.
    """

    quantity: str
    arm: str
    largest: float
    n: int
    value: Crossing
    limit: float = math.nan
    decades_left: Crossing = UNKNOWN
    fails_from_lr: Crossing = UNKNOWN
    fails_from_size: Crossing = UNKNOWN
    lrs: tuple[float, float] = (math.nan, math.nan)


def forecasts_at(records: Records, size: float, lr: float | None) -> list[AtSize]:
    """What the forecasts of records say at a size (parameters), and at a learning rate if one is given.

    Args:
        records: of a results folder with three sizes or more, so that the forecasts are scored.
        size: the size.
        lr: the learning rate.

    Raises:
        RequestError: there is no forecast that could be scored.
    """
    if is_imported(records):
        if not (found := list(_of_table(records, size))):
            public = f"lab predict --params {count(size)} lr={format_value(lr or 1e-3)} qk_norm=no"
            raise RequestError(
                f"no forecast: no arm has a value at {sizes.FEWEST_SIZES} sizes, one of them to score it by; {public} "
                "says what public runs do at this size"
            )
    else:
        made, _ = every_forecast(records)
        found = [_of_forecast(forecast, size, lr) for forecast in made if forecast.scored]
    if not found:
        raise RequestError("no forecast: it takes probes of logits or gradients at three sizes or more")
    return found


def _of_table(records: Records, size: float) -> Iterator[AtSize]:
    for arm, (runs, line, *_) in sizes.forecasts_by_arm(sizes.best_lrs(records)).items():
        value = Crossing(*(10 ** float(end) for end in line.predict(size)))
        yield AtSize(sizes.BEST_LR, arm, float(runs["size"].max()), len(runs), value)
    ended = judge(points(records.runs))
    for failing, quantity in enumerate((sizes.BEST_LR, sizes.FAILING_LR)):
        for law in optimum.fit_laws(records, ended, failing=bool(failing)):
            if law.power and "size" in law.power.exponents:
                others = {name: centre for name, centre in law.power.centres.items() if name != "size"}
                at = listed(f"{name} {format_value(float(f'{centre:.3g}'))}" for name, centre in others.items())
                arm, value = f"{law.arm or 'by the law'}, at {at}", law.power.predict({**others, "size": size})
                yield AtSize(quantity, arm, float(ended["size"].max()), law.n, value)


def _of_forecast(forecast: Forecast, size: float, lr: float | None) -> AtSize:
    lines, sign = {rate: forecast.lines[rate] for rate in sorted(forecast.scored)}, forecast.quantity.sign
    lrs = min(lines), max(lines)
    fitted = int(forecast.runs.loc[forecast.runs["lr"].isin(list(lines)), "value"].notna().sum())
    found = AtSize(forecast.quantity.name, forecast.arm, float(forecast.sizes[-1]), fitted, UNKNOWN, lrs=lrs)
    is_limited, fails_from_size, ends = forecast.limit > 0, UNKNOWN, np.full(3, math.nan)
    if lr and lrs[0] <= lr <= lrs[1]:
        ends = _predicted(lines, size, lr)
        if is_limited:
            searched = np.geomspace(forecast.sizes[0], fits.FARTHEST, fits.SEARCHED_SIZES)
            fails_from_size = fits.beyond(searched, Prediction(*_predicted(lines, searched, lr)), forecast.limit, sign)
    found = found._replace(value=Crossing(*(10**ends).tolist()), fails_from_size=fails_from_size)
    if not is_limited:
        return found
    return found._replace(
        limit=forecast.limit,
        decades_left=Crossing(*(sign * (math.log10(forecast.limit) - ends)).tolist()),
        fails_from_lr=forecast.fails_from_lr(size),
    )


def _predicted(lines: dict[float, Line], size: float | np.ndarray, lr: float) -> np.ndarray:
    """log10 of the value and of its ends, linear in log10 between the learning rates of lines."""
    predictions = np.array([line.predict(size) for line in lines.values()])
    rates = np.log10([*lines])
    between: np.ndarray = np.apply_along_axis(lambda values: np.interp(math.log10(lr), rates, values), 0, predictions)
    return between


def predict_at(records: Records, size: float, lr: float | None) -> Answer:
    """What the forecasts of records say at a size, beside the learning rate from which public runs of this size fail.

    Arguments and errors are as in ``forecasts_at``.
    """
    found, axis = forecasts_at(records, size, lr), named_axis(records.runs)
    public = read_limits()["failing_lr"].at({"params": size})
    largest = max(row.largest for row in found)
    decades = math.log10(size / largest)
    place = f"{count(size)} parameters" + (f" and {axis.name} {format_value(lr)}" if lr else "")
    beyond = (
        f"an extrapolation {decades:.1f} decades beyond the largest size that ran, {count(largest)}. "
        f"{fits.ABOUT['not_covered']}"
        if decades > 0
        else "within the sizes that ran."
    )
    by_quantity: dict[str, list[dict[str, str]]] = {}
    for row in found:
        by_quantity.setdefault(row.quantity, []).append(_cells(row, lr))
    titles = {sizes.BEST_LR: f"Best {axis.name}"}
    tables = [Section(titles.get(name, name), [pd.DataFrame(rows)]) for name, rows in by_quantity.items()]
    of_public = (
        "Public runs of AdamW without qk-norm, with 20 tokens to a parameter, fail at this size from a learning rate "
        f"of {with_ends(*public, digits=3)}. The forecast above holds for the tokens and the steps of this folder."
        if any(map(_foretells_failing, found)) and not math.isnan(public.middle)
        else ""
    )
    has_logit_limit = any(row.quantity == LOGIT.name and not math.isnan(row.limit) for row in found)
    of_logits = fits.ABOUT["logit_limit"] if has_logit_limit else ""
    parts = [*tables, of_public, _outside(found, lr), of_logits, *said_of_experts(records)]
    return Answer(f"At {place}, {beyond}", parts, data=[_plain(row, size, lr, public) for row in found])


def _outside(found: list[AtSize], lr: float | None) -> str:
    """That the learning rate lies beyond those that ran; empty where it does not."""
    outside = [row for row in found if lr and not math.isnan(row.lrs[0]) and math.isnan(row.value.middle)]
    if not outside or not lr:
        return ""
    low, high = min(row.lrs[0] for row in outside), max(row.lrs[1] for row in outside)
    return (
        f"Learning rate {format_value(lr)} is beyond those that ran, {format_value(low)} to {format_value(high)}, so "
        f"no value is given for {listed(few(dict.fromkeys(row.arm for row in outside)))}; train some runs there."
    )


def _foretells_failing(row: AtSize) -> bool:
    """Whether it says from which learning rate runs of the size are unstable."""
    return row.quantity == sizes.FAILING_LR or (row.quantity == LOGIT.name and not math.isnan(row.fails_from_lr.middle))


def _cells(row: AtSize, lr: float | None) -> dict[str, str]:
    texts = {"arm": row.arm}
    if not math.isnan(row.value.middle):
        texts["value"] = with_ends(*row.value, digits=3)
    if not math.isnan(row.limit):
        texts["limit"] = f"{row.limit:.3g}"
        if not math.isnan(row.decades_left.middle):
            texts["decades left"] = f"{row.decades_left.middle:+.1f}"
        texts["fails from learning rate"] = crossing_text(row.fails_from_lr, "{:.2g}".format, *row.lrs)
        if not math.isnan(row.fails_from_size.middle):
            texts["this one fails from size"] = crossing_text(row.fails_from_size, count, 0, fits.FARTHEST)
    if row.quantity == sizes.BEST_LR and lr:
        texts["yours over it, decades"] = f"{math.log10(lr / row.value.middle):+.2f}"
    return texts


def _plain(row: AtSize, size: float, lr: float | None, public: Crossing) -> dict[str, Any]:
    return {
        "quantity": row.quantity,
        "arm": row.arm,
        "size": size,
        "lr": lr,
        "decades_beyond_largest": math.log10(size / row.largest),
        "is_extrapolated": size > row.largest,
        "n": row.n,
        "interval_level": fits.PREDICTION_LEVEL,
        "not_tested": [fits.ABOUT["not_covered"]],
        **row.value.plain,
        "limit": row.limit,
        "decades_left": row.decades_left.plain,
        "fails_from_lr": row.fails_from_lr.plain,
        "fails_from_size": row.fails_from_size.plain,
        "public_runs_fail_from_lr": (public if _foretells_failing(row) else UNKNOWN).plain,
    }
