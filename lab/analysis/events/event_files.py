"""TensorBoard's event files as logs: a run for each folder that holds some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lab.analysis.events.log_formats import LOSS, STEP, Row, missing_column, usual_columns
from lab.core import files
from lab.core.errors import RequestError

PATTERN = "*tfevents*"
RUN = "."  # the run of the folder itself


def runs_of(folder: Path) -> dict[str, list[Path]]:
    """Event files by the folder that holds them, relative to the given one."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob(PATTERN)):
        if path.is_file():
            found.setdefault(str(path.parent.relative_to(folder)), []).append(path)
    return found


def read_rows(folder: Path, given: Mapping[str, str]) -> Iterator[Row]:
    """The rows of all runs in a folder.

    Raises:
        RequestError: TensorBoard is not installed, or no run has a loss.
    """
    paths = runs_of(folder)
    readers = {run: RunReader(run, given) for run in paths}
    for run, reader in readers.items():
        for rows in reader.read(paths[run]):
            yield from rows
    if not any(LOSS in reader.columns for reader in readers.values()):
        names = sorted({tag for reader in readers.values() for tag in reader.tags})
        raise RequestError(f"{folder} {missing_column(LOSS, names, given)}")


class RunReader:
    """Reads the event files of one run, and later what was added to them.

    Attributes:
        run: its name; empty where it is the folder itself.
        tags: names of the scalars that were met.
        columns: which of them holds what.
        last: the largest step that was read.
    """

    def __init__(self, run: str, given: Mapping[str, str]) -> None:
        self.run, self.given = "" if run == RUN else run, {key: name for key, name in given.items() if key != STEP}
        self.loaders = dict[Path, Any]()
        self.tags, self.columns, self.last = dict[str, None](), dict[str, str](), -1

    def read(self, paths: list[Path], events: int | None = None) -> Iterator[list[Row]]:
        """The scalars that were not read before, so many ``events`` at once, or all of a file.

        Raises:
            RequestError: TensorBoard is not installed.
        """
        for path in paths:
            if path not in self.loaders:
                self.loaders[path] = _loader(path)
            loaded = self.loaders[path].Load()
            while piece := list(islice(loaded, events)):
                yield self._rows([scalar for event in piece for scalar in _scalars(event)])

    def _rows(self, scalars: list[tuple[str, int, float]]) -> list[Row]:
        new = {tag: None for tag, _, _ in scalars if tag not in self.tags}
        if new:
            self.tags |= new
            self.columns = usual_columns(list(self.tags), self.given) | self.columns
        column_of = {tag: column for column, tag in self.columns.items() if column != STEP}
        rows = [Row(self.run, step, {column_of[tag]: value}) for tag, step, value in scalars if tag in column_of]
        self.last = max([self.last, *(row.step for row in rows)])
        return rows


def _loader(path: Path) -> Any:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        where = f"{path.parent} holds event files of TensorBoard"
        raise RequestError(f"{where}, which need an extra: pip install 'instability-lab[tensorboard]'") from None
    try:
        files.open_file(path).close()  # no pipe and no device
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    return EventFileLoader(str(path))


def _scalars(event: Any) -> Iterator[tuple[str, int, float]]:
    """Tag, step and value of the scalars in an event."""
    from tensorboard.util import tensor_util

    if event.HasField("summary"):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, int(event.step), float(value.simple_value)
            elif value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                number = tensor_util.make_ndarray(value.tensor)
                if number.dtype.kind in "fiu":
                    yield value.tag, int(event.step), float(number)
