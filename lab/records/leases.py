"""Leases: which process trains which runs of a results folder, so that several commands share them.

A job claims its runs before it trains them, and gives a sign every ten seconds while it does::

    plans/leases/<name>.json     of a command or a job: its request, machine and process, the runs that it wants and
                                 those that it holds; when it last changed is its last sign
    plans/leases/<name>.ended    the same of a job that has ended, for its command to read
    plans/leases/<run id>.<k>    the name of the job that holds a run; the largest k counts

Only one process can create a claim.  A job whose process has ended, or that gave no sign for a minute, holds nothing:
whoever comes next claims its runs by the next k.  A run has the same bits wherever it is trained and is recorded once,
so two holders of one run would waste time and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from lab.core import files
from lab.core.errors import RequestError
from lab.core.machine import process_started
from lab.records import parts, store
from lab.records.status import SILENT

SIGN_EVERY = 10.0  # seconds
LARGEST_CLAIM = 64  # bytes


class Member(NamedTuple):
    """A command, or a job of one, that trains in a folder.

    Attributes:
        request: a name of the command.
        machine: where it runs, see ``_this_machine``.
        process: its id.
        started: when that process started, see ``process_started``.
        wanted: ids of the runs that it should train.
        held: ids of those that it holds; a command holds none, only its jobs do.
        silent: seconds since its last sign.
    """

    request: str
    machine: str
    process: int
    started: str
    wanted: Sequence[str]
    held: Sequence[str]
    silent: float

    @property
    def is_alive(self) -> bool:
        """Whether it may still be at work."""
        has_ended = self.machine == _this_machine() and process_started(self.process) != self.started
        return not has_ended and self.silent < SILENT

    @property
    def place(self) -> str:
        """The name of its machine, for the user."""
        return self.machine.partition(" ")[0]


def living(folder: Path, without: str = "") -> list[Member]:
    """The commands and jobs that are at work in a folder, except those of the request ``without``."""
    found = map(_read, sorted(_leases(folder).glob("*.json")))
    return [member for member in found if member and member.request != without and member.is_alive]


def skipped(folder: Path, request: str) -> set[str]:
    """Ids of the runs that jobs of a request should have trained, and left to others; no job of it held them."""
    ended = _jobs(folder, request, "*.ended")
    held = {run for job in [*ended, *_jobs(folder, request, "*.json")] for run in job.held}
    return {run for job in ended for run in job.wanted} - held


def _jobs(folder: Path, request: str, pattern: str) -> list[Member]:
    members = map(_read, _leases(folder).glob(pattern))
    return [member for member in members if member and member.request == request]


def _read(path: Path) -> Member | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # gone meanwhile, or no file of ours
        content = files.read_json(path, dict)
        request, machine, started = (str(content[key]) for key in ("request", "machine", "started"))
        wanted, held = (list(map(str, content[key])) for key in ("wanted", "held"))
        silent = max(0.0, time.time() - path.stat().st_mtime)
        return Member(request, machine, int(content["process"]), started, wanted, held, silent)
    return None


class Presence:
    """Says, while the block runs, that a command or a job is at work in a folder.

    Args:
        folder: the results folder.
        request: a name of the command.
        wanted: ids of the runs that it should train.
    """

    def __init__(self, folder: Path, request: str, wanted: Sequence[str]) -> None:
        self.folder, self.leases = folder, _leases(folder)
        self.request, self.wanted, self.name = request, wanted, secrets.token_hex(8)
        self.over = threading.Event()

    @property
    def path(self) -> Path:
        """The file that says so."""
        return self.leases / f"{self.name}.json"

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            RequestError: the folder cannot be written.
        """
        self.write([])
        threading.Thread(target=self._give_signs, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.over.set()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def write(self, held: Sequence[str]) -> None:
        """Write the file, which holds these runs."""
        process = os.getpid()
        content = {"request": self.request, "machine": _this_machine(), "process": process}
        content |= {"started": process_started(process), "wanted": list(self.wanted), "held": list(held)}
        files.write_text(self.path, json.dumps(content), within=self.folder)

    def _give_signs(self) -> None:
        while not self.over.wait(SIGN_EVERY):
            with suppress(OSError):
                os.utime(self.path)


class Lease(Presence):
    """A job that holds those of its runs which no other request holds and nobody has recorded."""

    def __init__(self, folder: Path, request: str, wanted: Sequence[str]) -> None:
        super().__init__(folder, request, wanted)
        self.claims: dict[str, int] = {}

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that are held, in the order of ``wanted``."""
        return [run for run in self.wanted if run in self.claims]

    def __enter__(self) -> Self:
        """Claim the runs.

        Raises:
            RequestError: a run has an impossible id, or the folder cannot be written.
        """
        if strange := next((run for run in self.wanted if not re.fullmatch(parts.NAME, run)), None):
            raise RequestError(f"a run cannot be called {strange!r}")
        super().__enter__()  # first: a claim without a holder holds nothing
        try:
            self._claim()
            self.write(self.runs)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):
            self.path.replace(self.path.with_suffix(".ended"))
        super().__exit__(kind, value, trace)
        with suppress(OSError):
            self._unclaim(self.runs)

    def _claim(self) -> None:
        numbers = _numbers(self.leases)
        for run in self.wanted:
            number = max(numbers.get(run, ()), default=-1)
            while not self._is_held(run, number):
                number += 1
                if self._create(run, number):
                    self.claims[run] = number
                    break
        self._unclaim([run for run in self.runs if store.is_recorded(self.folder, run)])

    def _create(self, run: str, number: int) -> bool:
        """Create a claim unless it is there already; returns whether this process has created it."""
        try:
            with open(self.leases / f"{run}.{number}", "x") as file:
                file.write(self.name)
            return True
        except FileExistsError:
            return False
        except OSError as refusal:
            raise RequestError(f"cannot write {self.leases}: {refusal.strerror or refusal}") from None

    def _is_held(self, run: str, number: int) -> bool:
        """Whether a claim is that of another request whose job is alive."""
        claim = self.leases / f"{run}.{number}"
        with suppress(OSError, ValueError):  # released meanwhile
            name = files.read_bytes(claim, LARGEST_CLAIM).decode()
            if not name:  # created a moment ago, unless its process was killed before it wrote into it
                return time.time() - claim.stat().st_mtime < SILENT
            holder = _read(self.leases / f"{name}.json") if re.fullmatch(parts.NAME, name) else None
            return holder is not None and holder.request != self.request and holder.is_alive
        return False

    def _unclaim(self, runs: Sequence[str]) -> None:
        numbers = _numbers(self.leases) if runs else {}
        for run in runs:
            own = self.claims.pop(run)
            for number in sorted(numbers.get(run, ())):  # the smallest first: the largest that there is counts
                if number <= own:
                    with suppress(OSError):
                        (self.leases / f"{run}.{number}").unlink()


def forget(folder: Path, request: str) -> None:
    """Delete the files of a request that has ended, and of the dead once nobody is at work in the folder."""
    left = [*_leases(folder).glob("*")]  # before looking, so that nothing is deleted of who begins meanwhile
    is_alone = not living(folder, request)
    with suppress(OSError, RequestError):
        for path in left:
            if is_alone or ((member := _read(path)) and member.request == request):
                files.remove(path, within=folder)


def _leases(folder: Path) -> Path:
    return folder / "plans" / "leases"


def _numbers(leases: Path) -> dict[str, list[int]]:
    """The numbers of the claims of each run."""
    numbers: dict[str, list[int]] = {}
    for name in os.listdir(leases):
        run, _, number = name.partition(".")
        if run and number.isascii() and number.isdecimal():
            numbers.setdefault(run, []).append(int(number))
    return numbers


def _this_machine() -> str:
    """The name of this machine, and on Linux the namespace of its process ids: containers may share a name."""
    with suppress(OSError):
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()
