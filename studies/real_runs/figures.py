"""Figures of public runs: the cliff, the first failing rate over size, and what broke a tuned recipe."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.rendering import layout, marks, panels, scales, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import count
from lab.features.predict.limits import TOKENS_PER_PARAMETER, read_limits
from studies.real_runs.curves import RealRuns, failing_brackets

SOURCES = ("the lab", "Marin", "Step Law")
FARTHEST = 1e11  # parameters, up to which the law is drawn
# The rows of the matrix: the key that changes, and the range of its ratio to the tuned value.
CHANGES = {
    "rate x 2": ("learning_rate", 1.9, 2.1),
    "rate x 4": ("learning_rate", 3.9, 4.1),
    "rate x 8, 16": ("learning_rate", 7.9, np.inf),
    "warm-up / 4": ("warmup", 0.2, 0.26),
    "warm-up / 2": ("warmup", 0.4, 0.6),
    "longer warm-up": ("warmup", 1.1, np.inf),
    "higher beta1": ("beta1", 1.001, np.inf),
    "lower beta1": ("beta1", 0.0, 0.999),
    "lower beta2": ("beta2", 0.0, 0.999),
    "any epsilon": ("epsilon", 0.0, np.inf),
    "looser clip": ("max_grad_norm", 1.1, np.inf),
    "no clip": ("max_grad_norm", -1.0, 0.0),
    "more decay": ("weight_decay", 1.01, np.inf),
    "no decay": ("weight_decay", -1.0, 0.0),
    "larger batch": ("train_batch_size", 1.1, np.inf),
}


@layout.styled
def cliff(runs: RealRuns) -> Sheet:
    """Divergence is a cliff: the loss of each curve above its best, against the rate over the first one that failed.

    A curve is drawn through its best rate, the rate that costs 0.1 nats, the last rate before the first failing one,
    and that one. Curves on which no rate failed are left out.
    """
    curves = runs.curves[runs.curves["failing_lr"].notna() & (runs.curves["arm"] == "adamw")]
    kept = {source: curves[curves["source"] == source] for source in ("Step Law", "the lab")}
    sheet, facet_axes = layout.facets(
        [_titled(source, own) for source, own in kept.items()], ["loss above the best"], 13
    )
    for (axes,), own, look in zip(facet_axes, kept.values(), panels.arm_looks(kept).values(), strict=True):
        rates = own[["best_lr", "tolerated_lr", "edge_lr", "failing_lr"]].to_numpy() / own[["failing_lr"]].to_numpy()
        excess = np.stack([0 * own["best_lr"], 0 * own["best_lr"] + 0.1, own["edge_loss"] - own["best_loss"]], 1)
        excess = np.column_stack([excess, own["failing_loss"] - own["best_loss"]])
        for rate, loss in zip(rates, excess, strict=True):
            order = np.argsort(rate)
            axes.plot(rate[order], loss[order], color=look["color"], linewidth=0.7, alpha=0.5)
        scales.x_axis(axes, "learning rate over the first failing one", [0.03, 1], [0.03, 0.1, 0.3, 1], str)
        axes.set_ylim(-0.2, 5.2)
    return sheet


def _titled(source: str, own: pd.DataFrame) -> str:
    sizes = f"{count(own['parameters'].min())} to {count(own['parameters'].max())} parameters"
    return f"{source}, {sizes}, {len(own)} curves"


@layout.styled
def failing_rates(runs: RealRuns) -> Sheet:
    """From which learning rate runs fail, over size: models of the lab's, and public runs without qk-norm, with AdamW.

    Each bar leads from the highest rate that did not fail to the lowest one that did, or has no upper end where none
    failed. All are moved to 20 tokens to a parameter, by the power of tokens of the law that is drawn: it was fitted to
    all of them, and each size of each source counts equally. The band holds 95 % of new curves; the law is dashed
    where nothing ran.
    """
    limit = read_limits()["failing_lr"]
    assert limit.law
    sheet = Sheet(1, [22])
    axes = sheet.panel(0, 0)
    size = np.geomspace(limit.sizes[0] / 2, FARTHEST, 200)
    middle, low, high = np.array([limit.at({"params": each}) for each in size]).T
    area = axes.fill_between(size, low, high, color=style.INK, alpha=0.13, linewidth=0)
    marks.name(area, "95 % of new curves")
    curves = failing_brackets(runs.curves[runs.curves["arm"] == "adamw"])
    axes.plot(size, middle, color=style.INK, linewidth=1.2, linestyle=style.DASHED)
    for is_own in (True, False):
        ran = curves.loc[(curves["source"] == "the lab") == is_own, "parameters"]
        inside = (size >= ran.min()) & (size <= ran.max())
        axes.plot(size[inside], middle[inside], color=style.INK, linewidth=1.2)
    looks = panels.arm_looks(SOURCES)
    for source, look in looks.items():
        own = curves[curves["source"] == source]
        ratio = own["tokens"] / own["parameters"] / TOKENS_PER_PARAMETER
        moved = own[["low", "high"]].div(ratio ** limit.law.exponents["tokens"], axis=0)
        spread = np.exp(0.06 * np.linspace(-1, 1, len(own))) if len(own) > 1 else np.ones(1)
        x = own["parameters"].to_numpy() * spread
        failed = np.isfinite(moved["high"]).to_numpy()
        ends = moved.to_numpy()
        axes.vlines(x[failed], ends[failed, 0], ends[failed, 1], color=look["color"], linewidth=1.1, alpha=0.55)
        axes.plot(x[failed], np.sqrt(ends[failed].prod(1)), ".", color=look["color"], markersize=4)
        (open_ends,) = axes.plot(x[~failed], ends[~failed, 0], "^", color=look["color"], markersize=3.2, alpha=0.55)
        marks.name(open_ends, "no rate that was tried failed")
    scales.probe_axis(axes)
    axes.set_ylabel(f"first failing learning rate\n({TOKENS_PER_PARAMETER} tokens to a parameter)")
    scales.x_axis(axes, "parameters", size[[0, -1]], [1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11], count)
    sheet.keys(("runs of", panels.arm_keys(looks, linestyle="", marker="o")))
    return sheet


@layout.styled
def changes(runs: RealRuns) -> Sheet:
    """Which single changes of a tuned recipe broke runs of which optimizer: how many of how many ended 0.5 nats higher.

    Runs of 130 and 300 million parameters; empty cells were not tried.
    """
    single = runs.changes[~runs.changes["is_base"]]
    optimizers = sorted(single["optimizer"].unique())
    broken, tried = np.zeros((2, len(CHANGES), len(optimizers)))
    for row, (key, low, high) in enumerate(CHANGES.values()):
        ratio = single["ratio"].where(single["value"] != 0, -1.0)
        chosen = single[(single["changed_key"] == key) & ratio.between(low, high)].groupby("optimizer")["breaks"]
        broken[row] = chosen.sum().reindex(optimizers).fillna(0)
        tried[row] = chosen.count().reindex(optimizers).fillna(0)
    sheet = Sheet(1, [1.6 * len(CHANGES)], room=8.0)
    axes = sheet.panel(0, 0)
    share = np.divide(broken, tried, out=np.full_like(tried, np.nan), where=tried > 0)
    axes.imshow(share, cmap="Oranges", vmin=0, vmax=1.3, aspect="auto")
    for row, column in np.argwhere(tried > 0):
        text = f"{broken[row, column]:.0f}/{tried[row, column]:.0f}"
        weight = "bold" if broken[row, column] else "normal"
        axes.text(column, row, text, ha="center", va="center", fontsize=0.8 * style.page().size, weight=weight)
    axes.set_xticks(range(len(optimizers)), [name.replace("_", "\n") for name in optimizers])
    axes.set_yticks(range(len(CHANGES)), list(CHANGES))
    axes.grid(visible=False)
    return sheet
