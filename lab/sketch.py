"""Loss against learning rate while a sweep is under way, as text: a row per curve, a column per learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from lab.analysis.arms import name_arms
from lab.analysis.curves import FREE, plain
from lab.training.config import RunConfig, columns

BLOCKS = "▁▂▃▄▅▆▇█"
# Whole labels give way to numbers down to this width; below it, numbers give way to labels.
NARROW_LABEL = 16

Place = tuple[str, float]  # a curve, by size and arm, and a learning rate


def places(configs: Sequence[RunConfig]) -> list[Place]:
    """Where each run stands in the sketch; arms are called what the report will call them."""
    rows = [columns(config) for config in configs]
    keys = sorted({key for row in rows for key in row if key not in FREE and not key.startswith("probes.")})
    curves = [{key: plain(row.get(key)) for key in keys} for row in rows]
    distinct = {tuple(curve.values()): place for place, curve in enumerate(curves)}
    shapes = [(config.model.width, config.model.depth) for config in configs]
    sizes = [12 * depth * width**2 + width for width, depth in shapes]
    arms = name_arms([curves[place] for place in distinct.values()], [sizes[place] for place in distinct.values()])
    arm_of = dict(zip(distinct, arms, strict=True))
    told_by_width = len({width for width, _ in shapes}) == len(set(shapes))
    names = [f"width {width}" if told_by_width else f"width {width} depth {depth}" for width, depth in shapes]
    return [
        (f"{name}  {arm_of[tuple(curve.values())].label}", config.optimizer.lr)
        for name, curve, config in zip(names, curves, configs, strict=True)
    ]


def sketch(losses: Mapping[Place, Sequence[float]], width: int) -> list[str]:
    """Lines of at most ``width`` characters: a block and a number per learning rate, blocks alone when it is narrow.

    Seeds are averaged, those that are finite; x marks a place where one diverged, and stands alone where all did.
    """
    curves, rates = list(dict.fromkeys(curve for curve, _ in losses)), sorted({rate for _, rate in losses})
    means = {place: fmean(finite) for place, said in losses.items() if (finite := list(filter(math.isfinite, said)))}
    low = min(means.values(), default=0.0)
    high = min(max(means.values(), default=0.0), 2 * low)  # what is worse still would flatten the rest
    header = [_short(rate) for rate in rates]
    cell = max(5, *map(len, header)) + 1
    longest = max(map(len, curves))
    roomy = min(longest, NARROW_LABEL) + cell * len(rates) <= width
    head = "".join(f"{rate:>{cell}}" for rate in header) if roomy else f" {header[0]}..{header[-1]}"
    label = max(1, min(longest, width - max(len(head), len(rates) + 1)))

    def mark(place: Place) -> str:
        said = losses.get(place)
        if not said:
            return " " if said is None else "·"
        if not all(map(math.isfinite, said)):
            return "x"
        return BLOCKS[round(min(1, (means[place] - low) / (high - low)) * 7) if high > low else 0]

    lines = [fit("loss so far", label) + head]
    for curve in curves:
        row = [(curve, rate) for rate in rates]
        cells = [mark(place) + (_number(means[place]) if place in means else "") for place in row]
        text = "".join(f"{one:>{cell}}" for one in cells) if roomy else " " + "".join(map(mark, row))
        lines.append(fit(curve, label) + text)
    return [line[:width].rstrip() for line in lines]


def fit(text: str, width: int) -> str:
    """Exactly ``width`` characters."""
    return f"{text:{width}}" if len(text) <= width else f"{text[: width - 1]}…"


def _short(rate: float) -> str:
    """``0.003 -> 3e-3``."""
    digits, power = f"{rate:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _number(loss: float) -> str:
    """Four characters at most."""
    return f"{loss:.2f}"[:4].rstrip(".") if loss < 1000 else _short(float(f"{loss:.0e}"))
