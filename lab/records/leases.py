"""Leases: which process trains which runs of a results folder, so that several commands share them.

A job holds runs while it trains them, and leaves out those that others hold::

    plans/leases/<name>.lock              locked by a job as long as it lives
    plans/leases/<name>.json              the runs that it holds
    plans/leases/claims.lock              locked while a job chooses its runs
    plans/leases/<request>.<fleet>.left   the runs that a job left to others, for its command to read

The locks are of the operating system (``filelock.FileLock``): they end with the process, however it ends, so nobody
waits for the dead and no clocks are compared.  On Linux, NFS has them between machines, too.  Where a file system has
none, ``filelock`` makes do with the existence of the file, and recognizes the dead on the same machine only.

A run has the same bits wherever it is trained and is recorded once, so two holders of one run would waste time and
nothing else.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lab.core import files
from lab.core.errors import RequestError
from lab.records import store

LONGEST_CHOICE = 60.0  # seconds


@contextmanager
def hold(folder: Path, runs: Sequence[str], request: str = "", fleet: int = 0) -> Iterator[list[str]]:
    """Hold, within the block, those of these runs that no other job holds and nobody has recorded; yields their ids.

    Args:
        folder: the results folder.
        runs: ids of the runs of a fleet.
        request: a name of the command, which reads by ``left`` what its jobs left to others; empty if it does not.
        fleet: the number of the fleet in the plan.

    Raises:
        RequestError: the folder cannot be written.
    """
    place = _leases(folder)
    lock = files.inside(place / f"{secrets.token_hex(8)}.lock", folder)
    with ExitStack() as stack:
        try:
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(lock).acquire())
            stack.callback(_remove, lock)
            with FileLock(place / "claims.lock", timeout=LONGEST_CHOICE):
                others = held(folder)
                chosen = [run for run in runs if run not in others]
                files.write_text(lock.with_suffix(".json"), json.dumps(chosen), within=folder)
        except OSError as refusal:
            raise RequestError(f"cannot write {place}: {refusal.strerror or refusal}") from None
        # looked up after choosing, since a job records a run before it releases it
        chosen = [run for run in chosen if not store.is_recorded(folder, run)]
        if request and len(chosen) < len(runs):
            rest = sorted({*runs} - {*chosen})
            files.write_text(place / f"{request}.{fleet}.left", json.dumps(rest), within=folder)
        yield chosen


def held(folder: Path) -> set[str]:
    """Ids of the runs that jobs hold now, in whatever process; the files of jobs that were killed are deleted."""
    runs = set[str]()
    for path in _leases(folder).glob("*.json"):
        lock = path.with_suffix(".lock")
        try:
            with FileLock(lock).acquire(blocking=False):
                _remove(lock)
        except Timeout:
            with suppress(OSError, ValueError):  # released meanwhile
                runs |= {*map(str, files.read_json(path, list))}
        except OSError:  # a folder of somebody else
            pass
    return runs


def left(folder: Path, request: str) -> set[str]:
    """Ids of the runs that jobs of a request left to others; a second reading finds none."""
    runs = set[str]()
    for path in _leases(folder).glob(f"{request}.*.left"):
        with suppress(OSError, ValueError):
            runs |= {*map(str, files.read_json(path, list))}
            files.remove(path, within=folder)
    return runs


def _remove(lock: Path) -> None:
    """Delete the files of a job whose lock this process has; a lock on a file that is deleted counts for nobody."""
    lock.with_suffix(".json").unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


def _leases(folder: Path) -> Path:
    return folder / "plans" / "leases"
