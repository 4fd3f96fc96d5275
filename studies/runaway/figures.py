"""Figures of the study: the rates over width, and how runs fall on the way to a unigram model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.crossings import failing
from lab.analysis.laws.brackets import PowerLaw
from lab.analysis.rendering import layout, marks, panels, scales
from lab.analysis.rendering.layout import Sheet
from lab.analysis.sensitivity import capped
from lab.analysis.text import count, format_value
from studies.runaway.rates import LADDER, error_of

SHOWN = {"runaway": "attention logits pass 500", "failing": "the loss is half of the way up"}

DASHES = {200: (0, (4, 2)), 800: "-"}


@layout.styled
def over_width(table: pd.DataFrame) -> Sheet:
    """From which learning rate attention logits run away, and from which the loss fails, over the width of the model.

    Each line is a form of weight decay and a number of steps; a point is a mean over seeds in logs. An arrow marks a
    rate that lies beyond the highest that was tried.
    """
    chosen = table[table["stage"].isin(["trial", "coupled", "middle"])]
    decays = {"independent, 1e-4 a step": "adamw", "coupled, 0.1": "adamw_coupled"}
    looks = panels.arm_looks(decays)
    sheet, facet_axes = layout.facets(list(SHOWN.values()), ["learning rate"], 15)
    for (axes,), rate in zip(facet_axes, SHOWN, strict=True):
        for (name, optimizer), (steps, dash) in ((decay, dash) for decay in decays.items() for dash in DASHES.items()):
            own = chosen[(chosen["optimizer"] == optimizer) & (chosen["steps"] == steps)]
            points = [
                (width, 10 ** np.mean([found.log_bound for found in seeds]), any(not found.times for found in seeds))
                for width, seeds in own.groupby("width")[rate]
            ]
            width_n, lr_n, is_bound_n = map(np.array, zip(*points, strict=True))
            axes.plot(width_n, lr_n, **{**looks[name], "linestyle": dash, "marker": ""})
            axes.plot(width_n[~is_bound_n], lr_n[~is_bound_n], "o", color=looks[name]["color"], markersize=3.5)
            (ends,) = axes.plot(width_n[is_bound_n], lr_n[is_bound_n], "^", color=looks[name]["color"], markersize=4)
            marks.name(ends, "no rate that was tried does")
        axes.set_yscale("log")
        scales.y_ticks(axes)
        widths = sorted(chosen["width"].unique())
        scales.x_axis(axes, "width", widths, widths, format_value)
    sheet.keys(("weight decay", panels.arm_keys(looks, marker="")))
    sheet.note("Dashed: 200 steps; solid: 800 steps.")
    return sheet


@layout.styled
def over_size(table: pd.DataFrame, public: pd.DataFrame, fitted: PowerLaw) -> Sheet:
    """From which learning rate small models run away, what their law says of large ones, and where large ones failed.

    A dot is a small model whose attention logits pass 500 there, trained with decay that multiplies the learning rate.
    A bar leads from the highest rate at which a public run did not fail to the lowest at which one did. A diamond is
    the law of the small models with the width, depth, steps, batch and warm-up of these runs put in, a mean over the
    settings of a size, with its 95 % interval.
    """
    sheet = Sheet(1, [20])
    axes = sheet.panel(0, 0)
    groups = ["small models: logits run away", "public runs: the loss fails", "law of the small models"]
    looks = panels.arm_looks(groups)
    small, large, law = (looks[name]["color"] for name in groups)
    known = table[[found.times > 0 and not found.is_censored for found in table["runaway"]]]
    size = 12 * known["width"] ** 2 * known["depth"]
    axes.plot(size, [found.at for found in known["runaway"]], ".", color=small, markersize=4, alpha=0.7)
    failed = public[np.isfinite(public["high"])]
    spread = 10 ** (0.03 * np.linspace(-1, 1, len(failed)))
    axes.vlines(failed["parameters"] * spread, failed["low"], failed["high"], color=large, linewidth=0.8, alpha=0.5)
    for params, own in failed.groupby("parameters"):
        off = error_of(fitted, own)
        observed = np.log10(own[["low", "high"]].to_numpy()).mean()
        middle, low, high = (10 ** (observed + each) for each in off[:3])
        axes.vlines(params * 0.85, low, high, color=law, linewidth=1.4)
        axes.plot(params * 0.85, middle, "D", color=law, markersize=4)
    axes.set_yscale("log")
    scales.y_ticks(axes)
    axes.set_ylabel("learning rate")
    ends = [float(size.min()) / 1.5, float(public["parameters"].max()) * 1.5]
    scales.x_axis(axes, "parameters (without embeddings)", ends, [1e4, 1e5, 1e6, 1e7, 1e8, 1e9], count)
    sheet.keys(("", panels.arm_keys(looks, linestyle="", marker="o")))
    return sheet


@layout.styled
def share_of_the_way(runs: pd.DataFrame, unigram: Mapping[int, float], curves: pd.DataFrame, diverged: float) -> Sheet:
    """How runs fall as the learning rate rises: the share of the way from the best loss to that of a unigram model.

    Rates are multiples of the one at which a curve has gone half of the way. Curves of public runs are drawn through
    their best rate, the one that costs 0.1 nats, the last before the first failing rate, and that one; ``diverged`` is
    the loss at which their runs that diverged end.
    """
    groups = ["public runs (Step Law)", "small models, one change each"]
    looks = panels.arm_looks(groups)
    sheet = Sheet(1, [17])
    axes = sheet.panel(0, 0)
    failed = curves[(curves["source"] == "Step Law") & curves["failing_lr"].notna()]
    for curve in failed.to_dict("records"):
        lr = np.array([curve[name] for name in ("best_lr", "tolerated_lr", "edge_lr", "failing_lr")])
        rise = np.array([0, 0.1, curve["edge_loss"] - curve["best_loss"], curve["failing_loss"] - curve["best_loss"]])
        _draw(
            axes,
            lr,
            rise / (diverged - curve["best_loss"]),
            looks[groups[0]] | {"linewidth": 0.6, "alpha": 0.35},
        )
    for _, own in runs[runs["stage"] == "events"].groupby(LADDER, sort=False):
        own = own.assign(loss=capped(own)).sort_values("lr")
        rise = own["loss"].to_numpy() - own["loss"].min()
        way = unigram[int(own["vocabulary"].iloc[0])] - own["loss"].min()
        _draw(axes, own["lr"].to_numpy(), rise / way, looks[groups[1]] | {"linewidth": 1.1})
    axes.set_ylim(-0.03, 1.25)
    axes.set_ylabel("share of the way to a unigram model")
    scales.x_axis(axes, "learning rate over the failing one", [0.03, 4], [0.03, 0.1, 0.3, 1, 3], str)
    panels.level(axes, 0.5, "half of the way")
    sheet.keys(("runs", panels.arm_keys(looks, marker="")))
    return sheet


def _draw(axes: Axes, lr: np.ndarray, share: np.ndarray, look: Mapping[str, Any]) -> None:
    order = np.argsort(lr)
    at = failing(lr[order], share[order], 0.5)
    axes.plot(lr[order] / 10**at.log_bound, share[order], **{**look, "marker": "", "linestyle": "-"})
