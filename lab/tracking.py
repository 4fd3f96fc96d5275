"""A fleet in a tracker while it trains: what fails there stays there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.store import RUN_COLUMNS
from lab.trackers import Config, TrackedRun, Tracker, Value


def known(row: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, Value]]:
    """A row of ``runs.parquet`` as config and outcome, without what is absent."""
    there = {key: value for key, value in row.items() if value is not None and key != "id"}
    outcome = {key: value for key, value in there.items() if key in RUN_COLUMNS and key != "intervention"}
    return {key: value for key, value in there.items() if key not in outcome}, outcome


class Tracking:
    """The runs of a fleet in a tracker.  What fails there is said in one line and ends the tracking, nothing else."""

    def __init__(self, tracker: Tracker, folder: Path, runs: Mapping[str, Config], say: Callable[[str], None]) -> None:
        self.say, self.steps = say, dict.fromkeys(runs, -1)
        self.open: dict[str, TrackedRun] = {}
        with self._apart():
            for name, config in runs.items():
                if run := tracker.begin(name, folder.resolve().name, known(config)[0], folder):
                    self.open[name] = run

    def log(self, step: int, values: Mapping[str, Mapping[str, Value]]) -> None:
        """Values of some runs at a step; a run begun anew, in half its fleet, is silent until it is where it was."""
        with self._apart():
            for name in values:
                if name in self.open and step >= self.steps[name]:
                    self.open[name].log(values[name], step)
                    self.steps[name] = step

    def end(self, row: Mapping[str, Any]) -> None:
        """The outcome of the run whose row this is, with its last step."""
        with self._apart():
            if run := self.open.get(row["id"]):
                run.log(known(row)[1], max(0, self.steps[row["id"]]))

    def close(self) -> None:
        """Finish every run that is open, whatever became of it."""
        with self._apart():
            while self.open:
                self.open.popitem()[1].finish()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        try:
            yield
        except BaseException as fault:
            while self.open:
                with suppress(Exception):
                    self.open.popitem()[1].finish()
            if not isinstance(fault, Exception):
                raise
            self.say(f"tracking ends here, training goes on: {type(fault).__name__}: {fault}".split("\n")[0])

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
