"""Figures of any sweep: losses against rate, size, settings and steps, and what runs away as the rate rises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.contrasts import Measure, baseline_of, by_size, contrast, final_losses
from lab.analysis.crossings import rate_text
from lab.analysis.curves import EPSILON, depths
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.grouping import facets, swept_setting
from lab.analysis.probe_values import late
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import FINAL_LOSS, Dot
from lab.analysis.rendering.style import DASHED
from lab.analysis.runaway import HALF, Rate, rates, read_runaways
from lab.analysis.sensitivity import WINDOW, Window, by_curve, has_sensitivity, per_seed
from lab.analysis.text import LEARNING_RATE, capitalized, count, number, shortened
from lab.records.imported import is_imported, size_name
from lab.records.store import Records

GRADIENT = Quantity("gradient RMS", log=True)
GRADIENT_EQUALS_EPSILON, NO_BLOCKS = "gradient = epsilon", "model of no blocks"
POWER_LAW = "power law of the smaller sizes"
BEST_LOSS = Quantity("best held-out loss", "nats/token")
BLOCKLESS_DASHES = (0, (3, 1.5, 1, 1.5))
LOSS_BY_ARM = Measure("Final loss", "nats/token", final_losses, by_size, "lower")
LOSS_LABEL = "final held-out loss\n(nats/token)"
OWN_LABELS = 15.0  # least width of a panel with labels of its own, in multiples of the size of text
MOST_LINES = len(style.ARM_COLOURS)  # more arms have a row each instead of a line
FAILING, BOUND = "failing rate", "beyond what was tried"
# Lines of a panel that say in words from where they fail, and the height of such words, as a share of the panel's.
MOST_LABELS, LABEL_HEIGHT = 3, 0.1
# The two numbers drawn for each arm and size, and the look of each.
PARTS: dict[str, dict[str, Any]] = {
    "total": {},
    "above": {"linestyle": style.DASHED, "fillstyle": "none", "markersize": 8},
}


@figure("loss_against_setting")
def loss_against_setting(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss against a setting of the recipe, one line per {axis.name}.

    Lines are means over seeds. The flatter and the closer together they are, the less the setting and the {axis.name}
    matter.
    """
    swept = swept_setting(records.runs, runs)
    if swept is None:
        raise NothingToDrawError("nothing to draw: no numeric setting, or more than one, has three values or more")
    depth = swept.runs["id"].map(depths(records.runs))
    blockless = (depth == 0) & bool((depth > 0).any())  # if no run has a block, these are the curves themselves
    shown, without_blocks = swept.runs[~blockless], swept.runs[blockless]
    line = "lr" if shown["lr"].nunique() > 1 else "size"
    shades = style.shades(shown[line], style.LR_SHADES if line == "lr" else style.SIZE_SHADES)
    gradients = late(records, "grad_rms", "block0.mlp_up") if swept.key == EPSILON else pd.Series(dtype=float)
    shown = shown.assign(gradient=shown["id"].map(gradients).astype(float))
    shown["title"] = shown["rest"] + (", " + shown["size"].map(count) if line == "lr" else "")
    values = {"capped": (FINAL_LOSS, LOSS_LABEL)}
    if shown["gradient"].notna().any():
        values["gradient"] = (GRADIENT, "gradient RMS")
    by_title = dict(list(shown.groupby("title", sort=False)))
    sheet, facet_axes = layout.facets(list(map(str, by_title)), [label for _, label in values.values()], 13.0)
    for facet, of_facet in zip(by_title.values(), facet_axes, strict=True):
        position = scales.setting_axis(of_facet[-1], shown["setting"], swept.name)
        placed = facet.assign(position=position(facet["setting"]))
        for axes, (value, (quantity, _)) in zip(of_facet, values.items(), strict=True):
            for part in (placed[placed["setting"] == 0], placed[placed["setting"] > 0]):  # no line leads to zero
                panels.lines(axes, part, line, shades, "position", value, quantity)
        panels.references(of_facet[0], runs)
        if len(without_blocks):
            panels.level(of_facet[0], without_blocks["capped"].mean(), NO_BLOCKS, BLOCKLESS_DASHES)
    scales.loss_axis(facet_axes[0][0], runs, runs["capped"])
    if "gradient" in values:
        scales.probe_axis(facet_axes[0][1])
        for _, axes in facet_axes:
            panels.diagonal(axes, shown.loc[shown["setting"] > 0, "setting"], GRADIENT_EQUALS_EPSILON)
        sheet.note(
            "Below: the gradient of the first MLP layer, a root mean square over its elements, a mean over the last "
            "tenth of the run and a geometric mean over seeds."
        )
        sheet.explain(GRADIENT_EQUALS_EPSILON, "On the dotted line the gradient equals epsilon.")
    if (shown["setting"] == 0).any():
        sheet.note("A value of zero is drawn at the left edge without a line, since the axis is logarithmic.")
    keys = layout.line_keys(shades, number if line == "lr" else count)
    sheet.keys((style.axis().peak if line == "lr" else "parameters", keys))
    return sheet


@figure("best_loss_with_size")
def best_loss_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Best loss over the {axis.values}, and the {axis.name} that reaches it, against size.

    Each seed has a best of its own; lines are means over seeds (geometric for {axis.values}). The flatter a line of
    {axis.values}, the better a {axis.name} found on a small model suits a large one. All axes are logarithmic.
    """
    blocks = runs["id"].map(depths(records.runs)).fillna(1)  # an imported table may lack it
    best = runs[(blocks > 0) & (runs["lr"] == runs["best_lr"])]
    arms = [(str(arm), group) for arm, group in best.groupby("arm", sort=False) if group["size"].nunique() > 1]
    if not arms or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no arm has several sizes and learning rates")
    sheet, ((losses,), (rates,)) = layout.facets(["", ""], [""], 17.0, layout.columns_for(2, OWN_LABELS), share_y=False)
    looks, best_value = panels.arm_looks(arm for arm, _ in arms), Quantity(f"best {style.axis().peak}", log=True)
    for arm, best_of_arm in arms:
        look = looks[arm]
        sizes: dict[Any, pd.DataFrame] = dict(list(best_of_arm.groupby("size")))
        for axes, value, quantity in ((losses, "capped", BEST_LOSS), (rates, "lr", best_value)):
            seeds = [group[value].to_numpy(dtype=float) for group in sizes.values()]
            texts = [hover.text(group, quantity, of_size) for group, of_size in zip(sizes.values(), seeds, strict=True)]
            panels.mean_line(axes, list(sizes), seeds, quantity, texts, **look, markersize=5)
        _extrapolate(losses, best_of_arm, look)
    for axes in (losses, rates):
        scales.size_axis(axes, best["size"], size_name(records))
    scales.loss_axis(losses, runs, best["capped"], bigram=False)
    losses.set_ylabel("best held-out loss\n(nats/token)")
    scales.lr_ticks(rates, runs["lr"], best["lr"])
    rates.set_ylabel(style.literal(best_value.name))
    sheet.keys(("", panels.arm_keys(looks)))
    sheet.explain(
        POWER_LAW,
        "A dashed line is a power law fitted to the losses of all sizes of an arm except the largest. The hollow mark "
        "at its end is the loss that it predicts for the largest size.",
    )
    return sheet


def _extrapolate(axes: Axes, best: pd.DataFrame, look: dict[str, Any]) -> None:
    """Fit a power law to all sizes but the largest and draw it up to that one; needs three sizes."""
    losses = best.groupby("size")["capped"].mean()
    if len(losses) < 3:
        return
    slope, intercept = np.polyfit(np.log(losses.index[:-1]), np.log(losses.iloc[:-1]), 1)
    fitted = np.exp(intercept + slope * np.log(losses.index.to_numpy(dtype=float)))
    (line,) = axes.plot(losses.index, fitted, color=look["color"], linestyle=style.DASHED, linewidth=1)
    marks.name(line, POWER_LAW)
    hollow = look | {"linestyle": "", "fillstyle": "none", "markersize": 8}
    (end,) = axes.plot(losses.index[-1:], fitted[-1:], **hollow)
    text = f"{best['arm'].iloc[0]}\n{count(losses.index[-1])} parameters\nloss predicted {fitted[-1]:.4g} nats/token"
    panels.add_hover_texts(axes, end, [text])


@figure("learning_rate_sensitivity", over_window=True)
def learning_rate_sensitivity(records: Records, runs: pd.DataFrame, window: Window) -> Sheet:
    """Final loss against {axis.name}, and sensitivity.

    Top: the flatter a line, the less the choice of {axis.name} matters. Lines are means over seeds; a loss above that
    at initialization is drawn at it. The loss axis is logarithmic.

    Bottom: sensitivity, the mean regret over the {axis.values}; lower is less sensitive. The hollow marks are its
    {axis.above}, from {axis.values} above the best one. The distance between the two marks is the {axis.below}.
    """
    shown = facets(records.runs, runs)
    curves = by_curve(per_seed(runs, *window))
    if not has_sensitivity(curves):
        raise NothingToDrawError("nothing to draw: no curve has two learning rates")
    arms, sizes = list(curves["arm"].unique()), sorted(curves["size"].unique())
    has_lines = len(sizes) > 1 and len(arms) <= MOST_LINES and shown.line in ("arm", "size")
    below, room = (13.0, layout.LABELS) if has_lines else (panels.rows_height(arms), panels.rows_room(arms))
    titles = [label for label, _ in shown.panels]
    sheet, facet_axes = layout.facets(titles, [LOSS_LABEL], 15.0, below=[below], room=room)
    for (axes,), (_, panel_runs) in zip(facet_axes, shown.panels, strict=True):
        position = scales.lr_axis(axes, runs["lr"])
        placed = panel_runs.assign(position=position(panel_runs["lr"]))
        panels.lines(axes, placed, shown.line, shown.looks, "position", "capped", FINAL_LOSS)
        panels.references(axes, runs)
    scales.loss_axis(facet_axes[0][0], runs, runs["capped"])
    sheet.keys((shown.name, shown.keys))
    bottom = sheet.panel(-1, 0, sheet.columns)
    axis = style.axis()
    quantity = capitalized(axis.sensitivity) if window == WINDOW else f"{capitalized(axis.sensitivity)}, {window}"
    if has_lines:
        _sensitivity_lines(bottom, curves, runs, size_name(records))
        bottom.set_ylabel(style.literal(quantity) + "\n(nats/token)")
        if shown.line != "arm":
            sheet.keys(("arm", panels.arm_keys(panels.arm_looks(arms))))
    else:
        by_size = style.shades(sizes, style.SIZE_SHADES if shown.line == "size" else style.LR_SHADES)
        _sensitivity_rows(bottom, curves, runs, by_size)
        bottom.set_xlabel(style.literal(f"{quantity} (nats/token)"))
        if shown.line != "size" and len(sizes) > 1:
            sheet.keys(("parameters, below", layout.line_keys(by_size, count)))
    named = {"sensitivity": PARTS["total"], f"its {axis.above}": PARTS["above"]}
    in_rows = {} if has_lines else {"linestyle": ""}
    sheet.keys(("", panels.arm_keys(named, color=style.INK, marker="o", **in_rows)))
    return sheet


@figure("failing_learning_rate")
def failing_learning_rate(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss against {axis.name}, and from which training fails.

    Lines are means over seeds. Training fails where the loss is half of the way from the best one to that of a unigram
    model, which knows only how often each token occurs.
    """
    found: dict[Any, Rate] = {rate.curve: rate for rate in rates(records, runs, ()) if rate.quantity == HALF}
    if style.axis() != LEARNING_RATE or not any(seed.times for rate in found.values() for seed in rate.seeds):
        raise NothingToDrawError("nothing to draw: no curve is known to fail at a learning rate")
    shown = facets(records.runs, runs)
    sheet, facet_axes = layout.facets([title for title, _ in shown.panels], [LOSS_LABEL], 15.0)
    most = max(panel_runs["curve"].nunique() for _, panel_runs in shown.panels)
    room = most if most <= MOST_LABELS else 0
    for (axes,), (_, panel_runs) in zip(facet_axes, shown.panels, strict=True):
        position = scales.lr_axis(axes, runs["lr"])
        outcome = panel_runs["outcome"].replace("unstable", "")  # which is worse than a bigram model, another level
        placed = panel_runs.assign(position=position(panel_runs["lr"]), outcome=outcome)
        panels.lines(axes, placed, shown.line, shown.looks, "position", "capped", FINAL_LOSS)
        for row, (curve, of_curve) in enumerate(panel_runs.groupby("curve", sort=False)):
            if curve in found:
                look = shown.looks[of_curve[shown.line].iloc[0]]
                _mark_failing(axes, found[curve], of_curve, look, row if room else None)
    scales.loss_axis(facet_axes[0][0], runs, runs["capped"], bigram=False)
    low, high = facet_axes[0][0].get_ylim()
    facet_axes[0][0].set_ylim(low, high * (high / low) ** (LABEL_HEIGHT * room))
    sheet.keys((shown.name, shown.keys))
    sheet.explain(FAILING, "A diamond marks where a line gets there, between the {axis.values} that were tried.")
    sheet.explain(
        BOUND, "A hollow diamond is a bound: some seed fails at none that was tried, or already at the first."
    )
    return sheet


def _mark_failing(axes: Axes, rate: Rate, runs: pd.DataFrame, look: Mapping[str, Any], row: int | None) -> None:
    """A diamond on the mean curve where it fails, and in this row of the panel's top the same in words."""
    is_bound = math.isnan(rate.rate.mean)
    at = (rate.rate.low if math.isinf(rate.rate.high) else rate.rate.high) if is_bound else rate.rate.mean
    if not at:
        return  # some seed fails at the first learning rate, and another at none
    losses = runs[runs["lr"] > 0].groupby("lr")["capped"].mean().dropna()
    loss = math.exp(np.interp(math.log(at), np.log(losses.index), np.log(losses)))
    kind, filled = (BOUND, "none") if is_bound else (FAILING, "full")
    diamond: dict[str, Any] = {"color": look["color"], "markersize": 7, "fillstyle": filled}
    _mark(axes, rate, at, loss, kind, **diamond, markeredgewidth=1.4, zorder=4)
    if row is not None:
        fails_somewhere = any(seed.times for seed in rate.seeds)
        bound = f"fails {rate_text(rate.rate)}" if fails_somewhere else f"not up to {at:g}"
        words = bound if is_bound else f"fails from {at:.2g}"
        em, y = style.em() / scales.width(axes), 1 - LABEL_HEIGHT * (row + 0.7)
        axes.plot([em], [y], "D", **diamond, transform=axes.transAxes)
        look = {"va": "center_baseline", "size": style.SMALL * style.page().size}
        axes.text(2 * em, y, words, **look, transform=axes.transAxes)


@figure("loss_by_arm")
def loss_by_arm(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss of each arm of a table, and its difference from the baseline.

    Left: means over seeds. Right: differences from the baseline, paired by seed where seeds are shared; to the left of
    the line an arm is better.
    """
    arms = list(runs["arm"].unique())
    if not is_imported(records) or len(arms) < 2 or runs.groupby("curve")["lr"].nunique().max() > 1:
        raise NothingToDrawError("nothing to draw: no imported table of arms at one learning rate")
    reference = baseline_of(arms)
    shades = style.shades(sorted(runs["size"].unique()), style.LR_SHADES)
    sheet, (losses, differences) = panels.row_panels(arms, 2)
    levels, changes = [], []
    for size, of_size in runs.groupby("size"):
        look = {"color": shades[size], "marker": "o"}
        levels.append((look, panels.dots(of_size.assign(name=of_size["arm"]), "capped", FINAL_LOSS, arms)))
        changes.append((look, _difference_dots(of_size, arms, reference)))
    panels.rows(losses, arms, levels)
    panels.rows(differences, arms, changes)
    losses.set_xlabel("final loss (nats/token)")
    differences.set_xlabel(f"minus {reference} (nats/token)")
    differences.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    if len(shades) > 1:
        sheet.keys(("parameters", layout.line_keys(shades, count)))
    return sheet


def _difference_dots(runs: pd.DataFrame, arms: list[str], reference: str) -> dict[int, Dot]:
    """A dot for each arm but the reference, by number of its row."""
    values = contrast(LOSS_BY_ARM, runs.assign(value=runs["capped"]), reference).differences
    shown = {}
    for arm, cells in values.items():
        (interval,) = cells.values()
        text = f"{shortened(arm)}\n{LOSS_BY_ARM.change(interval)} nats/token beside {shortened(reference)}"
        if interval.n:
            shown[arms.index(arm)] = Dot(interval, text)
    return shown


def _sensitivity_lines(axes: Axes, curves: pd.DataFrame, runs: pd.DataFrame, name: str) -> None:
    """Against size of this name, a line per arm, solid and dashed for the instability part."""
    sizes = sorted(curves["size"].unique())
    arms = list(curves.groupby("arm", sort=False))
    for position, (_, of_arm) in enumerate(arms):
        # arms stand side by side, so that their bars do not hide one another
        aside = np.log(sizes[-1] / sizes[0]) * 0.012 * (position - (len(arms) - 1) / 2)
        for part, look in PARTS.items():
            dots = [_dot(curve, part, runs) for curve in of_arm.itertuples()]
            panels.draw_dots(axes, of_arm["size"] * np.exp(aside), dots, **panels.arm_look(position) | look)
    scales.size_axis(axes, sizes, name)
    axes.set_ylim(bottom=0)


def _sensitivity_rows(axes: Axes, curves: pd.DataFrame, runs: pd.DataFrame, shades: dict[Any, str]) -> None:
    """Draw sensitivity in a row per arm, with two dots per size."""
    arms = list(curves["arm"].unique())
    groups = []
    for size, of_size in curves.groupby("size"):
        for part, look in PARTS.items():
            dots = {arms.index(curve.arm): _dot(curve, part, runs) for curve in of_size.itertuples()}
            groups.append(({"color": shades[size], "marker": "o", **look}, dots))
    panels.rows(axes, arms, groups)
    axes.set_xlim(left=0)


def _dot(curve: Any, part: str, runs: pd.DataFrame) -> Dot:
    """One of the two numbers of a row of ``by_curve``."""
    interval = getattr(curve, part)
    of_curve = runs[(runs["arm"] == curve.arm) & (runs["size"] == curve.size)]
    axis = style.axis()
    name = axis.sensitivity if part == "total" else f"{axis.sensitivity}, {axis.above}"
    quantity = Quantity(name, "nats/token")
    return Dot(interval, hover.text(of_curve, quantity, np.array(interval.values)))


@figure("loss_over_steps")
def loss_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Training loss against step, one line per {axis.name}, with the largest attention logit below it.

    Lines are means over seeds (geometric for logits) at some of the recorded steps. Good {axis.values} end lowest;
    unstable ones rise, or stay near the loss of the bigram model. A loss that is non-finite, or above that at
    initialization, is drawn at the latter. A line of logits ends where some seed's is non-finite.
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [loss, ProbeSeries("attention_logit_max", None, "max attention\nlogit")])


@figure("output_logits_over_steps")
def output_logits_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Output logits against step: their mean, and the mean square of the log of the softmax normalizer.

    Lines are means over seeds (geometric for squares), one per {axis.name}. Late in training the output logits can
    drift away from zero; z-loss prevents that.
    """
    mean = ProbeSeries("output_logit_mean", "", "mean output logit", "asinh")
    return over_steps(records, runs, [mean, ProbeSeries("log_z_square", "", "mean of log² Z")])


@figure("updates_over_steps")
def updates_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient and update of the first MLP layer against step.

    Lines are root mean squares over the layer's elements and geometric means over seeds, one per {axis.name}. The
    update is Adam's, before learning rate and decay. It is near one, unless the gradient falls to Adam's epsilon.
    """
    gradient = ProbeSeries("grad_rms", "block0.mlp_up", "gradient RMS")
    sheet = over_steps(records, runs, [gradient, ProbeSeries("update_rms", "block0.mlp_up", "update RMS")])
    sheet.explain(marks.EPSILON, "The dashed line is Adam's epsilon.")
    return sheet


OTHERS = ("output_logits", "residual_stream", "router_logits", "gradients")  # that run away, besides attention logits
LEVEL, CROSSING = "level", "crossing"


@figure("max_attention_logit")
def max_attention_logit(records: Records, runs: pd.DataFrame) -> Sheet:
    """Largest attention logit against {axis.name}.

    The logit is the score before softmax: its peak over the run and over the recorded blocks, a geometric mean over
    seeds. Where the logit diverges, training is unstable.
    """
    return _runaways(records, runs, ["attention_logits"])


@figure("runaway_rates")
def runaway_rates(records: Records, runs: pd.DataFrame) -> Sheet:
    """Quantities that run away against {axis.name}.

    Output logits are the root of the mean square of log Z. Of them, as of the residual stream and of router logits, the
    largest value of the run counts; of epsilon over gradients the last value, a geometric mean over tensors. Lines are
    geometric means over seeds. A quantity is drawn if it passes its level somewhere.
    """
    found = rates(records, runs, OTHERS)
    passed = {rate.quantity for rate in found if any(each.times for each in rate.seeds)}
    return _runaways(records, runs, [name for name in OTHERS if name in passed])


def _runaways(records: Records, runs: pd.DataFrame, names: Sequence[str]) -> Sheet:
    """Quantities against learning rate, a line for each size or arm, and where it passes the level of the quantity."""
    shown_by_name = {name: read_runaways()[name] for name in names}
    peaks = runs.assign(**{name: runs["id"].map(runaway.of_runs(records)) for name, runaway in shown_by_name.items()})
    peaks[names] = peaks[names].where(np.isfinite(peaks[names]))
    if not names or peaks[names].isna().all(axis=None) or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no run recorded what runs away, or all have one learning rate")
    drawn = peaks[names].notna().any(axis=1).groupby(peaks["curve"]).transform("any")
    shown, found = facets(records.runs, peaks[drawn]), rates(records, runs, names)
    labels = [f"{each.takes}\n{each.title}" for each in shown_by_name.values()]
    sheet, facet_axes = layout.facets([title for title, _ in shown.panels], labels, 13.0)
    for of_facet, (_, panel_runs) in zip(facet_axes, shown.panels, strict=True):
        looks = {curve: shown.looks[keys.iloc[0]] for curve, keys in panel_runs.groupby("curve")[shown.line]}
        for axes, (name, runaway) in zip(of_facet, shown_by_name.items(), strict=True):
            quantity = Quantity(f"{runaway.takes} {runaway.title}", log=True)
            panels.lines(axes, panel_runs, shown.line, shown.looks, "lr", name, quantity)
            panels.level(axes, runaway.level, LEVEL, DASHED, style.INK)
            for rate in found:
                if rate.quantity == name and rate.curve in looks:
                    _mark_crossing(axes, rate, runaway.level, looks[rate.curve])
            scales.lr_axis(axes, runs["lr"])
    for axes in facet_axes[0]:
        scales.probe_axis(axes)
    means = "; ".join(f"{each.title} {each.level:g} ({each.means})" for each in shown_by_name.values())
    sheet.explain(LEVEL, f"The dashed line is the level above which a quantity has run away: {means}.")
    sheet.explain(CROSSING, "A diamond marks the learning rate at which it passes, with its interval over seeds.")
    sheet.keys((shown.name, shown.keys))
    return sheet


def _mark_crossing(axes: Axes, rate: Rate, level: float, look: Mapping[str, Any]) -> None:
    if math.isnan(rate.rate.mean):
        return
    axes.plot(rate.rate[1:3], [level, level], color=look["color"], linewidth=1.2)
    slope = f"{rate.slope:.2g} decades per decade of learning rate"
    _mark(axes, rate, rate.rate.mean, level, CROSSING, slope, color=look["color"], markersize=6, fillstyle="none")


def _mark(axes: Axes, rate: Rate, at: float, value: float, kind: str, *others: str, **look: Any) -> None:
    """Draw a diamond where a curve passes a level, with other lines for its hover text."""
    (mark,) = axes.plot([at], [value], "D", **look)
    marks.name(mark, kind)
    text = [f"{rate.arm}, {count(rate.size)} parameters", f"{rate.level} at {rate_text(rate.rate)}", *others]
    panels.add_hover_texts(axes, mark, ["\n".join(text)])
