"""How often `lab check` raises a false alarm, and what it misses: writes FALSE_ALARMS.md and the page.

    python benchmarks/false_alarms.py

Sweeps are drawn from the committed smoke baseline: at each learning rate, final loss, loss at initialization and what
probes measured are normal, with the mean and the standard deviation of the baseline's seeds.  Baseline and sweep are
drawn anew, every run independently, and the sweep is then made worse.  On one machine the same seeds of the same recipe
give the same losses and so no alarm; here equal seeds share only their names, which is the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from planted_faults import SMOKE, recipe_of, write_table

from lab.analysis.guard.baseline import PROBES, Baseline, read
from lab.analysis.guard.compare import MARGIN, OK, REGRESSION, Comparison, compare_tables
from lab.analysis.guard.matching import where
from lab.analysis.guard.quantities import NATS, measured

DRAWS, DRAWS_OF_NOTHING = 50, 200
TOGETHER = 50  # sweeps that are drawn and measured at once
ARM = "with qk-layernorm"
NUMBERS = ["loss", "loss_at_init", *PROBES]
ORDER = ["draw", "lr", "seed"]


class Case(NamedTuple):
    """A baseline to draw from, the number of seeds in baseline and sweep, and the first seed of the sweep."""

    truth: Baseline
    old: int
    new: int
    first: int


CASES = {
    "smoke, 5 seeds, the same again": Case(read(SMOKE), 5, 5, 0),
    "smoke, 5 seeds, then 3 others": Case(read(SMOKE), 5, 3, 100),
    "the page's example, 5 seeds, the same again": Case(recipe_of(read(SMOKE)), 5, 5, 0),
}
Change = Callable[[pd.DataFrame, Baseline], pd.DataFrame]


def draw(truth: Baseline, seeds: int, first: int, generator: np.random.Generator) -> pd.DataFrame:
    """Draw so many seeds of ``TOGETHER`` sweeps; curve ``c`` of draw ``d`` has the number ``d + TOGETHER * c``."""
    points = truth.runs.groupby(["curve", "lr"], as_index=False).first()
    spread = truth.runs.groupby(["curve", "lr"])[NUMBERS].agg(["mean", "std"])
    index = np.tile(np.arange(len(points)), TOGETHER * seeds)
    draws, seed_of_run = np.divmod(np.repeat(np.arange(TOGETHER * seeds), len(points)), seeds)
    runs = points.iloc[index].reset_index(drop=True).assign(draw=draws, seed=(first + seed_of_run).astype(str))
    for column in NUMBERS:
        runs[column] = generator.normal(
            spread[column, "mean"].to_numpy()[index], spread[column, "std"].to_numpy()[index]
        )
    return runs.assign(curve=runs["draw"] + TOGETHER * runs["curve"])


def flat(truth: Baseline) -> Baseline:
    """Return the same baseline with flat curves, on which any learning rate may be the best."""
    runs = truth.runs
    level, mean = (
        runs.groupby("curve")["loss"].transform("mean"),
        runs.groupby(["curve", "lr"])["loss"].transform("mean"),
    )
    return truth._replace(runs=runs.assign(loss=runs["loss"] - mean + level))


def everywhere(part: float) -> Change:
    """Raise all losses of an arm by a part of the best one."""

    def change(runs: pd.DataFrame, truth: Baseline) -> pd.DataFrame:
        return runs.assign(loss=runs["loss"] + np.where(runs["arm"] == ARM, part * truth.runs["loss"].min(), 0.0))

    return change


def unstable(part: float) -> Change:
    """Raise the losses of an arm at the two largest learning rates by a part of the best one."""

    def change(runs: pd.DataFrame, truth: Baseline) -> pd.DataFrame:
        affected = (runs["arm"] == ARM) & (runs["lr"] >= 0.1)
        return runs.assign(loss=runs["loss"] + np.where(affected, part * truth.runs["loss"].min(), 0.0))

    return change


def silent(runs: pd.DataFrame, truth: Baseline) -> pd.DataFrame:
    """Switch qk-layernorm off: its arm ends as the arm without it."""
    off, on = (runs[(runs["arm"] == ARM) == is_on].sort_values(ORDER) for is_on in (False, True))
    twins = {column: off[column].to_numpy() for column in NUMBERS}
    return pd.concat([off, on.assign(**twins)], ignore_index=True)


NOTHING = "nothing"
SCENARIOS: dict[str, Change] = {
    NOTHING: lambda runs, truth: runs,
    f"{NOTHING}, of a recipe with flat curves": lambda runs, truth: runs,
    **{f"one arm worse by {part:.0%} of the best loss": everywhere(part) for part in (0.02, 0.05, 0.1)},
    **{f"its two largest learning rates worse by {part:.0%}": unstable(part) for part in (0.05, 0.1, 0.2, 0.4)},
    "qk-layernorm silently off": silent,
}


class Rates(NamedTuple):
    """Shares of sweeps that are called a regression, that are not called ok, and in which a plain test finds a change.

    The plain test is one-sided at 5 %, on each number in nats.
    """

    regression: float
    not_ok: float
    plain: float


def rates(case: Case, truth: Baseline, change: Change, draws: int) -> Rates:
    """Return how often a change of the sweeps of a case is seen."""
    generator, counts = np.random.default_rng([case.old, case.new, case.first]), np.zeros(3)
    arms = {number: where(truth, number) for number in truth.curves}
    for _ in range(draws // TOGETHER):
        before = measured(truth._replace(runs=draw(truth, case.old, 0, generator)))
        now = measured(truth._replace(runs=change(draw(truth, case.new, case.first, generator), truth)))
        for number in range(TOGETHER):
            tables = [{curve: table[number + TOGETHER * curve] for curve in arms} for table in (before, now)]
            changes = compare_tables(arms, *tables, MARGIN)
            verdict = Comparison("", "", MARGIN, False, changes, [], [], []).verdict
            in_nats = [each for each in changes if each.unit == NATS and not np.isnan(each.equivalence)]
            counts += [verdict == REGRESSION, verdict != OK, any(each.low > 0 for each in in_nats)]
    return Rates(*counts / draws)


def row(name: str, change: Change) -> str:
    """A line of the table."""
    cells, plain = [], ""
    for case in CASES.values():
        if change is silent and case.truth.runs["arm"].nunique() == 1:
            cells.append("")
            continue
        truth = flat(case.truth) if "flat" in name else case.truth
        shares = rates(case, truth, change, DRAWS_OF_NOTHING if name.startswith(NOTHING) else DRAWS)
        cells.append(f"{shares.regression:.0%}, {shares.not_ok:.0%}")
        plain = plain or f"{shares.plain:.0%}"
    return f"| {name} | {' | '.join(cells)} | {plain} |"


def main() -> None:
    """Simulate, print, write."""
    head = f"| what changed | {' | '.join(CASES)} | plain test, {next(iter(CASES))} |"
    lines = [head, "|---" * (len(CASES) + 2) + "|"]
    for name, change in SCENARIOS.items():
        lines.append(row(name, change))
        print(lines[-1], flush=True)
    text = "# How often `lab check` says regression or drift\n\nWritten by `python benchmarks/false_alarms.py`, which "
    text += f"describes the draws: {DRAWS} sweeps each, {DRAWS_OF_NOTHING} where nothing changed, "
    text += f"margin {100 * MARGIN:g} %.\n"
    text += "The first number is the share of regressions, the second the share of regressions and drifts.\n"
    text += "The plain test is one-sided at 5 %, on each number in nats.\n\n"
    write_table("FALSE_ALARMS", text, lines)


if __name__ == "__main__":
    main()
