"""Measures what changes of a recipe cost in time, and writes the table that cards and the board read.

    python benchmarks/step_times.py [SECONDS [ROUNDS]]

For each change of the crash test and each arm of the board, a step is timed beside a step of the recipe without it, or
of one with experts if the change acts on these, in alternating rounds of one process.  The ratio is taken within each
round, so that a machine that slows down slows both sides.  The table has the median over rounds and its 95 % interval
by order statistics.  Changes of numbers alone, such as a longer warm-up, are timed as well: they cost nothing, so what
they measure is the error of the method.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import lab_fleet
import numpy as np
import pandas as pd
import scipy
import torch
from sides import WARM_UP_STEPS, steps_within

from lab.analysis.stress.arms import REFERENCE, arm_cards, board_arms
from lab.analysis.stress.battery import STEP_TIMES, read_battery
from lab.core import machine
from lab.core.errors import RequestError
from studies.board.failures import interventions
from studies.board.training import excludes

WIDTH, RUNS = 128, 1
SHARED = ("precision=fp32", "engine=eager", "probes=none")
CONTROL = ("z_loss",)


def words_of_changes() -> dict[str, tuple[tuple[str, ...], list[str]]]:
    """By name of a change the intervention that it needs, if any, and its overrides beside those that all share."""
    cards, words = arm_cards(), dict[str, tuple[tuple[str, ...], list[str]]]()
    for name, change in read_battery().changes.items():
        words[name] = (), list(change.words) or [f"intervention=[{','.join((*CONTROL, name))}]"]
    for name, arm in board_arms().items():
        needs = tuple(cards[part].needs for part in arm.adds if cards[part].needs)
        words[name] = needs, [interventions((*CONTROL, *needs), arm, excludes()), *arm.optimizer, *arm.words]
    return words


def main() -> None:
    """Time every arm, and write the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    machine.configure_process()
    torch.set_num_threads(1)
    references = {
        needs: lab_fleet.loop(WIDTH, *SHARED, f"intervention=[{','.join((*CONTROL, *needs))}]", runs=RUNS)
        for needs in ((), ("experts",))
    }
    rows = []
    for name, (needs, of_change) in words_of_changes().items():
        if name == REFERENCE:
            continue
        reference = references[needs]
        try:
            changed = lab_fleet.loop(WIDTH, *SHARED, *of_change, runs=RUNS)
        except RequestError as refusal:  # it acts in formats that this recipe does not have
            print(f"{name}: {refusal}", flush=True)
            continue
        for step in (reference, changed):
            for _ in range(WARM_UP_STEPS):
                step()
        ratios = np.sort([_milliseconds(changed, seconds) / _milliseconds(reference, seconds) for _ in range(rounds)])
        first = int(scipy.stats.binom.ppf(0.025, rounds, 0.5))  # of the interval of a median
        row = {"change": name, "ratio": np.median(ratios), "low": ratios[first - 1], "high": ratios[-first]}
        rows.append(row)
        print(f"{name}: {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]", flush=True)
    pd.DataFrame(rows).to_csv(STEP_TIMES, index=False, float_format="%.3f", lineterminator="\n")


def _milliseconds(step: Callable[[], int], seconds: float) -> float:
    started = time.perf_counter()
    done = steps_within(step, seconds)
    return (time.perf_counter() - started) / done * 1e3


if __name__ == "__main__":
    main()
