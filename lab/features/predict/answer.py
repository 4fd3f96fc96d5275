"""The answer of `lab predict`: tables of forecasts, sentences on limits, scores and cautions, and figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

import lab.analysis.laws.fits as fits
import lab.features.predict.sizes as sizes
from lab.analysis.curves import idle_parameters, parameters, points
from lab.analysis.laws.fits import REACH, crossing_text
from lab.analysis.rendering import html, layout
from lab.analysis.text import count, few, format_value, listed
from lab.core import files
from lab.core.errors import RequestError
from lab.features.predict.figures import gradient_forecast, logit_forecast
from lab.features.predict.forecasts import OUTPUT_LOGIT, Forecast, every_forecast
from lab.records.imported import is_imported
from lab.records.store import Records
from lab.report.answer import Answer, Part, Section

# Larger sizes for which limits are given, as multiples of the largest one that ran.
MULTIPLES = (4, 10, 100, 1000)
# A 95 % interval is called too narrow if it holds a smaller share of held-out runs.
LEAST_COVERAGE = 0.8
# Pairs of columns of a score that make a share, such as 9 of 12.
SHARES = {"inside the 95 % interval": ("inside", "runs"), "of the predicted class": ("right", "judged")}
BENT = " ~"


def predict(records: Records, folder: Path) -> Answer:
    """Forecast from records; writes its figures into the folder.

    Args:
        records: the runs of a results folder.
        folder: the results folder.

    Raises:
        RequestError: no quantity was recorded at enough sizes.
    """
    parts, rows = sizes.forecasts_of(records) if is_imported(records) else _forecasts_of_runs(records, folder)
    found = Answer("", parts)
    return replace(found, data={"fits": rows, "text": found.text().splitlines()})


def say(records: Records) -> list[str]:
    """Forecasts of all quantities in every arm, as lines; of a table's runs, of what ``sizes`` forecasts.

    Raises:
        RequestError: no arm has two sizes, or no quantity was recorded.
    """
    parts = sizes.forecasts_of(records)[0] if is_imported(records) else _trends(records, *every_forecast(records))
    return Answer("", parts).text().splitlines()


def _forecasts_of_runs(records: Records, folder: Path) -> tuple[list[Part], list[dict[str, Any]]]:
    """The forecasts of runs of the lab as parts of an answer and as data; draws their figures into the folder."""
    made, refusals = every_forecast(records)
    if not any(forecast.scored for forecast in made):
        raise RequestError(f"no forecast: {_unscored_reason(made[0])}")
    parts = [*_trends(records, made, refusals), *said_of_experts(records)]
    for draw in (logit_forecast, gradient_forecast):
        with suppress(RequestError):  # the text contains its message
            path = folder / "figures" / f"{draw.__name__}.svg"
            files.write_text(path, layout.svg(draw(records), draw.__name__), within=folder)
            parts.append(f"figure: {path}")
    return parts, [row for forecast in made for row in _fits(forecast)]


def said_of_experts(records: Records) -> list[str]:
    """That sizes count all experts, and how many parameters of the largest act on a token; nothing without experts."""
    runs = records.runs
    if is_imported(records) or not (idle := idle_parameters(runs)).any():
        return []
    size = parameters(runs.set_index("id"))
    largest = str(size[idle > 0].idxmax())
    active = count(size[largest] - idle[largest])
    return [f"Sizes count all experts: of the largest, {count(size[largest])}, {active} act on a token."]


def _fits(forecast: Forecast) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each line over size."""
    sizes, score = list(map(int, forecast.sizes)), forecast.score
    for lr, line in forecast.lines.items():
        held_out = None
        if score and lr in score.table.index:
            held_out = {"size": score.size, **score.table.loc[lr].astype(float).to_dict()}
        row = {"quantity": forecast.quantity.name, "arm": forecast.arm, "lr": lr, "limit": forecast.limit}
        yield {**row, "sizes": sizes, **line.plain, "crossing": forecast.fails_from_size(lr), "held_out": held_out}


def _trends(records: Records, made: Sequence[Forecast], refusals: Mapping[str, RequestError]) -> list[Part]:
    """A section for each quantity in every arm, and why another quantity has none."""
    parts: list[Part] = [
        Section(f"{forecast.quantity.name}; {forecast.arm}", [_table(forecast), *_notes(forecast)]) for forecast in made
    ]
    parts += [Section(name, [str(refusal)]) for name, refusal in refusals.items() if name != OUTPUT_LOGIT.name]
    fitted_arms = {forecast.arm for forecast in made}
    not_fitted = [arm for arm in points(records.runs)["arm"].unique() if arm not in fitted_arms]
    if not_fitted:
        parts.append(f"Not fitted, having one size only: {listed(few(not_fitted))}.")
    return [*parts, fits.ABOUT["trends"]]


def _table(forecast: Forecast) -> pd.DataFrame:
    """A row per learning rate; slopes are in log10 per decade of parameters."""
    rows, (smallest, *_, largest) = [], forecast.sizes
    for of_lr in _fits(forecast):
        lr, score, crossing = of_lr["lr"], of_lr["held_out"], of_lr["crossing"]
        row = {
            "learning rate": f"{format_value(lr)}{BENT * bool(forecast.bends[lr])}",
            "slope in size": f"{forecast.lines[lr].slope_interval:±+.2f}",
        }
        if forecast.score is not None:
            row |= dict.fromkeys(("held-out error", "inside", "class right"), "")
        if score:
            row["held-out error"] = "" if math.isnan(score["error"]) else f"{score['error']:+.2f}"
            row["inside"] = f"{score['inside']:.0f} of {score['runs']:.0f}" if score["runs"] else ""
            row["class right"] = f"{score['right']:.0f} of {score['judged']:.0f}" if score["judged"] else ""
        if crossing:
            row[f"{forecast.quantity.trouble} at"] = crossing_text(crossing, count, smallest, REACH * largest)
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _notes(forecast: Forecast) -> list[str]:
    """Sentences that explain the table of one arm: limit, score, larger sizes, cautions, runs left out."""
    runs, score = forecast.runs, forecast.score
    is_unstable = runs["outcome"] != ""
    without_value = runs[runs["value"].isna()]
    totals: dict[Any, float] = score.table.sum().to_dict() if score else {}
    error = score.table["error"].abs().median() if score else math.nan
    held_out = [] if math.isnan(error) else [f"median |error| {error:.2f} in log10"]
    for name, (part, whole) in SHARES.items() if score else ():
        if totals[whole]:
            held_out.append(f"{totals[part]:.0f} of {totals[whole]:.0f} runs {name}")
    text = html.render(
        "forecast.txt",
        forecast=forecast,
        quantity=forecast.quantity,
        threshold=forecast.threshold,
        runs=len(runs),
        kind="unstable" if is_unstable.all() else "" if is_unstable.any() else "stable",
        score=score,
        unscored="" if forecast.scored else _unscored_reason(forecast),
        held_out=held_out,
        is_narrow=score is not None and totals["inside"] < LEAST_COVERAGE * totals["runs"],
        sizes_by_lr=_limits_at_larger_sizes(forecast),
        bent={sign: [format_value(lr) for lr in forecast.lines if forecast.bends[lr] == sign] for sign in (-1, 1)},
        mark=BENT,
        has_bare_line=any(math.isnan(line.scatter) for line in forecast.lines.values()),
        without_value=Counter(zip(without_value["lr"], without_value["size"], strict=True)),
        without_line=[format_value(lr) for lr in sorted(set(runs["lr"]) - set(forecast.lines))],
        count=count,
        value=format_value,
    )
    return text.splitlines()


def _unscored_reason(forecast: Forecast) -> str:
    """The reason why no forecast is quoted, and what is missing."""
    if forecast.score is None:
        sizes = listed(map(count, forecast.sizes))
        return f"of two sizes ({sizes} parameters) none can be held out to score it; train a third size"
    runs = f"runs of {count(forecast.score.size)} parameters"
    return f"no learning rate has both {runs}, to score it by, and two smaller sizes; train a third size at one"


def _limits_at_larger_sizes(forecast: Forecast) -> dict[str, list[str]]:
    """Sizes larger than those that ran, by the learning rate from which they lie beyond the limit, in words."""
    sizes_by_lr: dict[str, list[str]] = {}
    for multiple in MULTIPLES if forecast.scored and forecast.limit > 0 else ():
        size = multiple * forecast.sizes[-1]
        ends = min(forecast.scored), max(forecast.scored)
        lr = crossing_text(forecast.fails_from_lr(size), "{:.2g}".format, *ends)
        sizes_by_lr.setdefault(lr, []).append(f"{count(size)} ({multiple}x)")
    return sizes_by_lr
