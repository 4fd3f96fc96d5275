"""Moves: changes of single numbers of an arm at single learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from lab.analysis.guard.baseline import PROBES, whole_seeds
from lab.analysis.guard.quantities import DECADES, NATS, QUANTITIES
from lab.analysis.sensitivity import capped
from lab.analysis.statistics import CHANGE_LEVEL, FEWEST_SEEDS, Difference, difference, holm

UNITS = {"final loss": NATS, **{QUANTITIES[column].name: DECADES for column in PROBES}}


class Move(NamedTuple):
    """Change of one number at one learning rate of an arm and size, with its 90 % interval.

    Attributes:
        size: parameters without embeddings.
        p: p of no change, adjusted for the learning rates of this arm and number (Holm 1979).
    """

    arm: str
    size: int
    number: str
    unit: str
    lr: float
    change: float
    low: float
    high: float
    p: float

    @property
    def is_certain(self) -> bool:
        """Whether the move is significant, adjusted for all learning rates."""
        return self.p < CHANGE_LEVEL


def find_moves(
    arm_and_size: tuple[str, int], before: pd.DataFrame, now: pd.DataFrame, negligible: Mapping[str, float]
) -> Iterator[Move]:
    """Yield the significant moves; if there are none, the largest change of final loss.

    Args:
        arm_and_size: the label of the arm, and the size (parameters).
        before: the runs of the old curve.
        now: the runs of the new curve, at the same learning rates.
        negligible: the largest change that does not count, by unit.
    """
    old, new = _numbers(before), _numbers(now)
    every = []
    for number, unit in UNITS.items():
        differences = dict(_differences(old[number], new[number]))
        ps = holm([change.p(negligible[unit]) for change in differences.values()])
        for (lr, change), p in zip(differences.items(), ps, strict=True):
            every.append(Move(*arm_and_size, number, unit, lr, change.mean, change.low, change.high, p))
    certain = [move for move in every if move.is_certain]
    losses = [move for move in every if move.number == "final loss"]
    yield from certain or sorted(losses, key=lambda move: -abs(move.change))[:1]


def _numbers(runs: pd.DataFrame) -> pd.DataFrame:
    """The numbers of ``UNITS`` as columns, indexed by learning rate and seed; losses are ``capped``."""
    runs = whole_seeds(runs)
    names = {"capped": "final loss", **{column: QUANTITIES[column].name for column in PROBES}}
    numbers = runs.assign(capped=capped(runs)).set_index(["lr", "seed"])
    return numbers[list(names)].rename(columns=names)


def _differences(before: pd.Series, now: pd.Series) -> Iterator[tuple[float, Difference]]:
    for lr in before.index.unique("lr"):
        old, new = before.loc[lr].dropna(), now.loc[lr].dropna()
        if min(len(old), len(new)) >= FEWEST_SEEDS:
            yield lr, difference(old, new)
