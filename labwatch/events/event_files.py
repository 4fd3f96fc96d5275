"""Event files of TensorBoard, from any trainer: their scalars, and the hyper-parameters of their runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.core import files
from lab.core.errors import RequestError
from lab.records import trackers

EVENTS = "*tfevents*"
POINTER = 200  # bytes, of which a pointer of Git LFS has fewer


class EventFolder(NamedTuple):
    """What the event files of a folder hold.

    Attributes:
        scalars: by tag the values in the order of steps; of a step logged twice the last one.
        config: hyper-parameters by name.
    """

    scalars: Mapping[str, pd.Series[float]]
    config: Mapping[str, Any]


def by_folder(folder: Path) -> dict[Path, list[Path]]:
    """All event files below a folder, sorted, by the folder that holds them."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob(EVENTS)):
        found.setdefault(path.parent, []).append(path)
    return found


def open_events(path: Path) -> Any:
    """The reader of an event file; each call of its ``Load`` yields the events that were added since the last one.

    Raises:
        RequestError: the extra ``tensorboard`` is not installed, or the file cannot be read.
    """
    trackers.require(trackers.TensorBoard())
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    try:
        with files.open_file(path) as file:  # refuses pipes and devices
            if files.is_lfs_pointer(file.read(POINTER)):
                raise RequestError(f"{path} {files.LFS_POINTER}")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    return EventFileLoader(str(path))


def scalars_of(event: Any) -> Iterator[tuple[str, int, float]]:
    """Yield tag, step and value of the scalars in an event, which the reader has converted to tensors."""
    from tensorboard.util import tensor_util

    for value in event.summary.value:
        if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
            number = tensor_util.make_ndarray(value.tensor)
            if number.dtype.kind in "fiu":
                yield value.tag, int(event.step), float(number)


def read_events(paths: Sequence[Path]) -> EventFolder:
    """Read the event files of a folder.

    Raises:
        RequestError: the extra ``tensorboard`` is not installed, or a file cannot be read.
    """
    values: dict[str, dict[int, float]] = {}
    config: dict[str, Any] = {}
    for file in paths:
        if not file.is_file() or file.stat().st_size > files.LARGEST_FILE:
            raise RequestError(f"{file} is no file of at most {files.LARGEST_FILE // files.MIB} MiB")
        reader = open_events(file)
        try:
            for event in reader.Load():
                for value in event.summary.value:
                    if value.metadata.plugin_data.plugin_name == "hparams":
                        config |= _hyper_parameters(value.metadata.plugin_data.content)
                for tag, step, number in scalars_of(event):
                    values.setdefault(tag, {})[step] = number
        except Exception as fault:  # damaged records raise errors of several packages
            raise RequestError(f"{file} cannot be read: {' '.join(str(fault).split())}") from None
    scalars = {tag: pd.Series(steps).sort_index() for tag, steps in values.items()}
    return EventFolder(scalars, config)


def _hyper_parameters(content: bytes) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    given = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in given.items()}
