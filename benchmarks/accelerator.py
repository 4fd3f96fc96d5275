"""Compares fleets on a GPU with the same runs one at a time, and with the peaks of the device; prints tables.

    python benchmarks/accelerator.py [DEVICE [SECONDS]]

DEVICE is `cuda` by default.  Peaks are measured in the same run: products of 4096 x 4096 in bf16, copies of 256 MB.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from lab_fleet import floor_of_step, loop
from torch.profiler import ProfilerActivity, profile
from torch_loop import captured_loop
from torch_loop import loop as one_model

from lab.core import machine

ENGINES = ("eager", "captured", "compiled")
FLEETS = (1, 16, 64, 256)
AT_ROOFLINE = {256: 64, 768: 8}  # width: runs
MATRIX_SIZE, COPIED_BYTES = 4096, 2**28
WARM_UP_STEPS = 5  # untimed: they compile, capture and fire probes first
STEPS_PER_READING = 20  # of the clock, for which the host waits until the device has finished
MAX_KERNELS = 15  # rows of the profile


def rate(step: Callable[[], float], seconds: float) -> float:
    """Repeat a step for some seconds; returns the sum of what it returns, per second."""
    for _ in range(WARM_UP_STEPS):
        step()
    machine.synchronize()
    done, started = 0.0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        for _ in range(STEPS_PER_READING):
            done += step()
        machine.synchronize()
    return done / (time.perf_counter() - started)


def fleet(device: str, width: int, runs: int, engine: str) -> Callable[[], int]:
    """Build a step of a fleet as `lab sweep` takes it, in bf16."""
    return loop(width, f"device={device}", "precision=bf16", f"engine={engine}", runs=runs)


def peaks(device: str, seconds: float) -> tuple[float, float]:
    """Measure floating-point operations per second of large products in bf16, and bytes per second of copies."""
    a_nn = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16)
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def multiply() -> float:
        torch.mm(a_nn, a_nn)
        return 2.0 * MATRIX_SIZE**3

    def copy() -> float:
        target.copy_(source)
        return 2.0 * COPIED_BYTES

    return rate(multiply, seconds), rate(copy, seconds)


def compare_with_single_runs(device: str, seconds: float) -> None:
    """Print model-steps per second at width 64."""
    alone = rate(one_model(64, 1, amp=True, compiled=True, explicit=False, device=device), seconds)
    print("| width 64 | model-steps/s | one at a time = 1 |\n|---|---|---|")
    print(f"| torch, AMP, compiled, one at a time | {alone:.0f} | 1.0 |")
    if device == "cuda":
        captured = rate(captured_loop(64), seconds)
        print(f"| the same, the whole step in a CUDA graph | {captured:.0f} | {captured / alone:.1f} |")
    for engine, runs in product(ENGINES, FLEETS):
        fleet_rate = rate(fleet(device, 64, runs, engine), seconds)
        print(f"| lab, bf16, {engine}, fleet of {runs} | {fleet_rate:.0f} | {fleet_rate / alone:.1f} |", flush=True)


def compare_with_roofline(device: str, seconds: float) -> None:
    """Print times of steps beside their roofline (operations over peak or bytes over bandwidth), and profiles."""
    peak, bandwidth = peaks(device, seconds)
    print(f"\npeak {peak / 1e12:.3g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s")
    for width, runs in AT_ROOFLINE.items():
        flops, moved_bytes = floor_of_step(width, runs)
        step = fleet(device, width, runs, "compiled")
        step_seconds = runs / rate(step, seconds)
        roofline = max(flops / peak, moved_bytes / bandwidth)
        print(f"\nwidth {width}, fleet of {runs}, one step: {flops / 1e9:.4g} GFLOP")
        print(f"at least {moved_bytes / 1e6:.4g} MB read and written; roofline {roofline * 1e3:.3g} ms")
        print(f"measured {step_seconds * 1e3:.3g} ms, {roofline / step_seconds:.0%} of the roofline speed\n")
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
        with profile(activities=kinds) as profiled:
            for _ in range(WARM_UP_STEPS):
                step()
            machine.synchronize()
        by = f"self_{device}_time_total"
        print(profiled.key_averages().table(sort_by=by, row_limit=MAX_KERNELS, max_name_column_width=60))


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name}; torch {torch.__version__}\n")
    compare_with_single_runs(device, seconds)
    compare_with_roofline(device, seconds)
