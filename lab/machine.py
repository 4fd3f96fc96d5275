"""What the lab asks of the machine: of the process before torch is loaded, of torch before it trains."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# glibc's numbers for mallopt(3), and the values asked for.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEEP, PAD = 2_000_000_000, 64 * 2**20
# Exit code of what was told to stop and may be started again: EX_TEMPFAIL of sysexits.h.
PREEMPTED = 75


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


@contextmanager
def heeding_sigterm() -> Iterator[Callable[[], bool]]:
    """Within the block SIGTERM ends nothing; gives a function that says whether it has come."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be heard
        yield lambda: False
        return
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
