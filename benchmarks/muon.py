"""Compares Muon's products, those of all runs and matrices in batches, with a loop over matrices; prints a table.

    python benchmarks/muon.py [DEVICE [SECONDS]]

On an idle machine.  Both make the matrices of a fleet's blocks orthogonal, as an update does; the loop takes one matrix
of one run at a time.  They take turns, so that a change of the speed meets both, and the median turn counts.  The last
column says what share of the FLOPs of an update's forward and backward pass the products are, at 512 tokens per run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lab.core import machine
from lab.optim.links.muon import NEWTON_SCHULZ, orthogonalize

PRESET = "original"
WIDTHS, DEPTH, RUNS, TOKENS = (32, 64, 128, 256), 3, 8, 512


def matrices(width: int, device: str) -> list[Tensor]:
    """Matrices ``[r i o]`` of the blocks of a fleet: four of attention and two of the MLP in each."""
    shapes = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    return [torch.randn(RUNS, *shape, device=device) for shape in shapes * DEPTH]


def one_by_one(every: Sequence[Tensor], preset: str) -> list[Tensor]:
    """The same by one matrix of one run at a time."""
    return [torch.cat([orthogonalize([run[None]], preset)[0] for run in each]) for each in every]


def share_of_flops(every: Sequence[Tensor], preset: str) -> float:
    """FLOPs of the products over those of forward and backward: six per weight and token."""
    products = 0.0
    for each in every:
        small, large = sorted(each.shape[1:])
        products += len(NEWTON_SCHULZ[preset]) * 2 * (2 * small * small * large + small**3)
    return products / (6 * TOKENS * sum(each[0].numel() for each in every))


def seconds_of(work: Callable[[], object], other: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median seconds of each, taking turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while time.perf_counter() < started + seconds or len(taken[0]) < 3:
        for each, times in zip((work, other), taken, strict=True):
            machine.synchronize()
            begun = time.perf_counter()
            each()
            machine.synchronize()
            times.append(time.perf_counter() - begun)
    return statistics.median(taken[0][1:]), statistics.median(taken[1][1:])


def main(device: str, seconds: float) -> None:
    """Print the table."""
    machine.configure_torch()
    print(f"Muon, {PRESET}, depth {DEPTH}, {RUNS} runs, {device}, torch {torch.__version__}\n")
    print("| width | batched, ms | one by one, ms | times as fast | FLOPs of an update |\n|---|---|---|---|---|")
    for width in WIDTHS:
        every = matrices(width, device)
        for ours, theirs in zip(orthogonalize(every, PRESET), one_by_one(every, PRESET), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        batched, looped = seconds_of(lambda: orthogonalize(every, PRESET), lambda: one_by_one(every, PRESET), seconds)  # noqa: B023
        share = share_of_flops(every, PRESET)
        print(
            f"| {width} | {1e3 * batched:.2f} | {1e3 * looped:.2f} | {looped / batched:.1f} | {share:.0%} |", flush=True
        )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments[0] if arguments else "cpu", float(arguments[1]) if len(arguments) > 1 else 5.0)
