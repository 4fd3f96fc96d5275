"""The noise scale along training, and the batch and learning rate that follow from it, for `lab predict`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.analysis.batch_sizes import STAGES, TunedSteps, noise_sums, ratio_of_means, stages, tuned_steps
from lab.analysis.curves import points
from lab.analysis.rendering import html, layout, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import Interval, geometric_mean
from lab.analysis.text import arm_phrase, count, format_value
from lab.core import files
from lab.core.errors import RequestError
from lab.records.imported import is_imported
from lab.records.store import Records
from lab.report.answer import Part

PROBE = "noise_scale"
# A noise scale this many times larger than the batch that measured it is known badly.
REACH = 4
# Powers of the batch by which Adam's best learning rate may grow: the square-root rule and the linear rule.
ADAM_EXPONENTS = (0.5, 1.0)


class BatchAdvice(NamedTuple):
    """The noise scale of the runs of one arm, size and learning rate, and what follows from it.

    Attributes:
        arm: label of the arm.
        size: parameters, without embeddings.
        lr: peak learning rate.
        batch_size: sequences per update at the end of the run.
        seq_len: tokens per sequence.
        steps: updates of a run.
        loss: final held-out loss, nats per token, mean over seeds.
        stages: noise scale in each quarter of the steps, sequences: a geometric mean over seeds, with its interval.
        critical: the mean of the four, sequences, which estimates the critical batch size (McCandlish et al. 2018, sec.
            2.3).
    """

    arm: str
    size: int
    lr: float
    batch_size: int
    seq_len: int
    steps: int
    loss: float
    stages: tuple[Interval, ...]
    critical: Interval

    @property
    def batch(self) -> float:
        """The recommended batch, sequences: the critical one, which takes twice the least steps and examples."""
        return self.critical.mean

    @property
    def learning_rates(self) -> tuple[float, float]:
        """Learning rate at that batch by the square-root rule and by the linear rule, both saturating."""
        ratio = (1 + self.critical.mean / self.batch_size) / 2
        low, high = sorted(self.lr * ratio**exponent for exponent in ADAM_EXPONENTS)
        return low, high

    @property
    def steps_there(self) -> float:
        """Steps to this run's final loss at that batch: ``S_min (1 + B_crit / B)`` through this run."""
        return self.steps * 2 / (1 + self.critical.mean / self.batch_size)

    @property
    def tokens_there(self) -> float:
        """Tokens to this run's final loss at that batch."""
        return self.steps_there * self.batch * self.seq_len


def is_measured(records: Records) -> bool:
    """Whether any run of the lab recorded the noise scale; a table may call anything so."""
    return not is_imported(records) and bool((records.metrics["probe"] == PROBE).any())


def advise(records: Records) -> list[BatchAdvice]:
    """Measure the noise scale of every arm, size and learning rate of a folder, over all seeds.

    Raises:
        RequestError: no run recorded the probe.
    """
    if not is_measured(records):
        raise RequestError(
            f"no run recorded the probe {PROBE}; train with batch=constant 'probes.names=[train_loss,val_loss,{PROBE}]'"
        )
    sums = noise_sums(records)
    table = points(records.runs).merge(records.runs[["id", "batch_size", "seq_len", "steps"]], on="id")
    table = table[table["id"].isin(sums.index.get_level_values("id"))]
    return [_advice(group, sums) for _, group in table.groupby(["arm", "size", "lr"], sort=False)]


def _advice(runs: pd.DataFrame, sums: pd.DataFrame) -> BatchAdvice:
    first = runs.iloc[0]
    steps = int(first["steps"])
    ratios = np.array([[ratio_of_means(stage) for stage in stages(sums.loc[run], steps)] for run in runs["id"]])
    return BatchAdvice(
        arm=str(first["arm"]),
        size=int(first["size"]),
        lr=float(first["lr"]),
        batch_size=int(first["batch_size"]),
        seq_len=int(first["seq_len"]),
        steps=steps,
        loss=float(runs["loss"].mean()),
        stages=tuple(map(geometric_mean, ratios.T)),
        critical=geometric_mean(ratios.mean(axis=1)),
    )


def batch_advice(records: Records, folder: Path) -> tuple[list[Part], dict[str, Any]]:
    """The advice as parts of an answer and as data; draws ``batch.svg`` into the folder of the records.

    Raises:
        RequestError: no run recorded the probe, or no batch size reached the target.
    """
    tuned = tuned_steps(records)
    if tuned and all(curve.steps.empty for curve in tuned):
        name, refusals = tuned[0].name, list(tuned[0].refusals.values())
        raise RequestError(f"no batch size of {folder} has a learning rate to advise from; {name}: {refusals[-1]}")
    advice = advise(records)
    # with a single micro-batch there is no noise scale, and so no advice
    measured = [curve for curve in advice if math.isfinite(curve.critical.mean)] or advice
    best = min(measured, key=lambda curve: curve.loss if math.isfinite(curve.loss) else math.inf)
    picture = folder / "batch.svg"
    files.write_text(picture, layout.svg(noise_figure(measured), "batch"))
    text = html.render(
        "batch_advice.txt",
        unmeasured=len(advice) - len(measured),
        curves=len(advice),
        tuned=tuned,
        best=best,
        arm=arm_phrase(best.arm),
        count=count,
        value=format_value,
    )
    left_out = [sentence for curve in tuned for sentence in curve.cautions()]
    cautions = html.render("batch_cautions.txt", best=best, reach=REACH, left_out=left_out).splitlines()
    parts: list[Part] = [pd.DataFrame(map(_row, measured)), *text.splitlines(), *cautions, f"figure: {picture}"]
    return parts, _plain(advice, best, tuned, cautions)


def _row(advice: BatchAdvice) -> dict[str, Any]:
    quarters = {f"quarter {n}": _spell(stage) for n, stage in enumerate(advice.stages, 1)}
    return {
        "arm": advice.arm,
        "parameters": count(advice.size),
        "lr": format_value(advice.lr),
        "batch": advice.batch_size,
        "loss": f"{advice.loss:.3f}",
        **quarters,
        "noise scale [95 %], sequences": "" if math.isnan(advice.critical.mean) else f"{advice.critical:.3g}",
        "seeds": advice.critical.n,
    }


def _spell(interval: Interval) -> str:
    return "" if math.isnan(interval.mean) else f"{interval.mean:.3g}"


@layout.styled
def noise_figure(advice: Sequence[BatchAdvice]) -> Sheet:
    """Noise scale in each quarter of training, a line per learning rate, a panel per arm and size.

    Dots are geometric means over seeds, bars their 95 % intervals. The dashed line is the batch size of the run.
    """
    curves = list(dict.fromkeys((curve.arm, curve.size) for curve in advice))
    shades = style.shades((curve.lr for curve in advice), style.LR_SHADES)
    titles = [f"{arm}, {count(size)} parameters" for arm, size in curves]
    sheet, facet_axes = layout.facets(titles, ["noise scale, sequences"], 19.0)
    for (arm, size), (axes,) in zip(curves, facet_axes, strict=True):
        for curve in (curve for curve in advice if (curve.arm, curve.size) == (arm, size)):
            _line(axes, curve, shades[curve.lr])
            axes.axhline(curve.batch_size, color=style.INK, linestyle="--", linewidth=1)
        axes.set_yscale("log")
        axes.set_xlim(0, 100)
        axes.set_xlabel("training, %")
    measured = Line2D([], [], color=style.INK, linestyle="--", linewidth=1, label="batch size of the run")
    sheet.keys(("learning rate", layout.line_keys(shades)), ("", [measured]))
    return sheet


def _line(axes: Axes, advice: BatchAdvice, colour: str) -> None:
    middles = (np.arange(STAGES) + 0.5) * 100 / STAGES
    means = np.array([stage.mean for stage in advice.stages])
    ends = np.array([[stage.mean - stage.low, stage.high - stage.mean] for stage in advice.stages]).T
    axes.errorbar(middles, means, np.where(np.isfinite(ends), ends, 0), color=colour, marker="o", markersize=4)


def _plain(
    advice: Sequence[BatchAdvice], best: BatchAdvice, tuned: Sequence[TunedSteps], cautions: list[str]
) -> dict[str, Any]:
    def interval(mean: float, low: float, high: float) -> dict[str, float]:
        return {"mean": mean, "low": low, "high": high}

    rows = [
        {
            **{name: getattr(curve, name) for name in ("arm", "size", "lr", "batch_size", "seq_len", "steps", "loss")},
            "seeds": curve.critical.n,
            "noise_scale_by_quarter": [interval(*stage[:3]) for stage in curve.stages],
            "critical_batch_size": interval(*curve.critical[:3]),
        }
        for curve in advice
    ]
    recommended = {
        "arm": best.arm,
        "size": best.size,
        "batch_size": best.batch,
        "learning_rates": best.learning_rates,
        "steps": best.steps_there,
        "tokens": best.tokens_there,
    }
    measured = []
    for curve in (curve for curve in tuned if curve.has_fit):
        fit = curve.fit
        scale, limit = (fit.scale, fit.limit) if fit.is_bounded else (math.nan, math.nan)
        critical = interval(scale, fit.low or math.nan, fit.high)
        measured.append({"optimizer": curve.name, "critical_batch_size": critical, "fewest_steps": limit})
    return {"rows": rows, "recommended": recommended, "steps_to_target": measured, "cautions": cautions}
