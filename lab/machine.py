"""What the lab asks of the machine: of the process before torch is loaded, of torch before it trains."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# glibc's numbers for mallopt(3), and the values asked for.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP, PAD = 2_000_000_000, 64 * 2**20
# Entries of a product of two unit normal 64 x 64 matrices are wrong by 1e-5 at most in fp32, by 0.1 in bf16.
FP32_ERROR = 1e-4


def prepare() -> None:
    """Let waiting threads sleep, let the allocator keep what it has, and keep what is compiled for the next process.

    Threads that spin while they wait starve everybody on a shared machine.  And every step frees tensors of a few
    megabytes: by default glibc hands each back to the system and faults it in again, page by page.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not _is_intel():  # elsewhere MKL's bits depend on where in memory a matrix lies, unless asked
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instability-lab"
    with suppress(OSError):  # torch knows a place of its own, which lasts less long
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # jobs are processes already
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            for option, value in ((M_MMAP_THRESHOLD, KEEP), (M_TRIM_THRESHOLD, KEEP), (M_TOP_PAD, PAD)):
                mallopt(option, value)


def settle() -> None:
    """Tell torch how this process trains: on one thread, without denormal numbers, its fp32 products by ``products``.

    One thread gives the same bits on any number of cores.  Attention that has collapsed is full of numbers below
    1e-38, on which a CPU is many times slower; they are zero to every purpose here.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    switch = _switch()
    if not _is_intel():
        switch.fp32_precision = "bf16"
        if not _exact():
            switch.fp32_precision = "none"


def products() -> str:
    """Who multiplies matrices in fp32 on a CPU: ``MKL`` or ``oneDNN``.

    MKL keeps its fast kernels for Intel's processors; on others oneDNN is about twice as fast.  Torch hands it fp32
    products only where they *may* be rounded to bf16, and none below 4096 multiplications.
    """
    return "oneDNN" if _switch().fp32_precision == "bf16" else "MKL"


def _switch() -> Any:
    import torch

    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # not Linux: leave things as they are


def _exact() -> bool:
    """Whether fp32 products err as fp32 does; a unit for bf16 would round to it, as it was allowed to."""
    import torch

    a, b = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    error = (torch.bmm(a, b).double() - torch.bmm(a.double(), b.double())).abs().max()
    return bool(error < FP32_ERROR)
