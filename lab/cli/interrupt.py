"""Interrupts (Ctrl-C): one line, exit code 130 and no traceback, whatever is going on; and SIGTERM while it stops."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from lab.core import machine
from lab.core.printing import say

INTERRUPTED = 130


def handle() -> None:
    """From now on an interrupt during an import ends this process at once; any other raises ``KeyboardInterrupt``.

    Libraries turn an interrupt of their import into errors of other types, or print a traceback and go on. Python does
    the same where it cannot raise an exception, such as in a finalizer. A process that ignores interrupts still does.

    SIGTERM ends the process as it does by default, but one that follows another changes no exit code.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _end_import)
    hook = sys.unraisablehook

    def end_unraisable(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _end()
        hook(unraisable)

    sys.unraisablehook = end_unraisable


def _terminate(number: int, frame: FrameType | None) -> None:
    if not machine.is_stopping():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _end_import(number: int, frame: FrameType | None) -> None:
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> NoReturn:
    report()
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def report() -> None:
    """Say that the program was interrupted, on a line of its own."""
    start = "\n" if sys.stderr.isatty() else ""  # after the ^C that a terminal shows
    say(f"{start}interrupted; the same command trains what is missing", error=True)


def handle_at_exit(code: int) -> None:
    """From now on an interrupt ends the process with this exit code, since all work is done and printed.

    Once more SIGTERM does not change the code of a process that has stopped: one with a handler would die of it, since
    Python takes handlers away as it ends.
    """
    if code == machine.EXIT_PREEMPTED:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is _end_import:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
