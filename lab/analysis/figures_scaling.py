"""Figures of growth: what a probe heard against the size of a model, the learning rate and the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.analysis import drawing, panels
from lab.analysis.arms import count
from lab.analysis.gallery import NothingToDrawError, fate_keys, figure
from lab.analysis.measured import late, near
from lab.store import Records

EPSILON = "optimizer.eps"


class Measured(NamedTuple):
    """A probe as one number per run: its name for readers, where it listens in block 0, and when."""

    probe: str
    where: str
    label: str
    when: Callable[[Records, str, str], pd.Series] = late

    def at(self, block: int) -> str:
        """Where it listens in another block."""
        return self.where.replace("block0", f"block{block}", 1)


@figure("max_attention_logit")
def max_attention_logit(records: Records, runs: pd.DataFrame) -> Figure:
    """Largest attention logit against learning rate.

    The logit is the score before softmax, its peak over the run and over the recorded blocks: geometric mean over
    seeds, bands from the lowest to the highest seed; crosses and triangles as in the first figure: where the logit runs
    away, training is lost.
    """
    heard = records.metrics[records.metrics["probe"] == "attention_logit_max"]
    heard = heard[np.isfinite(heard["value"]) & (heard["value"] > 0)]
    if heard.empty:
        raise NothingToDrawError("nothing to draw: no run recorded attention_logit_max")
    peaks = runs.assign(peak=runs["id"].map(heard.groupby("id")["value"].max()))
    sizes = drawing.shades(runs["size"], drawing.SIZE_SHADES)
    arms = list(dict.fromkeys(runs["arm"]))
    columns = min(len(arms), drawing.MOST_COLUMNS)
    sheet = drawing.Sheet(columns, [(1.9, 0.95)] * -(-len(arms) // columns), headroom=0.55)
    first: Axes | None = None
    for place, arm in enumerate(arms):
        axes = sheet.panel(place // columns, place % columns, sharey=first)
        first = first or axes
        for size, some in peaks[peaks["arm"] == arm].groupby("size"):
            panels.over(axes, some, "lr", "peak", sizes[size], panels.geometric)
        panels.lr_axis(axes, runs["lr"])
        panels.title(axes, arm)
        axes.set_yscale("log")
        axes.set_ylabel("" if place % columns else "peak of max\nattention logit")
        axes.tick_params(labelleft=place % columns == 0)
    sheet.keys(("parameters", drawing.line_keys(sizes, count)), ("", fate_keys(runs)))
    return sheet.figure


@figure("gradient_with_size")
def gradient_with_size(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient of the first MLP layer against size, learning rate and block."""
    return _growth(records, runs, Measured("grad_rms", "block0.mlp_up", "gradient RMS"))


@figure("key_gradient_with_size")
def key_gradient_with_size(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient of the key projection against size, learning rate and block."""
    return _growth(records, runs, Measured("grad_rms", "block0.attention.key", "gradient RMS"))


@figure("block_output_with_size")
def block_output_with_size(records: Records, runs: pd.DataFrame) -> Figure:
    """Output of a block against size, learning rate and block."""
    return _growth(records, runs, Measured("block_rms", "block0", "block output RMS"))


@figure("attention_logit_with_size")
def attention_logit_with_size(records: Records, runs: pd.DataFrame) -> Figure:
    """Largest attention logit early in training against size, learning rate and block."""
    tenth = lambda records, probe, where: near(records, probe, where, 0.1)  # noqa: E731
    return _growth(records, runs, Measured("attention_logit_max", "block0", "max attention\nlogit", tenth))


def _growth(records: Records, runs: pd.DataFrame, measured: Measured) -> Figure:
    raise NothingToDrawError("not yet")
