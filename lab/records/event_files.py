"""Event files of TensorBoard, from any trainer: their scalars, and a table with a row per run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from lab.core import files
from lab.core.errors import RequestError
from lab.records import columns, trackers

EVENTS = "*tfevents*"
PAIR = re.compile(r"([A-Za-z][\w.]*)=(.*?)(?=[_-][A-Za-z][\w.]*=|$)")  # lr=1e-3 of lr=1e-3_seed=1
CONFIGS = ("hparams.yaml", "config.yaml", "config.json")  # files beside the events, as Lightning and Hydra leave them


class EventFolder(NamedTuple):
    """What the event files of a folder hold.

    Attributes:
        scalars: by tag the values in the order of steps; of a step logged twice the last one.
        config: hyper-parameters by name, dotted where they are nested.
    """

    scalars: Mapping[str, pd.Series[float]]
    config: Mapping[str, Any]


class EventTable(NamedTuple):
    """A table with a row per run, named by its path, and which of its columns are scalars that were logged."""

    table: pd.DataFrame
    measured: frozenset[str]


def read_event_folders(folder: Path, loss: str | None = None) -> EventTable:
    """Read all event files below a folder: a row per folder that holds some.

    Columns are hyper-parameters; the final value of each scalar, though the largest of one that is called a learning
    rate; ``step``, the last one; and ``folder``, the path without hyper-parameters. Hyper-parameters come from their
    plugin, which may have a folder of its own below the run's; from a file beside the events; or else from the path,
    as in ``clip/lr=0.01,seed=1``.

    Args:
        folder: searched with all folders below it.
        loss: the tag of the losses, if it has no usual name.

    Raises:
        RequestError: the extra ``tensorboard`` is not installed, there are no event files, a file cannot be read, or a
            run has no loss.
    """
    if not folder.is_dir():
        raise RequestError(f"no folder {folder}")
    trackers.require(trackers.TensorBoard())
    found = {path: _read(path, paths) for path, paths in by_folder(folder).items()}
    rows: dict[str, dict[str, Any]] = {}
    measured = {"step"}
    for path, (scalars, config) in found.items():
        above = found.get(path.parent)
        if not scalars or (config and above and above.scalars and not above.config):
            continue  # the hyper-parameters of the folder above
        below = [other.config for place, other in found.items() if place.parent == path and other.config]
        name = path.relative_to(folder).as_posix()
        given = config or (below[0] if len(below) == 1 else {})
        settings = {**_pairs(name), **given}
        row = {"folder": _without_pairs(name), "step": max(int(values.index[-1]) for values in scalars.values())}
        logged = {tag: values for tag, values in scalars.items() if tag not in settings or not _is_lr(tag)}
        measured |= {*logged}
        rows[name] = {**row, **settings, **{tag: _summary(tag, values) for tag, values in logged.items()}}
    if not rows:
        raise RequestError(f"no event files with scalars below {folder}")
    table = pd.DataFrame.from_dict(rows, orient="index")
    tag = columns.column_of(table, "loss", loss)
    for name in rows:
        if tag not in rows[name]:
            raise RequestError(f"run {name} has no values of {tag}")
    return EventTable(table, frozenset(measured))


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
        files.open_file(path).close()  # refuses pipes and devices
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


def _read(folder: Path, paths: Sequence[Path]) -> EventFolder:
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
    return EventFolder(scalars, config or _config_file(folder))


def _hyper_parameters(content: bytes) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    given = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in given.items()}


def _config_file(folder: Path) -> dict[str, Any]:
    """Hyper-parameters in a file beside the events, lists and what is null left out."""
    path = next((path for name in CONFIGS if (path := folder / name).is_file()), None)
    if path is None:
        return {}
    try:
        text = files.read_bytes(path, files.LARGEST_JSON).decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # few bytes may stand for many
            raise ValueError("it has aliases")
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as fault:
        raise RequestError(f"{path} cannot be read: {' '.join(str(fault).split())}") from None
    return dict(_flat(content)) if isinstance(content, dict) else {}


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float):
            yield f"{prefix}{key}", value


def _pairs(name: str) -> dict[str, str | float]:
    """``clip/lr=0.01,seed=1 -> {lr: 0.01, seed: 1}``."""
    pairs = [pair for part in re.split(r"[/,;&\s]+", name) for pair in PAIR.findall(part)]
    return {key: _number_or_word(value) for key, value in pairs}


def _number_or_word(text: str) -> str | float:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _without_pairs(name: str) -> str:
    """``clip/lr=0.01,seed=1 -> clip``."""
    parts = [PAIR.sub("", part).strip("_-") for part in re.split(r"[/,;&\s]+", name)]
    return " ".join(filter(None, parts))


def _summary(tag: str, values: pd.Series[float]) -> float:
    """The peak of a learning rate, the final value of anything else."""
    return float(values.max() if _is_lr(tag) else values.iloc[-1])


def _is_lr(tag: str) -> bool:
    return bool({tag.lower(), re.split(r"[/.]", tag.lower())[-1]} & {*columns.USUAL_NAMES["lr"]})
