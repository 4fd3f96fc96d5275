"""Says where a compiled step in bf16 spends its time, and which part of it waits for memory: writes PARTS.md.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/parts.py [WIDTH ...]

One process trains the fleet of ``make bench`` under torch's profiler, without probes.  Bytes are counted from the
shapes: each tensor once where a part reads it and once where it writes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lab_fleet
import torch
import torch._inductor.config as compiler
from bench import processor, row, table
from shapes import BATCH, LENGTH, VOCABULARY, WIDTHS, depth, runs
from sides import WARM_UP_STEPS
from torch.profiler import ProfilerActivity, profile

from lab.core import machine
from lab.model import kernels

STEPS = 10
# Words in the name of an operation, by the part that it belongs to; the first that fits counts.
PARTS = {
    "products": ("bmm",),
    "attention": ("::attention", "::split_heads", "::causal_softmax"),
    "GELU": ("::gelu",),
    "norms of blocks": ("::layer_norm",),
    "loss": ("::token_loss",),
    "clipping, Adam": ("_copy__div", "pow_sum"),
    "embedding, residual stream, casts": ("cpp_fused",),
}
METHOD = """\
One core trains a fleet as in [Speed](RESULTS.md), in bf16 and compiled, without probes. "MB" are read and written at
least, per model-step. A pass over {megabytes:.0f} MB, which no cache holds, moves {limit:.1f} GB/s here: a part near
that rate waits for memory. What a cache still holds comes faster.
"""


def bytes_of_parts(width: int) -> dict[str, float]:
    """Bytes that the parts of a model-step read and write at least."""
    tokens, blocks = BATCH * LENGTH, depth(width)
    weights = 12 * blocks * width**2 + 2 * VOCABULARY * width
    by_tiles = kernels.multiplies_tiles()
    products = [shape for shape in lab_fleet.shapes_of_products(width, 1) if not (by_tiles and shape[1] == LENGTH)]
    return {
        "products": sum(6.0 * r * (n * i + i * o + n * o) for r, n, i, o in products),
        "attention": 2.0 * blocks * tokens * width * (4 + 7),  # qkv to mixed; both gradients and qkv
        "GELU": 2.0 * blocks * tokens * 4 * width * (2 + 3),
        "norms of blocks": 2.0 * blocks * tokens * width * (4 + 2 + 2 + 4 + 4),
        "loss": 2.0 * tokens * VOCABULARY * (1 + 2),
        "clipping, Adam": 26.0 * weights,  # weight and moments read and written in fp32, a gradient in bf16 read
    }


def milliseconds_of_parts(width: int) -> dict[str, float]:
    """Milliseconds of a model-step by part, and of all; what is none of them is the call of one after the other."""
    step = lab_fleet.loop(width, "precision=bf16", "engine=compiled", "probes=none", runs=runs(width))
    for _ in range(WARM_UP_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        model_steps = sum(step() for _ in range(STEPS))
        taken = (time.perf_counter() - started) / model_steps * 1e3
    spent = dict.fromkeys(PARTS, 0.0)
    for event in profiler.key_averages():
        for part, words in PARTS.items():
            if any(word in event.key for word in words):
                spent[part] += event.self_cpu_time_total / model_steps / 1e3
                break
    return {**spent, "all": taken}


def memory_limit(megabytes: float) -> float:
    """Gigabytes per second that a pass over so much memory reads and writes."""
    x = torch.ones(int(megabytes * 1e6 / 4))
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        x.mul_(1.0)
        rates.append(2 * x.numel() * 4 / (time.perf_counter() - started) / 1e9)
    return max(rates)


def page(widths: list[int]) -> Iterator[str]:
    """Yield PARTS.md, line by line."""
    megabytes = 400.0
    units = "with" if kernels.multiplies_tiles() else "without"
    yield "# Parts of a step\n"
    yield f"Written by `benchmarks/parts.py`. Processor {processor()} {units} AMX; torch {torch.__version__}.\n"
    yield METHOD.format(megabytes=megabytes, limit=memory_limit(megabytes))
    for width in widths:
        spent, moved = milliseconds_of_parts(width), bytes_of_parts(width)
        rest = spent["all"] - sum(spent[part] for part in PARTS)
        yield f"## Width {width}\n"
        yield from table("", ["ms per model-step", "of the step", "MB", "GB/s"])
        for part, ms in {**{part: spent[part] for part in PARTS}, "calls, allocation, drawing": rest}.items():
            size = [f"{moved[part] / 1e6:.1f}", f"{moved[part] / ms / 1e6:.1f}"] if part in moved else ["", ""]
            yield row(part, [f"{ms:.2f}", f"{ms / spent['all']:.0%}", *size])
        yield row("all", [f"{spent['all']:.2f}", "", f"{sum(moved.values()) / 1e6:.0f}", ""])
        yield ""


def main() -> None:
    """Measure and write."""
    machine.configure_process()
    machine.configure_torch()
    compiler.cpp.enable_kernel_profile = True
    text = "\n".join(page([int(word) for word in sys.argv[1:]] or list(WIDTHS)))
    (Path(__file__).parent / "PARTS.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
