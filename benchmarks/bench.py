"""Compares the lab's speed with other training loops, and measures its cost: writes a page for this kind of processor.

    python benchmarks/bench.py [WIDTH ...]

All sides of a width are set up first, then stepped in alternating rounds, so that other load on the machine affects all
of them.  Ratios are of fastest rounds.  The two sides of JAX are left out if it is not installed.  Each kind of
processor has a page of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lab_fleet import floor_of_step
from omegaconf import OmegaConf
from shapes import BATCH, HEAD_WIDTH, LENGTH, VOCABULARY, WIDTHS, depth, runs
from sides import CORES, Side, compare, medians

from lab.core import machine
from lab.core.shipped import data_folder
from lab.model import kernels

HERE = Path(__file__).parent
ROUNDS, SECONDS = 3, 0.4
# By the kind of processor.
PAGES = {
    "with matrix units": "RESULTS_AMX.md",
    "with products of bf16, without matrix units": "RESULTS.md",
    "without products of bf16": "RESULTS_FP32.md",
}
METHOD = f"""\
One model-step is one update of one model on {BATCH} x {LENGTH} bytes with vocabulary {VOCABULARY}, head width
{HEAD_WIDTH}, qk-layernorm, z-loss, clipping at norm 1 and AdamW, including the drawing of the batch. Models have two
blocks up to width 64 and four above. Time is wall time over all model-steps done in each of {ROUNDS} alternating
rounds, without set-up and compilation. Ratios are taken between fastest rounds, because other load on the machine only
slows a round.

Each side uses as many threads or processes as its name says. For (b) to (d) with one model at a time, the table shows
the best of all settings that were tried: a thread per core, and (c) in AMP above width 64. Every side has the lab's
allocator setting and huge pages, as the jobs of a sweep have; JAX multiplies in bf16. Sides (a) to (e) train one model
per process; (f) trains {runs(32)} at once, or {runs(256)} at width 256. The lab runs one single-threaded process per
core, each with a fleet as large as (f)'s, with probes at their default interval and evaluation included.
"""
TARGETS = """\
Above 1 the lab is faster. "plain" is the best of (a), "best peer" the best of (b), (c), (e) and (f), and "tuned" the
best of (d), with one model at a time or one process per core. "at most" is plain over the products of a step alone,
which is the ratio of an engine in which everything else takes no time. Targets are in brackets; a target above "at
most" cannot be met on this machine.
"""
FLOORS = """\
The table shows the rate of the products alone, with one process per core, and their share of a compiled step. The rest
of a step is norms, rotations, softmax, GELU, loss, clipping and Adam ([Parts of a step](PARTS.md)).
"""
# By the key of a ratio: its name in the table, and its targets at each of WIDTHS, if any.
RATIOS: dict[str, tuple[str, tuple[float, ...]]] = {
    "fp32_vs_plain": ("fp32 over plain", (2.0, 2.0, 1.8, 1.8)),
    "fp32_at_most": ("at most", ()),
    "bf16_vs_plain": ("bf16 over plain", (3.0,) * 4),
    "eager_vs_plain": ("eager bf16 over plain", (2.0,) * 4),
    "bf16_at_most": ("at most", ()),
    "bf16_vs_best_peer": ("bf16 over best peer", (1.5,) * 4),
    "bf16_vs_tuned_per_core": ("bf16 over tuned", (1.0,) * 4),
}
Timings = Mapping[tuple[str, int], list[float]]

# Probes at every 25th step cost too little to be measured, so they fire at every step and the cost is divided.
PROBES = {"none": "probes=none", "at every step": "probes.every=1"}
EAGER_FP32, EAGER_BF16 = "lab, fp32, eager", "lab, bf16, eager"
FP32, BF16 = "lab, fp32, compiled", "lab, bf16, compiled"
PRODUCTS = {precision: f"the products of {precision} alone" for precision in ("fp32", "bf16")}


def peers(width: int) -> dict[str, Side]:
    """Return the sides of other training loops; set-up takes long, so only two of them run on one thread and on all."""
    wide = width > 64
    options_and_threads: dict[str, tuple[tuple[str, ...], set[int]]] = {
        "(a) plain torch": ((), {1, CORES}),
        "(b) torch, AMP": (("amp",), {CORES}),
        "(c) torch, compile" + ", AMP" * wide: (("compiled", *["amp"] * wide), {CORES}),
        "(d) torch, AMP, explicit attention": (("amp", "explicit"), {1, CORES}),
    }
    sides = {}
    for name, (options, thread_counts) in options_and_threads.items():
        for threads in sorted(thread_counts):
            # one model at a time; the tuned loop also as one process per core, which is the strictest comparison
            workers = CORES if name.startswith("(d)") and threads == 1 else 1
            side_name = f"{name}, {threads} thread{'s' * (threads > 1)}"
            sides[side_name] = Side("torch", options, workers=workers, threads=threads)
    if importlib.util.find_spec("jax"):
        for name, options in {"(e) JAX jit": (), "(f) JAX jit, vmap": ("vmap",)}.items():
            sides[f"{name}, {CORES} threads"] = Side("jax", options, threads=CORES)
    return sides


def ours() -> dict[str, Side]:
    """Return the lab's sides, a single-threaded process per core, and those of the products alone."""
    engines = {
        EAGER_FP32: ("fp32", "eager"),
        FP32: ("fp32", "compiled"),
        EAGER_BF16: ("bf16", "eager"),
        BF16: ("bf16", "compiled"),
    }
    sides = {
        name: Side("lab", (f"precision={precision}", f"engine={engine}"), workers=CORES)
        for name, (precision, engine) in engines.items()
    }
    return sides | {name: Side("products", (precision,), workers=CORES) for precision, name in PRODUCTS.items()}


def summary(timings: Timings, width: int) -> dict[str, Any]:
    """Sum up one width: ms per model-step of the whole machine, and ratios above 1 where the lab is faster."""
    ms = {key: min(values) for key, values in timings.items()}
    plain = {key: value for key, value in ms.items() if key[0].startswith("(a)")}
    best_plain = min(plain, key=lambda key: plain[key])
    peers_ms = [value for (name, workers), value in ms.items() if name[:3] in ("(b)", "(c)", "(e)", "(f)")]
    tuned = [value for (name, _), value in ms.items() if name.startswith("(d)")]
    tuned_alone = [value for (name, workers), value in ms.items() if name.startswith("(d)") and workers == 1]
    fp32, bf16, eager = (ms[name, CORES] for name in (FP32, BF16, EAGER_BF16))
    fp32_products, bf16_products = (ms[name, CORES] for name in PRODUCTS.values())
    flops = floor_of_step(width, 1)[0]
    return {
        "plain_ms": plain[best_plain],
        "plain_threads": int(best_plain[0].split(", ")[-1].split()[0]),
        "fp32_ms": fp32,
        "fp32_eager_ms": ms[EAGER_FP32, CORES],
        "bf16_ms": bf16,
        "eager_ms": eager,
        "best_peer_ms": min(peers_ms),
        "tuned_ms": min(tuned_alone),
        "fp32_vs_plain": plain[best_plain] / fp32,
        "fp32_eager_vs_plain": plain[best_plain] / ms[EAGER_FP32, CORES],
        "bf16_vs_plain": plain[best_plain] / bf16,
        "eager_vs_plain": plain[best_plain] / eager,
        "bf16_vs_best_peer": min(peers_ms) / bf16,
        "bf16_vs_tuned": min(tuned_alone) / bf16,
        "bf16_vs_tuned_per_core": min(tuned) / bf16,
        "fp32_at_most": plain[best_plain] / fp32_products,
        "bf16_at_most": plain[best_plain] / bf16_products,
        "gemm_fraction": bf16_products / bf16,
        "fp32_gemm_fraction": fp32_products / fp32,
        "gemm_gflops": flops / bf16_products / 1e6,
        "fp32_gemm_gflops": flops / fp32_products / 1e6,
    }


def rows(timings: Timings, plain_ms: float) -> Iterator[str]:
    """Yield the rows of the table of one width."""
    for name in dict.fromkeys(name for name, _ in timings):
        busy = max(workers for other, workers in timings if other == name)
        all_ms, single_ms = timings[name, busy], timings[name, 1]
        cells = [f"{statistic(all_ms):.2f}" for statistic in (min, statistics.median, max)]
        alone = f"{statistics.median(single_ms):.2f}" if busy > 1 or "1 thread" in name else ""
        label = name + f", {busy} processes" * (busy > 1)
        yield row(label, [*cells, f"{plain_ms / min(all_ms):.2f}", alone])


def costs() -> dict[str, dict[str, float]]:
    """Measure ms per model-step of one core by fleet size, length and probes, at width 64 in bf16."""
    eager, compiled = (("precision=bf16", f"engine={engine}") for engine in ("eager", "compiled"))
    varied: dict[str, dict[str, tuple[str, ...]]] = {
        "fleet of": {str(runs): (*eager, f"runs={runs}") for runs in (1, 4, 16)},
        "sequence length": {str(length): (*eager, f"seq_len={length}") for length in (64, 128, 256)},
        "probes": {name: (*eager, override) for name, override in PROBES.items()},
        "probes, compiled": {name: (*compiled, override) for name, override in PROBES.items()},
    }
    sides = {f"{what}/{value}": Side("lab", words) for what, by in varied.items() for value, words in by.items()}
    ms = medians(compare(sides, 64, ROUNDS, 2 * SECONDS))
    return {what: {value: ms[f"{what}/{value}", 1] for value in by} for what, by in varied.items()}


def probes_cost(ms: Mapping[str, float]) -> str:
    """Describe what probes add to a step at the default interval, from ms per model-step."""
    every = int(OmegaConf.load(data_folder("conf") / "probes" / "all.yaml").every)
    without, with_probes = (ms[name] for name in PROBES)
    return f"; at every {every}th, as by default, they cost {(with_probes / without - 1) / every:.1%}"


def whole_runs() -> dict[str, float]:
    """Measure seconds of `lab train` from the shell, with its report, by number of steps."""
    seconds = {}
    for steps in (100, 400):
        with TemporaryDirectory() as out:
            overrides = [f"out={out}", f"steps={steps}", f"seq_len={LENGTH}", f"batch_size={BATCH}", "precision=bf16"]
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "lab", "train", *overrides], check=True, capture_output=True)
            seconds[str(steps)] = time.perf_counter() - started
    return seconds


def kind() -> str:
    """Return the kind of this processor, a key of ``PAGES``."""
    with_units, with_bf16, without = PAGES
    return with_units if kernels.multiplies_tiles() else with_bf16 if machine.multiplies_bf16() else without


def processor() -> str:
    """Return the processor's name, if the system reports it, or else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Describe the machine and the versions of the libraries."""
    machine.configure_torch()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if importlib.util.find_spec("jax"):
        versions["jax"] = importlib.metadata.version("jax")
    return {
        "processor": processor(),
        "cores": CORES,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "fp32_products": machine.matmul_library(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions,
    }


def row(first: object, cells: Sequence[str]) -> str:
    """Return a line of a table."""
    return f"| {first} | " + " | ".join(cells) + " |"


def table(first: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the head of a table."""
    yield row(first, names)
    yield "|---" * (1 + len(names)) + "|"


def page(facts: Mapping[str, Any], tables: Mapping[int, Sequence[str]], results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page of this kind of processor, line by line."""
    line = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    yield f"# Speed {kind()}\n\nWritten by `make bench`. {line}.\n"
    others = [f"[{name}]({file})" for name, file in PAGES.items() if name != kind() and (HERE / file).exists()]
    yield f"There are pages of processors {' and '.join(others)}.\n"
    yield METHOD
    for width, lines in tables.items():
        yield f"## Width {width}, {depth(width)} blocks\n"
        yield from table(
            "", ["fastest, ms per model-step", "median", "slowest", "speed, best (a) = 1", "one core, median"]
        )
        yield from lines
        yield ""
    widths = {int(name[6:]): numbers for name, numbers in results["cpu"].items() if name.startswith("width_")}
    yield "## Targets\n"
    yield TARGETS
    yield from table("width", [name for name, _ in RATIOS.values()])
    targets_of = {key: dict(zip(WIDTHS, targets, strict=False)) for key, (_, targets) in RATIOS.items()}
    for width, numbers in widths.items():
        targets = [f" ({by_width[width]:g})" if width in by_width else "" for by_width in targets_of.values()]
        yield row(width, [f"{numbers[key]:.2f}{target}" for key, target in zip(targets_of, targets, strict=True)])
    yield "\n## Products\n"
    yield FLOORS
    yield from table("width", ["fp32, GFLOP/s", "of a step", "bf16, GFLOP/s", "of a step"])
    keys = ["fp32_gemm_gflops", "fp32_gemm_fraction", "gemm_gflops", "gemm_fraction"]
    for width, numbers in widths.items():
        yield row(width, [f"{numbers[key]:.0f}" if "gflops" in key else f"{numbers[key]:.0%}" for key in keys])
    yield "\n## What the cost depends on\n"
    yield "Times are in ms per model-step on one core, at width 64 in bf16 with fleets of 8, eager unless noted.\n"
    for what, by_value in results["cpu"]["costs"].items():
        of_probes = probes_cost(by_value) if what.startswith("probes") else ""
        yield f"- {what}: " + ", ".join(f"{value} {ms:.2f}" for value, ms in by_value.items()) + of_probes
    by_steps = results["cpu"]["seconds_of_lab_train_by_steps"]
    yield "\n`lab train` (width 64, head width 16, bf16) takes so many seconds, with start and report: "
    yield ", ".join(f"{steps} steps {seconds:.1f}" for steps, seconds in by_steps.items())


def main() -> None:
    """Measure, print, write."""
    started, tables, results = time.time(), {}, {"machine": environment(), "cpu": {}}
    for width in [int(word) for word in sys.argv[1:]] or WIDTHS:
        timings = compare({**peers(width), **ours()}, width, ROUNDS, SECONDS)
        numbers = summary(timings, width)
        results["cpu"][f"width_{width}"] = {key: round(value, 3) for key, value in numbers.items()}
        tables[width] = list(rows(timings, numbers["plain_ms"]))
        print(f"width {width}, {time.time() - started:.0f} s", *tables[width], sep="\n", flush=True)
    results["cpu"]["costs"], results["cpu"]["seconds_of_lab_train_by_steps"] = costs(), whole_runs()
    text = "\n".join(page(results["machine"], tables, results)) + "\n"
    (HERE / PAGES[kind()]).write_text(text)
    print(text, f"in all {time.time() - started:.0f} s", sep="\n")


if __name__ == "__main__":
    main()
