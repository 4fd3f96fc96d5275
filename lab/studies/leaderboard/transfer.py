"""Whether the board predicts large models: published orderings of arms, each asked of the failure that it is about."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.judging.decision import CONTRADICTED, NO_EFFECT, REPRODUCED
from lab.analysis.judging.evidence import read_evidence
from lab.analysis.judging.verdicts import committed, judge_claim, verdict_of
from lab.analysis.rendering import html
from lab.analysis.statistics import Interval, student_t
from lab.analysis.text import plain_text, to_json
from lab.core import files, shipped
from lab.core.errors import RequestError, nearest
from lab.records import store
from lab.studies.claims import CLAIMS
from lab.studies.leaderboard.failures import (
    AT_EASE,
    REFERENCE,
    STRESSED,
    Cell,
    Failure,
    board_arms,
    no_such_arm,
    read_cells,
    read_failures,
)
from lab.studies.leaderboard.matrix import Tables, compared, is_trained, judge, tables_of
from lab.studies.stress.reference import BOUNDS_SCORES

FILE = Path(__file__).with_name("outcomes.yaml")
A, B, EQUAL, SIZE_DEPENDENT = "a", "b", "equal", "size-dependent"
OUTCOMES = (A, B, EQUAL, SIZE_DEPENDENT)
OPEN, NOT_TESTABLE = "open", "not testable"
OPPOSITE = {A: B, B: A, EQUAL: "not equal", SIZE_DEPENDENT: EQUAL}
EASE = "at ease"  # the control of a failure without its stress, as an arm of an ordering
BOUNDING = BOUNDS_SCORES | {"qk_layernorm_model", "qkv_norm", "adamw_qk_clip"}
DRAWS, SEED = 4000, 0  # of the bootstrap over sources
LEVEL = 0.05  # of the test against an answer that takes no run


class Pair(NamedTuple):
    """Two arms, and which of them was published to be more stable; see the head of ``outcomes.yaml``.

    Attributes:
        read: the day on which the source was read; empty where only notes on it were.
    """

    source: str
    size: str
    metric: str
    read: str
    a: str
    b: str
    outcome: str
    newer: str = A
    failure: str = ""
    claim: str = ""
    why_not: str = ""


class Prediction(NamedTuple):
    """The prediction for a pair.

    Attributes:
        pair: the pair.
        word: ``a``, ``b``, ``equal``, ``size-dependent``, ``open`` or ``not testable``.
        difference: of what is measured under stress, a minus b, paired by seed, over what the control loses; of a claim
            its effect. None without one.
        reason: why it is not testable.
    """

    pair: Pair
    word: str
    difference: Interval | None = None
    reason: str = ""

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
    pairs = []
    for ordering in shipped.load(FILE)["orderings"]:
        about = {key: ordering[key] for key in ("source", "size", "metric")}
        read = str(ordering["read"]) if ordering["read"] else ""
        pairs += [Pair(**about, read=read, **entry) for entry in ordering["pairs"]]
    return tuple(pairs)


def read_outcomes(path: Path) -> list[Pair]:
    """The pairs of a user's table: CSV with columns ``a``, ``b``, ``outcome`` and ``failure``, and ``source`` if any.

    Raises:
        RequestError: the table cannot be read, a column is missing, or an arm, an outcome or a failure is unknown.
    """
    try:
        table = files.read_csv(path, dtype=str, keep_default_na=False, nrows=files.MOST_CELLS)
    except OSError as fault:
        raise RequestError(f"no table of outcomes {path}: {fault.strerror}") from None
    except ValueError as fault:
        raise RequestError(f"{path} is no CSV table: {' '.join(str(fault).split())}") from None
    if missing := [column for column in ("a", "b", "outcome", "failure") if column not in table]:
        raise RequestError(
            f"{path} has no column {missing[0]!r}; it takes a, b, outcome and failure, and source if any"
        )
    if table.empty:
        raise RequestError(f"{path} has no row; each is an ordering of two arms")
    pairs = []
    for row in table.to_dict("records"):
        given = {str(key): str(value).strip() for key, value in row.items()}
        if wrong := [given[key] for key in (A, B) if given[key] not in (*board_arms(), EASE)]:
            raise RequestError(f"{path}: {no_such_arm(wrong[0])}")
        for key, known in (("outcome", (A, B, EQUAL)), ("failure", read_failures().failures)):
            if given[key] not in known:
                raise RequestError(f"{path}: unknown {key} {given[key]!r}; {nearest(given[key], known)}")
        kept = {key: given[key] for key in ("a", "b", "outcome", "failure")}
        pairs.append(Pair(source=given.get("source", path.name), size="", metric="", read="", **kept))
    return pairs


def predict(folder: Path, pairs: Sequence[Pair]) -> list[Prediction]:
    """What the rule says of each pair, from the board of a folder, and from the claims of the folders beside it.

    Raises:
        RequestError: the folder holds no board.
    """
    asked = None if all(pair.claim for pair in pairs) else _Asked(tables_of(folder, read_cells(folder)[0]))
    return [asked.prediction(pair) if asked and not pair.claim else _by_claim(pair, folder.parent) for pair in pairs]


def _by_claim(pair: Pair, results: Path) -> Prediction:
    claim = CLAIMS[pair.claim]
    folder = results / claim.sweep
    records = store.find(folder) if folder.is_dir() else None
    if records:
        verdict = judge_claim(claim, [read_evidence(folder, records)])
    elif results == shipped.data_folder("results"):  # of an installed package, which has the verdict only
        verdict = verdict_of(committed()[claim.name])
    else:
        return Prediction(pair, NOT_TESTABLE, reason=f"there are no runs of the sweep {claim.sweep} in {results}")
    words = {REPRODUCED: pair.outcome, CONTRADICTED: OPPOSITE[pair.outcome], NO_EFFECT: EQUAL}
    word = words.get(verdict.verdict, OPEN)
    return Prediction(pair, word, Interval(verdict.effect, verdict.low, verdict.high, verdict.seeds))


# The sweep that trained some arms at three widths; the learning rate there, and the failures that it brings about.
SIZES, TOP_LR, AT_THE_TOP = "leaderboard_sizes", 0.3, ("attention_logits", "beyond_qk_norm")


def size_trends(results: Path, pairs: Sequence[Pair]) -> dict[tuple[str, str], Interval]:
    """How the loss of a, minus that of b, grows with a decade of parameters at a learning rate of 0.3, by both arms.

    Only of pairs whose failure a high learning rate brings about, and whose arms the sweep ``SIZES`` trained.
    """
    folder = results / SIZES
    records = store.find(folder) if folder.is_dir() else None
    if not records:
        return {}
    runs = records.runs[records.runs["optimizer.lr"] == TOP_LR]
    trends = dict[tuple[str, str], Interval]()
    for pair in (pair for pair in pairs if pair.failure in AT_THE_TOP):
        of_arms = [runs[runs["intervention"] == _with_control(arm, pair.failure)] for arm in (pair.a, pair.b)]
        if all(len(of_arm) for of_arm in of_arms):
            a, b = (of_arm.pivot_table("final_val_loss", "seed", "parameters") for of_arm in of_arms)
            differences = (a.to_numpy(dtype=float) - b.to_numpy(dtype=float)).T
            sizes = np.log10(b.columns.to_numpy(dtype=float))
            trends[pair.a, pair.b] = student_t(np.polyfit(sizes, differences, 1)[0])
    return trends


def _with_control(arm: str, failure: str) -> str:
    """The interventions of an arm beside the control of a failure, as records name them; empty without any."""
    control = set(read_failures().failures[failure].control) if failure in read_failures().failures else set()
    return "+".join(sorted(control | ({*arm.split("+")} - {REFERENCE, EASE}))) if control else ""


class _Asked:
    """The runs of a board, asked which of two arms stands a failure better."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.rule = tables, read_failures().rule
        self.judged = {
            name: judge(failure, tables, self.rule)[1:]
            for name, failure in read_failures().failures.items()
            if is_trained(failure, tables, self.rule)
        }

    def prediction(self, pair: Pair) -> Prediction:
        if pair.why_not:
            return Prediction(pair, NOT_TESTABLE, reason=pair.why_not)
        failure = read_failures().failures[pair.failure]
        if failure.name not in self.judged:
            return Prediction(pair, NOT_TESTABLE, reason=f"the control of {failure.title} was not trained")
        found = [self._measured(arm, failure) for arm in (pair.a, pair.b)]
        if missing := [arm for arm, values in zip((pair.a, pair.b), found, strict=True) if values is None]:
            return Prediction(pair, NOT_TESTABLE, reason=f"{missing[0]} has no runs under {failure.title}")
        lost, prior = self.judged[failure.name]
        if not (lost.low > 0 and lost.mean >= failure.least):
            return Prediction(pair, NOT_TESTABLE, reason=f"the control does not fail under {failure.title}")
        a, b = (values for values in found if values is not None)
        difference = (a - b).dropna()
        if not len(difference) or (difference == 0).all():
            return Prediction(pair, EQUAL if len(difference) else OPEN)
        test = compared(difference.to_numpy(dtype=float), prior)
        word = OPEN
        if test.is_within(self.rule.margin * lost.mean):
            word = EQUAL
        elif test.p < self.rule.alpha:
            word = A if test.interval.mean < 0 else B
        mean, low, high = (end / lost.mean for end in test.interval[:3])
        return Prediction(pair, word, Interval(mean, low, high, len(difference)))

    def _measured(self, arm: str, failure: Failure) -> pd.Series[float] | None:
        """What is measured of an arm under stress by seed; of ``at ease`` the control without it."""
        place = failure.places[AT_EASE if arm == EASE else STRESSED]
        name = REFERENCE if arm == EASE else arm
        if arm in failure.control:
            name = REFERENCE
        table = self.tables.get(Cell(failure.name, name, AT_EASE if arm == EASE else STRESSED, place.lr))
        return table[failure.metric] if table is not None and len(table) >= len(self.rule.screened) else None


class Score(NamedTuple):
    """How often answers agree with published outcomes, with a 95 % interval from a bootstrap over sources."""

    decided: int
    agreeing: int
    low: float
    high: float

    def __str__(self) -> str:
        share = self.agreeing / max(self.decided, 1)
        return f"{self.agreeing} of {self.decided} ({share:.0%}, 95 % interval {self.low:.0%} to {self.high:.0%})"


def score(predictions: Sequence[Prediction], answer: Callable[[Pair], str] | None = None) -> Score:
    """The score of decided predictions, or of another ``answer`` to the same pairs."""
    decided = [prediction for prediction in predictions if prediction.is_decided]
    hits = [
        prediction.agrees if answer is None else answer(prediction.pair) == prediction.pair.outcome
        for prediction in decided
    ]
    sources = pd.Series([prediction.pair.source for prediction in decided], dtype=str)
    by_source = pd.DataFrame({"hits": hits, "trials": 1}).groupby(sources.to_numpy()).sum()
    if not len(by_source):
        return Score(0, 0, math.nan, math.nan)
    drawn = np.random.default_rng(SEED).integers(len(by_source), size=(DRAWS, len(by_source)))
    hits_d, trials_d = (by_source[key].to_numpy(dtype=float)[drawn].sum(1) for key in ("hits", "trials"))
    low, high = np.quantile(hits_d / trials_d, [0.025, 0.975])
    return Score(len(decided), sum(hits), float(low), float(high))


def one_bit(pair: Pair) -> str:
    """The arm that bounds the scores of attention, if the other one does not; else ``equal``."""
    bounds = [_bounds_scores(arm, pair.failure) for arm in (pair.a, pair.b)]
    return EQUAL if bounds[0] == bounds[1] else A if bounds[0] else B


def _bounds_scores(arm: str, failure: str) -> bool:
    control = read_failures().failures[failure].control if failure else ()
    return bool(BOUNDING & {*control, *arm.split("+")})


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
    """The share of decided pairs that agree, beside that of the best answer that takes no run."""
    name, answer = max(NULLS.items(), key=lambda item: score(predictions, item[1]).agreeing)
    own, null = score(predictions), score(predictions, answer)
    decided = [prediction for prediction in predictions if prediction.is_decided]
    trivial = [answer(prediction.pair) == prediction.pair.outcome for prediction in decided]
    wins = sum(prediction.agrees and not hit for prediction, hit in zip(decided, trivial, strict=True))
    losses = sum(hit and not prediction.agrees for prediction, hit in zip(decided, trivial, strict=True))
    # McNemar's exact test
    is_better = wins > losses and scipy.stats.binomtest(wins, wins + losses).pvalue < LEVEL
    once = distinct(predictions)
    own_once, null_once = score(once), score(once, answer)
    return (
        f"{own} of the decided orderings agree, {'more than' if is_better else 'no better than'} with the answer "
        f"'{name}', with which {null.agreeing} do; of the {own_once.decided} distinct comparisons of two arms "
        f"{own_once.agreeing} agree, and {null_once.agreeing} with that answer"
    )


def table(predictions: Sequence[Prediction]) -> pd.DataFrame:
    """A row for each pair."""
    rows = [
        {
            "a": prediction.pair.a,
            "b": prediction.pair.b,
            "asked of": prediction.pair.failure or prediction.pair.claim,
            "a minus b": _shown(prediction),
            "predicted": prediction.word,
            "published": prediction.pair.outcome,
            "agrees": ("yes" if prediction.agrees else "no") if prediction.is_decided else "",
            "source": f"{prediction.pair.source}{prediction.pair.size and f' ({prediction.pair.size})'}",
            "read": prediction.pair.read or "not read",
        }
        for prediction in predictions
    ]
    return pd.DataFrame(rows)


def _shown(prediction: Prediction) -> str:
    interval = prediction.difference
    if interval is None:
        return ""
    if prediction.pair.claim:
        return f"{interval.mean:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
    return f"{interval.mean:+.0%} [{interval.low:+.0%}, {interval.high:+.0%}]"


def lines(predictions: Sequence[Prediction], trends: Mapping[tuple[str, str], Interval]) -> list[str]:
    """Lines with the score beside its nulls, where the board is wrong, what is not testable, and the pairs."""
    agree: dict[str, list[bool]] = {}
    for prediction in predictions:
        agree.setdefault(prediction.word, []).append(prediction.agrees)
    reasons = Counter(prediction.reason for prediction in predictions if prediction.reason)
    text = html.render(
        "transfer.txt",
        headline=headline(predictions),
        nulls={name: score(predictions, answer) for name, answer in NULLS.items()},
        agree={word: agree[word] for word in OUTCOMES if word in agree},
        open=len(agree.get(OPEN, ())),
        not_testable=len(agree.get(NOT_TESTABLE, ())),
        number=len(predictions),
        read=sum(bool(prediction.pair.read) for prediction in predictions),
        wrong=[prediction for prediction in predictions if prediction.is_decided and not prediction.agrees],
        trends=len(trends),
        seeds=min((trend.n for trend in trends.values()), default=0),
        grows=[f"{a} over {b}" for (a, b), trend in trends.items() if trend.high < 0],
        shrinks=[f"{a} over {b}" for (a, b), trend in trends.items() if trend.low > 0],
        reasons=[f"{reason} ({number})" if number > 1 else reason for reason, number in reasons.items()],
    )
    return [*text.splitlines(), "", *plain_text(table(predictions))]


def as_json(predictions: Sequence[Prediction]) -> str:
    """The pairs and the scores as a JSON object; null where unknown."""
    content = {
        "headline": headline(predictions),
        "score": score(predictions)._asdict(),
        "nulls": {name: score(predictions, answer)._asdict() for name, answer in NULLS.items()},
        "pairs": [_plain(prediction) for prediction in predictions],
    }
    return to_json(content)


def _plain(prediction: Prediction) -> dict[str, Any]:
    interval = prediction.difference
    return {
        **prediction.pair._asdict(),
        "predicted": prediction.word,
        "agrees": prediction.agrees if prediction.is_decided else None,
        "difference": interval.mean if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "reason": prediction.reason or None,
    }
