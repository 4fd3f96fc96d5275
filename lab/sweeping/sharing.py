"""Commands that train in one folder at the same time share the runs: each awaits those that another one holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from lab.records import leases, store

LOOK_EVERY = 0.5  # seconds


class Sharing:
    """What other commands train of the runs that this one is to train, while the block runs.

    Attributes:
        request: a name for this command, by which its jobs know each other.
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
        """Look who else is at work just now; returns a line for each command that is new and shares runs."""
        lines = []
        for other in leases.living(self.folder, self.request):
            if other.request not in self.known and not {*self.runs}.isdisjoint(other.wanted):
                self.known.add(other.request)
                lines.append(f"another command, on {other.place}, trains some of these runs, too; the two share them")
        return lines

    @property
    def is_alone(self) -> bool:
        """Whether no other command trains in the folder just now."""
        return not leases.living(self.folder, self.request)

    @property
    def elsewhere(self) -> set[str]:
        """The runs that this command left to others."""
        return leases.skipped(self.folder, self.request)

    @property
    def awaited(self) -> set[str]:
        """Those of them that nobody has recorded."""
        return {run for run in self.elsewhere if not store.is_recorded(self.folder, run)}

    def await_others(self, told_to_stop: Callable[[], bool]) -> set[str]:
        """Wait until others have recorded what was left to them, or told to stop.

        Returns:
            What they left in turn, as when they were killed.
        """
        while (left := self.awaited) and not told_to_stop():
            held = {run for other in leases.living(self.folder, self.request) for run in other.held}
            if left - held and (free := self.awaited - held):  # a run is recorded before it is released
                return free
            time.sleep(LOOK_EVERY)
        return set()
