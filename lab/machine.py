"""What the lab asks of the machine: threads, allocator, memory, signals."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from lab import products

# glibc's numbers for mallopt(3), and the values asked for.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP, PAD = 2_000_000_000, 64 * 2**20
# Exit code of what was told to stop and may be started again: EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75


def prepare() -> None:
    """Let the allocator keep what it has, products be the same bits everywhere, and what is compiled be found again."""
    keep_memory()
    if not products.is_intel():  # elsewhere MKL's bits depend on where in memory a matrix lies, unless asked
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    with suppress(OSError, RuntimeError):  # no home, or not ours: torch knows a place of its own, which lasts less long
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # jobs are processes already


def keep_memory() -> None:
    """Let the allocator keep what it has.

    Every step frees tensors of a few megabytes: by default glibc hands each back to the system and faults it in again,
    page by page.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        for option, value in ((M_MMAP_THRESHOLD, KEEP), (M_TRIM_THRESHOLD, KEEP), (M_TOP_PAD, PAD)):
            mallopt(option, value)


def cache_folder() -> Path:
    """Where things lie that can be made anew: ``LAB_CACHE``, else ``instability-lab`` in the user's cache.

    Raises:
        RuntimeError: there is no home folder.
    """
    if named := os.environ.get("LAB_CACHE"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "instability-lab"


def settle() -> None:
    """Tell torch how this process trains: on one thread, without denormal numbers, its fp32 products by ``products``.

    One thread gives the same bits on any number of cores.  Attention that has collapsed is full of numbers below
    1e-38, on which a CPU is many times slower; they are zero to every purpose here.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    products.choose()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fresh_processes(imports: Sequence[str] = ("lab.fleet", "lab.record")) -> BaseContext:
    """Where processes come from that inherit no state: forks of a clean one, which imports these modules once."""
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(imports))
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


def visible_gpus() -> list[str]:
    """The CUDA devices this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if named is None else named.split(",")[:count]


def free_memory(device: str = "cpu", place: int = 0) -> float:
    """Bytes that can still be taken: on ``cuda`` of the device at that place, else of main memory."""
    if device == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(place)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kilobytes = dict(line.split()[:2] for line in meminfo.read_text().splitlines())
        return min(int(kilobytes["MemAvailable:"]) * 1024.0, *left_in_groups())
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def left_in_groups(root: Path = Path("/")) -> Iterator[float]:
    """Bytes that each control group around this process has left; containers and clusters set such limits."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # a kernel without them
        return
    inside = {controllers: path.strip("/") for _, controllers, path in groups}
    # version 2, then 1: limit, use, and what of the use is files read lately, dropped on demand
    for top, limit, used, dropped in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        home = root / "sys/fs/cgroup" / top
        group = home / inside.get(top, "")
        for folder in (group, *group.parents[: len(group.parts) - len(home.parts)]):
            with suppress(OSError, ValueError, KeyError):  # a group that limits nothing has no such file, or says max
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[dropped]
                yield float(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(cached))


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an allocator had nothing left; torch's for the CPU and for mps have no exception of their own."""
    import torch

    words = ("can't allocate memory", "not enough memory", "out of memory")
    said = isinstance(fault, RuntimeError) and any(word in str(fault) for word in words)
    return said or isinstance(fault, (MemoryError, torch.OutOfMemoryError))


def release() -> None:
    """Give back what a failed attempt held: cycles, and what the allocators were told to keep."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(function: str) -> Any:
    """A function of this process's C library; none, where it has none of that name, as musl."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


@contextmanager
def heeding_sigterm() -> Iterator[Callable[[], bool]]:
    """Within the block SIGTERM, or SIGUSR2, which SLURM may send before, ends nothing; gives whether one has come."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be heard
        yield lambda: False
        return
    came = threading.Event()
    signals = [signal.SIGTERM, *([signal.SIGUSR2] if hasattr(signal, "SIGUSR2") else [])]
    before = [signal.signal(number, lambda *_: came.set()) for number in signals]
    try:
        yield came.is_set
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
