"""Batch sizes with their learning rates tuned: for the fewest steps to a target, or for the best loss on a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import starmap
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import LR, parameters
from lab.analysis.sensitivity import vertex
from lab.analysis.text import spell
from lab.records.store import Records
from lab.studies.batch_size.estimates import FEWEST_BATCHES, Numbers, SaturatingCurve, steps_curve
from lab.studies.batch_size.targets import crossings, tune

# Fewest batch sizes with equal examples, and with equal steps, for which budgets are compared.
FEWEST_AT_A_BUDGET = 3
# A learning rate is good if its loss is at most this many times the best one.
GOOD = 1.05
OPTIMIZER_NAMES = {"sgd": "SGD", "momentum": "momentum", "adamw": "Adam"}


class TunedSteps(NamedTuple):
    """The batch sizes of one optimizer and model size, with the learning rate tuned for steps to the target.

    Attributes:
        name: the optimizer, with the size if there are several.
        steps: updates to the target, with a row per seed and a column per batch size that is not refused.
        lr: the best learning rate, in the same rows and columns.
        refusals: the reason why a batch size is left out, by batch size.
        lrs: the learning rates tried, by batch size.
    """

    name: str
    steps: pd.DataFrame
    lr: pd.DataFrame
    refusals: dict[float, str]
    lrs: dict[float, list[float]]

    @property
    def batches(self) -> Numbers:
        """Batch sizes with a tuned learning rate, sequences, in rising order."""
        return self.steps.columns.to_numpy(dtype=float)

    @property
    def has_fit(self) -> bool:
        """Whether there are enough batch sizes for ``fit``."""
        return len(self.batches) >= FEWEST_BATCHES

    @property
    def fit(self) -> SaturatingCurve:
        """The hyperbola through the geometric means over seeds.

        Raises:
            ValueError: fewer than ``FEWEST_BATCHES`` batch sizes.
        """
        return steps_curve(self.batches, np.exp(np.log(self.steps).mean(axis=0)))

    def cautions(self) -> Iterator[str]:
        """A sentence on each batch size that is left out."""
        for batch, refusal in self.refusals.items():
            yield f"Left out: {self.name} at a batch of {spell(batch)}, since {refusal}."


def tuned_steps(records: Records) -> list[TunedSteps]:
    """Tune the learning rate of every batch size for steps to the loss of a bigram model.

    Only runs with a constant schedule count, since with decay the length of the run sets when a loss is reached. The
    list is sorted by size and optimizer; it is empty if no optimizer has several batch sizes and learning rates.
    """
    runs = records.runs[(records.runs["status"] != "failed") & (records.runs["schedule.name"] == "constant")]
    several = [
        (key, group)
        for key, group in runs.assign(size=parameters(runs)).groupby(["size", "optimizer.name"])
        if group["batch_size"].nunique() > 1 and group[LR].nunique() > 1 and _are_one_arm(group, "batch_size", LR)
    ]
    if not several:
        return []
    steps = crossings(records)["steps"]
    sizes = {size for (size, _), _ in several}
    return [
        _tuned(_name(str(optimizer), size, sizes), group.assign(to_target=group["id"].map(steps).astype(float)))
        for (size, optimizer), group in several
    ]


def _are_one_arm(runs: pd.DataFrame, *keys: str) -> bool:
    """Whether the runs differ in nothing but these keys and the seed."""
    return not runs.duplicated([*keys, "seed"]).any()


def _name(optimizer: str, size: object, sizes: Collection[object]) -> str:
    name = OPTIMIZER_NAMES.get(optimizer, optimizer)
    return name if len(sizes) == 1 else f"{name}, {size} parameters"


def _tuned(name: str, runs: pd.DataFrame) -> TunedSteps:
    tables = {
        float(str(batch)): group.pivot_table("to_target", "seed", LR, dropna=False)
        for batch, group in runs.groupby("batch_size")
    }
    lrs = {batch: [float(lr) for lr in table.columns] for batch, table in tables.items()}
    tuned = {batch: tune(lrs[batch], table) for batch, table in tables.items()}
    refusals = {batch: one.refusal for batch, one in tuned.items() if one.refusal}
    steps, lr = (
        pd.DataFrame(
            {batch: pd.Series(one[part], tables[batch].index) for batch, one in tuned.items() if not one.refusal}
        )
        for part in (0, 1)
    )
    return TunedSteps(name, steps, lr, refusals, lrs)


class TunedBudget(NamedTuple):
    """The batch sizes of one budget, ``equal examples`` or ``equal steps``, with the learning rate tuned for the loss.

    Attributes:
        name: the name of the budget.
        loss: best final loss, nats per token, with a row per seed and a column per batch size.
        lr: best learning rate, the vertex of a parabola; NaN if the best one is at an end of the grid.
        low: lowest good learning rate, see ``GOOD``.
        high: highest good learning rate.
    """

    name: str
    loss: pd.DataFrame
    lr: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame

    def cautions(self) -> Iterator[str]:
        """A sentence on each batch size whose best learning rate is at an end of the grid."""
        for batch in self.lr.columns[self.lr.isna().any()]:
            yield (
                f"Left out of laws of the learning rate: {self.name} at a batch of {spell(float(batch))}, since the "
                "best learning rate of some seed is the lowest or the highest tried."
            )


def budget_pairs(pairs: Collection[tuple[float, float]]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The distinct pairs of batch size and steps with equal examples, and those with equal steps, in rising order."""
    examples = Counter(batch * steps for batch, steps in pairs).most_common(1)[0][0]
    count = Counter(steps for _, steps in pairs).most_common(1)[0][0]
    rising = sorted(pairs)
    return [pair for pair in rising if pair[0] * pair[1] == examples], [pair for pair in rising if pair[1] == count]


def budgets(records: Records, runs: pd.DataFrame) -> list[TunedBudget]:
    """Tune the learning rate of every batch size at equal examples and at equal steps.

    Args:
        runs: judged points of curves (``judge``).

    Returns:
        Two budgets; none if either has fewer than ``FEWEST_AT_A_BUDGET`` batch sizes, or one learning rate only.
    """
    cards = records.runs.set_index("id").reindex(runs["id"], columns=["batch_size", "steps"])
    runs = runs.merge(cards.reset_index(), on="id")
    pairs = set(zip(runs["batch_size"].astype(float), runs["steps"].astype(float), strict=True))
    at_budgets = budget_pairs(pairs)
    if (
        not _are_one_arm(runs, "batch_size", "steps", "lr")
        or min(map(len, at_budgets)) < FEWEST_AT_A_BUDGET
        or runs["lr"].nunique() == 1
    ):
        return []
    return list(starmap(_budget, zip(("equal examples", "equal steps"), at_budgets, [runs] * 2, strict=True)))


def _budget(name: str, pairs: list[tuple[float, float]], runs: pd.DataFrame) -> TunedBudget:
    rows = []
    for batch, steps in pairs:
        at_pair = runs[(runs["batch_size"] == batch) & (runs["steps"] == steps)]
        for seed, curve in at_pair.sort_values("lr").groupby("seed"):
            rows.append({"batch": batch, "seed": seed, **_best(curve["lr"].to_numpy(), curve["capped"].to_numpy())})
    table = pd.DataFrame(rows)
    return TunedBudget(
        name, *(table.pivot_table(part, "seed", "batch", dropna=False) for part in TunedBudget._fields[1:])
    )


def _best(lr_l: Numbers, loss_l: Numbers) -> dict[str, float]:
    best = int(loss_l.argmin())
    is_inside = 0 < best < len(lr_l) - 1
    fine = np.geomspace(lr_l[0], lr_l[-1], 1001)
    good = fine[np.interp(np.log(fine), np.log(lr_l), loss_l) <= GOOD * loss_l.min()]
    ends = {"low": float(good[0]), "high": float(good[-1])}
    return {"loss": float(loss_l.min()), "lr": vertex(lr_l, loss_l) if is_inside else math.nan, **ends}
