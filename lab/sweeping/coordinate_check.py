"""Coordinate checks: train a few steps at several widths and measure what changes at each hook point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lab.analysis.rendering import layout
from lab.analysis.statistics import FEWEST_SEEDS
from lab.core import distributed, files, machine
from lab.core.axes import per_run_rms
from lab.core.errors import RequestError
from lab.core.hooks import listening
from lab.sweeping import coordinate_growth
from lab.sweeping.capacity import check_fits, measure_host
from lab.sweeping.dry_run import swept_values
from lab.sweeping.planner import Point, points, results_folder
from lab.training.config import RunConfig
from lab.training.fleet import Fleet

KINDS = ("query", "key", "scores", "block_output", "logits")
ROWS = 8  # held-out windows on which changes are measured, the same for every width, seed and step
VARIES = ("model.width", "seed", "data.seed")
# Overrides of a check; the user's come after them.  Without qk-layernorm, which would hide the growth of queries and
# keys from the scores.  The learning rate is the best one of the base width, without warm-up.  Ten updates: they can
# move a row of the embedding by more than its initial norm, at every width.  After fewer, normalization makes the first
# block change with the square root of the width under every parametrization of the paper, since none rescales the
# embedding.  At higher learning rates five seeds lie too far apart to decide.
DEFAULTS = [
    *("data=synthetic", "intervention=[]", "schedule=constant", "schedule.warmup=0", "optimizer.lr=3e-2", "steps=10"),
    *("model.width=32,64,128,256", "seed=0,1,2,3,4", "probes=none", "out=runs/coordcheck"),
]


@dataclass(frozen=True)
class CoordinateCheck:
    """Changes after a few updates at several widths, judged by ``lab.sweeping.coordinate_growth.slopes``.

    ``changes`` holds the rows of the function ``changes``; ``parametrization`` is the name of the one checked.
    """

    folder: Path
    parametrization: str
    changes: pd.DataFrame

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """The slope of each coordinate with its interval, and whether it stays within the bound."""
        return coordinate_growth.slopes(self.changes)

    @property
    def passed(self) -> bool:
        """Whether no coordinate grows with the width."""
        return bool(self.slopes["holds"].all())

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table, and the verdict."""
        yield from coordinate_growth.lines(self.changes)
        grown = " ".join(self.slopes.loc[~self.slopes["holds"], "coordinate"])
        verdict = "passes" if self.passed else f"fails by {grown}"
        rule = f"slopes with 95 % intervals over seeds; none may reach above {coordinate_growth.BOUND:g}"
        yield f"{self.parametrization} {verdict} ({rule}); {self.folder}"

    def write(self) -> None:
        """Write ``coordcheck.csv`` and ``coordcheck.svg`` into the folder."""
        files.write_csv(self.folder / "coordcheck.csv", self.changes)
        svg = layout.svg(coordinate_growth.figure(self.changes), "coordcheck")
        files.write_text(self.folder / "coordcheck.svg", svg)


def check_coordinates(trees: Sequence[Mapping[str, Any]]) -> CoordinateCheck:
    """Train a few steps at every width and measure the changes.

    Raises:
        RequestError: points differ in more than width and seed, or are too few for a slope with an interval.
    """
    configs = sorted((point.config for point in _check_points(trees)), key=lambda config: config.model.width)
    folder = results_folder(trees)
    machine.configure_torch()
    fleets = [list(fleet) for _, fleet in groupby(configs, key=lambda config: config.model.width)]
    rows = pd.DataFrame([row for fleet in fleets for row in changes(fleet)])
    return CoordinateCheck(folder, configs[0].parametrization.name, rows)


def _check_points(trees: Sequence[Mapping[str, Any]]) -> Sequence[Point]:
    if distributed.world_size() > 1:
        raise RequestError("coordcheck trains in one process; run it without torchrun")
    requested = points(trees)
    if requested[0].config.guest:
        raise RequestError("coordcheck compares parametrizations, and none applies to a custom model")
    for key in swept_values(requested):
        if key not in VARIES:
            raise RequestError(f"coordcheck compares widths: give model.width and seed several values, not {key}")
    widths, seeds = {point.config.model.width for point in requested}, {point.config.seed for point in requested}
    if len(widths) < 2:
        raise RequestError(f"a slope takes at least two widths, as in model.width=32,64, not {min(widths)} alone")
    if len(seeds) < FEWEST_SEEDS:
        raise RequestError(f"an interval takes at least {FEWEST_SEEDS} seeds, as in seed=0,1,2, not {len(seeds)}")
    for point in requested:
        check_fits(point.config, measure_host(point.config.device, [None]))
    return requested


def changes(configs: Sequence[RunConfig]) -> Iterator[dict[str, Any]]:
    """Train runs of one width as a fleet; yields rows ``width, seed, step, coordinate, change`` after every update.

    A change is the root mean square of a tensor minus the same tensor at initialization, on fixed held-out windows.
    """
    fleet = Fleet(configs)
    tokens_rbt = fleet.evaluation.held_out_nt[:ROWS, :-1].expand(fleet.runs, -1, -1)
    at_init = _observe(fleet, tokens_rbt)
    for step in range(fleet.config.steps):
        fleet.step(step)
        for coordinate, tensor_r in _observe(fleet, tokens_rbt).items():
            change_r = per_run_rms(tensor_r - at_init[coordinate]).tolist()
            for config, change in zip(configs, change_r, strict=True):
                row = {"width": config.model.width, "seed": config.seed, "step": step + 1}
                yield {**row, "coordinate": coordinate, "change": change}


@torch.no_grad()
def _observe(fleet: Fleet, tokens_rbt: Tensor) -> dict[str, Tensor]:
    """The tensors at the hook points, by names such as ``block0.query``; of scores, the causal part only."""
    tensors: dict[str, Tensor] = {}

    def record(kind: str, where: str, *values: Tensor) -> None:
        if kind in KINDS:
            tensors[f"{where}.{kind}".lstrip(".")] = values[0].tril() if kind == "scores" else values[0]

    with listening(record):
        fleet.model(tokens_rbt)
    return tensors
