"""What an armed, silent controller costs: seconds per step with a response that never acts, over those without one.

Blocks of steps of both fleets alternate, so that a change of the speed meets both.  On an idle machine:
``python benchmarks/armed.py``.  The bound is 1.03.
"""

from __future__ import annotations

import statistics
import time
from itertools import islice

from lab.core import machine
from lab.sweeping.launch import compose_points
from lab.training.config import RunConfig, run_config
from lab.training.fleet import Fleet
from lab.training.loop import train

BLOCKS, STEPS, BOUND = 12, 25, 1.03
SHARED = ("probes=none", "device=cpu", "engine=eager", "precision=bf16", f"steps={BLOCKS * STEPS + 2}")


def config(*overrides: str) -> RunConfig:
    """The default recipe of a run that never spikes before the end, since its learning rate is low."""
    return run_config(compose_points([*SHARED, *overrides])[0])


def main() -> None:
    """Print the ratio of each pair of blocks, and their median."""
    machine.configure_torch()
    moments = []
    for response in ("none", "rewind_and_skip"):
        moments.append(train(Fleet([config(f"response={response}", f"seed={seed}") for seed in range(3)])))
        list(islice(moments[-1], 2))  # what comes before the first update, and one update
    ratios = []
    for block in range(BLOCKS):
        seconds = [0.0, 0.0]
        for arm in (0, 1) if block % 2 else (1, 0):
            start = time.perf_counter()
            list(islice(moments[arm], STEPS))
            seconds[arm] = time.perf_counter() - start
        ratios.append(seconds[1] / seconds[0])
        print(f"block {block}: {ratios[-1]:.3f}", flush=True)
    print(f"armed over free: {statistics.median(ratios):.3f}, bound {BOUND}")


if __name__ == "__main__":
    main()
