"""Hover texts of data points: settings of the runs, value, interval over seeds, run ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from lab.analysis.rendering import style
from lab.analysis.rendering.marks import OUTCOMES
from lab.analysis.statistics import geometric_mean, student_t
from lab.analysis.text import count, shortened

COLUMNS = ("arm", "size", "lr", "seed", "outcome", "id")
MOST_IDS = 3


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

    def text(self, values: np.ndarray) -> str:
        """The mean over seeds with its 95 % interval; below three seeds the values."""
        interval = geometric_mean(values) if self.log else student_t(values)
        return f"{self.name} {interval:.4g} {self.unit if interval.n else ''}".rstrip()


def text(runs: pd.DataFrame | Mapping[str, np.ndarray], quantity: Quantity, values: np.ndarray, *others: str) -> str:
    """Lines on the runs of one point.

    Args:
        runs: the columns ``arm``, ``size``, ``lr``, ``seed``, ``outcome``, and ``id`` if runs have ids. For many points
            they are given as arrays, since picking rows of a table takes too long.
        quantity: what the values measure.
        values: one finite value per seed that has one.
        *others: further lines about the position of the point.
    """
    columns = {name: np.asarray(runs[name]) for name in COLUMNS if name in runs}
    axis, lrs, n = style.axis(), sorted(set(columns["lr"])), len(columns["lr"])
    lr = f"{axis.name} {lrs[0]:g}" if len(lrs) == 1 else f"{len(lrs)} {axis.values}, {lrs[0]:g} to {lrs[-1]:g}"
    counts = {outcome: int((columns["outcome"] == outcome).sum()) for outcome in OUTCOMES}
    outcomes = [f"{lost} of {n} {outcome}" for outcome, lost in counts.items() if lost]
    size = f"{count(columns['size'][0])} parameters".removesuffix("unknown size parameters")
    place = filter(None, (shortened(str(columns["arm"][0])), size, lr if axis.peak else "", *others))
    seeds, ids = dict.fromkeys(map(str, columns["seed"])), list(map(str, columns.get("id", ())))
    names = [_few(list(seeds), "seed"), *[_few(ids, "run")] * bool(ids)]
    return "\n".join([*dict.fromkeys(place), quantity.text(values), *outcomes, *names])


def _few(names: Sequence[str], kind: str) -> str:
    """``runs a, b, c and 4 more``."""
    more = f" and {len(names) - MOST_IDS} more" if len(names) > MOST_IDS else ""
    return f"{kind}{'s' * (len(names) > 1)} {', '.join(names[:MOST_IDS])}{more}"


class Points(NamedTuple):
    """The marks of a line, with the text of each."""

    line: Line2D
    texts: Sequence[str]

    def drawn_texts(self) -> list[str]:
        """The texts of the marks that a drawing holds, in its order; marks outside the canvas are removed."""
        xy = np.array(self.line.get_xydata(), dtype=float)
        figure = self.line.get_figure(root=True)
        assert figure is not None
        pixels = self.line.get_transform().transform(xy)
        is_inside = np.all((pixels >= 0) & (pixels <= figure.bbox.size), axis=1)
        if (np.isfinite(pixels).all(axis=1) & ~is_inside).any():
            self.line.set_data(*np.where(is_inside[:, None], xy, np.nan).T)
        return [text for text, inside in zip(self.texts, is_inside, strict=True) if inside]
