"""Forecasts for runs imported from a table: best learning rate, LR sensitivity and eta_div of larger models.

Such a table holds no probes, so only quantities of its curves can be extrapolated over size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import lab.analysis.laws.fits as fits
import lab.analysis.laws.optimum as optimum
from lab.analysis.curves import named_axis, points
from lab.analysis.laws.fits import Line, with_ends
from lab.analysis.rendering import html
from lab.analysis.sensitivity import WINDOW, Window, check_window, judge, optima, per_seed
from lab.analysis.text import Axis, capitalized, count, few, listed
from lab.core.errors import RequestError
from lab.records.imported import UNKNOWN_SIZE
from lab.records.store import Records
from lab.report.answer import Part, Section

MULTIPLES = (4, 10, 100)  # of the largest size, for which values are predicted
FEWEST_SIZES = 3  # one of them is held out
QUANTITIES = LR, SENSITIVITY, ETA_DIV = "Best learning rate", "LR sensitivity (nats/token)", "eta_div"


class SizeForecast(NamedTuple):
    """The growth with size of one quantity of one arm.

    Attributes:
        runs: columns ``size`` and ``value``, a row per seed; positive values only.
        line: the line fitted to all sizes.
        error: log10 of the prediction by the smaller sizes for the largest, minus that of its geometric mean.
        unchanged: the same error of a forecast without growth, the geometric mean of the next smaller size.
        inside: how many runs of the largest size lie in the interval; None without an interval.
    """

    runs: pd.DataFrame
    line: Line
    error: float
    unchanged: float
    inside: int | None


def observe(records: Records, window: Window = WINDOW) -> pd.DataFrame:
    """A row per arm, size and seed, with a column per quantity; NaN where a quantity has no value.

    A best learning rate at an end of its grid is no value, since the optimum may lie beyond.

    Raises:
        RequestError: no run ended, or too few learning rates lie in the window.
    """
    ended = points(records.runs)
    if ended.empty:
        raise RequestError("nothing to fit: no run ended")
    check_window(ended, window)
    seeds, best = per_seed(ended, *window), optima(ended)["best_lr_fine"]
    grids = ended.groupby(["curve", "seed"], sort=False)["lr"].agg(["min", "max"])
    is_inner = (best.to_numpy() > grids["min"].to_numpy()) & (best.to_numpy() < grids["max"].to_numpy())
    values: dict[str, Any] = {
        LR: np.where(is_inner, best, math.nan),
        SENSITIVITY: seeds["total"],
        ETA_DIV: seeds["eta_div"],
    }
    return seeds[["arm", "size", "seed"]].assign(**values)


def make_forecast(runs: pd.DataFrame) -> SizeForecast | None:
    """The forecast of runs with columns ``size`` and ``value``; None if fewer than three sizes have values."""
    usable = runs[runs["value"] > 0]
    sizes = sorted(usable["size"].unique())
    if len(sizes) < FEWEST_SIZES:
        return None
    small, largest = usable[usable["size"] < sizes[-1]], usable[usable["size"] == sizes[-1]]
    middle, low, high = map(float, fits.fit(small["size"], small["value"]).predict(sizes[-1]))
    measured, before = np.log10(largest["value"]), np.log10(usable.loc[usable["size"] == sizes[-2], "value"])
    inside = int(measured.between(low, high).sum()) if math.isfinite(low) else None
    line = fits.fit(usable["size"], usable["value"])
    return SizeForecast(
        usable[["size", "value"]], line, middle - measured.mean(), before.mean() - measured.mean(), inside
    )


def parts(records: Records, window: Window) -> list[Part]:
    """Forecasts of all quantities in every arm, a section each, and the place of the optimum.

    Raises:
        RequestError: no arm has three sizes with a value, so that no forecast can be scored; or see ``observe``.
    """
    observed, axis = observe(records, window), named_axis(records.runs)
    by_quantity = {quantity: forecasts_of(observed, quantity) for quantity in QUANTITIES}
    place = _place_of_optimum(records)
    if not any(by_quantity.values()):
        sizes = sorted(observed["size"].unique())
        given = (
            f"{listed(few(map(count, sizes)))} parameters"
            if sizes != [UNKNOWN_SIZE]
            else "lab import --size names them"
        )
        why = f"no arm has a value at {FEWEST_SIZES} sizes ({given}), one of them to score it by"
        if not place:
            raise RequestError(f"no forecast: {why}")
        return [f"No forecast: {why}.", *place]
    sections = list[Part]()
    for quantity, forecasts in by_quantity.items():
        over = f", over {axis.values} from {window}" if quantity == SENSITIVITY and window != WINDOW else ""
        largest = {float(forecast.runs["size"].max()) for forecast in forecasts.values()}
        rows = [_row(arm, one, largest.copy().pop() if len(largest) == 1 else None) for arm, one in forecasts.items()]
        cautions = _cautions(quantity, axis, observed, forecasts)
        sections.append(Section(f"{named(quantity, axis)}{over}", [pd.DataFrame(rows), *cautions]))
    return [*sections, fits.ABOUT["sizes"], *place]


def _place_of_optimum(records: Records) -> list[Part]:
    """Whether the best learning rate transfers, and its law, a section each; empty if neither can be told."""
    ended, axis = judge(points(records.runs)), named_axis(records.runs)
    about = {name: fits.ABOUT[name].format(axis=axis) for name in ("transfer", "law", "failing_law")}
    sections = list[Part]()
    if len(table := optimum.transfer_table(ended, axis)):
        sections.append(Section(optimum.TRANSFER.format(axis=axis), [table, about["transfer"]]))
    laws = optimum.fit_laws(records, ended)
    if laws and (sections or any(law.has_exponents for law in laws)):
        sections.append(Section(optimum.LAW.format(axis=axis), [*(law.text for law in laws), about["law"]]))
    if failing := optimum.fit_laws(records, ended, failing=True):
        texts = [law.text for law in failing]
        sections.append(Section(optimum.FAILING_LAW.format(axis=axis), [*texts, about["failing_law"]]))
    return sections


def named(quantity: str, axis: Axis) -> str:
    """The name of a quantity of curves along an axis."""
    of_axis = {LR: f"Best {axis.name}", SENSITIVITY: f"{capitalized(axis.sensitivity)} (nats/token)"}
    return of_axis.get(quantity, quantity)


def plain(records: Records, window: Window) -> list[dict[str, Any]]:
    """The fits of all quantities in every arm in plain values; None where a number is not finite.

    Raises:
        RequestError: see ``observe``.
    """
    observed, rows = observe(records, window), []
    for quantity in QUANTITIES:
        for arm, forecast in forecasts_of(observed, quantity).items():
            sizes = sorted(map(int, forecast.runs["size"].unique()))
            held_out = {
                "size": sizes[-1],
                **{name: getattr(forecast, name) for name in ("error", "unchanged", "inside")},
            }
            row = {"quantity": quantity, "arm": arm, "sizes": sizes}
            rows.append({**row, **forecast.line.plain, "held_out": held_out})
    return rows


def forecasts_of(observed: pd.DataFrame, quantity: str) -> dict[str, SizeForecast]:
    """The forecasts of a quantity that could be made, by arm."""
    arms = observed.assign(value=observed[quantity]).groupby("arm", sort=False)
    return {str(arm): forecast for arm, runs in arms if (forecast := make_forecast(runs))}


def _row(arm: str, forecast: SizeForecast, largest: float | None) -> dict[str, str]:
    """A row of the table of a quantity; its columns name sizes if all arms have the same ``largest`` one."""
    runs, line, own = forecast.runs, forecast.line, forecast.runs["size"].max()
    row = {
        "arm": arm,
        "sizes": str(runs["size"].nunique()),
        "slope": f"{line.slope_interval:±+.2f}",
        **({} if largest else {"largest": count(own)}),
        f"error at {count(largest) if largest else 'it'}": f"{forecast.error:+.2f}",
        "without growth": f"{forecast.unchanged:+.2f}",
        "inside": "" if forecast.inside is None else f"{forecast.inside} of {int((runs['size'] == own).sum())}",
    }
    for multiple in MULTIPLES:
        middle, low, high = (10 ** float(end) for end in line.predict(multiple * own))
        name = f"{count(multiple * largest)} ({multiple}x)" if largest else f"{multiple}x"
        row[name] = with_ends(middle, low, high, digits=2)
    return row


def _cautions(quantity: str, axis: Axis, observed: pd.DataFrame, forecasts: dict[str, SizeForecast]) -> list[str]:
    text = html.render(
        "size_forecast.txt",
        axis=axis,
        is_best=quantity == LR,
        is_limit=quantity == ETA_DIV,
        fewest=FEWEST_SIZES,
        unscored=[arm for arm in observed["arm"].unique() if arm not in forecasts],
        missing=int(observed[quantity].isna().sum()),
        curves=len(observed),
        worse=[arm for arm, forecast in forecasts.items() if abs(forecast.error) > abs(forecast.unchanged)],
        narrow=[arm for arm, forecast in forecasts.items() if forecast.inside == 0],
        uncertain=[arm for arm, of_arm in forecasts.items() if abs(of_arm.line.slope) <= of_arm.line.slope_error],
    )
    return text.splitlines()
