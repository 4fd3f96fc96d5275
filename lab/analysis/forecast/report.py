"""Write forecasts as `lab predict` shows them: tables, sentences on limits, scores and cautions, and figures."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

import lab.analysis.forecast.fits as fits
import lab.analysis.forecast.output_logits as output_logits
import lab.analysis.forecast.sizes as sizes
from lab.analysis.curves import points
from lab.analysis.forecast.figures import gradient_forecast, logit_forecast
from lab.analysis.forecast.fits import REACH, crossing_text, slope_text
from lab.analysis.forecast.forecasts import GRADIENT, LOGIT, Forecast, ForecastQuantity, ForecastScore, make_forecasts
from lab.analysis.rendering import layout
from lab.analysis.sensitivity import WINDOW, Window
from lab.analysis.text import count, finite, format_value, listed, plain_text
from lab.core import files
from lab.core.errors import RequestError
from lab.records import run_table
from lab.records.store import Records

# Larger sizes for which limits are given, as multiples of the largest one that ran.
MULTIPLES = (4, 10, 100, 1000)
# A 95 % interval is called too narrow if it holds a smaller share of held-out runs.
LEAST_COVERAGE = 0.8
# Pairs of columns of a score that make a share, such as 9 of 12.
SHARES = {"inside the 95 % interval": ("inside", "runs"), "of the predicted class": ("right", "judged")}
BENT = " ~"
INSEPARABLE = "logits do not separate unstable runs from stable ones"


def sentences(forecast: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    """Sentences that explain the table of one arm: limit, score, larger sizes, cautions, runs left out."""
    yield from _limit(forecast, quantity)
    if forecast.score and forecast.scored:
        yield from _score(forecast.score, quantity.sign)
        yield from _at_larger_sizes(forecast, quantity)
    else:
        yield f"No forecast: {unscored_reason(forecast)}."
    if forecast.lines:
        yield from _along_learning_rates(forecast)
        yield from _cautions(forecast, quantity)
    yield from _left_out(forecast)


def _limit(forecast: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    runs, threshold = forecast.runs, forecast.threshold
    unstable = int((runs["outcome"] != "").sum())
    if quantity.sign < 0:
        note = "." if forecast.limit else ", which no gradient reaches."
        yield f"Limit: Adam's epsilon, {format_value(forecast.limit)}{note}"
        return
    kind = "unstable" if unstable == len(runs) else "stable" if not unstable else ""
    if threshold is None:
        why = f"all {len(runs)} runs are {kind}" if kind else INSEPARABLE
        yield f"No threshold can be calibrated: {why}. So there is no limit for larger sizes."
        return
    why = f"all {len(runs)} of this arm are {kind}" if kind else f"in this arm {INSEPARABLE}"
    whose = f"the runs of all arms, since {why}" if forecast.borrowed else "these runs"
    yield (
        f"Threshold {threshold.value:.3g}, calibrated on {whose}: the gap from {threshold.low:.3g} to "
        f"{threshold.high:.3g}; above it {threshold.unstable[0]} of {threshold.unstable[1]} unstable runs, below it "
        f"{threshold.stable[0]} of {threshold.stable[1]} stable ones."
    )


def unscored_reason(forecast: Forecast) -> str:
    """The reason why no forecast is quoted, and what is missing."""
    if forecast.score is None:
        sizes = listed(map(count, forecast.sizes))
        return f"of two sizes ({sizes} parameters) none can be held out to score it; train a third size"
    runs = f"runs of {count(forecast.score.size)} parameters"
    return f"no learning rate has both {runs}, to score it by, and two smaller sizes; train a third size at one"


def _score(score: ForecastScore, sign: int) -> Iterator[str]:
    table = score.table
    error = table["error"].abs().median()
    parts = [] if math.isnan(error) else [f"median |error| {error:.2f} in log10"]
    parts += [
        f"{table[part].sum()} of {table[total].sum()} runs {name}"
        for name, (part, total) in SHARES.items()
        if table[total].sum()
    ]
    limit = f" and threshold ({score.limit:.3g})" if sign > 0 and not math.isnan(score.limit) else ""
    yield f"Held out {count(score.size)}, lines{limit} from the smaller sizes: {listed(parts)}."
    if table["inside"].sum() < LEAST_COVERAGE * table["runs"].sum():
        yield "The intervals are too narrow here, since growth is not quite a power law: they are lower bounds."


def _at_larger_sizes(forecast: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    if math.isnan(forecast.limit) or not forecast.limit:
        return
    lrs, largest = forecast.scored, forecast.sizes[-1]
    lines = {lr: forecast.lines[lr] for lr in lrs}
    sizes_by_lr: dict[str, list[str]] = {}
    for multiple in MULTIPLES:
        crossing = fits.lr_beyond(lines, forecast.limit, quantity.sign, multiple * largest)
        lr = crossing_text(crossing, "{:.2g}".format, lrs[0], lrs[-1])
        sizes_by_lr.setdefault(lr, []).append(f"{count(multiple * largest)} ({multiple}x)")
    parts = [f"{lr} at {listed(sizes)}" for lr, sizes in sizes_by_lr.items()]
    yield f"{quantity.trouble.capitalize()} from learning rate {'; '.join(parts)}."


def _along_learning_rates(forecast: Forecast) -> Iterator[str]:
    largest = forecast.sizes[-1]
    runs = forecast.runs[forecast.runs["size"] == largest].dropna(subset="value")
    if runs["lr"].nunique() > 1:
        slope = slope_text(fits.fit(runs["lr"], runs["value"]))
        yield f"Along the learning rates at {count(largest)} the slope is {slope}."


def _cautions(forecast: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    directions = {-1: ("downward" + " (saturation)" * (quantity.sign > 0), "much"), 1: ("upward", "little")}
    for sign, (direction, amount) in directions.items():
        bent = [format_value(lr) for lr in forecast.lines if forecast.bend_sign(lr) == sign]
        if bent:
            yield (
                f"Marked{BENT}: growth bends {direction} at learning rate {listed(bent)}; beyond the largest size its "
                f"line predicts too {amount}."
            )
    if any(math.isnan(line.scatter) for line in forecast.lines.values()):
        yield "A line through only two runs has no interval."


def _left_out(forecast: Forecast) -> Iterator[str]:
    without_value = forecast.runs[forecast.runs["value"].isna()]
    if len(without_value):
        counts = Counter(zip(without_value["lr"], without_value["size"], strict=True))
        parts = [f"{runs} at {format_value(lr)} and {count(size)}" for (lr, size), runs in counts.items()]
        yield (
            f"Left out of the fits, as already diverged or without a positive value: {len(without_value)} of "
            f"{len(forecast.runs)} runs ({listed(parts)} parameters)."
        )
    without_line = sorted(set(forecast.runs["lr"]) - set(forecast.lines))
    if without_line:
        yield f"No line, for want of a second size: learning rate {listed(map(format_value, without_line))}."


SCORE_COLUMNS = ("held-out error", "inside", "class right")
LINE_LENGTH = 120
LEGEND = """Slopes are in log10 per decade; errors in log10, predicted minus measured (geometric mean over seeds).
Brackets hold the limits by the ends of the 95 % interval for one new run. ≤ means already at the smallest run; > means
not up to the largest value searched."""


def predict(records: Records, folder: Path, window: Window | None = None) -> list[str]:
    """Forecast from records, and write ``figures/*_forecast.svg`` into their folder.

    Args:
        records: the runs of a results folder.
        folder: the results folder.
        window: the learning rates over which sensitivity is a mean; only for runs imported from a table.

    Returns:
        The lines of ``say``, those on rounded output logits if they were recorded, and one per figure. For runs
        imported from a table, the lines of ``sizes.say``.

    Raises:
        RequestError: a window was given for runs that were not imported from a table. Or there is nothing to forecast:
            no output logits were recorded, and neither quantity was recorded at enough sizes.
    """
    if run_table.is_imported(records):
        return sizes.say(records, window or WINDOW, LINE_LENGTH)
    if window:
        raise RequestError("--window goes with runs imported from a table: here no sensitivity is forecast")
    rounded = output_logits.say(records, LINE_LENGTH)
    try:
        lines = say(records)
        _check_scored(records)
    except RequestError as error:
        if not rounded:
            raise
        return [*rounded, "", str(error)]
    lines += ["", *rounded] if rounded else []
    for draw in (logit_forecast, gradient_forecast):
        try:
            figure = draw(records)
        except RequestError:  # the lines of `say` contain its message
            continue
        path = folder / "figures" / f"{draw.__name__}.svg"
        files.write_text(path, layout.svg(figure, draw.__name__), within=folder)
        lines.append(f"figure: {path}")
    return lines


def plain(records: Records, window: Window | None = None) -> list[dict[str, Any]]:
    """The numbers of each fit of ``predict``: a line over size of an arm and a learning rate, None where unknown."""
    if run_table.is_imported(records):
        return sizes.plain(records, window or WINDOW)
    rows = []
    for quantity in (LOGIT, GRADIENT):
        with suppress(RequestError):  # a quantity that was not recorded
            for forecast in make_forecasts(records, quantity):
                for lr, line in forecast.lines.items():
                    row = {"quantity": quantity.name, "arm": forecast.arm, "lr": lr, "limit": finite(forecast.limit)}
                    rows.append(
                        {
                            **row,
                            "sizes": list(map(int, forecast.sizes)),
                            **line.plain,
                            **_plain_ends(forecast, quantity, lr),
                        }
                    )
    return rows


def _plain_ends(forecast: Forecast, quantity: ForecastQuantity, lr: float) -> dict[str, Any]:
    """Where a line crosses the limit, and how it did on the size that was held out."""
    ends: dict[str, Any] = {"crossing": None, "held_out": None}
    if lr in forecast.scored and not math.isnan(forecast.limit):
        smallest, largest = forecast.sizes[0], forecast.sizes[-1]
        crossing = fits.size_beyond(forecast.lines[lr], forecast.limit, quantity.sign, smallest, largest)
        ends["crossing"] = {name: finite(value) for name, value in crossing._asdict().items()}
    if forecast.score is not None and lr in forecast.score.table.index:
        held_out = forecast.score.table.loc[lr].to_dict()
        ends["held_out"] = {"size": int(forecast.score.size)} | {
            name: finite(float(value)) for name, value in held_out.items()
        }
    return ends


def _check_scored(records: Records) -> None:
    forecasts: list[Forecast] = []
    for quantity in (LOGIT, GRADIENT):
        with suppress(RequestError):  # a quantity that was not recorded
            forecasts += make_forecasts(records, quantity)
    if not any(forecast.scored for forecast in forecasts):
        raise RequestError(f"no forecast: {unscored_reason(forecasts[0])}")


def say(records: Records) -> list[str]:
    """Forecasts of both quantities in every arm, as lines; for runs imported from a table, the lines of ``sizes.say``.

    Raises:
        RequestError: no arm has two sizes, or neither quantity was recorded.
    """
    if run_table.is_imported(records):
        return sizes.say(records, WINDOW, LINE_LENGTH)
    lines, errors, fitted_arms = [], [], set()
    for quantity in (LOGIT, GRADIENT):
        try:
            forecasts = make_forecasts(records, quantity)
            lines += [line for forecast in forecasts for line in [*_forecast_lines(forecast, quantity), ""]]
            fitted_arms |= {forecast.arm for forecast in forecasts}
        except RequestError as error:
            errors.append(error)
            lines += [f"{quantity.name}: {error}", ""]
    if len(errors) == 2:
        raise errors[0]
    not_fitted = [arm for arm in points(records.runs)["arm"].unique() if arm not in fitted_arms]
    if not_fitted:
        lines += [*textwrap.wrap(f"Not fitted, having one size only: {listed(not_fitted)}.", LINE_LENGTH), ""]
    return [*lines, *textwrap.wrap(LEGEND, LINE_LENGTH)]


def _forecast_lines(forecast: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    yield f"{quantity.name}; {forecast.arm}"
    if forecast.lines:
        yield from plain_text(_table(forecast, quantity))
    for sentence in sentences(forecast, quantity):
        yield from textwrap.wrap(sentence, LINE_LENGTH)


def _table(forecast: Forecast, quantity: ForecastQuantity) -> pd.DataFrame:
    """A row per learning rate; slopes are in log10 per decade of parameters."""
    rows, smallest, largest = [], forecast.sizes[0], forecast.sizes[-1]
    for lr, line in forecast.lines.items():
        mark = BENT if forecast.bend_sign(lr) else ""
        row = {"learning rate": f"{format_value(lr)}{mark}", "slope in size": slope_text(line)}
        if forecast.score is not None:
            row |= _score_cells(forecast.score, lr)
        if lr in forecast.scored and not math.isnan(forecast.limit):
            crossing = fits.size_beyond(line, forecast.limit, quantity.sign, smallest, largest)
            row[f"{quantity.trouble} at"] = crossing_text(crossing, count, smallest, REACH * largest)
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _score_cells(score: ForecastScore, lr: float) -> dict[str, str]:
    if lr not in score.table.index:
        return dict.fromkeys(SCORE_COLUMNS, "")
    row = score.table.loc[lr].to_dict()
    error = "" if math.isnan(row["error"]) else f"{row['error']:+.2f}"
    shares = [f"{row[part]:.0f} of {row[total]:.0f}" if row[total] else "" for part, total in SHARES.values()]
    return dict(zip(SCORE_COLUMNS, [error, *shares], strict=True))
