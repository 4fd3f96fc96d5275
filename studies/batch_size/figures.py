"""Figures on the batch size: steps against it, learning rates, noise scales, and ramps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import arm_labels
from lab.analysis.rendering import hover, layout, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import geometric_mean, student_t
from lab.analysis.text import count, format_value, number
from lab.records.store import Records
from studies.batch_size.fits import FEWEST_BATCHES, Numbers, SaturatingCurve, learning_rate_curve
from studies.batch_size.measures import TunedBudget, budgets, by_tenth, loss_at, over_tokens
from studies.batch_size.tuning import TunedSteps, tuned_steps

STEPS = Quantity("steps to the target", log=True)
BEST_LR, BEST_LOSS = Quantity("best learning rate", log=True), Quantity("best held-out loss", "nats/token")
NOISE = Quantity("noise scale", "sequences", log=True)
BATCH_LABEL, BEST_LR_LABEL = "batch size (sequences)", "best peak learning rate"
BEST_LOSS_LABEL = "best held-out loss\n(nats/token)"
CRITICAL, REGIME_ENDS = "critical batch", "end of a regime"
DOTTED: tuple[int, tuple[float, float]] = (0, (1, 1.5))
# Rules for the growth of the learning rate with the batch: name, power, dashes.
RULES = (("linear", 1.0, style.DASHED), ("square root", 0.5, DOTTED))
# The local slope of the hyperbola is -0.9 at a ninth of the critical batch, and -0.1 at nine times the critical batch;
# these two slopes separate the three regimes of Shallue et al. 2018.
REGIME_FACTOR = 9.0


@figure("steps_with_batch")
def steps_with_batch(records: Records, runs: pd.DataFrame) -> Sheet:
    """Steps to the loss of a bigram model against batch size, and against the sequences that they take.

    Each batch size has a learning rate of its own, the best of those tried. Dots are geometric means over seeds. The
    line is the hyperbola S = S_min (1 + B_crit / B), fitted to them in log space. Below a ninth of the critical batch
    B_crit, twice the batch nearly halves the steps (perfect scaling). Above nine times B_crit it saves hardly any
    (maximal data parallelism). In between, returns diminish.
    """
    tuned = tuned_steps(records)
    curves = [curve for curve in tuned if curve.has_fit]
    if not curves:
        raise NothingToDrawError("nothing to draw: no optimizer reached the target at four tuned batch sizes")
    label = "steps to the target"
    sheet, facet_axes = layout.facets([curve.name for curve in curves], [label, label], 14.0, share_x=False)
    batches = np.concatenate([curve.batches for curve in curves])
    for index, (curve, (above, below)) in enumerate(zip(curves, facet_axes, strict=True)):
        colour = panels.arm_look(index)["color"]
        _steps_panel(above, curve, colour, batches)
        _examples_panel(below, curve, colour, curves)
    scales.probe_axis(facet_axes[0][0])
    for curve, (above, _) in zip(curves, facet_axes, strict=True):
        if curve.fit.is_bounded:
            _critical_lines(above, curve.fit)
        else:
            sheet.note(f"With {curve.name} the critical batch is {curve.fit.scale_text}.")
    fitted = Line2D([], [], color=style.INK, label="fitted hyperbola")
    interval = Patch(color=style.INK, alpha=0.2, linewidth=0, label="its 95 % interval")
    sheet.keys(("", [fitted, interval]))
    sheet.note("Shaded areas are hyperbolas whose critical batch lies in its 95 % interval.")
    sheet.explain(CRITICAL, "Dashed lines are critical batches, which take twice the least steps and sequences.")
    sheet.explain(REGIME_ENDS, "Dotted lines separate the three regimes.")
    for sentence in (sentence for curve in tuned for sentence in curve.cautions()):
        sheet.note(sentence)
    return sheet


def _steps_panel(axes: Axes, tuned: TunedSteps, colour: str, batches: Numbers) -> None:
    fit = tuned.fit
    _dots(axes, tuned.steps, colour, tuned.name, STEPS)
    fine = np.geomspace(batches.min(), batches.max(), 100)
    axes.plot(fine, fit.limit * (1 + fit.scale / fine), color=colour)
    low, high = _band(tuned, fit, fine)
    axes.fill_between(fine, low, high, color=colour, alpha=0.2, linewidth=0)
    scales.setting_axis(axes, batches, BATCH_LABEL)


def _critical_lines(axes: Axes, fit: SaturatingCurve) -> None:
    """Draw the critical batch and the ends of regimes that are in view."""
    left, right = axes.get_xlim()
    ends = (1 / REGIME_FACTOR, REGIME_FACTOR)
    for name, factor, dashes in [(CRITICAL, 1.0, style.DASHED), *((REGIME_ENDS, factor, DOTTED) for factor in ends)]:
        if left < fit.scale * factor < right:
            panels.level(axes, fit.scale * factor, name, dashes, upright=True)


def _examples_panel(axes: Axes, tuned: TunedSteps, colour: str, curves: Sequence[TunedSteps]) -> None:
    fit = tuned.fit
    examples = tuned.steps * tuned.batches
    axes.plot(np.exp(np.log(examples).mean()), np.exp(np.log(tuned.steps).mean()), "o", color=colour, markersize=3.5)
    fine = np.geomspace(tuned.batches.min(), tuned.batches.max(), 100)
    axes.plot(fit.limit * (fine + fit.scale), fit.limit * (1 + fit.scale / fine), color=colour)
    every = np.concatenate([(curve.steps * curve.batches).to_numpy(dtype=float).ravel() for curve in curves])
    ends = [float(np.nanmin(every)), float(np.nanmax(every))]
    scales.x_axis(axes, "sequences to the target", ends, scales.decades(ends), count)


def _band(tuned: TunedSteps, fit: SaturatingCurve, fine: Numbers) -> tuple[Numbers, Numbers]:
    """Lowest and highest hyperbola with a critical batch inside its interval, each with its best-fitting limit."""
    log_steps = np.log(tuned.steps).mean(axis=0).to_numpy(dtype=float)
    hyperbolas = []
    for scale in np.geomspace(max(fit.low, 1e-9), min(fit.high, 1e12), 9):
        limit = np.exp((log_steps - np.log1p(scale / tuned.batches)).mean())
        hyperbolas.append(limit * (1 + scale / fine))
    return np.min(hyperbolas, axis=0), np.max(hyperbolas, axis=0)


def _dots(axes: Axes, table: pd.DataFrame, colour: str, name: str, quantity: Quantity) -> None:
    """Draw the mean over seeds in each column, with its interval; the columns are batch sizes."""
    batches = table.columns.to_numpy(dtype=float)
    dots = []
    for batch, column in zip(batches, table, strict=True):
        seeds = table[column].dropna().to_numpy(dtype=float)
        of_batch = f"batch of {format_value(float(batch))} sequences"
        text = "\n".join([name, of_batch, quantity.text(seeds), f"{len(seeds)} seeds"])
        interval = geometric_mean(seeds) if quantity.log else student_t(seeds)
        dots.append(Dot(interval._replace(values=()), text))  # without the values of single seeds
    panels.draw_dots(axes, batches, dots, color=colour, marker="o", linestyle="", markersize=3.5)


@figure("best_lr_with_batch")
def best_lr_with_batch(records: Records, runs: pd.DataFrame) -> Sheet:
    """Best learning rate against batch size, with three laws.

    Dots are the learning rates that take the fewest steps to a target, or end at the lowest loss; they are geometric
    means over seeds. The dashed line is the linear rule, the dotted one the square-root rule, each through the middle
    of all dots.
    """
    tuned, at_budgets = tuned_steps(records), budgets(records, runs)
    sources: Sequence[TunedSteps | TunedBudget] = tuned or at_budgets
    tables = [(source.name, source.lr.dropna(axis=1)) for source in sources]
    laws = [(name, table) for name, table in tables if table.shape[1] > 1]
    if not laws:
        raise NothingToDrawError("nothing to draw: no two batch sizes have a best learning rate inside the grid")
    shown, labels = (laws, [BEST_LR_LABEL]) if tuned else (tables, [BEST_LR_LABEL, BEST_LOSS_LABEL])
    sheet, facet_axes = layout.facets([name for name, _ in shown], labels, 14.0)
    batches = np.unique(np.concatenate([table.columns.to_numpy(dtype=float) for _, table in shown]))
    for index, ((name, table), of_facet) in enumerate(zip(shown, facet_axes, strict=True)):
        if table.shape[1] > 1:
            _rates_panel(of_facet[0], name, table, panels.arm_look(index)["color"])
        scales.setting_axis(of_facet[-1], batches, BATCH_LABEL)
    scales.probe_axis(facet_axes[0][0])
    keys = [Line2D([], [], color=style.INK, linestyle=dashes, label=name) for name, _, dashes in RULES]
    if any(table.shape[1] >= FEWEST_BATCHES for _, table in laws):
        keys.append(Line2D([], [], color=style.INK, label="saturating"))
        sheet.note("The solid line is the saturating law lr_max / (1 + B / batch), fitted in log space.")
    sheet.keys(("law", keys))
    if not tuned:
        _add_losses(facet_axes, at_budgets)
        sheet.note("Shaded areas hold the learning rates within 5 % of the best loss; below are the best losses.")
    for sentence in (sentence for source in sources for sentence in source.cautions()):
        sheet.note(sentence)
    return sheet


def _rates_panel(axes: Axes, name: str, table: pd.DataFrame, colour: str) -> None:
    _dots(axes, table, colour, name, BEST_LR)
    own, means = table.columns.to_numpy(dtype=float), np.exp(np.log(table).mean(axis=0).to_numpy(dtype=float))
    fine = np.geomspace(own.min(), own.max(), 100)
    for _, power, dashes in RULES:
        offset = np.exp((np.log(means) - power * np.log(own)).mean())
        axes.plot(fine, offset * fine**power, color=style.INK, linestyle=dashes, linewidth=1)
    if len(own) >= FEWEST_BATCHES:
        fit = learning_rate_curve(own, means)
        axes.plot(fine, fit.limit / (1 + fit.scale / fine), color=colour)


def _add_losses(facet_axes: Sequence[Sequence[Axes]], at_budgets: Sequence[TunedBudget]) -> None:
    """Shade good learning rates above, and draw the best losses below."""
    for index, (budget, (rates, losses)) in enumerate(zip(at_budgets, facet_axes, strict=True)):
        ends = [np.exp(np.log(table).mean()).to_numpy(dtype=float) for table in (budget.low, budget.high)]
        rates.fill_between(budget.low.columns.to_numpy(dtype=float), *ends, color=style.INK, alpha=0.12, linewidth=0)
        colour, batches = panels.arm_look(index)["color"], budget.loss.columns.to_numpy(dtype=float)
        _dots(losses, budget.loss, colour, budget.name, BEST_LOSS)
        losses.plot(batches, budget.loss.mean(), color=colour)
    facet_axes[0][1].set_yscale("log")
    scales.y_ticks(facet_axes[0][1])


@figure("noise_scale_with_loss")
def noise_scale_with_loss(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient noise scale against held-out loss: a line per size, and for the largest size a line per learning rate.

    Dots are tenths of training, which goes from right to left. In each tenth the noise scale is the mean trace of the
    gradient's covariance over the mean squared norm of the gradient. Losses are means over seeds, noise scales
    geometric means. Lines per size are at the learning rate that ends lowest.
    """
    tenths = by_tenth(records).reset_index().merge(runs, on="id", suffixes=("", "_final"))
    if tenths.empty or tenths["size"].nunique() < 2 or tenths["arm"].nunique() > 1:
        raise NothingToDrawError("nothing to draw: no single arm of several sizes recorded noise_scale")
    largest = tenths[tenths["size"] == tenths["size"].max()]
    sizes, lrs = style.shades(tenths["size"], style.SIZE_SHADES), style.shades(largest["lr"], style.LR_SHADES)
    titles = ["best learning rate of each size", f"{count(tenths['size'].max())} parameters"]
    sheet, ((left,), (right,)) = layout.facets(titles, ["noise scale (sequences)"], 17.0)
    for size, of_size in tenths.groupby("size"):
        best_lr = of_size.groupby("lr")["loss_final"].mean().idxmin()
        _noise_line(left, of_size[of_size["lr"] == best_lr], sizes[size], f"{count(float(str(size)))} parameters")
    for lr, of_lr in largest.groupby("lr"):
        _noise_line(right, of_lr, lrs[lr], f"learning rate {lr:g}")
    scales.probe_axis(left)
    losses = tenths.groupby(["size", "lr", "tenth"])["loss"].mean()
    low, high = float(losses.min()), float(losses.max())
    for axes in (left, right):
        scales.x_axis(axes, "held-out loss (nats/token)", [low, high], scales.log_ticks(low, high, 6), number)
    sheet.keys(("parameters", layout.line_keys(sizes, count)), ("peak learning rate", layout.line_keys(lrs)))
    return sheet


def _noise_line(axes: Axes, tenths: pd.DataFrame, colour: str, name: str) -> None:
    losses, seeds, texts = [], [], []
    for tenth, rows in tenths.groupby("tenth"):
        losses.append(float(rows["loss"].mean()))
        seeds.append(rows["noise_scale"].to_numpy(dtype=float))
        place = f"tenth {int(str(tenth)) + 1} of training\nheld-out loss {losses[-1]:.4g} nats/token"
        texts.append("\n".join([name, place, NOISE.text(seeds[-1])]))
    panels.mean_line(axes, losses, seeds, NOISE, texts, color=colour)


CONSTANT = "constant"
DIFFERENCE = Quantity("final loss minus that of the constant batch", "nats/token")
LEVEL = "constant batch"
TICKS = (1, 2, 5, 10, 20, 50, 100)
SHARES = np.geomspace(1, 100, 80)  # of the tokens, percent, at which lines are drawn


@figure("batch_ramps")
def batch_ramps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Batch size and held-out loss over the tokens, one line per batch schedule, and final losses.

    Losses are relative to the constant batch with the same seed and at as many tokens: below zero a schedule is ahead.
    Each schedule and seed has the learning rate with the lowest final loss of those tried. Lines and dots are means
    over seeds. The axis of tokens is logarithmic.
    """
    best = _best(records, runs)
    names = list(dict.fromkeys(best["batch"]))
    looks = panels.arm_looks(names)
    over, total = over_tokens(records.of(best["id"])), records.runs.set_index("id")["tokens"].astype(float)
    held, losses = {}, {}  # at each of ``SHARES``, by batch schedule and seed
    for name, seed, run in best[["batch", "seed", "id"]].itertuples(index=False):
        curve = over[run].assign(tokens=over[run]["tokens"] * 100 / total[run])
        before = np.searchsorted(curve["tokens"].to_numpy(dtype=float), SHARES, side="right") - 1
        held[name, seed] = curve["sequences"].to_numpy(dtype=float)[before]
        losses[name, seed] = loss_at(curve, SHARES)
    rows = [name for name in names if name != CONSTANT]
    columns = layout.columns_for(2, panels.NARROWEST_ROWS)
    below = [panels.rows_height(rows)]
    sheet, ((batch_axes,), (loss_axes,)) = layout.facets(["", ""], [""], 15.0, columns, share_y=False, below=below)
    for name, look in looks.items():
        seeds = [seed for batch, seed in held if batch == name]
        _line(batch_axes, np.array([held[name, seed] for seed in seeds]), look)
        paired = [losses[name, seed] - losses[CONSTANT, seed] for seed in seeds if (CONSTANT, seed) in losses]
        if name != CONSTANT and paired:
            _line(loss_axes, np.array(paired), look)
    for axes, label in ((batch_axes, "batch, sequences"), (loss_axes, "loss minus that of the\nconstant (nats/token)")):
        scales.x_axis(axes, "tokens, % of the run", SHARES, TICKS, number)
        axes.set_ylabel(label)
    scales.probe_axis(batch_axes)
    panels.level(loss_axes, 0.0, LEVEL, style.DASHED)
    bottom = sheet.panel(-1, 0, sheet.columns)
    constant = best[best["batch"] == CONSTANT].set_index("seed")["capped"]
    final = best.assign(difference=best["capped"] - best["seed"].map(constant))
    for row, name in enumerate(rows):
        of_name = final[final["batch"] == name]
        changes = of_name["difference"].dropna().to_numpy()
        text = hover.text(of_name, DIFFERENCE, changes)
        dots = {row: Dot(student_t(changes), text)} if len(changes) else {}
        panels.rows(bottom, rows, [({**looks[name], "marker": "o"}, dots)])
    panels.level(bottom, 0.0, LEVEL, style.DASHED, upright=True)
    bottom.set_xlabel("final held-out loss minus that\nof the constant batch (nats/token)")
    sheet.keys(("batch", panels.arm_keys(looks, marker="")))
    sheet.explain(LEVEL, "The dashed lines are the constant batch itself.")
    return sheet


def _best(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The best run of each seed and batch schedule, at the largest size, with the column ``batch``.

    Raises:
        NothingToDrawError: there is no growing batch beside a constant one, other settings differ, too, or no run
            recorded its batch.
    """
    names = records.runs.set_index("id").reindex(columns=["batch.name"])["batch.name"]
    best: pd.DataFrame = runs[(runs["lr"] == runs["best_lr"]) & (runs["size"] == runs["size"].max())]
    best = best.assign(batch=best["id"].map(names)).dropna(subset=["batch"])
    if CONSTANT not in set(best["batch"]) or best["batch"].nunique() < 2:
        raise NothingToDrawError("nothing to draw: no batch that grows beside a constant one")
    of_batch = [key for key in map(str, records.runs) if key.startswith("batch.")]
    if best["id"].map(arm_labels(records.runs, [*of_batch, "steps"])).nunique() > 1:
        raise NothingToDrawError("nothing to draw: other settings differ besides the batch")
    if not set(best["id"]) <= set(records.metrics.loc[records.metrics["probe"] == "batch", "id"]):
        raise NothingToDrawError("nothing to draw: no run recorded its batch")
    return best.sort_values("batch", key=lambda names: names == CONSTANT, kind="stable")


def _line(axes: Axes, values_sn: Numbers, look: Mapping[str, Any]) -> None:
    """Draw the mean over seeds at each of ``SHARES``, with the band from the lowest to the highest."""
    axes.plot(SHARES, values_sn.mean(axis=0), color=look["color"], linestyle=look["linestyle"])
    panels.band(axes, SHARES, values_sn.min(axis=0), values_sn.max(axis=0), look["color"], len(values_sn))
