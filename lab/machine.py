"""What the lab asks of the machine: of the process before torch is loaded, of torch before it trains."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import BaseContext
from pathlib import Path

# glibc's numbers for mallopt(3), and the values asked for.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP, PAD = 2_000_000_000, 64 * 2**20


def prepare() -> None:
    """Let waiting threads sleep, and let the allocator keep what it has.

    Threads that spin while they wait starve everybody on a shared machine.  And every step frees tensors of a few
    megabytes: by default glibc hands each back to the system and faults it in again, page by page.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            for option, value in ((M_MMAP_THRESHOLD, KEEP), (M_TRIM_THRESHOLD, KEEP), (M_TOP_PAD, PAD)):
                mallopt(option, value)


def settle() -> None:
    """Tell torch how this process trains: on one thread, and without denormal numbers.

    One thread gives the same bits on any number of cores.  Attention that has collapsed is full of numbers below
    1e-38, on which a CPU is many times slower; they are zero to every purpose here.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def fresh_processes() -> BaseContext:
    """Where processes come from that inherit no state: forks of a clean one, which imports torch once."""
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["lab.fleet", "lab.record"])
    return processes


def wait() -> None:
    """Until an accelerator has done what it was told; a CPU always has."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(device: str = "cpu") -> float:
    """Bytes this process has taken so far at most: of graphics memory on ``cuda``, else resident."""
    if device == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return 0.0  # not told
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def free_memory(device: str = "cpu") -> float:
    """Bytes that can still be taken: on ``cuda`` of the fullest device, else of main memory."""
    if device == "cuda":
        import torch

        return float(min(torch.cuda.mem_get_info(place)[0] for place in range(torch.cuda.device_count())))
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kilobytes = dict(line.split()[:2] for line in meminfo.read_text().splitlines())
        return min(int(kilobytes["MemAvailable:"]) * 1024.0, *_left_in_groups())
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def _left_in_groups() -> Iterator[float]:
    """What each control group around this process has left; containers and clusters set such limits."""
    # limit, use, and the part of the use that is files read lately and dropped on demand; version 2 and version 1
    for top, limit, used, dropped in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        places = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        inside = next((path for _, kind, path in places if kind == top), "/")
        group = Path("/sys/fs/cgroup", top, inside.lstrip("/"))
        for folder in (group, *group.parents[: -len(Path("/sys/fs/cgroup").parents)]):
            with suppress(OSError, ValueError, KeyError):  # a group that limits nothing has no such file, or says max
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[dropped]
                yield int((folder / limit).read_text()) - int((folder / used).read_text()) + float(cached)


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an allocator had nothing left; torch's for the CPU and for mps have no exception of their own."""
    import torch

    words = ("can't allocate memory", "not enough memory", "out of memory")
    said = isinstance(fault, RuntimeError) and any(word in str(fault) for word in words)
    return said or isinstance(fault, (MemoryError, torch.OutOfMemoryError))


def release() -> None:
    """Give back what a failed attempt held, cycles and the accelerator's cache included."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
