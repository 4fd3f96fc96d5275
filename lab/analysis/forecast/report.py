"""What `lab predict` says: forecasts with their scores, limits and cautions, in words, tables and figures."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

import lab.analysis.text as text
from lab.analysis.curves import load, points
from lab.analysis.forecast import fits
from lab.analysis.forecast.figures import gradient_forecast, logit_forecast
from lab.analysis.forecast.fits import REACH, Crossing, Line
from lab.analysis.forecast.forecasts import GRADIENT, LOGIT, Forecast, ForecastQuantity, Score, make_forecasts
from lab.analysis.rendering import style
from lab.analysis.text import count, listed, spell
from lab.core import files
from lab.core.errors import RequestError
from lab.records.store import Records

FARTHER = (4, 10, 100, 1000)
# Share of held-out runs inside a 95 % interval below which the interval is called too narrow.
HONEST = 0.8
# Of the score: what of how many.
SHARES = {"inside the 95 % interval": ("inside", "runs"), "of the class foretold": ("right", "judged")}
BENT = " ~"
DUMB = "logits do not tell unstable runs from stable ones"


def sentences(made: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    """What there is to say of one arm beside its table."""
    yield from _limit(made, quantity)
    if made.lines:
        yield from (*_score(made.score, made.sizes, quantity.sign), *_ahead(made, quantity), *_along(made))
        yield from _cautions(made, quantity)
    yield from _left_out(made)


def _limit(made: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    runs, found = made.runs, made.threshold
    lost = int((runs["fate"] != "").sum())
    if quantity.sign < 0:
        yield f"Limit: Adam's epsilon, {spell(made.limit)}" + ("." if made.limit else ", which no gradient meets.")
        return
    kind = "unstable" if lost == len(runs) else "stable" if not lost else ""
    if found is None:
        why = f"all {len(runs)} runs are {kind}" if kind else DUMB
        yield f"No threshold can be calibrated: {why}. What logit the larger sizes bear is not said."
        return
    why = f"all {len(runs)} of this arm are {kind}" if kind else f"in this arm {DUMB}"
    whose = f"the runs of all arms, since {why}" if made.borrowed else "these runs"
    yield (
        f"Threshold {found.value:.3g}, calibrated on {whose}: the gap from {found.low:.3g} to {found.high:.3g}; above "
        f"it {found.unstable[0]} of {found.unstable[1]} unstable runs, below it {found.stable[0]} of "
        f"{found.stable[1]} stable ones."
    )


def _score(score: Score | None, sizes: list[int], sign: int) -> Iterator[str]:
    if score is None:
        yield (
            f"Not scored: of two sizes ({listed(map(count, sizes))}) none can be held out, and no bend can be seen; a "
            "third size would do."
        )
        return
    table = score.table
    if table.empty:
        yield f"Not scored at {count(score.size)}: no learning rate has two smaller sizes."
        return
    error = table["error"].abs().median()
    parts = [] if math.isnan(error) else [f"median |error| {error:.2f} in log10"]
    parts += [
        f"{table[part].sum()} of {table[of].sum()} runs {name}"
        for name, (part, of) in SHARES.items()
        if table[of].sum()
    ]
    limit = f" and threshold ({score.limit:.3g})" if sign > 0 and not math.isnan(score.limit) else ""
    found = listed(parts) if parts else "no value to compare with"
    yield f"Held out {count(score.size)}, lines{limit} from the smaller sizes: {found}."
    if table["inside"].sum() < HONEST * table["runs"].sum():
        yield "The intervals are too narrow here: growth is not quite a power law. Take them for the least uncertainty."


def _ahead(made: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    if math.isnan(made.limit) or not made.limit:
        return
    lrs, largest = sorted(made.lines), made.sizes[-1]
    at: dict[str, list[str]] = {}
    for times in FARTHER:
        found = fits.lr_beyond(made.lines, made.limit, quantity.sign, times * largest)
        words = span(found, "{:.2g}".format, lrs[0], lrs[-1])
        at.setdefault(words, []).append(f"{count(times * largest)} ({times}x)")
    said = "; ".join(f"{words} at {listed(sizes)}" for words, sizes in at.items())
    yield f"{quantity.trouble.capitalize()} from learning rate {said}."


def _along(made: Forecast) -> Iterator[str]:
    largest = made.sizes[-1]
    top = made.runs[made.runs["size"] == largest].dropna(subset="value")
    if top["lr"].nunique() > 1:
        against = slope(fits.fit(top["lr"], top["value"]))
        yield f"Along the learning rates at {count(largest)} the slope is {against}."


def _cautions(made: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    ways = {-1: ("downward" + " (saturation)" * (quantity.sign > 0), "much"), 1: ("upward", "little")}
    for sign, (way, amount) in ways.items():
        bent = [spell(lr) for lr in made.lines if made.way(lr) == sign]
        if bent:
            yield (
                f"Marked{BENT}: growth bends {way} at learning rate {listed(bent)}; beyond the largest size its line "
                f"says too {amount}."
            )
    if any(math.isnan(line.scatter) for line in made.lines.values()):
        yield "No interval where there are only two runs to a line."


def _left_out(made: Forecast) -> Iterator[str]:
    gone = made.runs[made.runs["value"].isna()]
    if len(gone):
        at = Counter(zip(gone["lr"], gone["size"], strict=True))
        places = [f"{runs} at {spell(lr)} and {count(size)}" for (lr, size), runs in at.items()]
        yield (
            f"Left out of the fits, as diverged by then or with a value that has no logarithm: {len(gone)} of "
            f"{len(made.runs)} runs ({listed(places)} parameters)."
        )
    alone = sorted(set(made.runs["lr"]) - set(made.lines))
    if alone:
        yield f"No line, for want of a second size: learning rate {listed(map(spell, alone))}."


def slope(line: Line) -> str:
    """Slope and half its interval."""
    error = line.slope_error
    return f"{line.slope:+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def span(crossing: Crossing, say: Callable[[float], str], first: float, last: float) -> str:
    """``1.2M (700k to > 98.6M)``: where, and where at the ends of the interval."""

    def place(at: float) -> str:
        return f"> {say(last)}" if math.isinf(at) else f"≤ {say(first)}" if at <= first * (1 + 1e-9) else say(at)

    middle, *ends = (place(at) if not math.isnan(at) else "" for at in crossing)
    return middle if {*ends} <= {middle, ""} else f"{middle} ({ends[0]} to {ends[1]})"


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
            made = make_forecasts(records, quantity)
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


def _about(made: Forecast, quantity: ForecastQuantity) -> Iterator[str]:
    yield f"{quantity.name}; {made.arm}"
    if made.lines:
        yield from text.plain_text(_table(made, quantity))
    for sentence in sentences(made, quantity):
        yield from textwrap.wrap(sentence, WIDE)


def _table(made: Forecast, quantity: ForecastQuantity) -> pd.DataFrame:
    """A row per learning rate; the slope is in log10 per decade of parameters."""
    rows = []
    for lr, line in made.lines.items():
        row = {"learning rate": spell(lr) + BENT * bool(made.way(lr)), "slope in size": slope(line)}
        if made.score is not None:
            row |= _scored(made.score, lr)
        if not math.isnan(made.limit):
            crossing = fits.size_beyond(line, made.limit, quantity.sign, made.sizes[0], made.sizes[-1])
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
