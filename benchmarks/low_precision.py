"""What rounding to few bits costs: seconds per step of a fleet in each precision, over those of fp32.

    python benchmarks/low_precision.py [eager|compiled]

Steps of all precisions alternate, so that a change of the speed meets all, and the median turn counts.  Seconds are of
the processor, so other programs on the machine change little.  The bound is 1.6 at width 64 for rounding to nearest.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from lab.core import machine
from lab.sweeping.launch import compose_points
from lab.training.config import RunConfig, run_config
from lab.training.fleet import Fleet

RUNS, TURNS, STEPS, BOUND = 8, 12, 3, 1.6
REFERENCE = "precision=fp32"
BOUNDED = ("precision=fp8_current", "precision=fp8_delayed", "precision=mxfp8", "precision=mxfp4")
OTHERS = (
    "precision=mxfp8 norm_gains=rounded",
    "precision=mxfp8 stochastic_rounding=gradients",
    "precision=nvfp4",
    "precision=nvfp4 stochastic_rounding=gradients",
)
SHARED = ("model=d64", "probes=none", "device=cpu", f"steps={1 + TURNS * STEPS}")


def config(*overrides: str) -> RunConfig:
    """The default recipe with these overrides."""
    return run_config(compose_points([*SHARED, *overrides])[0])


def main(engine: str) -> None:
    """Print a row for each precision."""
    machine.configure_process()
    machine.configure_torch()
    # nvfp4 has so many small operations that compiling them takes longer than it saves
    arms = (REFERENCE, *BOUNDED, *(OTHERS if engine == "eager" else ()))
    fleets = {
        arm: Fleet([config(f"engine={engine}", f"seed={seed}", *arm.split()) for seed in range(RUNS)]) for arm in arms
    }
    for fleet in fleets.values():
        fleet.step(0)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(TURNS):
        for arm, fleet in fleets.items():
            begun = time.process_time()
            for step in range(STEPS):
                fleet.step(1 + turn * STEPS + step)
            seconds[arm].append((time.process_time() - begun) / STEPS)
    print(
        f"width 64, depth 2, {RUNS} runs, {engine}, torch {torch.__version__}; bound {BOUND} of {', '.join(BOUNDED)}\n"
    )
    print("| | ms per step of the fleet | over fp32 |\n|---|---|---|")
    for arm, of_arm in seconds.items():
        ratios = [one / other for one, other in zip(of_arm, seconds[REFERENCE], strict=True)]
        print(f"| {arm} | {1e3 * statistics.median(of_arm):.1f} | {statistics.median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["eager"]))
