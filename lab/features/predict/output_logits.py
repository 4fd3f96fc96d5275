"""Rounded output logits: the level that they reach, how it grows, and when their number format costs loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

import lab.analysis.laws.fits as fits
import lab.analysis.probe_values as probe_values
from lab.analysis.curves import points
from lab.analysis.laws.fits import REACH, crossing_text
from lab.analysis.logit_rounding import BF16, COSTLY, FORMATS, level_at_cost
from lab.analysis.sensitivity import judge
from lab.analysis.text import count, format_value, listed
from lab.records.store import Records
from lab.report.answer import Part, Section

LEVEL, MIDDLE = "level", "level half-way"
# Fewer sizes, or fewer runs for growth over steps, have no useful interval.
FEWEST_SIZES, FEWEST_RUNS = 3, 2
TITLE = "Rounded output logits"


def parts(records: Records) -> list[Part]:
    """The part on rounded output logits; nothing if no run recorded ``log_z_square`` or ``log_z``."""
    runs = observe(records)
    if runs.empty:
        return []
    levels = [f"{level_at_cost(COSTLY, bits):g} in {name}" for bits, name in FORMATS.items() if bits < max(FORMATS)]
    tables = {
        f"{TITLE}; {arm}; {count(of_arm['size'].max())} parameters": _table(of_arm)
        for arm, of_arm in runs.groupby("arm", sort=False)
    }
    return [
        f"{TITLE}: rounding costs {COSTLY:g} nats per token where |log Z| reaches {listed(levels)}.",
        *(Section(title, [table]) for title, table in tables.items()),
        fits.ABOUT["output_logits"] if any(len(table.columns) > 2 for table in tables.values()) else "",
    ]


def observe(records: Records) -> pd.DataFrame:
    """``judge(points)`` of runs that did not diverge, with the columns ``level``, ``level half-way`` and ``updates``.

    A level is |log Z|: the root of the mean of log^2 Z over tokens, or else the absolute mean of log Z.
    """
    probes = set(records.metrics["probe"])
    probe = next((name for name in ("log_z_square", "log_z") if name in probes), None)
    if probe is None:
        return pd.DataFrame()
    runs = judge(points(records.runs))
    runs["updates"] = runs["id"].map(probe_values.updates(records.runs))
    for column, part in ((LEVEL, 1.0), (MIDDLE, 0.5)):
        value = runs["id"].map(probe_values.near(records, probe, "", part)).abs().to_numpy(dtype=float)
        runs[column] = np.sqrt(value) if probe == "log_z_square" else value
    levels = runs[[LEVEL, MIDDLE]].to_numpy(dtype=float)
    usable: pd.DataFrame = runs[(np.isfinite(levels) & (levels > 0)).all(axis=1) & (runs["outcome"] != "diverged")]
    return usable


def _table(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for the highest stable learning rate of the largest size, and one for its highest."""
    sizes, rows = sorted(runs["size"].unique()), []
    for lr, name in _top_lrs(runs[runs["size"] == sizes[-1]]).items():
        own = runs[runs["lr"] == lr]
        largest = own[own["size"] == sizes[-1]]
        level = 10 ** float(np.log10(largest[LEVEL]).mean())
        row = {"learning rate": f"{format_value(lr)} ({name})", "|log Z|": f"{level:.3g}"}
        if len(sizes) > 1:
            steps = np.concatenate([largest["updates"] / 2, largest["updates"]])
            over_steps = np.concatenate([largest[MIDDLE], largest[LEVEL]])
            enough_runs = "" if len(largest) >= FEWEST_RUNS else f"needs {FEWEST_RUNS} seeds"
            enough_sizes = "" if own["size"].nunique() >= FEWEST_SIZES else f"needs {FEWEST_SIZES} sizes"
            of_size = _growth(own["size"].to_numpy(), own[LEVEL].to_numpy(), level, enough_sizes, count)
            of_steps = _growth(steps, over_steps, level, enough_runs, "{:.3g}".format)
            row |= dict(zip(("growth with size", "largest foretold", "bf16 from size"), of_size, strict=True))
            row |= {"growth with steps": of_steps[0], "bf16 from steps": of_steps[2]}
        rows.append(row)
    return pd.DataFrame(rows)


def _top_lrs(runs: pd.DataFrame) -> dict[float, str]:
    """The highest learning rate at which no run is unstable, and the highest; one if they are the same."""
    unstable = set(runs.loc[runs["outcome"] != "", "lr"])
    lrs = sorted(map(float, runs["lr"].unique()))
    top, stable = lrs[-1], [(lr, "highest stable") for lr in lrs if lr not in unstable][-1:]
    return {**dict(stable), **({} if stable and stable[0][0] == top else {top: "highest"})}


def _growth(
    x: np.ndarray, level: np.ndarray, reached: float, missing: str, write: Callable[[float], str]
) -> tuple[str, str, str]:
    """Slope, number of runs at the largest ``x`` that the others predict, and the ``x`` where bf16 becomes costly."""
    limit = level_at_cost(COSTLY, BF16)
    if len(set(x)) < 2:
        return "", "", "already there" if reached >= limit else missing
    line, first, last = fits.fit(x, level), float(x.min()), float(x.max())
    is_last, inside = x == last, ""
    if len(set(x)) > 2:
        _, low, high = map(float, fits.fit(x[~is_last], level[~is_last]).predict(last))
        measured = np.log10(level[is_last])
        inside = f"{((low <= measured) & (measured <= high)).sum()} of {len(measured)}" if math.isfinite(low) else ""
    if reached >= limit:
        answer = "already there"
    elif missing:
        answer = missing
    elif not line.slope > line.slope_error:
        answer = "does not grow" if line.slope <= 0 else "no certain growth"
    else:
        answer = crossing_text(fits.size_beyond(line, limit, 1, first, last), write, first, REACH * last)
    return f"{line.slope_interval:±+.2f}", inside, answer
