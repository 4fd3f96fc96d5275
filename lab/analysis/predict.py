"""Prediction: what small sizes say of larger ones, in tables and sentences, with its score on the largest."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from lab import store
from lab.analysis import drawing, scaling, tables
from lab.analysis.arms import count, spell
from lab.analysis.curves import load
from lab.analysis.findings import listed
from lab.analysis.forecast import GRADIENT, LOGIT, Forecast, Quantity, Score, forecasts
from lab.analysis.forecast_figures import gradient_forecast, logit_forecast
from lab.analysis.scaling import REACH, Bend, Crossing, Line
from lab.registry import RequestError

FARTHER = (4, 10, 100, 1000)
# Share of held-out runs inside a 95 % interval below which the interval is called too narrow.
HONEST = 0.8
# Of the score: what of how many.
SHARES = {"inside the 95 % interval": ("inside", "runs"), "of the class foretold": ("right", "judged")}
SCORED = ("held-out error", "inside", "class right")
BENT = " ~"
WIDE = 120
LEGEND = """Slopes are in log10 per decade; errors in log10, predicted minus measured (geometric mean over seeds). In
brackets: where the ends of the 95 % interval for one new run would have it. ≤ already at the smallest run, > not up to
the largest looked at."""


def predict(folder: Path) -> list[str]:
    """Lines of text on both quantities in every arm; writes ``figures/*_forecast.svg`` into the folder.

    Raises:
        RequestError: the folder cannot be read, has one size only, or recorded neither quantity.
    """
    records = load(folder)
    said, refused = [], []
    for quantity, draw in ((LOGIT, logit_forecast), (GRADIENT, gradient_forecast)):
        try:
            made = forecasts(records, quantity)
        except RequestError as refusal:
            refused.append(refusal)
            said += [f"{quantity.name}: {refusal}", ""]
            continue
        path = folder / "figures" / f"{draw.__name__}.svg"
        store.write_text(path, drawing.svg(draw(records), draw.__name__))
        said += [line for one in made for line in [*_about(one, quantity), ""]]
        said += [f"figure: {path}", ""]
    if len(refused) == 2:
        raise refused[0]
    return [*said, *textwrap.wrap(LEGEND, WIDE)]


def _about(made: Forecast, quantity: Quantity) -> Iterator[str]:
    yield f"{quantity.name}; {made.arm}"
    sentences = [*_limit(made, quantity)]
    if made.lines:
        yield from tables.plain_text(_table(made, quantity))
        sentences += [*_score(made.score, made.sizes, quantity.sign), *_forecast(made, quantity), *_cautions(made)]
    for sentence in [*sentences, *_left_out(made)]:
        yield from textwrap.wrap(sentence, WIDE)


def _table(made: Forecast, quantity: Quantity) -> pd.DataFrame:
    """A row per learning rate; the slope is in log10 per decade of parameters."""
    rows = []
    for lr, line in made.lines.items():
        row = {"learning rate": spell(lr) + BENT * bool(_sign(made.bends[lr])), "slope in size": _slope(line)}
        if made.score is not None:
            row |= _scored(made.score, lr)
        if not math.isnan(made.limit):
            crossing = scaling.size_beyond(line, made.limit, quantity.sign, made.sizes[0], made.sizes[-1])
            row[f"{quantity.trouble} at"] = _span(crossing, count, made.sizes[0], REACH * made.sizes[-1])
        rows.append(row)
    return pd.DataFrame(rows)


def _scored(score: Score, lr: float) -> dict[str, str]:
    if lr not in score.table.index:
        return dict.fromkeys(SCORED, "")
    row = score.table.loc[lr].to_dict()
    error = "" if math.isnan(row["error"]) else f"{row['error']:+.2f}"
    shares = [f"{row[part]:.0f} of {row[of]:.0f}" if row[of] else "" for part, of in SHARES.values()]
    return dict(zip(SCORED, [error, *shares], strict=True))


def _limit(made: Forecast, quantity: Quantity) -> Iterator[str]:
    runs, found = made.runs, made.threshold
    lost = int((runs["fate"] != "").sum())
    if quantity.sign < 0:
        yield f"Limit: Adam's epsilon, {spell(made.limit)}" + ("." if made.limit else ", which no gradient meets.")
        return
    kind = "unstable" if lost == len(runs) else "stable" if not lost else ""
    if found is None:
        why = f"all {len(runs)} runs are {kind}" if kind else "stable and unstable runs have the same logits"
        yield f"No threshold can be calibrated: {why}. What logit the larger sizes bear is not said."
        return
    whose = f"the runs of all arms, since all {len(runs)} of this arm are {kind}" if made.borrowed else "these runs"
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
    parts = [f"median |error| {table['error'].abs().median():.2f} in log10"]
    parts += [
        f"{table[part].sum()} of {table[of].sum()} runs {name}"
        for name, (part, of) in SHARES.items()
        if table[of].sum()
    ]
    limit = f" and threshold ({score.limit:.3g})" if sign > 0 and not math.isnan(score.limit) else ""
    yield f"Held out {count(score.size)}, lines{limit} from the smaller sizes: {listed(parts)}."
    if table["inside"].sum() < HONEST * table["runs"].sum():
        yield "The intervals are too narrow here: growth is not quite a power law. Take them for the least uncertainty."


def _forecast(made: Forecast, quantity: Quantity) -> Iterator[str]:
    if math.isnan(made.limit) or not made.limit:
        return
    lrs, largest = sorted(made.lines), made.sizes[-1]
    at: dict[str, list[str]] = {}
    for times in FARTHER:
        found = scaling.lr_beyond(made.lines, made.limit, quantity.sign, times * largest)
        words = _span(found, "{:.2g}".format, lrs[0], lrs[-1])
        at.setdefault(words, []).append(f"{count(times * largest)} ({times}x)")
    said = "; ".join(f"{words} at {listed(sizes)}" for words, sizes in at.items())
    yield f"{quantity.trouble.capitalize()} from learning rate {said}."
    top = made.runs[made.runs["size"] == largest].dropna(subset="value")
    if top["lr"].nunique() > 1:
        slope = _slope(scaling.fit(top["lr"], top["value"]))
        yield f"Along the learning rates at {count(largest)} the slope is {slope}."


def _cautions(made: Forecast) -> Iterator[str]:
    ways = {-1: ("downward (saturation)", "much"), 1: ("upward", "little")}
    for sign, (way, amount) in ways.items():
        bent = [spell(lr) for lr in made.lines if _sign(made.bends[lr]) == sign]
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


def _slope(line: Line) -> str:
    error = line.slope_error
    return f"{line.slope:+.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")


def _span(crossing: Crossing, say: Callable[[float], str], first: float, last: float) -> str:
    """``1.2M (700k to > 98.6M)``: where, and where at the ends of the interval."""

    def place(at: float) -> str:
        return f"> {say(last)}" if math.isinf(at) else f"≤ {say(first)}" if at <= first * (1 + 1e-9) else say(at)

    middle, *ends = (place(at) if not math.isnan(at) else "" for at in crossing)
    return middle if {*ends} <= {middle, ""} else f"{middle} ({ends[0]} to {ends[1]})"


def _sign(bend: Bend | None) -> int:
    return bend.sign if bend else 0
