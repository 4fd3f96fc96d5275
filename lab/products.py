"""Who multiplies matrices in fp32 on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Entries of a product of two unit normal 64 x 64 matrices are wrong by 1e-5 at most in fp32, by 0.1 in bf16.
FP32_ERROR = 1e-4


def choose() -> None:
    """oneDNN, where MKL runs its slow kernels and oneDNN's results are as exact."""
    if is_intel():
        return
    _switch().fp32_precision = "bf16"
    if not _exact():
        _switch().fp32_precision = "none"


def chosen() -> str:
    """``MKL`` or ``oneDNN``.

    MKL keeps its fast kernels for Intel's processors; on others oneDNN is about twice as fast.  Torch hands it fp32
    products only where they *may* be rounded to bf16, and none below 4096 multiplications.
    """
    return "oneDNN" if _switch().fp32_precision == "bf16" else "MKL"


def is_intel() -> bool:
    """Whether this is a processor that MKL knows; taken for granted where the system does not tell."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _switch() -> Any:
    import torch

    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _exact() -> bool:
    """Whether fp32 products err as fp32 does; a unit for bf16 would round to it, as it was allowed to."""
    import torch

    a, b = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    error = (torch.bmm(a, b).double() - torch.bmm(a.double(), b.double())).abs().max()
    return bool(error < FP32_ERROR)
