"""A GPU: fleets beside the same runs one at a time, and beside what the device can do; prints tables.

    python benchmarks/accelerator.py [DEVICE [SECONDS]]

On `cuda` by default.  Peaks are measured here, in the same run: products of 4096 x 4096 in bf16, copies of 256 MB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from lab_fleet import floor_of_step, loop
from torch.profiler import ProfilerActivity, profile
from torch_loop import loop as one_model

from lab.core import machine

FLEETS = (1, 16, 64, 128, 256)
WIDE, RUNS_OF_WIDE = 256, 64
SQUARE, COPIED = 4096, 2**28
SETTLE_STEPS = 5  # compiled, captured, and the first that listens
MOST_KERNELS = 12


def rate(step: Callable[[], float], seconds: float) -> float:
    """Whatever a step counts, per second."""
    for _ in range(SETTLE_STEPS):
        step()
    machine.synchronize()
    done, started = 0.0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        done += step()
        machine.synchronize()
    return done / (time.perf_counter() - started)


def fleet(device: str, width: int, runs: int) -> Callable[[], int]:
    """A step of a fleet as `lab sweep` takes it, compiled, in bf16."""
    return loop(width, f"device={device}", "precision=bf16", "engine=compiled", runs=runs)


def peaks(device: str, seconds: float) -> tuple[float, float]:
    """Floating-point operations per second of large products in bf16, and bytes per second read and written."""
    a_nn = torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)
    here, there = (torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2))

    def multiply() -> float:
        torch.mm(a_nn, a_nn)
        return 2.0 * SQUARE**3

    def copy() -> float:
        there.copy_(here)
        return 2.0 * COPIED

    return rate(multiply, seconds), rate(copy, seconds)


def beside_one_at_a_time(device: str, seconds: float) -> None:
    """Model-steps per second at width 64."""
    alone = rate(one_model(64, 1, amp=True, compiled=True, explicit=False, device=device), seconds)
    print("| width 64 | model-steps/s | one at a time = 1 |\n|---|---|---|")
    print(f"| torch, AMP, compiled, one at a time | {alone:.0f} | 1.0 |")
    for runs in FLEETS:
        found = rate(fleet(device, 64, runs), seconds)
        print(f"| lab, bf16, compiled, fleet of {runs} | {found:.0f} | {found / alone:.1f} |", flush=True)


def beside_the_roof(device: str, seconds: float) -> None:
    """Time of a step at width 256 beside the larger of operations over peak and bytes over bandwidth; a profile."""
    flops, moved = floor_of_step(WIDE, RUNS_OF_WIDE)
    peak, bandwidth = peaks(device, seconds)
    step = fleet(device, WIDE, RUNS_OF_WIDE)
    took = RUNS_OF_WIDE / rate(step, seconds)
    roof = max(flops / peak, moved / bandwidth)
    print(f"\npeak {peak / 1e12:.3g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s")
    print(f"width {WIDE}, fleet of {RUNS_OF_WIDE}: {flops / 1e9:.4g} GFLOP, at least {moved / 1e6:.4g} MB a step")
    print(f"a step takes {took * 1e3:.3g} ms; the roof is {roof * 1e3:.3g} ms; {roof / took:.0%} of it is reached\n")
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with profile(activities=kinds) as found:
        for _ in range(SETTLE_STEPS):
            step()
        machine.synchronize()
    by = f"self_{device}_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=MOST_KERNELS, max_name_column_width=60))


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name}; torch {torch.__version__}\n")
    beside_one_at_a_time(device, seconds)
    beside_the_roof(device, seconds)
