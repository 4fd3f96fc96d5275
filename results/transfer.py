"""Whether the board predicts large models: published orderings of arms, each asked of the failure that it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import scipy

from lab.analysis.stress.arms import REFERENCE
from lab.analysis.stress.cures import compared
from lab.core import shipped
from lab.features.stress.reference import BOUNDS_SCORES
from studies.board.failures import Failure, read_cells, read_failures
from studies.board.matrix import Tables, damages, family_of, lost_by_control, tables_of
from studies.claims.decision import CONTRADICTED, NO_EFFECT, REPRODUCED
from studies.claims.verdicts import committed

FILE = Path(__file__).with_name("published_orderings.yaml")
A, B, EQUAL, SIZE_DEPENDENT = "a", "b", "equal", "size-dependent"
OPEN, NOT_TESTABLE = "open", "not testable"
OPPOSITE = {A: B, B: A, EQUAL: "not equal", SIZE_DEPENDENT: EQUAL}
EASE = "at ease"  # the control of a failure without its stress, as an arm of an ordering
BOUNDING = BOUNDS_SCORES | {"qk_layernorm_model", "qkv_norm", "adamw_qk_clip"}
LEVEL = 0.05  # of the test against an answer that takes no run


class Pair(NamedTuple):
    """Two arms, and which of them was published to be more stable; see the head of ``published_orderings.yaml``."""

    source: str
    size: str
    a: str
    b: str
    outcome: str
    newer: str = A
    failure: str = ""
    claim: str = ""
    why_not: str = ""


class Prediction(NamedTuple):
    """The prediction for a pair: ``a``, ``b``, ``equal``, ``size-dependent``, ``open`` or ``not testable``."""

    pair: Pair
    word: str

    @property
    def is_decided(self) -> bool:
        """Whether the prediction can agree or disagree with the outcome."""
        return self.word not in (OPEN, NOT_TESTABLE)

    @property
    def agrees(self) -> bool:
        """Whether the published outcome is the predicted one."""
        return self.word == self.pair.outcome


@cache
def published() -> tuple[Pair, ...]:
    """The pairs of the published orderings."""
    return tuple(
        Pair(ordering["source"], ordering["size"], **entry)
        for ordering in shipped.load(FILE)["orderings"]
        for entry in ordering["pairs"]
    )


def predict(folder: Path, pairs: Sequence[Pair]) -> list[Prediction]:
    """What the damages on the board of a folder, and the committed verdicts on claims, say of each pair."""
    tables = tables_of(folder, read_cells(folder)[0])
    return [Prediction(pair, _by_claim(pair) if pair.claim else _by_board(pair, tables)) for pair in pairs]


def _by_claim(pair: Pair) -> str:
    words = {REPRODUCED: pair.outcome, CONTRADICTED: OPPOSITE[pair.outcome], NO_EFFECT: EQUAL}
    return words.get(str(committed()[pair.claim]["verdict"]), OPEN)


def _by_board(pair: Pair, tables: Tables) -> str:
    failure, rule = read_failures().failures.get(pair.failure), read_failures().rule
    if pair.why_not or failure is None:
        return NOT_TESTABLE
    lost = lost_by_control(failure, tables)
    found = [_damage(arm, failure, tables) for arm in (pair.a, pair.b)]
    if any(damage is None for damage in found) or not (lost.low > 0 and lost.mean >= failure.least):
        return NOT_TESTABLE
    a, b = (damage for damage in found if damage is not None)
    difference = (a - b).dropna()
    if len(difference) < len(rule.screened):
        return NOT_TESTABLE
    if (difference == 0).all():
        return EQUAL
    interval, p = compared(difference.to_numpy(dtype=float), family_of(failure, tables, rule).prior)
    margin = rule.margin * lost.mean
    if -margin < interval.low and interval.high < margin:
        return EQUAL
    return OPEN if not p < rule.alpha else A if interval.mean < 0 else B


def _damage(arm: str, failure: Failure, tables: Tables) -> pd.Series[float] | None:
    """The damage of an arm by seed; an arm of the control is the reference, and at ease none is done."""
    found = damages(failure, tables)
    if arm == EASE:
        return 0 * found[REFERENCE]
    return found.get(REFERENCE if arm in failure.control else arm)


def score(predictions: Sequence[Prediction], answer: Callable[[Pair], str] | None = None) -> int:
    """How many decided predictions, or other answers to the same pairs, agree with what was published."""
    return sum(
        prediction.agrees if answer is None else answer(prediction.pair) == prediction.pair.outcome
        for prediction in predictions
        if prediction.is_decided
    )


def one_bit(pair: Pair) -> str:
    """The arm that bounds the scores of attention, if the other one does not; else ``equal``."""
    control = read_failures().failures[pair.failure].control if pair.failure in read_failures().failures else ()
    bounds = [bool(BOUNDING & {*control, *arm.split("+")}) for arm in (pair.a, pair.b)]
    return EQUAL if bounds[0] == bounds[1] else A if bounds[0] else B


NULLS: Mapping[str, Callable[[Pair], str]] = {
    "always the newer arm": lambda pair: pair.newer,
    "always the arm that the source names first": lambda pair: A,
    "the arm that bounds the scores of attention": one_bit,
}


def distinct(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The first decided prediction of each comparison of two arms of the board, which several sources may report."""
    found = dict[tuple[frozenset[str], str], Prediction]()
    for prediction in predictions:
        pair = prediction.pair
        if prediction.is_decided and pair.failure and EASE not in (pair.a, pair.b):
            found.setdefault((frozenset((pair.a, pair.b)), pair.failure), prediction)
    return list(found.values())


def headline(predictions: Sequence[Prediction]) -> str:
    """How many decided pairs agree, beside the best answer that takes no run."""
    decided, once = [one for one in predictions if one.is_decided], distinct(predictions)
    name, answer = max(NULLS.items(), key=lambda item: score(decided, item[1]))
    trivial = [answer(one.pair) == one.pair.outcome for one in decided]
    wins = sum(one.agrees and not hit for one, hit in zip(decided, trivial, strict=True))
    losses = sum(hit and not one.agrees for one, hit in zip(decided, trivial, strict=True))
    # McNemar's exact test
    is_better = wins > losses and scipy.stats.binomtest(wins, wins + losses).pvalue < LEVEL
    return (
        f"{score(decided)} of {len(decided)} decided orderings agree, {'more than' if is_better else 'no better than'} "
        f"with the answer '{name}', with which {sum(trivial)} do; of the {len(once)} distinct comparisons of two arms "
        f"{score(once)} agree, and {score(once, answer)} with that answer"
    )


def table(predictions: Sequence[Prediction]) -> pd.DataFrame:
    """A row for each pair."""
    rows = [
        {
            "a": one.pair.a,
            "b": one.pair.b,
            "asked of": one.pair.failure or one.pair.claim,
            "predicted": one.word,
            "published": one.pair.outcome,
            "agrees": ("yes" if one.agrees else "no") if one.is_decided else "",
            "source": f"{one.pair.source}{one.pair.size and f' ({one.pair.size})'}",
        }
        for one in predictions
    ]
    return pd.DataFrame(rows)
