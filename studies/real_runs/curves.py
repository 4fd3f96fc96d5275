"""Curves of the loss over the learning rate: where the best one lies, and where runs begin to fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.crossings import failing
from lab.analysis.runaway import FAILS_AT
from lab.analysis.sensitivity import LOST
from lab.core import files, shipped

HOME = Path(__file__).parent
ARMS = HOME / "arms.yaml"
TOLERATED = 0.1  # nats above the best loss, up to which a rate above the best one is tolerated
BROKEN = 0.5  # nats above its base, from which a single change counts as catastrophic
MOST = 12.0  # nats, about the loss of a uniform guess, which stands for all that is higher or not finite
NAMES = {"mini": "adam_mini", "soape": "soap"}  # of optimizers that Marin's table calls otherwise
# Nats, where runs that diverged end: the median of losses above 5.5 in each table. Nobody published a unigram model's.
UNIGRAM = {"Step Law": 6.7, "Marin": 7.7}
# Keys by which a curve of losses is told from others.
CURVE = ("source", "arm", "parameters", "tokens", "batch")


class Curve(NamedTuple):
    """What the claims need of a curve. Learning rates are NaN where a curve has none such.

    Attributes:
        best_lr: with the lowest loss.
        best_loss: at that rate, nats/token.
        is_inside: whether lower and higher rates were tried.
        tolerated_lr: from which the loss is ``TOLERATED`` above the best, interpolated in log.
        edge_lr: the highest rate below ``failing_lr`` that was tried, with ``edge_loss``.
        failing_lr: the lowest rate above the best one from which the loss is ``LOST`` above the best, with
            ``failing_loss``.
        highest_lr: the highest rate that was tried.
        higher: how many rates above ``failing_lr`` were tried.
        survivors: how many of these ended below that loss.
        half_edge_lr: the highest rate below ``half_lr`` that was tried.
        half_lr: the lowest rate above the best one from which the loss is half of the way to that of a unigram model.
    """

    best_lr: float
    best_loss: float
    is_inside: bool
    tolerated_lr: float
    edge_lr: float
    edge_loss: float
    failing_lr: float
    failing_loss: float
    highest_lr: float
    higher: int
    survivors: int
    half_edge_lr: float
    half_lr: float


def curve_of(lr: np.ndarray, loss: np.ndarray, unigram: float = math.nan) -> Curve:
    """The curve of final losses (nats/token) over learning rates; a loss that is not finite is a run that failed.

    The loss of a unigram model may be NaN, which means unknown.
    """
    order = np.argsort(lr)
    lr, loss = lr[order], np.where(np.isfinite(loss), loss, np.inf)[order]
    best, lost = int(np.argmin(loss)), failing(lr, loss, LOST)
    loss_at = dict(zip(lr, loss, strict=True))
    higher = loss[lr > lost.high]
    half = failing(lr, loss, FAILS_AT * (unigram - float(loss[best])))
    return Curve(
        best_lr=float(lr[best]),
        best_loss=float(loss[best]),
        is_inside=0 < best < len(lr) - 1,
        tolerated_lr=failing(lr, loss, TOLERATED).at,
        edge_lr=lost.low if lost.times else math.nan,
        edge_loss=float(loss_at.get(lost.low, math.nan)) if lost.times else math.nan,
        failing_lr=lost.high if lost.times else math.nan,
        failing_loss=float(loss_at.get(lost.high, math.nan)),
        highest_lr=float(lr[-1]),
        higher=len(higher),
        survivors=int((higher <= loss[best] + LOST).sum()),
        half_edge_lr=half.low if half.times else math.nan,
        half_lr=half.high if half.times else math.nan,
    )


def curves_of(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each curve: the columns of ``CURVE`` that the runs have, and the fields of ``Curve``.

    Args:
        runs: with the columns ``lr`` and ``loss``, those that tell curves apart, and ``loss_unigram`` if known.
    """
    keys = [name for name in CURVE if name in runs]
    rows = []
    for key, part in runs.groupby(keys, sort=True):
        unigram = float(part["loss_unigram"].iloc[0]) if "loss_unigram" in part else math.nan
        curve = curve_of(part["lr"].to_numpy(), part["loss"].to_numpy(), unigram)
        rows.append({**dict(zip(keys, key, strict=True)), **curve._asdict()})
    return pd.DataFrame(rows)


def failing_brackets(curves: pd.DataFrame) -> pd.DataFrame:
    """Curves with ``low`` and ``high``, between which runs begin to fail; infinite where no rate that was tried did."""
    return curves.assign(low=curves["edge_lr"].fillna(curves["highest_lr"]), high=curves["failing_lr"].fillna(math.inf))


class RealRuns(NamedTuple):
    """The committed numbers of public runs.

    Attributes:
        curves: a row for each curve, as ``curves_of`` makes them.
        changes: a tuned base and single changes of it, a row each; see ``changes_of``.
        embedding: runs with a norm of queries and keys: ``parameters``, ``arm``, ``lr``, ``loss``, ``log_z``.
    """

    curves: pd.DataFrame
    changes: pd.DataFrame
    embedding: pd.DataFrame


def read_real_runs(folder: Path = HOME) -> RealRuns:
    """The numbers that come with the lab."""
    marin, embedding = (files.read_csv(folder / f"{name}.csv") for name in ("marin", "output_embedding"))
    changes = changes_of(marin)
    others = [curves_of(rates_of(changes)), curves_of(embedding.assign(source="output embedding"))]
    return RealRuns(pd.concat([files.read_csv(folder / "curves.csv"), *others], ignore_index=True), changes, embedding)


def changes_of(marin: pd.DataFrame) -> pd.DataFrame:
    """The single changes of Marin's tables.

    A loss is at most ``MOST``. Columns besides those of the table: ``ratio`` of the changed value to that of the base
    (NaN where that is 0), ``base_lr``, ``excess`` of the final loss over that of the base, and ``breaks``.
    """
    keys = ["optimizer", "size", "chinchilla"]
    table = marin.assign(optimizer=marin["optimizer"].replace(NAMES), loss=marin["loss"].fillna(MOST).clip(upper=MOST))
    base = table[keys].merge(table[table["is_base"]], on=keys, how="left")
    changed = table["changed_key"].replace({"train_batch_size": "batch_sequences"})
    base_value = pd.Series([base.at[row, key] if key in base else math.nan for row, key in changed.items()])
    table = table.assign(base_lr=base["learning_rate"], excess=table["loss"] - base["loss"])
    return table.assign(ratio=table["value"] / base_value.where(base_value != 0), breaks=table["excess"] > BROKEN)


def rates_of(changes: pd.DataFrame) -> pd.DataFrame:
    """Runs of a base and of changes of its learning rate alone, as ``curves_of`` takes them."""
    kept = changes[changes["is_base"] | (changes["changed_key"] == "learning_rate")]
    return pd.DataFrame(
        {
            "source": "Marin",
            "arm": kept["optimizer"],
            "parameters": kept["parameters"],
            "tokens": kept["tokens"],
            "batch": kept["tokens"] / kept["steps"],
            "lr": kept["base_lr"].where(kept["is_base"], kept["value"]),
            "loss": kept["loss"],
            "loss_unigram": UNIGRAM["Marin"],
        }
    )


def broken_by_arm() -> pd.DataFrame:
    """How many single changes broke in public runs of each size, by the arm of the board that ``arms.yaml`` names."""
    changes = read_real_runs().changes
    changes = changes[~changes["is_base"]]
    changes = changes.assign(is_higher=changes["ratio"] > 1, size=changes["size"].str.upper())
    rows = []
    for arm, about in shipped.load(ARMS).items():
        mine = changes[(changes[list(about)] == list(about.values())).all(axis=1)]
        for size, breaks in mine.groupby("size")["breaks"]:
            rows.append({"arm": arm, "size": size, "broken": int(breaks.sum()), "runs": len(breaks)})
    return pd.DataFrame(rows)
