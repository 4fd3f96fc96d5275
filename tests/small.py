"""Config trees and fleets for tests, small enough for milliseconds."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from lab import Fleet, RunConfig, run_config
from lab.core import machine
from lab.data import corpus
from lab.sweeping.compose import Composer, expand, parse
from lab.training.evaluation import PASS_TOKENS
from lab.training.loop import train
from lab.training.recorder import Recorder, Run

SMALL = [
    "data=synthetic",
    "model.width=16",
    "model.head_width=8",
    "seq_len=12",
    "batch_size=4",
    "steps=12",
    "probes.every=5",
    "validation=short",
]


COMPOSER = Composer()


def tree(*overrides: str) -> dict[str, Any]:
    """The resolved config tree of a small run."""
    (point,) = expand(parse([*SMALL, *overrides]))
    return deepcopy(dict(COMPOSER.tree(point)))


def forget_data() -> None:
    """Let data be opened as another process would open them."""
    corpus._corpora.clear()
    corpus.look_again()


def configs(*per_run: str, shared: tuple[str, ...] = ()) -> list[RunConfig]:
    """One config per string of space-separated overrides."""
    return [run_config(tree(*shared, *overrides.split())) for overrides in per_run]


def brief(fleet: Fleet) -> Fleet:
    """The fleet, with less held out: still a pass and a part of one, no longer most of what it takes."""
    windows = PASS_TOKENS // fleet.config.seq_len + 7
    fleet.evaluation.held_out_nt = fleet.evaluation.held_out_nt[:windows]
    return fleet


def trained(wanted: list[RunConfig]) -> list[Run]:
    """Outcome and rows of every run of one fleet, wall time left out."""
    machine.configure_torch()
    return [(outcome, rows) for outcome, rows, _ in records(Fleet(wanted))]


def records(fleet: Fleet) -> list[Run]:
    """Outcomes without timings, values of probes and events of a fleet, trained to its end."""
    recorder = Recorder(fleet)
    for result in train(fleet):
        recorder.keep(result)
    return untimed(recorder)


def untimed(recorder: Recorder) -> list[Run]:
    """What was recorded of each run, wall time left out."""
    timings = ("wall_seconds", "model_steps_per_second")
    return [
        run._replace(outcome={key: value for key, value in run.outcome.items() if key not in timings})
        for run in recorder.runs()
    ]
