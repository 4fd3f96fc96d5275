"""Coordinate checks: train a few steps at several widths or depths and measure what changes at each hook point."""

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
ROWS = 8  # held-out windows on which changes are measured, the same for every model, seed and step
VARIES = ("model.width", "model.depth", "seed", "data.seed")
# Overrides of a check, before the user's.  No qk-layernorm: it would hide the growth of queries and keys from the
# scores.  The learning rate is the best of the base width, without warm-up: ten updates can move a row of the embedding
# by more than its initial norm, at every width.  After fewer updates, normalization makes the first block change with
# the square root of the width under every parametrization of the paper, since none rescales the embedding; at higher
# learning rates five seeds lie too far apart to decide.
DEFAULTS = [
    *("data=synthetic", "intervention=[]", "schedule=constant", "schedule.warmup=0", "optimizer.lr=3e-2", "steps=10"),
    *("model.width=32,64,128,256", "seed=0,1,2,3,4", "probes=none", "out=runs/coordcheck"),
]


@dataclass(frozen=True)
class CoordinateCheck:
    """What a few updates changed at several widths or depths, judged by ``lab.sweeping.coordinate_growth.slopes``.

    ``changes`` holds the rows of ``changes``; ``checked`` names the parametrization, and interventions if any.
    """

    folder: Path
    checked: str
    changes: pd.DataFrame

    @cached_property
    def slopes(self) -> pd.DataFrame:
        """The slope of each coordinate with its interval, and whether it stays within the bound."""
        return coordinate_growth.slopes(self.changes)

    @property
    def passed(self) -> bool:
        """Whether no coordinate grows with the size."""
        return bool(self.slopes["holds"].all())

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table, and the verdict."""
        yield from coordinate_growth.lines(self.changes)
        grown = " ".join(self.slopes.loc[~self.slopes["holds"], "coordinate"])
        verdict = "passes" if self.passed else f"fails by {grown}"
        rule = f"slopes with 95 % intervals over seeds; none may reach above {coordinate_growth.BOUND:g}"
        yield f"{self.checked} {verdict} ({rule}); {self.folder}"

    def write(self) -> None:
        """Write ``coordcheck.csv`` and ``coordcheck.svg`` into the folder."""
        files.write_csv(self.folder / "coordcheck.csv", self.changes)
        svg = layout.svg(coordinate_growth.figure(self.changes), "coordcheck")
        files.write_text(self.folder / "coordcheck.svg", svg)


def check_coordinates(trees: Sequence[Mapping[str, Any]]) -> CoordinateCheck:
    """Train a few steps at every width or depth and measure what they change.

    Raises:
        RequestError: points differ in more than one size and seed, or in too little for a slope with an interval.
    """
    configs = sorted((point.config for point in _check_points(trees)), key=_sizes)
    folder = results_folder(trees)
    machine.configure_torch()
    fleets = [list(fleet) for _, fleet in groupby(configs, key=_sizes)]
    rows = pd.DataFrame([row for fleet in fleets for row in changes(fleet)])
    if coordinate_growth.size_of(rows) == "depth":
        rows = _of_first_and_last_block(rows)
    names = list(configs[0].intervention)
    checked = configs[0].parametrization.name + (f" with {', '.join(names)}" if names else "")
    return CoordinateCheck(folder, checked, rows)


def _of_first_and_last_block(changes: pd.DataFrame) -> pd.DataFrame:
    """The rows of coordinates that models of every depth have, in blocks ``block0`` and ``last_block``."""
    block = changes["coordinate"].str.extract(r"^block(\d+)\.", expand=False).astype(float)
    is_last = block == changes["depth"] - 1
    named = changes["coordinate"].str.replace(r"^block\d+", "last_block", regex=True)
    kept = changes.assign(coordinate=changes["coordinate"].where(~is_last, named))
    return kept[block.isna() | (block == 0) | is_last]


def _check_points(trees: Sequence[Mapping[str, Any]]) -> Sequence[Point]:
    if distributed.world_size() > 1:
        raise RequestError("coordcheck trains in one process; run it without torchrun")
    requested = points(trees)
    if requested[0].config.guest:
        raise RequestError("coordcheck compares parametrizations, and none applies to a custom model")
    for key in swept_values(requested):
        if key not in VARIES:
            known = "model.width or model.depth, and seed"
            raise RequestError(f"coordcheck compares sizes: give {known} several values, not {key}")
    sizes, seeds = {_sizes(point.config) for point in requested}, {point.config.seed for point in requested}
    widths, depths = map(set, zip(*sizes, strict=True))
    if len(widths) > 1 and len(depths) > 1:
        raise RequestError(
            "coordcheck compares widths at one depth, or depths at one model.width, as in model.width=32"
        )
    if len(sizes) < 2:
        raise RequestError(f"a slope takes at least two widths, as in model.width=32,64, not {min(widths)} alone")
    if min(depths) < 2 and len(depths) > 1:
        raise RequestError(
            f"depths are compared by first and last block; model.depth=2 is the least, not {min(depths)}"
        )
    if len(seeds) < FEWEST_SEEDS:
        raise RequestError(f"an interval takes at least {FEWEST_SEEDS} seeds, as in seed=0,1,2, not {len(seeds)}")
    for point in requested:
        check_fits(point.config, measure_host(point.config.device, [None]))
    return requested


def _sizes(config: RunConfig) -> tuple[int, int]:
    return config.model.width, config.model.depth


def changes(configs: Sequence[RunConfig]) -> Iterator[dict[str, Any]]:
    """Train runs of one size as a fleet; yields rows after every update.

    Columns are ``width``, ``depth``, ``seed``, ``step``, ``coordinate`` and ``change``, the root mean square of a
    tensor minus the same tensor at initialization, on fixed held-out windows.
    """
    fleet = Fleet(configs)
    tokens_rbt = fleet.evaluation.held_out_nt[:ROWS, :-1].expand(fleet.runs, -1, -1)
    at_init = _observe(fleet, tokens_rbt)
    for step in range(fleet.config.steps):
        fleet.step(step)
        for coordinate, tensor_r in _observe(fleet, tokens_rbt).items():
            change_r = per_run_rms(tensor_r - at_init[coordinate]).tolist()
            for config, change in zip(configs, change_r, strict=True):
                row = {"width": config.model.width, "depth": config.model.depth, "seed": config.seed, "step": step + 1}
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
