"""How often `lab check` raises a false alarm, and how often it misses a regression: writes FALSE_ALARMS.md.

    python benchmarks/false_alarms.py

Sweeps are drawn from the committed smoke baseline: at each learning rate, final loss and growth of the attention logits
are normal, with the mean and the standard deviation of the baseline's seeds.  Baseline and sweep are drawn anew, every
run independently, and the sweep is then made worse.  On one machine the same seeds of the same recipe give the same
losses and so no alarm; here equal seeds share only their names, which is the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from lab.analysis.guard.baseline import Baseline, read
from lab.analysis.guard.compare import REGRESSION, compare_baselines

HERE = Path(__file__).parent
SMOKE = HERE.parent / "results" / "baselines" / "smoke.json"
DRAWS = 100
# Number of seeds in the baseline and in the sweep, and the first seed of the sweep.
CASES = {
    "5 seeds, the same again": (5, 5, 0),
    "5 seeds, then 3 others": (5, 3, 100),
    "3 seeds, the same again": (3, 3, 0),
}
POINT = ["curve", "lr"]
ARM = "with qk-layernorm"
Change = Callable[[pd.DataFrame, Baseline], pd.DataFrame]


def draw(truth: Baseline, seeds: int, first: int, generator: np.random.Generator) -> pd.DataFrame:
    """Draw so many seeds of the sweep."""
    points = truth.runs.groupby(POINT, as_index=False).first()
    spread = truth.runs.groupby(POINT)[["loss", "logit_growth"]].agg(["mean", "std"])
    drawn = []
    for seed in range(first, first + seeds):
        runs = points.assign(seed=str(seed))
        for column in ("loss", "logit_growth"):
            runs[column] = generator.normal(spread[column, "mean"], spread[column, "std"])
        drawn.append(runs)
    return pd.concat(drawn, ignore_index=True)


def flat(truth: Baseline) -> Baseline:
    """Return the same baseline with flat curves, on which any learning rate may be the best."""
    runs = truth.runs
    level, mean = runs.groupby("curve")["loss"].transform("mean"), runs.groupby(POINT)["loss"].transform("mean")
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
    """Switch an intervention off: its arm ends as the arm without it."""
    order = ["lr", "seed"]
    off, on = (runs[(runs["arm"] == ARM) == is_on].sort_values(order) for is_on in (False, True))
    twins = {column: off[column].to_numpy() for column in ("loss", "logit_growth")}
    return pd.concat([off, on.assign(**twins)], ignore_index=True)


SCENARIOS: dict[str, Change] = {
    "nothing": lambda runs, truth: runs,
    "nothing, of a recipe with flat curves": lambda runs, truth: runs,
    **{f"one arm worse by {part:.0%} of the best loss": everywhere(part) for part in (0.02, 0.05, 0.1, 0.2)},
    **{f"its two largest learning rates worse by {part:.0%}": unstable(part) for part in (0.05, 0.1, 0.2, 0.4)},
    "qk-layernorm silently off": silent,
}


def rates(truth: Baseline, old: int, new: int, first: int, change: Change) -> tuple[float, float]:
    """Return the share of regressions, and of sweeps in which a plain test (one-sided, 5 %) finds a worse number."""
    generator, regressions, plain = np.random.default_rng([old, new, first]), 0, 0
    for _ in range(DRAWS):
        before = truth._replace(runs=draw(truth, old, 0, generator))
        now = truth._replace(runs=change(draw(truth, new, first, generator), truth))
        check = compare_baselines(before, now, 0.05)
        assert not check.reasons
        regressions += check.verdict == REGRESSION
        plain += any(
            number.low > 0
            for number in check.changes
            if number.unit == "nats/token" and not np.isnan(number.equivalence)
        )
    return regressions / DRAWS, plain / DRAWS


def main() -> None:
    """Simulate, print, write."""
    truth = read(SMOKE)
    cases = list(CASES)
    lines = [f"| what changed | {' | '.join(cases)} | plain test, {cases[0]} |", "|---" * (len(CASES) + 2) + "|"]
    for name, change in SCENARIOS.items():
        scenario = flat(truth) if "flat" in name else truth
        shares = [rates(scenario, *case, change) for case in CASES.values()]
        cells = [f"{share:.0%}" for share, _ in shares] + [f"{shares[0][1]:.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    head = "# How often `lab check` says regression\n\nWritten by `python benchmarks/false_alarms.py`, which "
    head += f"describes the draws: {DRAWS} sweeps each, margin 5 %.\n"
    head += "A plain test is one-sided at 5 %, on each number in nats.\n\n"
    (HERE / "FALSE_ALARMS.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
