"""Save the curves of a recipe as a baseline, and show one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

import lab.analysis.guard.baseline as baselines
import lab.features.guard.render as render
from lab.analysis.guard.baseline import Baseline
from lab.analysis.guard.check import MARGIN
from lab.analysis.guard.compare import compare_baselines
from lab.analysis.guard.matching import grid_of, where
from lab.analysis.guard.quantities import measured
from lab.analysis.sensitivity import WINDOW, Window, check_window
from lab.analysis.statistics import student_t
from lab.analysis.text import count, format_value, plain_text

COLUMN_NAMES = {
    "total": "sensitivity",
    "below": "under-training",
    "above": "instability",
    "best": "best loss",
    "loss_at_init": "loss at initialization",
    "logit_growth": "logit growth (decades)",
}


def save_baseline(folder: Path, path: Path, window: Window = WINDOW) -> Iterator[str]:
    """Write the baseline of a results folder; yields lines about its content, or its differences from the old file."""
    new = baselines.from_folder(folder, window)
    check_window(new.runs, window)
    old = baselines.read(path) if path.is_file() else None
    baselines.save(new, path)
    yield f"{path}: {len(new.runs)} runs of {folder}"
    if old is not None and old.window != window:
        yield f"sensitivity over learning rates from {old.window} -> {window}"
        old = None
    yield from describe_baseline(new) if old is None else _differences(old, new)


def describe_baseline(baseline: Baseline) -> Iterator[str]:
    """Yield lines about how a baseline was made, then a table with a row per arm and size."""
    for name, lines in baseline.made.items():
        yield from (f"{name}: {line}" for line in lines)
    if baseline.window != WINDOW:
        yield f"sensitivity over learning rates from {baseline.window}"
    yield from plain_text(pd.DataFrame(_curve_row(baseline, *curve) for curve in measured(baseline).items()))


def _curve_row(baseline: Baseline, number: int, seeds: pd.DataFrame) -> dict[str, str]:
    (arm, size), lrs = where(baseline, number), grid_of(baseline, number)
    own = baseline.recipe_lrs.get(number)
    return {
        "arm": arm,
        "parameters": count(size),
        "learning rates": f"{len(lrs)} from {format_value(lrs[0])} to {format_value(lrs[-1])}",
        "recipe's own": format_value(own) if own else "not on record",
        "seeds": str(len(seeds)),
        **{name: student_t(seeds[column]).bare for column, name in COLUMN_NAMES.items()},
    }


def _differences(old: Baseline, new: Baseline) -> Iterator[str]:
    """Yield lines about the differences of two baselines: in how they were made, then in their curves."""
    comparison = compare_baselines(old, new, MARGIN)
    for name in ("commands", "versions", "data"):
        if old.made.get(name) != new.made.get(name):
            yield f"{name}: {'; '.join(old.made.get(name, []))} -> {'; '.join(new.made.get(name, []))}"
    yield from render.text(comparison)
