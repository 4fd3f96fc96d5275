"""The machine: threads, allocator, matrix-product library, memory, processes and signals."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from multiprocessing.context import BaseContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Entries of a product of two unit normal 64 x 64 matrices are wrong by 1e-5 at most in fp32, by 0.1 in bf16.
FP32_ERROR = 1e-4


def choose_matmul_library() -> None:
    """Choose oneDNN for fp32 products where MKL would run slow kernels and oneDNN is as exact."""
    if is_intel() or not multiplies_bf16():
        return
    _matmul_backend().fp32_precision = "bf16"
    if not _is_exact():
        _matmul_backend().fp32_precision = "none"


def matmul_library() -> str:
    """The library of fp32 products: ``MKL`` or ``oneDNN``.

    MKL reserves its AVX-512 kernels for Intel's processors; on others oneDNN is about twice as fast.  Torch calls it
    for fp32 products only if they *may* be rounded to bf16 and the processor has fast bf16 products, and never below
    4096 multiplications.
    """
    return "oneDNN" if _matmul_backend().fp32_precision == "bf16" else "MKL"


def is_intel() -> bool:
    """Whether this is an Intel processor, assumed if the system does not say."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _matmul_backend() -> Any:
    import torch

    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _is_exact() -> bool:
    """Whether fp32 products have fp32 precision; a processor with bf16 units may round to bf16, as it is allowed to."""
    import torch

    a, b = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    error = (torch.bmm(a, b).double() - torch.bmm(a.double(), b.double())).abs().max()
    return bool(error < FP32_ERROR)


def multiplies_bf16() -> bool:
    """Whether this processor has fast bf16 products: oneDNN's, which on x86 need AVX-512.

    Torch's own bf16 products take ten times as long as fp32 products.
    """
    import torch

    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


# How C++ is built for the processor at hand; its warnings are for those who change it.
BUILD = ("-O3", "-funroll-loops", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-w", "-shared", "-fPIC")
# glibc's option numbers for mallopt(3), and the values to set.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP, PAD = 2_000_000_000, 64 * 2**20
# Exit code of a process that was preempted and may be started again: EX_TEMPFAIL of sysexits.h.
EXIT_PREEMPTED = 75


def configure_process() -> None:
    """Configure the allocator, matrix products and the compile cache for reproducible runs."""
    configure_allocator()
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # otherwise MKL's bits depend on a matrix's address
    with suppress(OSError, RuntimeError):  # no home folder that can be written: torch uses a temporary cache
        cache = compiled_folder()
        given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if not given or Path(given).parent == cache.parent:  # as of the machine that submitted this job
            cache.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # jobs are processes already


def compiled_folder() -> Path:
    """The folder for code that is compiled for this machine.

    Raises:
        RuntimeError: there is no home folder.
    """
    return cache_folder() / "compiled" / _instruction_sets()


def compiler() -> str | None:
    """The C++ compiler of this machine, if there is one: ``CXX``, else g++ or clang++."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compiled_library(source: Path) -> Any:
    """The functions of a file in C++, built once per machine; None where there is no compiler, or it fails."""
    path = compiled_folder() / f"{source.stem}-{sha256(source.read_bytes()).hexdigest()[:8]}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent) as folder:  # another process may build it, too
                built = Path(folder) / path.name
                subprocess.run([compiler() or "", *BUILD, source, "-o", built], check=True, capture_output=True)
                built.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return None


def _instruction_sets() -> str:
    """A digest of the instruction sets for which torch compiles here.

    Its own key of compiled code does not contain them, so a folder that machines share, or processes that are told to
    use fewer, would load code whose vectors have another length, which writes beyond the end of tensors.
    """
    known = [platform.machine(), os.environ.get("ATEN_CPU_CAPABILITY", "")]
    with suppress(OSError, StopIteration):  # a system without this file has processors of one kind
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        known.append(next(line for line in lines if line.startswith(("flags", "Features"))))
    return sha256("\n".join(known).encode()).hexdigest()[:8]


def configure_allocator() -> None:
    """Let the allocator keep freed memory.

    Every step frees tensors of a few megabytes; by default glibc returns each to the system and faults it in again,
    page by page.  Processes that start from this one, as jobs do, also ask for huge pages, because glibc reads that
    setting only when a process starts.
    """
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        for option, value in ((M_MMAP_THRESHOLD, KEEP), (M_TRIM_THRESHOLD, KEEP), (M_TOP_PAD, PAD)):
            mallopt(option, value)


def cache_folder() -> Path:
    """The folder for files that can be made again: ``LAB_CACHE``, else ``instability-lab`` in the user's cache.

    Raises:
        RuntimeError: there is no home folder.
    """
    if folder := os.environ.get("LAB_CACHE"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "instability-lab"


def configure_torch() -> None:
    """Configure torch: one thread, denormal numbers flushed to zero, and the library of fp32 products.

    One thread gives the same bits on any number of cores.  Collapsed attention is full of numbers below 1e-38, on
    which a CPU is many times slower; treating them as zero changes no result that matters here.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    choose_matmul_library()


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


TRAINING_MODULES = ("lab.training.fleet", "lab.training.recorder")


def clean_process_context(imports: Sequence[str] = TRAINING_MODULES) -> BaseContext:
    """A context whose processes inherit no state: forks of a clean server that imports these modules once.

    The server and its forks ignore SIGTERM and Ctrl-C until they say otherwise: jobs must save their checkpoints first,
    and none should print a traceback of its imports.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver  # there is none on Windows

    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(list(imports))
    with _ignoring_signals():
        forkserver.ensure_running()
    return processes


@contextmanager
def _ignoring_signals() -> Iterator[None]:
    """Ignore SIGTERM and Ctrl-C, as processes started within the block will; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def synchronize() -> None:
    """Wait for the device to finish; a no-op on the CPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(device: str = "cpu") -> float:
    """Most bytes this process has used so far: device memory on ``cuda``, else resident memory; 0 on Windows."""
    if device == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return 0.0
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def visible_gpus() -> list[str]:
    """The CUDA devices this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    count = torch.cuda.device_count()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if devices is None else devices.split(",")[:count]


def free_memory(device: str = "cpu", index: int = 0) -> float:
    """Bytes that are free: of the ``cuda`` device with this index, else of main memory."""
    if device == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(index)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kilobytes = dict(line.split()[:2] for line in meminfo.read_text().splitlines())
        return min(int(kilobytes["MemAvailable:"]) * 1024.0, *free_cgroup_memory())
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return math.inf


def free_cgroup_memory(root: Path = Path("/")) -> Iterator[float]:
    """Free bytes of each control group of this process; containers and clusters set such limits."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # a kernel without them
        return
    inside = {controllers: path.strip("/") for _, controllers, path in groups}
    # version 2, then 1: limit, use, and the part of it that caches files and is freed on demand
    for top, limit, used, cache in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        home = root / "sys/fs/cgroup" / top
        group = home / inside.get(top, "")
        for folder in (group, *group.parents[: len(group.parts) - len(home.parts)]):
            with suppress(OSError, ValueError, KeyError):  # a group without a limit has no such file, or says max
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[cache]
                yield float(int((folder / limit).read_text()) - int((folder / used).read_text()) + int(cached))


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an allocator failed; torch's allocators for the CPU and mps have no exception type of their own."""
    import torch

    phrases = ("can't allocate memory", "not enough memory", "out of memory")
    says_so = isinstance(fault, RuntimeError) and any(phrase in str(fault) for phrase in phrases)
    return says_so or isinstance(fault, (MemoryError, torch.OutOfMemoryError))


def release_memory() -> None:
    """Free the memory of a failed attempt: reference cycles, and what the allocators keep."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(function: str) -> Any:
    """A function of glibc by its name; None in other C libraries, such as musl."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None


class _Caught:
    """Whether a signal arrived in the latest outermost block of ``catching_sigterm``, and how many blocks are open."""

    is_received = False
    blocks = 0


def is_stopping() -> bool:
    """Whether a signal has asked this process to stop, and it does or has done what that takes."""
    return _Caught.is_received


@contextmanager
def catching_sigterm(*, interrupts: bool = False) -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM, and SIGUSR2, which SLURM may send before it; yields a function that says whether one arrived.

    Of nested blocks all say so, whichever was open when it arrived. With ``interrupts`` also catch the first Ctrl-C.

    Raises:
        KeyboardInterrupt: at the end of the block, after a Ctrl-C; a second one is raised at once.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield lambda: False
        return
    is_interrupted = False

    # a signal may arrive inside the handler of the one before, so a handler takes no lock: it assigns, and ends
    def stop(*_: object) -> None:
        _Caught.is_received = True

    def interrupt(*_: object) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        _Caught.is_received = is_interrupted = True

    handlers: dict[int, Callable[..., None]] = {signal.SIGTERM: stop}
    if hasattr(signal, "SIGUSR2"):
        handlers[signal.SIGUSR2] = stop
    if interrupts:
        handlers[signal.SIGINT] = interrupt
    if not _Caught.blocks:
        _Caught.is_received = False
    _Caught.blocks += 1
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield is_stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _Caught.blocks -= 1
        if is_interrupted:
            raise KeyboardInterrupt
