"""Prediction: what small sizes say of larger ones, in tables and sentences, with its score on the largest."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from lab.analysis import scaling, text
from lab.analysis.curves import load, points
from lab.analysis.forecast import GRADIENT, LOGIT, Forecast, Quantity, Score, forecasts
from lab.analysis.forecast_figures import gradient_forecast, logit_forecast
from lab.analysis.forecast_findings import BENT, SHARES, sentences, slope, span
from lab.analysis.rendering import style
from lab.analysis.scaling import REACH
from lab.analysis.text import count, listed, spell
from lab.core import files
from lab.core.errors import RequestError
from lab.records.store import Records

SCORED = ("held-out error", "inside", "class right")
WIDE = 120
LEGEND = """Slopes are in log10 per decade; errors in log10, predicted minus measured (geometric mean over seeds). In
brackets: where the ends of the 95 % interval for one new run would have it. ≤ already at the smallest run, > not up to
the largest looked at."""


def predict(folder: Path) -> list[str]:
    """What ``say`` says of a results folder; writes ``figures/*_forecast.svg`` into it.

    Raises:
        RequestError: the folder cannot be read, has one size only, or recorded neither quantity.
    """
    records = load(folder)
    lines = say(records)
    for draw in (logit_forecast, gradient_forecast):
        try:
            figure = draw(records)
        except RequestError:  # which has been said
            continue
        path = folder / "figures" / f"{draw.__name__}.svg"
        files.write_text(path, style.svg(figure, draw.__name__))
        lines.append(f"figure: {path}")
    return lines


def say(records: Records) -> list[str]:
    """Lines of text on both quantities in every arm.

    Raises:
        RequestError: no arm has two sizes, or neither quantity was recorded.
    """
    lines, refused, told = [], [], set()
    for quantity in (LOGIT, GRADIENT):
        try:
            made = forecasts(records, quantity)
            lines += [line for one in made for line in [*_about(one, quantity), ""]]
            told |= {one.arm for one in made}
        except RequestError as refusal:
            refused.append(refusal)
            lines += [f"{quantity.name}: {refusal}", ""]
    if len(refused) == 2:
        raise refused[0]
    alone = [arm for arm in points(records.runs)["arm"].unique() if arm not in told]
    if alone:
        lines += [*textwrap.wrap(f"Not fitted, having one size only: {listed(alone)}.", WIDE), ""]
    return [*lines, *textwrap.wrap(LEGEND, WIDE)]


def _about(made: Forecast, quantity: Quantity) -> Iterator[str]:
    yield f"{quantity.name}; {made.arm}"
    if made.lines:
        yield from text.plain_text(_table(made, quantity))
    for sentence in sentences(made, quantity):
        yield from textwrap.wrap(sentence, WIDE)


def _table(made: Forecast, quantity: Quantity) -> pd.DataFrame:
    """A row per learning rate; the slope is in log10 per decade of parameters."""
    rows = []
    for lr, line in made.lines.items():
        row = {"learning rate": spell(lr) + BENT * bool(made.way(lr)), "slope in size": slope(line)}
        if made.score is not None:
            row |= _scored(made.score, lr)
        if not math.isnan(made.limit):
            crossing = scaling.size_beyond(line, made.limit, quantity.sign, made.sizes[0], made.sizes[-1])
            row[f"{quantity.trouble} at"] = span(crossing, count, made.sizes[0], REACH * made.sizes[-1])
        rows.append(row)
    return pd.DataFrame(rows)


def _scored(score: Score, lr: float) -> dict[str, str]:
    if lr not in score.table.index:
        return dict.fromkeys(SCORED, "")
    row = score.table.loc[lr].to_dict()
    error = "" if math.isnan(row["error"]) else f"{row['error']:+.2f}"
    shares = [f"{row[part]:.0f} of {row[of]:.0f}" if row[of] else "" for part, of in SHARES.values()]
    return dict(zip(SCORED, [error, *shares], strict=True))
