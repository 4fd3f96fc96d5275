"""Figures by name: each turns records into a drawing, and its docstring is its caption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.analysis import drawing, panels
from lab.analysis.arms import count
from lab.analysis.curves import points
from lab.analysis.sensitivity import by_curve, judge, per_seed
from lab.registry import Registry, RequestError
from lab.store import Records

FIGURES: Registry[Callable[[Records], Figure]] = Registry("figure", "figures")
MOST_STEPS = 150


@FIGURES.register("learning_rate_sensitivity")
@drawing.styled
def learning_rate_sensitivity(records: Records) -> Figure:
    """Final loss against learning rate, and sensitivity against size.

    Top: the flatter a line, the less the choice of learning rate matters. Lines are means over seeds, bands reach from
    the lowest to the highest seed, and a loss above that at initialization is drawn there. A cross marks learning rates
    above the best one at which some seed ended worse than a bigram model of the text (unstable), a triangle those at
    which some seed's loss was no number any more or ended no lower than it began (diverged). The loss axis is
    logarithmic.

    Bottom: mean regret over the learning rates, so lower is less sensitive. The dashed line is the part that comes from
    learning rates above the best one, instability; the distance between the two lines is under-training. Bars are 95 %
    Student-t intervals over the n seeds; below three seeds each seed is a dash.
    """
    runs = _judged(records)
    arms = list(runs["arm"].unique())
    figure = drawing.canvas(len(arms), height=6.0)
    layout = figure.add_gridspec(2, len(arms), height_ratios=(1.3, 1))
    top = [figure.add_subplot(layout[0, 0])]
    top += [figure.add_subplot(layout[0, column], sharey=top[0]) for column in range(1, len(arms))]
    sizes = drawing.shades(runs["size"], drawing.SIZE_SHADES)
    for axes, arm in zip(top, arms, strict=True):
        for size, some in runs[runs["arm"] == arm].groupby("size"):
            panels.over_lr(axes, some, "capped", sizes[size], "mean")
        panels.references(axes, runs)
        axes.set_title(drawing.literal(arm, 30))
        panels.lr_axis(axes, runs["lr"])
        axes.tick_params(labelleft=axes is top[0])
    panels.loss_axis(top[0], runs, runs["capped"], "final held-out loss (nats/token)")
    drawing.beside(top[-1], drawing.line_keys(sizes, count), "parameters")
    drawing.beside(top[-1], [*_band_key(runs), *drawing.fate_keys(), *drawing.reference_keys(top[-1])], lower=True)
    panels.sensitivities(figure.add_subplot(layout[1, :]), by_curve(per_seed(runs)))
    return figure


@FIGURES.register("loss_over_steps")
@drawing.styled
def loss_over_steps(records: Records) -> Figure:
    """Training loss against step, one line per learning rate, for each arm and size.

    Lines are means over seeds at up to 150 of the recorded steps; darker is a lower learning rate. Good learning rates
    end lowest; unstable ones rise, or stay near the loss of the bigram model. A loss above that at initialization, or
    one that is no number, is drawn at initialization.
    """
    runs = _judged(records)
    heard = _heard(records, runs, "train_loss")
    init = heard["loss_at_init"]
    heard["value"] = np.where(np.isfinite(heard["value"]), np.fmin(heard["value"], init), init)
    sizes = sorted(runs["size"].unique())
    figure = drawing.canvas(runs["arm"].nunique(), height=2.3 * len(sizes) + 0.4)
    grid = figure.subplots(len(sizes), runs["arm"].nunique(), squeeze=False, sharey=True)
    _over_steps(grid, _seed_means(heard), runs)
    for axes in grid.flat:
        panels.references(axes, runs)
    for axes, arm in zip(grid[0], runs["arm"].unique(), strict=True):
        axes.set_title(drawing.literal(arm, 30))
    for axes, size in zip(grid[:, 0], sizes, strict=True):
        label = f"{count(size)} parameters\ntraining loss (nats/token)"
        panels.loss_axis(axes, runs, heard["value"], label)
    drawing.beside(grid[0, -1], drawing.reference_keys(grid[0, -1]), lower=True)
    return figure


@FIGURES.register("max_attention_logit")
@drawing.styled
def max_attention_logit(records: Records) -> Figure:
    """Largest attention logit against learning rate, and over the steps.

    The logit is the score before softmax, the largest over the recorded blocks. Top: its peak over the run, geometric
    mean over seeds, bands from the lowest to the highest seed; crosses and triangles as in the first figure: where the
    logit runs away, training is lost. Below: geometric means over seeds at up to 150 of the recorded steps, one line
    per learning rate, darker is lower; a line ends where the logit is no positive number.
    """
    runs = _judged(records)
    heard = _heard(records, runs, "attention_logit_max")
    heard = heard[np.isfinite(heard["value"]) & (heard["value"] > 0)].assign(value=lambda h: np.log(h["value"]))
    lines, peaks = _seed_means(heard), runs.merge(heard.groupby("id")["value"].max().rename("peak"), on="id")
    lines["value"], peaks["peak"] = np.exp(lines["value"]), np.exp(peaks["peak"])
    sizes = drawing.shades(runs["size"], drawing.SIZE_SHADES)
    figure = drawing.canvas(runs["arm"].nunique(), height=2.1 * (1 + len(sizes)) + 0.4)
    grid = figure.subplots(1 + len(sizes), runs["arm"].nunique(), squeeze=False, sharey=True)
    _over_steps(grid[1:], lines, runs)
    for axes, arm in zip(grid[0], runs["arm"].unique(), strict=True):
        for size, some in peaks[peaks["arm"] == arm].groupby("size"):
            panels.over_lr(axes, some, "peak", sizes[size], lambda values: float(np.exp(np.log(values).mean())))
        panels.lr_axis(axes, runs["lr"])
        axes.set_title(drawing.literal(arm, 30))
    grid[0, 0].set_yscale("log")
    grid[0, 0].set_ylabel("peak of max\nattention logit")
    for axes, size in zip(grid[1:, 0], sizes, strict=True):
        axes.set_ylabel(f"{count(size)} parameters\nmax attention logit")
    drawing.beside(grid[0, -1], drawing.line_keys(sizes, count), "parameters")
    drawing.beside(grid[0, -1], [*_band_key(runs), *drawing.fate_keys()], lower=True)
    return figure


def _judged(records: Records) -> pd.DataFrame:
    runs = judge(points(records.runs))
    if runs.empty:
        raise RequestError("nothing to draw: no run ended")
    return runs


def _heard(records: Records, runs: pd.DataFrame, probe: str) -> pd.DataFrame:
    """``runs`` with ``step`` and ``value``: the largest over places, at up to ``MOST_STEPS`` steps per arm and size."""
    heard = records.metrics[records.metrics["probe"] == probe].groupby(["id", "step"])["value"].max().reset_index()
    heard = heard.merge(runs, on="id")
    if heard.empty:
        raise RequestError(f"nothing to draw: no run recorded {probe}")
    some = [table[table["step"].isin(_spread(table["step"]))] for _, table in heard.groupby(["arm", "size"])]
    return pd.concat(some, ignore_index=True)


def _spread(steps: pd.Series) -> Any:
    known = np.unique(steps)
    return known[np.unique(np.linspace(0, len(known) - 1, min(len(known), MOST_STEPS)).round().astype(int))]


def _seed_means(heard: pd.DataFrame) -> pd.DataFrame:
    return heard.groupby(["arm", "size", "lr", "step"], sort=False)["value"].mean().reset_index()


def _over_steps(grid: Any, lines: pd.DataFrame, runs: pd.DataFrame) -> None:
    """Fill panels, a row per size and a column per arm, with a line per learning rate."""
    shades = drawing.shades(runs["lr"], drawing.LR_SHADES)
    for row, size in zip(grid, sorted(runs["size"].unique()), strict=True):
        for axes, arm in zip(row, runs["arm"].unique(), strict=True):
            panels.over_steps(axes, lines[(lines["arm"] == arm) & (lines["size"] == size)], shades)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    drawing.beside(grid[0, -1], drawing.line_keys(shades, "{:g}".format), "peak learning rate")


def _band_key(runs: pd.DataFrame) -> list[Patch]:
    seeds = runs["seed"].nunique()
    return [Patch(color=drawing.INK, alpha=0.25, linewidth=0, label=f"range of {seeds} seeds")] if seeds > 1 else []
