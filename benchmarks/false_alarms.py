"""How often `lab check` cries wolf, and how often it misses one: writes FALSE_ALARMS.md.

    python benchmarks/false_alarms.py

Sweeps are drawn as the committed smoke baseline has them: at each learning rate the final loss and the growth of the
attention logits are normal, with the mean and the spread of its seeds.  Baseline and sweep are both drawn anew, each
run for itself, and the sweep is then made worse.  On one machine the same seeds of the same recipe give the same losses
and no alarm at all; here they share nothing but their names, which is the worst case.
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
# How many seeds there are in the baseline and in the sweep, and the name of the sweep's first.
CASES = {
    "5 seeds, the same again": (5, 5, 0),
    "5 seeds, then 3 others": (5, 3, 100),
    "3 seeds, the same again": (3, 3, 0),
}
WORLD = ["curve", "lr"]
ARM = "qk_layernorm+z_loss"
Change = Callable[[pd.DataFrame, Baseline], pd.DataFrame]


def drawn(world: Baseline, seeds: int, first: int, chance: np.random.Generator) -> pd.DataFrame:
    """As many seeds of the same sweep."""
    points = world.runs.groupby(WORLD, as_index=False).first()
    spread = world.runs.groupby(WORLD)[["loss", "logit_growth"]].agg(["mean", "std"])
    found = []
    for seed in range(first, first + seeds):
        one = points.assign(seed=str(seed))
        for column in ("loss", "logit_growth"):
            one[column] = chance.normal(spread[column, "mean"], spread[column, "std"])
        found.append(one)
    return pd.concat(found, ignore_index=True)


def flat(world: Baseline) -> Baseline:
    """The same, with a curve that does not mind its learning rate, so that any may be the best."""
    runs = world.runs
    level, mean = runs.groupby("curve")["loss"].transform("mean"), runs.groupby(WORLD)["loss"].transform("mean")
    return world._replace(runs=runs.assign(loss=runs["loss"] - mean + level))


def everywhere(part: float) -> Change:
    """All losses of an arm higher by a part of the best one."""

    def change(runs: pd.DataFrame, world: Baseline) -> pd.DataFrame:
        return runs.assign(loss=runs["loss"] + np.where(runs["arm"] == ARM, part * world.runs["loss"].min(), 0.0))

    return change


def unstable(part: float) -> Change:
    """The losses of an arm at the two largest learning rates higher by a part of the best one."""

    def change(runs: pd.DataFrame, world: Baseline) -> pd.DataFrame:
        hit = (runs["arm"] == ARM) & (runs["lr"] >= 0.1)
        return runs.assign(loss=runs["loss"] + np.where(hit, part * world.runs["loss"].min(), 0.0))

    return change


def silent(runs: pd.DataFrame, world: Baseline) -> pd.DataFrame:
    """An intervention that does nothing any more: its arm ends as the arm without it."""
    order = ["lr", "seed"]
    off, on = (runs[(runs["arm"] == ARM) == is_on].sort_values(order) for is_on in (False, True))
    twins = {column: off[column].to_numpy() for column in ("loss", "logit_growth")}
    return pd.concat([off, on.assign(**twins)], ignore_index=True)


SCENARIOS: dict[str, Change] = {
    "nothing": lambda runs, world: runs,
    "nothing, of a recipe with flat curves": lambda runs, world: runs,
    **{f"one arm worse by {part:.0%} of the best loss": everywhere(part) for part in (0.02, 0.05, 0.1, 0.2)},
    **{f"its two largest learning rates worse by {part:.0%}": unstable(part) for part in (0.05, 0.1, 0.2, 0.4)},
    "qk-layernorm silently off": silent,
}


def rates(world: Baseline, old: int, new: int, first: int, change: Change) -> tuple[float, float]:
    """Share of regressions, and of sweeps in which a plain test (one-sided, 5 %) finds something worse."""
    chance, found, plain = np.random.default_rng([old, new, first]), 0, 0
    for _ in range(DRAWS):
        before = world._replace(runs=drawn(world, old, 0, chance))
        now = world._replace(runs=change(drawn(world, new, first, chance), world))
        check = compare_baselines(before, now, 0.05)
        assert not check.reasons
        found += check.verdict == REGRESSION
        plain += any(one.low > 0 for one in check.changes if one.unit == "nats/token" and not np.isnan(one.equivalence))
    return found / DRAWS, plain / DRAWS


def main() -> None:
    """Simulate, print, write."""
    world = read(SMOKE)
    heads = list(CASES)
    lines = [f"| what changed | {' | '.join(heads)} | plain test, {heads[0]} |", "|---" * (len(CASES) + 2) + "|"]
    for name, change in SCENARIOS.items():
        true = flat(world) if "flat" in name else world
        shares = [rates(true, *case, change) for case in CASES.values()]
        cells = [f"{share:.0%}" for share, _ in shares] + [f"{shares[0][1]:.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    head = "# How often `lab check` says regression\n\nWritten by `python benchmarks/false_alarms.py`, at whose head "
    head += f"stands what is drawn: {DRAWS} sweeps each, margin 5 %.\n"
    head += "A plain test is one-sided at 5 %, on each number in nats.\n\n"
    (HERE / "FALSE_ALARMS.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
