"""Coordinate check of a parametrization: a few updates at several widths, and what they change at each hook point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lab.analysis import coordinates
from lab.analysis.rendering import style
from lab.analysis.statistics import FEWEST_SEEDS
from lab.core import distributed, files, machine
from lab.core.axes import per_run_rms
from lab.core.errors import RequestError
from lab.core.hooks import listening
from lab.sweep.dry_run import swept_keys
from lab.sweep.planner import points, results_folder
from lab.training.config import RunConfig
from lab.training.fleet import Fleet

KINDS = ("query", "key", "scores", "block_output", "logits")
ROWS = 8  # held-out windows that every width, seed and step is looked at through
VARIES = ("model.width", "seed", "data.seed")
# What a check is, unless asked otherwise.  Without qk-layernorm, which would hide from the scores how queries and keys
# grow.  At the best learning rate of the base width, there from the first update on: in ten updates it can move a row
# of the embedding by more than the row began with, at every width.  Long before that, normalization lets the first
# block change with the square root of the width under every parametrization of the paper, for none of them rescales
# the embedding; at higher learning rates seeds lie too far apart for five of them to tell.
DEFAULTS = [
    *("data=synthetic", "intervention=[]", "schedule=constant", "schedule.warmup=0", "optimizer.lr=3e-2", "steps=10"),
    *("model.width=32,64,128,256", "seed=0,1,2,3,4", "probes=none", "out=runs/coordcheck"),
]


class CoordinateCheck:
    """Changes measured, and the rule of ``analysis.coordinates.slopes`` put to them."""

    def __init__(self, trees: Sequence[Mapping[str, Any]]) -> None:
        """Train a few steps at every width.

        Raises:
            RequestError: points differ in more than width and seed, or in too little for a slope with an interval.
        """
        configs = sorted((point.config for point in _asked(trees)), key=lambda config: config.model.width)
        self.folder, self.name = results_folder(trees), configs[0].parametrization.name
        machine.configure_torch()
        fleets = [list(some) for _, some in groupby(configs, key=lambda config: config.model.width)]
        self.changes = pd.DataFrame([row for fleet in fleets for row in changes(fleet)])
        self.passed = bool(coordinates.slopes(self.changes)["holds"].all())

    def lines(self) -> Iterator[str]:
        """Table and verdict."""
        yield from coordinates.lines(self.changes)
        judged = coordinates.slopes(self.changes)
        grown = " ".join(judged.loc[~judged["holds"], "coordinate"])
        rule = f"slopes with 95 % intervals over seeds; none may reach above {coordinates.BOUND:g}"
        yield f"{self.name} {'passes' if self.passed else f'fails by {grown}'} ({rule}); {self.folder}"

    def write(self) -> None:
        """Leave ``coordcheck.csv`` and ``coordcheck.svg`` in the folder."""
        files.write_text(self.folder / "coordcheck.csv", self.changes.to_csv(index=False))
        drawn = style.svg(coordinates.figure(self.changes), "coordcheck")
        files.write_text(self.folder / "coordcheck.svg", drawn)


def _asked(trees: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    if distributed.world_size() > 1:
        raise RequestError("coordcheck trains in one process; leave torchrun away")
    asked = points(trees)
    if asked[0].config.guest:
        raise RequestError("coordcheck compares parametrizations, and none has a say in a guest")
    for key in swept_keys(asked):
        if key not in VARIES:
            raise RequestError(f"coordcheck compares widths: give model.width and seed several values, not {key}")
    widths, seeds = {point.config.model.width for point in asked}, {point.config.seed for point in asked}
    if len(widths) < 2:
        raise RequestError(f"a slope takes at least two widths, as in model.width=32,64, not {min(widths)} alone")
    if len(seeds) < FEWEST_SEEDS:
        raise RequestError(f"an interval takes at least {FEWEST_SEEDS} seeds, as in seed=0,1,2, not {len(seeds)}")
    return asked


def changes(configs: Sequence[RunConfig]) -> Iterator[dict[str, Any]]:
    """Train runs of one width as a fleet; rows ``width, seed, step, coordinate, change`` after every update.

    A change is the root mean square of a tensor minus the same at initialization, on the same held-out windows.
    """
    fleet = Fleet(configs)
    tokens_rbt = fleet.held_out_nt[:ROWS, :-1].expand(fleet.runs, -1, -1)
    before = _look(fleet, tokens_rbt)
    for step in range(fleet.config.steps):
        fleet.step(step)
        for coordinate, tensor_r in _look(fleet, tokens_rbt).items():
            moved_r = per_run_rms(tensor_r - before[coordinate]).tolist()
            for config, change in zip(configs, moved_r, strict=True):
                names = {"width": config.model.width, "seed": config.seed, "step": step + 1}
                yield {**names, "coordinate": coordinate, "change": change}


@torch.no_grad()
def _look(fleet: Fleet, tokens_rbt: Tensor) -> dict[str, Tensor]:
    """What arrives at the hook points, by ``block0.query`` and the like; of scores, those of the past."""
    heard: dict[str, Tensor] = {}

    def ear(kind: str, where: str, *values: Tensor) -> None:
        if kind in KINDS:
            heard[f"{where}.{kind}".lstrip(".")] = values[0].tril() if kind == "scores" else values[0]

    with listening(ear):
        fleet.model(tokens_rbt)
    return heard
