"""Config trees and fleets for tests, small enough for milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lab import machine
from lab.app import data_folder
from lab.config import RunConfig, run_config
from lab.fleet import Fleet
from lab.record import Run, Tape
from lab.train import train

SMALL = [
    "data=synthetic",
    "model.width=16",
    "model.head_width=8",
    "seq_len=12",
    "batch_size=4",
    "steps=12",
    "probes.every=5",
]


def tree(*overrides: str) -> dict[str, Any]:
    """The resolved config tree of a small run."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(data_folder("conf")), version_base="1.3"):
        plain = OmegaConf.to_container(compose("config", [*SMALL, *overrides]), resolve=True)
    assert isinstance(plain, dict)
    del plain["fleet"]
    return plain  # type: ignore[return-value]


def configs(*per_run: str, shared: tuple[str, ...] = ()) -> list[RunConfig]:
    """One config per string of space-separated overrides."""
    return [run_config(tree(*shared, *overrides.split())) for overrides in per_run]


def trained(wanted: list[RunConfig]) -> list[Run]:
    """Outcome and rows of every run of one fleet, wall time left out."""
    machine.settle()
    try:
        tape = Tape(Fleet(wanted))
        for moment in train(tape.fleet):
            tape.keep(moment)
    finally:
        torch.set_flush_denormal(False)  # for the tests that come after, which may want such numbers
    timings = ("wall_seconds", "model_steps_per_second")
    return [({k: v for k, v in outcome.items() if k not in timings}, rows) for outcome, rows in tape.runs()]
