"""A sweep of eight runs, begun in a process of its own or carried out in this one, and its records compared."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab import main
from lab.core import files, machine
from lab.records import store

WORDS = ["train", "-m", "seed=0,1", "optimizer.lr=1e-2,1e-1", "intervention=[],[qk_layernorm]"]
SIZE = ["data=synthetic", "validation=short", "model.width=16", "model.depth=1", "steps=24", "hydra.sweeper.max_runs=2"]
RUNS = 8  # in four fleets
needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
OutputOf = Callable[..., str]  # the fixture ``output_of``
TIMINGS = ["wall_seconds", "model_steps_per_second", "out"]


def begin(folder: Path, launcher: str, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "lab", *WORDS, *SIZE, f"hydra/launcher={launcher}", f"out={folder}", *more]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def begin_forked(folder: Path) -> Any:
    """The same in one process that is forked from one with torch; it draws nothing."""
    processes: Any = machine.clean_process_context()
    sweep = processes.Process(target=_finish_silently, args=(folder,))
    sweep.start()
    return sweep


def _finish_silently(folder: Path) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    finish(folder, "basic")


def lab(*words: str, reports: bool = False) -> int:
    """Exit code of a command line, run in this process, which has torch already.

    What trains leaves an empty page unless it ``reports``, which takes as long as a small sweep.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lab", *words])
        if words[:1] in (("train",), ("sweep",)) and not reports:
            patch.setattr("lab.report.build.make_report", empty_page)
        return main(list(words))


def empty_page(folders: Sequence[Path]) -> tuple[None, str]:
    """In place of a report."""
    files.write_text(folders[0] / "report.html", "")
    return None, ""


def finished(folder: Path, *words: str) -> store.Records:
    """What a command line that trains leaves behind, timings left out."""
    assert lab(*words, f"out={folder}") == 0
    records = store.read(folder)
    return store.Records(records.runs.drop(columns=TIMINGS), records.metrics)


def finish(folder: Path, launcher: str = "local") -> store.Records:
    return finished(folder, *WORDS, *SIZE, f"hydra/launcher={launcher}")


def wait_for_runs(folder: Path, count: int, goes_on: Callable[[], bool]) -> None:
    while len(list(folder.glob("runs/*/run.json"))) < count and goes_on():
        time.sleep(0.01)


def processes(group: int, pattern: str = "") -> list[int]:
    """Ids of the living processes of a group whose command line holds the pattern, oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            command = (place / "cmdline").read_text()
            if command and pattern in command and os.getpgid(int(place.name)) == group:
                found.append(int(place.name))
    return sorted(found)


def assert_same(records: store.Records, expected: store.Records) -> None:
    pd.testing.assert_frame_equal(records.runs, expected.runs, check_exact=True)
    order = ["id", "step", "probe", "where"]
    both = (part.metrics.sort_values(order, ignore_index=True) for part in (records, expected))
    pd.testing.assert_frame_equal(*both, check_exact=True)
