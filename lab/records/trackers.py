"""Trackers: experiment trackers to which the values of runs go besides the store."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

from lab.core import files
from lab.core.errors import RequestError
from lab.core.registry import TRACKERS
from lab.records.store import RUN_COLUMNS, SPIKE_LAB

LONGEST_NAME = 150  # characters of a folder's name, before the id
Value = float | str
Config = Mapping[str, Value]


class TrackedRun(Protocol):
    """One run, open in a tracker; the names are those of ``wandb.Run`` and ``trackio.Run``."""

    def log(self, values: Mapping[str, Value], step: int) -> None:
        """Log values of one step, NaN and infinity included; steps never decrease."""

    def finish(self) -> None:
        """Close the run."""


class Tracker(Protocol):
    """A destination of runs; its fields are the keys of ``conf/tracker/NAME.yaml``."""

    package: ClassVar[str]  # the package it imports, and the extra of that name; empty without one

    def begin(self, name: str, group: str, config: Config, folder: Path) -> TrackedRun | None:
        """Open a run; the tracker's own files go into ``folder``.  None is a run that is not tracked."""


@TRACKERS.register("none")
@dataclass(frozen=True)
class NoTracker:
    """Values go only to the store."""

    package: ClassVar[str] = ""

    def begin(self, name: str, group: str, config: Config, folder: Path) -> None:
        """Track nothing."""


@TRACKERS.register("tensorboard")
@dataclass(frozen=True)
class TensorBoard:
    """Event files in OUT/tensorboard, one folder a run, named by its config and id; hyper-parameters on their page."""

    package: ClassVar[str] = "tensorboard"

    def begin(self, name: str, group: str, config: Config, folder: Path) -> TrackedRun:
        """Open an event file; that of an earlier attempt at this run is deleted."""
        event_folder = folder / "tensorboard" / readable_name(name, config)
        files.inside(event_folder / "events", folder)
        for earlier in event_folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        return EventFile(event_folder, name, config)


# What sets most runs apart; TensorBoard's page of hyper-parameters has the rest.
NAMING_KEYS = ("intervention", "custom_model", "parametrization.name", "optimizer.name", "schedule.name")
NUMBERING_KEYS = ("model.width", "model.depth", "optimizer.lr", "seed")


def readable_name(name: str, config: Config) -> str:
    """A folder's name from a run's config and, at the end, its id: ``z_loss,adamw,width=64,lr=0.01,seed=0,ID``."""
    words = [str(config[key]) for key in NAMING_KEYS if key in config]
    numbers = [f"{key.rpartition('.')[2]}={config[key]}" for key in NUMBERING_KEYS if key in config]
    safe = [re.sub(r"[^\w.+=-]", "_", part) for part in (*words, *numbers)]
    return ",".join([",".join(safe)[:LONGEST_NAME], name])


class EventFile:
    """One run in TensorBoard's format, written without torch or TensorFlow."""

    def __init__(self, folder: Path, name: str, config: Config) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.text, self.writer = Event, text_pb, EventFileWriter(str(folder))
        self.writer.add_event(Event(wall_time=time.time(), summary=hparams_pb(dict(config), trial_id=name)))

    def log(self, values: Mapping[str, Value], step: int) -> None:
        """Write one event: numbers as scalars, words as text."""
        event = self.event(wall_time=time.time(), step=step)
        for tag, value in values.items():
            if isinstance(value, str):
                event.summary.MergeFrom(self.text(tag, value))
            else:
                event.summary.value.add(tag=tag, simple_value=value)
        self.writer.add_event(event)

    def finish(self) -> None:
        """Flush and close."""
        self.writer.close()


@TRACKERS.register("wandb")
@dataclass(frozen=True)
class WeightsAndBiases:
    """Weights & Biases; WANDB_MODE=offline keeps the runs in OUT/wandb, for `wandb sync`."""

    project: str = "instability-lab"
    package: ClassVar[str] = "wandb"

    def begin(self, name: str, group: str, config: Config, folder: Path) -> TrackedRun:
        """Open a run beside those already open in this process; by default they would be one."""
        files.inside(folder / "wandb" / name, folder)
        run: TrackedRun = import_module(self.package).init(
            project=self.project,
            name=name,
            group=group,
            config=dict(config),
            dir=str(folder),
            reinit="create_new",
            settings={"silent": True, "console": "off"},
        )
        return run


@TRACKERS.register("trackio")
@dataclass(frozen=True)
class Trackio:
    """Trackio, in its own local database (TRACKIO_DIR) or a Space (TRACKIO_SPACE_ID)."""

    project: str = "instability-lab"
    package: ClassVar[str] = "trackio"

    def begin(self, name: str, group: str, config: Config, folder: Path) -> TrackedRun:
        """Open a run in its own context: trackio ends a run that is open in the current one."""
        init = partial(import_module(self.package).init, project=self.project, embed=False)
        return QuietRun(lambda: Context().run(init, name=name, group=group, config=dict(config)))


class QuietRun:
    """Silences a tracker that prints when a run begins and ends."""

    def __init__(self, begin: Callable[[], TrackedRun]) -> None:
        with redirect_stdout(io.StringIO()):
            self.run = begin()
        self.log = self.run.log

    def finish(self) -> None:
        """Close the run."""
        with redirect_stdout(io.StringIO()):
            self.run.finish()


def require(tracker: Tracker) -> None:
    """Refuse a tracker that is not installed, before anything is trained.

    Raises:
        RequestError: its package is not installed.
    """
    try:
        if tracker.package:
            distribution(tracker.package)
    except PackageNotFoundError:
        package = tracker.package
        raise RequestError(f"{package} is not installed: pip install 'instability-lab[{package}]'") from None


def tag(probe: str, where: str) -> str:
    """The name of a probe's values in a tracker."""
    return f"{probe}/{where}" if where else probe


def config_and_outcome(row: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Split a row of ``runs.parquet`` into config and outcome, without missing values."""
    present = {key: value for key, value in row.items() if value is not None and key != "id"}
    outcome = {
        key: value for key, value in present.items() if key in RUN_COLUMNS and key not in ("intervention", *SPIKE_LAB)
    }
    return {key: value for key, value in present.items() if key not in outcome}, outcome


class FleetTracker:
    """The runs of a fleet in a tracker.  A failure there prints one line and ends the tracking, not the training."""

    def __init__(self, tracker: Tracker, folder: Path, runs: Mapping[str, Config], say: Callable[[str], None]) -> None:
        self.tracker, self.folder, self.runs, self.say = tracker, folder, runs, say
        self.steps = dict.fromkeys(runs, -1)
        self.open: dict[str, TrackedRun] = {}

    def log(self, step: int, values: Mapping[str, Mapping[str, Value]]) -> None:
        """Log values of runs at a step; a run that starts again, in half its fleet, skips the steps logged before."""
        with self._contained():
            for name in values:
                if name in self.open and step >= self.steps[name]:
                    self.open[name].log(values[name], step)
                    self.steps[name] = step

    def end(self, row: Mapping[str, Any]) -> None:
        """Log the outcome of the run of this row, at its last step."""
        with self._contained():
            if run := self.open.get(row["id"]):
                run.log(config_and_outcome(row)[1], max(0, self.steps[row["id"]]))

    @contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except BaseException as fault:
            while self.open:
                with suppress(Exception):
                    self.open.popitem()[1].finish()
            if not isinstance(fault, Exception):
                raise
            self.say(f"tracking ends here, training goes on: {type(fault).__name__}: {fault}".split("\n")[0])

    def __enter__(self) -> FleetTracker:
        with self._contained():
            for name, config in self.runs.items():
                if run := self.tracker.begin(
                    name, self.folder.resolve().name, config_and_outcome(config)[0], self.folder
                ):
                    self.open[name] = run
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with self._contained():
            while self.open:
                self.open.popitem()[1].finish()
