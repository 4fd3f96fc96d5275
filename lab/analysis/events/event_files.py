"""TensorBoard's event files as logs: a run for each folder that holds some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    readers = {run: RunReader(run, paths, given) for run, paths in runs_of(folder).items()}
    for reader in readers.values():
        yield from reader.read()
    if not any(LOSS in reader.columns for reader in readers.values()):
        names = sorted({tag for reader in readers.values() for tag in reader.tags})
        raise RequestError(f"{folder} {missing_column(LOSS, names, given)}")


class RunReader:
    """Reads the event files of one run, and later what was added to them."""

    def __init__(self, run: str, paths: list[Path], given: Mapping[str, str]) -> None:
        self.run, self.given = "" if run == RUN else run, given
        self.loaders = [_loader(path) for path in paths]
        self.tags = dict[str, None]()
        self.columns = dict[str, str]()

    def read(self) -> list[Row]:
        """The scalars that were not read before."""
        scalars = [scalar for loader in self.loaders for event in loader.Load() for scalar in _scalars(event)]
        self.tags |= dict.fromkeys(tag for tag, _, _ in scalars)
        found = usual_columns(list(self.tags), {key: name for key, name in self.given.items() if key != STEP})
        self.columns = found | self.columns
        column_of = {tag: column for column, tag in self.columns.items() if column != STEP}
        return [Row(self.run, step, {column_of[tag]: value}) for tag, step, value in scalars if tag in column_of]


def _loader(path: Path) -> Any:
    files.open_file(path).close()  # no pipe and no device
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        raise RequestError(
            f"{path.parent} holds event files of TensorBoard; to read them, install instability-lab[tensorboard]"
        ) from None
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
