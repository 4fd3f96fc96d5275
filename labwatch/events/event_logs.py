"""Logs from event files of TensorBoard: a run for each folder that holds some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from labwatch.events.event_files import EVENTS, by_folder, open_events, scalars_of
from labwatch.events.log_names import STEP, usual_columns
from labwatch.events.log_reader import Row

RUN = "."  # the run of the folder itself


def runs_of(path: Path) -> dict[str, list[Path]]:
    """The event files below a folder by run, which is the path of their folder; or a file that is one of these."""
    if not path.is_dir():
        return {RUN: [path]} if is_event_file(path) else {}
    found = {folder: list(filter(Path.is_file, paths)) for folder, paths in by_folder(path).items()}
    return {str(folder.relative_to(path)): paths for folder, paths in found.items() if paths}


def is_event_file(path: Path) -> bool:
    """Whether a path is an event file of TensorBoard, by its name."""
    return path.is_file() and fnmatch(path.name, EVENTS)


class RunReader:
    """Reads the event files of one run, and later the events that were added to them; ``runs_of`` finds such files.

    Attributes:
        run: the name of the run; empty for the folder itself.
        tags: names of the scalars found.
        columns: the name of the scalar of each column of a log.
        last: the largest step read.
    """

    runs_of = staticmethod(runs_of)

    def __init__(self, run: str, given: Mapping[str, str]) -> None:
        self.run, self.given = "" if run == RUN else run, {key: name for key, name in given.items() if key != STEP}
        self.loaders = dict[Path, Any]()
        self.tags, self.columns, self.last = dict[str, None](), dict[str, str](), -1

    def read(self, paths: list[Path], events: int | None = None) -> Iterator[list[Row]]:
        """Yield the rows that were not read before, from ``events`` events at a time, or from all of a file.

        Raises:
            RequestError: TensorBoard is not installed, or a file cannot be read.
        """
        for path in paths:
            if path not in self.loaders:
                self.loaders[path] = open_events(path)
            loaded = self.loaders[path].Load()
            while piece := list(islice(loaded, events)):
                yield self._rows([scalar for event in piece for scalar in scalars_of(event)])

    def _rows(self, scalars: list[tuple[str, int, float]]) -> list[Row]:
        new = {tag: None for tag, _, _ in scalars if tag not in self.tags}
        if new:
            self.tags |= new
            self.columns = usual_columns(list(self.tags), self.given) | self.columns
        columns_of: dict[str, list[str]] = {tag: [] for tag in self.columns.values()}
        for column, tag in self.columns.items():
            if column != STEP:
                columns_of[tag].append(column)
        rows = [
            Row(self.run, step, dict.fromkeys(columns_of[tag], value))
            for tag, step, value in scalars
            if columns_of.get(tag)
        ]
        self.last = max([self.last, *(row.step for row in rows)])
        return rows
