"""How well a small model fails like a large one: its single changes held against Marin's, by the frozen rule.

The rule is in ``yardstick.yaml`` and was frozen before anything was trained for this study. A change is told by its
key, its direction and its ratio to the value of the base. A small model says of each change how much it costs each
optimizer; Marin's runs say whether it broke them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

from lab.analysis.sensitivity import LOST

BROKEN = 0.5  # nats above its base, from which a run of Marin's counts as broken
CHANGE = ["key", "direction", "ratio"]
NULLS = {" and ".join(CHANGE[:count]): CHANGE[:count] for count in (1, 2, 3)}


def changes_of(changes: pd.DataFrame) -> pd.DataFrame:
    """Marin's single changes: ``optimizer``, ``table`` (size and budget), ``CHANGE``, ``excess`` (nats), ``broke``.

    Args:
        changes: of the public runs, as the study of real runs reads them.
    """
    changes = changes[~changes["is_base"]]
    directed = with_directions(changes.rename(columns={"changed_key": "key"}))
    return directed.assign(
        table=changes["size"] + " " + changes["chinchilla"].astype(str), broke=directed["excess"] > BROKEN
    )[["optimizer", "table", *CHANGE, "value", "excess", "broke"]].reset_index(drop=True)


def with_directions(changes: pd.DataFrame) -> pd.DataFrame:
    """Changes with a ``direction`` (up, down, off, same, other) and a ``ratio`` of three digits, 0 without one.

    Args:
        changes: with ``value`` and its ``ratio`` to the base, NaN where one of them is 0 or no number.
    """
    off = changes["value"] == 0
    ratio = changes["ratio"].mask(off | ~(changes["ratio"] > 0))
    ratio = ratio.map(lambda each: float(f"{each:.3g}"))
    direction = np.select([off, ratio > 1, ratio < 1, ratio == 1], ["off", "up", "down", "same"], "other")
    return changes.assign(direction=direction, ratio=ratio.fillna(0.0))


def average_precision(broke: Iterable[bool], score: Iterable[float]) -> float:
    """The precision, averaged over the changes that broke, in the order of the scores; ties count as one step.

    NaN if none broke.
    """
    hits, scores = np.array([*broke], float), np.array([*score], float)
    order = np.argsort(-scores, kind="stable")
    hits, scores = np.cumsum(hits[order]), scores[order]
    if not len(hits) or not hits[-1]:
        return math.nan
    ends = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    return float((np.diff(hits[ends], prepend=0.0) * hits[ends] / (ends + 1)).sum() / hits[-1])


def share_broken(known: pd.DataFrame, asked: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """For each change asked about, the share of known ones alike by ``by`` that broke; of fewer keys where none is."""
    share = pd.Series(known["broke"].mean(), asked.index)
    for count in range(1, len(by) + 1):
        keys = list(by[:count])
        share = asked[keys].join(known.groupby(keys)["broke"].mean(), on=keys)["broke"].fillna(share)
    return share


def null_scores(changes: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """What other optimizers say of each change, which needs no small model."""
    parts = [share_broken(changes[changes["optimizer"] != name], own, by) for name, own in changes.groupby("optimizer")]
    return pd.Series(pd.concat(parts), changes.index)


def ceiling_scores(changes: pd.DataFrame) -> pd.Series:
    """What the other tables of the same optimizer say of each change, told by its value."""
    parts = []
    for (optimizer, table), own in changes.groupby(["optimizer", "table"]):
        known = changes[(changes["optimizer"] == optimizer) & (changes["table"] != table)]
        parts.append(share_broken(known, own, ["key", "direction", "value"]))
    return pd.Series(pd.concat(parts), changes.index)


def concordance(changes: pd.DataFrame, score: pd.Series) -> tuple[float, int]:
    """Of pairs of optimizers under one change, in which share the one that broke more often has the higher score.

    Ties of the score count as half. The second number is how many pairs differ in what broke.

    Args:
        changes: as ``changes_of`` gives them.
        score: of each of them; NaN where the small model says nothing.
    """
    return _concordance(*_by_change(changes, score))


def _by_change(changes: pd.DataFrame, score: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """The share that broke and the mean score, each ``[change, optimizer]``; NaN where one was not tried."""
    cells = changes.assign(score=score).groupby([*CHANGE, "optimizer"])[["broke", "score"]].mean().unstack()
    return cells["broke"].to_numpy(float), cells["score"].to_numpy(float)


def _concordance(broke: np.ndarray, told: np.ndarray) -> tuple[float, int]:
    difference = told[:, :, None] - told[:, None]
    more = (broke[:, :, None] > broke[:, None]) & np.isfinite(difference)
    pairs = int(more.sum())
    return (float((np.sign(difference[more]) / 2 + 0.5).sum()) / pairs if pairs else math.nan), pairs


def chance_of_concordance(changes: pd.DataFrame, score: pd.Series, draws: int = 2000) -> float:
    """How often a concordance as high comes about if what the small model says belongs to no optimizer.

    Whole optimizers of the small model are renamed at random, among those that it has, so that its changes of one
    optimizer stay together; the true naming counts as one of the draws. The number cannot be below one over the
    factorial of how many there are. NaN without a pair.
    """
    broke, told = _by_change(changes, score)
    has = np.flatnonzero(np.isfinite(told).any(0))
    broke, told = broke[:, has], told[:, has]
    draw, (own, pairs) = np.random.default_rng(0), _concordance(broke, told)
    if not pairs:
        return math.nan
    drawn = [_concordance(broke, told[:, draw.permutation(len(has))])[0] for _ in range(draws)]
    return (1 + sum(each >= own - 1e-12 for each in drawn)) / (draws + 1)


def power_of_concordance(changes: pd.DataFrame, noise: float, draws: int = 40) -> tuple[float, float]:
    """The mean concordance of simulated small models, and how often it is above chance at a level of .05.

    What they say of a change is the share of runs that it broke, and normal noise; half as much noise is common to all
    changes of an optimizer.
    """
    draw = np.random.default_rng(1)
    cells, optimizers = changes.groupby(["optimizer", *CHANGE]), changes.groupby("optimizer")
    shares, found = cells["broke"].transform("mean"), []
    for _ in range(draws):
        own, common = (draw.standard_normal(by.ngroups)[by.ngroup()] for by in (cells, optimizers))
        said = shares + noise * (own + common / 2)
        found.append((concordance(changes, said)[0], chance_of_concordance(changes, said, 200) <= 0.05))
    mean, power = np.mean(found, axis=0)
    return float(mean), float(power)


def factors_to_failure(changes: pd.DataFrame, limit: float = BROKEN) -> pd.Series:
    """For each optimizer log10 of the first multiple of the tuned rate that costs more than ``limit``.

    The cost is a mean over seeds, and the number the median over tables. Where none failed, it is the next multiple
    after the largest one that was tried.
    """
    rates = changes[(changes["key"] == "learning_rate") & (changes["ratio"] > 1)]
    places = ["optimizer", "table"]
    costs = rates.assign(table=rates.get("table", "")).groupby([*places, "ratio"])["excess"].mean().reset_index()
    beyond = 2 * costs.groupby(places)["ratio"].max()
    first = costs[costs["excess"] > limit].groupby(places)["ratio"].min().reindex(beyond.index).fillna(beyond)
    return pd.Series(np.log10(first)).groupby(level="optimizer").median()


class Score(NamedTuple):
    """A small model beside the nulls, on the changes that it made.

    Attributes:
        concordance: see above, of ``pairs`` pairs; .5 by chance.
        precision: average precision; ``nulls`` of the same changes, by the names of ``NULLS``.
        factors: rank correlation of the factors to failure over optimizers; NaN with fewer than three.
    """

    concordance: float
    pairs: int
    precision: float
    nulls: dict[str, float]
    factors: float


def toy_scores(changes: pd.DataFrame, toy: pd.DataFrame) -> pd.Series:
    """The excess loss of the small model under each of Marin's changes, its mean over seeds; NaN where not tried.

    Args:
        toy: a row for each run: ``optimizer``, ``CHANGE``, ``excess`` (nats).
    """
    keys = ["optimizer", *CHANGE]
    return changes[keys].join(toy.groupby(keys)["excess"].mean(), on=keys)["excess"]


def score(changes: pd.DataFrame, toy: pd.DataFrame) -> Score:
    """Hold a small model's changes against Marin's; the nulls know the same optimizers' other changes."""
    own = toy_scores(changes, toy)
    tried = own.notna()
    share, pairs = concordance(changes, own)
    nulls = {
        name: average_precision(changes["broke"][tried], null_scores(changes, by)[tried]) for name, by in NULLS.items()
    }
    factors = pd.concat([factors_to_failure(changes), factors_to_failure(toy, LOST)], axis=1).dropna()
    agreement = float(scipy.stats.spearmanr(*factors.to_numpy().T).statistic) if len(factors) > 2 else math.nan
    return Score(share, pairs, average_precision(changes["broke"][tried], own[tried]), nulls, agreement)


def left_out(changes: pd.DataFrame, toys: Mapping[str, pd.DataFrame], by: str) -> tuple[float, dict[str, str]]:
    """The concordance of what was left out while the small model was chosen, and which one was chosen each time.

    Each optimizer (``by="optimizer"``) or key in turn is left out, and the model of the best concordance on the others
    chosen. Left-out pairs are those with that optimizer, or under that key, and are pooled.
    """
    right, pairs, chosen = 0.0, 0, {}
    told = {name: toy_scores(changes, toy) for name, toy in toys.items()}
    for out in sorted(set(changes[by]) & {each for toy in toys.values() for each in toy[by]}):
        inside = changes[by] != out
        fitted = {name: concordance(changes[inside], own[inside])[0] for name, own in told.items()}
        if not all(map(math.isfinite, fitted.values())):
            continue
        name = chosen[out] = max(fitted, key=lambda name: fitted[name])
        whole, all_pairs = concordance(changes, told[name])
        part, part_pairs = concordance(changes[inside], told[name][inside])
        if all_pairs > part_pairs:
            right += whole * all_pairs - (part * part_pairs if part_pairs else 0.0)
            pairs += all_pairs - part_pairs
    return (right / pairs if pairs else math.nan), chosen
