"""Commands that train in one folder at the same time share the runs: each waits for those that another one holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from lab.records import leases, store

LOOK_EVERY = 0.5  # seconds


class Sharing:
    """The sharing of this command's runs with other commands, within the block.

    Attributes:
        request: a random name of this command, which its jobs have in common.
    """

    def __init__(self, folder: Path, runs: Sequence[str]) -> None:
        self.folder, self.runs, self.request = folder, runs, secrets.token_hex(8)
        self.presence, self.known = leases.Presence(folder, self.request, runs), set[str]()

    def __enter__(self) -> Sharing:
        self.presence.__enter__()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.presence.__exit__(kind, value, trace)
        leases.forget(self.folder, self.request)

    def look(self) -> list[str]:
        """Look for other commands in the folder; returns a line for each new one that shares runs with this one."""
        lines = []
        for other in leases.living(self.folder, self.request):
            if other.request not in self.known and not {*self.runs}.isdisjoint(other.wanted):
                self.known.add(other.request)
                lines.append(f"another command, on {other.place}, also trains some of these runs; each trains once")
        return lines

    @property
    def is_alone(self) -> bool:
        """Whether no other command trains in the folder now."""
        return not leases.living(self.folder, self.request)

    @property
    def elsewhere(self) -> set[str]:
        """The runs that this command left to others."""
        return leases.skipped(self.folder, self.request)

    @property
    def awaited(self) -> set[str]:
        """The runs left to others that are not recorded yet."""
        return {run for run in self.elsewhere if not store.is_recorded(self.folder, run)}

    def await_others(self, stop_requested: Callable[[], bool]) -> set[str]:
        """Wait until other commands have recorded the runs left to them, or until a stop is requested.

        Returns:
            The runs that no command holds any more, such as those of a command that was killed.
        """
        while (left := self.awaited) and not stop_requested():
            held = {run for other in leases.living(self.folder, self.request) for run in other.held}
            if left - held and (free := self.awaited - held):  # a run is recorded before it is released
                return free
            time.sleep(LOOK_EVERY)
        return set()
