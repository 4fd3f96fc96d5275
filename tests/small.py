"""Config trees and fleets for tests, small enough for milliseconds."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lab import Fleet, RunConfig, run_config
from lab.core import machine
from lab.core.shipped import data_folder
from lab.data import corpus
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


@cache
def composed(*files: str) -> DictConfig:
    """A small run that chooses these files."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(data_folder("conf")), version_base="1.3"):
        return compose("config", [*SMALL, *files])


def tree(*overrides: str) -> dict[str, Any]:
    """The resolved config tree of a small run; those that choose the same files are composed once, as in a sweep."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    chooses = [(data_folder("conf") / override.key_or_group).is_dir() for override in parsed]
    config = deepcopy(composed(*(text for text, is_file in zip(overrides, chooses, strict=True) if is_file)))
    values = [override for override, is_file in zip(parsed, chooses, strict=True) if not is_file]
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    del plain["fleet"]
    return plain  # type: ignore[return-value]


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
