"""Forecasts for runs imported from a table: the best learning rate of larger models, and laws of the learning rate.

Such a table holds no probes, so only its curves can be extrapolated over size.
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
from lab.analysis.sensitivity import judge, optima
from lab.analysis.text import Axis, count, few, listed
from lab.core.errors import RequestError
from lab.records.imported import UNKNOWN_SIZE
from lab.records.store import Records
from lab.report.answer import Part, Section

MULTIPLES = (4, 10, 100)  # of the largest size, for which values are predicted
FEWEST_SIZES = 3  # one of them is held out
BEST_LR, FAILING_LR = "Best learning rate", "eta_div"


class SizeForecast(NamedTuple):
    """The growth with size of one number per run.

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


def best_lrs(records: Records) -> pd.DataFrame:
    """The best learning rate of each curve and seed: columns ``arm``, ``size``, ``seed`` and ``value``.

    One at an end of its grid is no value (NaN), since the optimum may lie beyond.

    Raises:
        RequestError: no run ended.
    """
    ended = points(records.runs)
    if ended.empty:
        raise RequestError("nothing to fit: no run ended")
    curves, best = ended.groupby(["curve", "seed"], sort=False), optima(ended)
    low, high = curves["lr"].min().to_numpy(), curves["lr"].max().to_numpy()
    is_inner = (best["best_lr_fine"] > low) & (best["best_lr_fine"] < high)
    sizes, values = curves["size"].first().to_numpy(), best["best_lr_fine"].where(is_inner)
    return best[["arm", "seed"]].assign(size=sizes, value=values)


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


def forecasts_by_arm(best: pd.DataFrame) -> dict[str, SizeForecast]:
    """The forecasts that could be made of ``best_lrs``, by arm."""
    arms = best.groupby("arm", sort=False)
    return {str(arm): forecast for arm, runs in arms if (forecast := make_forecast(runs))}


def forecasts_of(records: Records) -> tuple[list[Part], list[dict[str, Any]]]:
    """The forecasts of all arms and the place of the optimum, as parts of an answer; the forecasts also as data.

    Raises:
        RequestError: no run ended. Or no arm has three sizes with a value, so that no forecast can be scored, and
            nothing can be told of the place of the optimum either.
    """
    best, axis = best_lrs(records), named_axis(records.runs)
    forecasts, place = forecasts_by_arm(best), _place_of_optimum(records)
    if not forecasts:
        sizes = sorted(best["size"].unique())
        given = (
            f"{listed(few(map(count, sizes)))} parameters"
            if sizes != [UNKNOWN_SIZE]
            else "lab import --size names them"
        )
        why = f"no arm has a value at {FEWEST_SIZES} sizes ({given}), one of them to score it by"
        if not place:
            raise RequestError(f"no forecast: {why}")
        return [f"No forecast: {why}.", *place], []
    largest = {float(forecast.runs["size"].max()) for forecast in forecasts.values()}
    rows = [_row(arm, one, largest.copy().pop() if len(largest) == 1 else None) for arm, one in forecasts.items()]
    table = Section(f"Best {axis.name}", [pd.DataFrame(rows), *_cautions(axis, best, forecasts)])
    return [table, fits.ABOUT["sizes"], *place], [_plain(arm, one) for arm, one in forecasts.items()]


def _place_of_optimum(records: Records) -> list[Part]:
    """Whether the best learning rate transfers, and the laws, a section each; empty if nothing can be told."""
    ended, axis = judge(points(records.runs)), named_axis(records.runs)
    about = {name: fits.ABOUT[name].format(axis=axis) for name in ("transfer", "law", "failing_law")}
    sections = list[Part]()
    if len(table := optimum.transfer_table(ended, axis)):
        sections.append(Section(optimum.TRANSFER.format(axis=axis), [table, about["transfer"]]))
    laws = optimum.fit_laws(records, ended)
    if laws and (sections or any(law.power for law in laws)):
        sections.append(Section(optimum.LAW.format(axis=axis), [*(law.text for law in laws), about["law"]]))
    if failing := optimum.fit_laws(records, ended, failing=True):
        texts = [law.text for law in failing]
        sections.append(Section(optimum.FAILING_LAW.format(axis=axis), [*texts, about["failing_law"]]))
    return sections


def _row(arm: str, forecast: SizeForecast, largest: float | None) -> dict[str, str]:
    """A row of the table; its columns name sizes if all arms have the same ``largest`` one."""
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


def _plain(arm: str, forecast: SizeForecast) -> dict[str, Any]:
    sizes = sorted(map(int, forecast.runs["size"].unique()))
    held_out = {name: getattr(forecast, name) for name in ("error", "unchanged", "inside")}
    row = {"quantity": BEST_LR, "arm": arm, "sizes": sizes}
    return {**row, **forecast.line.plain, "held_out": {"size": sizes[-1], **held_out}}


def _cautions(axis: Axis, best: pd.DataFrame, forecasts: dict[str, SizeForecast]) -> list[str]:
    text = html.render(
        "size_forecast.txt",
        axis=axis,
        fewest=FEWEST_SIZES,
        unscored=[arm for arm in best["arm"].unique() if arm not in forecasts],
        missing=int(best["value"].isna().sum()),
        curves=len(best),
        worse=[arm for arm, forecast in forecasts.items() if abs(forecast.error) > abs(forecast.unchanged)],
        narrow=[arm for arm, forecast in forecasts.items() if forecast.inside == 0],
        uncertain=[arm for arm, of_arm in forecasts.items() if abs(of_arm.line.slope) <= of_arm.line.slope_error],
    )
    return text.splitlines()
