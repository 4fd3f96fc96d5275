"""Hover texts of data points: settings of the runs, value, interval over seeds, run ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from lab.analysis.rendering.marks import OUTCOMES
from lab.analysis.statistics import FEWEST_SEEDS, student_t
from lab.analysis.text import count, shortened
from lab.core.printing import printable

COLUMNS = ("arm", "size", "lr", "seed", "outcome", "id")
MOST_IDS = 3
NEAR = 0.1  # points between where a mark should be and where it is drawn


class Quantity(NamedTuple):
    """A measured quantity.

    Attributes:
        name: its name for readers.
        unit: its unit; empty for a pure number.
        log: whether means over seeds are geometric, and intervals those of logarithms.
    """

    name: str
    unit: str = ""
    log: bool = False

    def mean(self, values: np.ndarray) -> float:
        """Mean over seeds."""
        return float(np.exp(np.log(values).mean()) if self.log else values.mean())

    def lines(self, values: np.ndarray) -> list[str]:
        """The mean over seeds and its 95 % interval, a line each; below three seeds no interval."""
        if not len(values):
            return [f"{self.name} undefined"]
        shown = [f"{self.name} {self.mean(values):.4g}{f' {self.unit}' * bool(self.unit)}"]
        if len(values) >= FEWEST_SEEDS:
            interval = student_t(np.log(values) if self.log else values)
            low, high = (np.exp(end) if self.log else end for end in (interval.low, interval.high))
            shown.append(f"95 % interval {low:.4g} to {high:.4g}")
        return shown


class HoverText:
    """Maker of hover texts from columns of runs, kept as arrays, since picking rows of a table takes too long."""

    def __init__(self, runs: pd.DataFrame) -> None:
        """``runs`` has the columns ``arm``, ``size``, ``lr``, ``seed``, ``outcome``, and ``id`` if runs have ids."""
        self.columns = {name: runs[name].to_numpy() for name in COLUMNS if name in runs}

    def point(self, shown: Any, quantity: Quantity, values: np.ndarray, *others: str) -> str:
        """Lines on the runs of one point.

        Args:
            shown: mask or indices of its runs.
            quantity: what the values measure.
            values: one finite value per seed that has one.
            *others: further lines about the position of the point.
        """
        runs = {name: column[shown] for name, column in self.columns.items()}
        lrs, n = sorted(set(runs["lr"])), len(runs["lr"])
        lr = f"learning rate {lrs[0]:g}" if len(lrs) == 1 else f"{len(lrs)} learning rates, {lrs[0]:g} to {lrs[-1]:g}"
        counts = {outcome: int((runs["outcome"] == outcome).sum()) for outcome in OUTCOMES}
        outcomes = [f"{lost} of {n} {outcome}" for outcome, lost in counts.items() if lost]
        where = [shortened(str(runs["arm"][0])), f"{count(runs['size'][0])} parameters", lr, *others]
        seeds, ids = dict.fromkeys(map(str, runs["seed"])), list(map(str, runs.get("id", ())))
        names = [_few(list(seeds), "seed"), *[_few(ids, "run")] * bool(ids)]
        return "\n".join([*where, *quantity.lines(values), *outcomes, *names])


def _few(names: Sequence[str], kind: str) -> str:
    """``runs a, b, c and 4 more``."""
    more = f" and {len(names) - MOST_IDS} more" if len(names) > MOST_IDS else ""
    return f"{kind}{'s' * (len(names) > 1)} {', '.join(names[:MOST_IDS])}{more}"


class Points(NamedTuple):
    """The marks of a line, with the text of each."""

    line: Line2D
    texts: Sequence[str]


def with_texts(drawn: str, points: Iterable[Points], height: float) -> str:
    """Give every mark of these lines the attribute ``data-hover``.

    Args:
        drawn: an SVG of the figure in which each line is a group whose id is its ``group_id``.
        points: the lines with their texts, in the order of their group ids.
        height: height of the figure, in points.
    """
    by_group = {group_id(number): each for number, each in enumerate(points)}

    def marked(group: re.Match[str]) -> str:
        line, texts = by_group[group[1]]
        dpi = line.get_figure(root=True).dpi  # type: ignore[union-attr]
        xy = line.get_transform().transform(np.asarray(line.get_xydata(), dtype=float)) * 72 / dpi
        xy[:, 1] = height - xy[:, 1]

        def use(mark: re.Match[str]) -> str:
            distances = np.hypot(*(xy - [float(mark[1]), float(mark[2])]).T)
            nearest = int(np.nanargmin(distances))
            if distances[nearest] > NEAR:
                return mark[0]
            xy[nearest] = np.nan  # marks that coincide take one text each
            return f'{mark[0]} data-hover="{_attribute(texts[nearest])}"'

        return re.sub(r'<use xlink:href="[^"]*" x="([^"]*)" y="([^"]*)"', use, group[0])

    return re.sub(r'<g id="(hover\d+)">.*?(?=<g id="|\Z)', marked, drawn, flags=re.DOTALL)


def group_id(number: int) -> str:
    """Id of the SVG group of a line with texts."""
    return f"hover{number}"


def _attribute(text: str) -> str:
    """Plain text escaped as the value of an attribute; line breaks are kept, in HTML and in XML."""
    return escape(printable(text)).replace("\n", "&#10;")
