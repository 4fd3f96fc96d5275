"""At which learning rates a recipe fails, how far above its best one that is, and how steeply its loss rises there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.crossings import SLOPE_OVER, Crossing, crossing, failing, halving_lrs, over_seeds, rate_text
from lab.analysis.runaway import COSTLY, FAILS_AT, HALF, read_runaways
from lab.analysis.statistics import Interval, student_t
from lab.analysis.stress.battery import LARGEST
from lab.analysis.stress.measures import FAILS_ABOVE, Outcomes, curve, fitted_best_lrs, is_capped
from lab.records.plans import Setting

LOGITS = "attention_logits"  # the quantity of ``read_runaways`` that a card reads if its runs recorded it
MOST = 6  # learning rates between those of the tests


class FineCurve(NamedTuple):
    """What a card knows of a recipe's own curve besides the losses at the learning rates that its tests read.

    Attributes:
        between: losses at the learning rates between them, a row per learning rate and a column per seed.
        unigram: loss of a unigram model of the text, nats per token; NaN if it is not known.
        logits: the largest attention logit of a run, infinite where it diverged; rows and columns as of ``between``, of
            all learning rates that recorded it.
    """

    between: pd.DataFrame = pd.DataFrame()
    unigram: float = math.nan
    logits: pd.DataFrame = pd.DataFrame()


class Passing(NamedTuple):
    """Where a quantity of a recipe passes its level as the learning rate rises.

    Attributes:
        quantity: ``HALF``, ``COSTLY`` or ``LOGITS``.
        seeds: its crossing by seed.
        best_lrs: the best learning rate by seed.
        ways: by seed the nats from the best loss to that of a unigram model; NaN where that is not known.
    """

    quantity: str
    seeds: Mapping[int, Crossing]
    best_lrs: pd.Series[float]
    ways: pd.Series[float]

    @property
    def title(self) -> str:
        """What is passed, in words."""
        if self.quantity == LOGITS:
            return f"attention logits {read_runaways()[LOGITS].level:g}"
        return f"loss {self.quantity}"

    @property
    def rate(self) -> Interval:
        """The learning rate over seeds, see ``over_seeds``."""
        return over_seeds(list(self.seeds.values()))

    @property
    def headroom(self) -> Interval:
        """Decades from the best learning rate of a seed to it, over seeds; bounds as of ``over_seeds``."""
        ratio = over_seeds(
            [
                found._replace(
                    log_at=found.log_at - math.log10(self.best_lrs[seed]),
                    low=found.low / self.best_lrs[seed],
                    high=found.high / self.best_lrs[seed],
                )
                for seed, found in self.seeds.items()
            ]
        )
        with np.errstate(divide="ignore"):
            mean, low, high = map(float, np.log10(ratio[:3]))
            return Interval(mean, low, high, ratio.n, tuple(map(float, np.log10(ratio.values))), ratio.error)

    @property
    def steepness(self) -> Interval:
        """The share of the way that the loss goes in ``SLOPE_OVER`` decades around it, over the seeds that pass."""
        if self.quantity == LOGITS:
            return student_t([])
        return student_t(found.slope * SLOPE_OVER / self.ways[seed] for seed, found in self.seeds.items())

    @property
    def passed(self) -> int:
        """How many seeds pass the level."""
        return sum(found.times > 0 for found in self.seeds.values())

    @property
    def width(self) -> float:
        """Decades between the learning rates that were tried on both sides, the widest of the seeds; NaN if unknown."""
        return max((found.width for found in self.seeds.values() if found.width < math.inf), default=math.nan)

    @property
    def row(self) -> dict[str, str]:
        """Its numbers for readers."""
        steepness = f"{self.steepness:±.2f}" if self.steepness.n else ""
        return {
            "what is passed": self.title,
            "learning rate": rate_text(self.rate),
            "decades above the best": rate_text(self.headroom),
            f"share of the way in {SLOPE_OVER:g} decades": steepness,
            "tried around it, decades apart": "" if math.isnan(self.width) else f"{self.width:.2f}",
            "seeds that pass": f"{self.passed} of {len(self.seeds)}",
        }

    @property
    def plain(self) -> dict[str, Any]:
        """Its numbers in plain values."""
        named = {"learning_rate": self.rate, "headroom": self.headroom, "steepness": self.steepness}
        numbers = {name: {"value": found.mean, "low": found.low, "high": found.high} for name, found in named.items()}
        at = {str(seed): found.at for seed, found in self.seeds.items()}
        facts = {"seeds": at, "passed": self.passed, "n": len(self.seeds), "bracket": self.width}
        return {"quantity": self.title, **numbers, **facts}


def fine_curve(done: Outcomes, between: Outcomes) -> FineCurve:
    """What the runs of the recipe itself say, with those at learning rates between those of the tests."""
    tables = {setting.lr: table for setting, table in {**done, **between}.items() if not setting.words}
    unigram = [float(table["loss_unigram"].mean()) for table in tables.values() if "loss_unigram" in table]
    column = LARGEST + read_runaways()[LOGITS].probe
    recorded = {lr: tables[lr][column].astype(float) for lr in sorted(tables) if column in tables[lr]}
    logits = {lr: of_lr.mask(is_capped(tables[lr]), math.inf) for lr, of_lr in recorded.items()}
    known = pd.DataFrame(logits).T.reindex(columns=curve(done).columns).dropna()
    is_recorded = bool(np.isfinite(known).any(axis=None))
    return FineCurve(curve(between), unigram[0] if unigram else math.nan, known if is_recorded else pd.DataFrame())


def passings(losses: pd.DataFrame, fine: FineCurve) -> Iterator[Passing]:
    """Yield where the loss of a recipe fails, where it is ``FAILS_ABOVE`` up, and where its attention logits run away.

    Args:
        losses: at the learning rates that its tests read, rising, a column per seed.
        fine: what else is known of its curve.
    """
    if len(losses) < 2:
        return
    every = pd.concat([losses, fine.between]).sort_index()[list(losses)]
    best_lrs, ways = fitted_best_lrs(losses), fine.unigram - every.min()
    by_seed = {int(str(seed)): loss for seed, loss in every.items()}
    if (ways > 0).all():
        half = {seed: failing(loss.index, loss, FAILS_AT * ways[seed]) for seed, loss in by_seed.items()}
        yield Passing(HALF, half, best_lrs, ways)
    up = {seed: failing(loss.index, loss, FAILS_ABOVE) for seed, loss in by_seed.items()}
    yield Passing(COSTLY, up, best_lrs, ways)
    if len(fine.logits):
        level = read_runaways()[LOGITS].level
        logits = {
            int(str(seed)): crossing(of_seed.index, of_seed, level, log=True) for seed, of_seed in fine.logits.items()
        }
        yield Passing(LOGITS, logits, best_lrs, ways)


def finer_settings(done: Outcomes, between: Outcomes, width: float) -> list[Setting]:
    """The learning rates to try next, so that no seed fails in a bracket wider than this (decades).

    They halve the brackets.  A single bracket is quartered, since one more round takes longer than two more rates.
    """
    fails = next(passings(curve(done), fine_curve(done, between)), None)
    if fails is None or fails.quantity != HALF:
        return []
    found = [*fails.seeds.values()]
    lrs = halving_lrs(found, width)
    if len(lrs) == 1:
        halved = [each for each in found if each.low < lrs[0] < each.high]
        below, above = ([each._replace(high=lrs[0]) for each in halved], [each._replace(low=lrs[0]) for each in halved])
        lrs += halving_lrs([*below, *above], width)
    return [Setting((), lr) for lr in lrs[: max(MOST - len(between), 0)]]
