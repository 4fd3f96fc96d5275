"""Whether the leaderboard predicts large models: published orderings of arms, compared with predictions by a rule."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.judging.decision import CONTRADICTED, NO_EFFECT, REPRODUCED
from lab.analysis.judging.effects import FEWEST_SIZES, slope
from lab.analysis.judging.evidence import read_evidence
from lab.analysis.judging.verdicts import committed, judge_claim, verdict_of
from lab.analysis.statistics import FEWEST_SEEDS, Interval, holm, share_interval, student_t
from lab.analysis.text import finite, listed, plain_text
from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.core.shipped import data_folder, load
from lab.records import store
from lab.studies.claims import CLAIMS
from lab.studies.leaderboard.arms import known
from lab.studies.leaderboard.board import ALPHA, NO_DIFFERENCE, OPEN, QK, SAME, Board, p_of
from lab.studies.leaderboard.curves import Curve, Setting

FILE = Path(__file__).with_name("outcomes.yaml")
A, B, EQUAL = "a", "b", "equal"
ANSWERS = {A: "the arm named first", B: "the arm named second", EQUAL: "no difference"}
OUTCOMES = tuple(ANSWERS)
NOT_ON_BOARD = "not on the board"
DEFAULT_MEASURE = "above"
# The column that says that a seed of an arm lies at the end of the scale of a measure.
CENSORED = {"eta_div": "censored", "trains": "trains"}
FEWEST_RANKS = 4
REFERENCE = "reference"


class Measure(NamedTuple):
    """A quantity that predicts which of two arms is more stable.

    Attributes:
        sign: 1 if a lower value is better, -1 if a higher one is.
        margin: the largest difference that does not count.
    """

    key: str
    name: str
    sign: int
    margin: float
    unit: str


@cache
def measures() -> Mapping[str, Measure]:
    """The measures of ``outcomes.yaml``, by name."""
    return {
        key: Measure(key, entry["name"], 1 if entry["better"] == "lower" else -1, entry["margin"], entry["unit"])
        for key, entry in load(FILE)["measures"].items()
    }


class Pair(NamedTuple):
    """Two arms, and which of them was published to be more stable.

    Attributes:
        ordering: which it belongs to.
        a: what the first arm has besides the recipe of the board; in words where ``claim`` or ``why_not``.
        outcome: ``a``, ``b`` or ``equal``, as published.
        measure: that predicts it; empty where a claim does.
        why_not: why nothing here can predict it; empty where something can.
        claim: which of the lab's claims says that a is the more stable; empty where the board predicts.
    """

    ordering: str
    source: str
    size: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    outcome: str
    measure: str
    why_not: str = ""
    claim: str = ""

    @property
    def arms(self) -> tuple[str, str]:
        """The names of both arms for readers."""
        first, second = ("+".join(arm) or REFERENCE for arm in (self.a, self.b))
        return first, second


class Prediction(NamedTuple):
    """The prediction of the board for a pair.

    Attributes:
        word: ``a``, ``b``, ``no difference``, ``open`` or ``not on the board``.
        difference: of the measure, a minus b, paired by seed; of a claim, its effect from b to a. None without one.
        values: means of the measure of a and of b; NaN without runs.
        reason: why there is none; empty where there is one.
        trend: slope of the difference over log10 of parameters, by seed; None below three sizes.
        is_censored: whether in most seeds both arms lie at the end of the scale, where nothing distinguishes them: no
            learning rate of the grid is unstable, or every run trains.
    """

    pair: Pair
    word: str
    difference: Interval | None
    values: tuple[float, float]
    reason: str = ""
    trend: Interval | None = None
    is_censored: bool = False

    @property
    def is_decided(self) -> bool:
        """Whether the prediction can agree or disagree with the outcome."""
        return self.word in (A, B, NO_DIFFERENCE)

    @property
    def agrees(self) -> bool:
        """Whether the published outcome is the predicted one."""
        return self.pair.outcome == (EQUAL if self.word == NO_DIFFERENCE else self.word)


def published() -> list[Pair]:
    """The pairs of the published orderings."""
    pairs = []
    for name, ordering in load(FILE)["orderings"].items():
        for entry in ordering["pairs"]:
            a, b = ((one,) if isinstance(one, str) else tuple(one) for one in (entry["a"], entry["b"]))
            about = (entry["outcome"], entry.get("measure", ""), entry.get("why_not", ""), entry.get("claim", ""))
            pairs.append(Pair(name, ordering["source"], ordering["size"], a, b, *about))
    return pairs


def read_outcomes(path: Path) -> list[Pair]:
    """The pairs of a user's table: CSV with the columns ``a``, ``b``, ``outcome``, and optionally ``measure``.

    An arm is a name, several names joined by ``+``, or ``reference``.

    Raises:
        RequestError: the table cannot be read, a column is missing, or an arm, an outcome or a measure is unknown.
    """
    try:
        table = files.read_csv(path, dtype=str, keep_default_na=False, nrows=files.MOST_CELLS)
    except OSError as fault:
        raise RequestError(f"no table of outcomes {path}: {fault.strerror}") from None
    except ValueError as fault:
        raise RequestError(f"{path} is no CSV table: {' '.join(str(fault).split())}") from None
    if missing := [column for column in ("a", "b", "outcome") if column not in table]:
        raise RequestError(f"{path} has no column {missing[0]!r}; it takes a, b and outcome, and measure if any")
    return [_pair(path, {str(key): str(value) for key, value in row.items()}) for row in table.to_dict("records")]


def _pair(path: Path, row: Mapping[str, str]) -> Pair:
    outcome, measure = row["outcome"].strip(), row.get("measure", "").strip() or DEFAULT_MEASURE
    if outcome not in OUTCOMES:
        raise RequestError(f"{path}: unknown outcome {outcome!r}; {nearest(outcome, OUTCOMES)}")
    if measure not in measures():
        raise RequestError(f"{path}: unknown measure {measure!r}; {nearest(measure, measures())}")
    a, b = (_arm(row[name].strip()) for name in ("a", "b"))
    return Pair(path.stem, path.name, "", a, b, outcome, measure)


def _arm(text: str) -> tuple[str, ...]:
    names = () if text in ("", REFERENCE) else tuple(name.strip() for name in text.split("+"))
    for name in names:
        known(name.removeprefix("no "))
    return names


def predict(board: Board, pairs: Sequence[Pair], results: Path) -> list[Prediction]:
    """What the rule says of each pair, in the setting with the most arms among those in which both arms were trained.

    Of several such settings, the first in the results counts.

    Args:
        results: the folder of results on which claims are judged.
    """
    every = [one.setting for one in board.curves]
    settings = sorted(dict.fromkeys(every), key=lambda setting: -every.count(setting))
    return [_by_claim(pair, results) if pair.claim else _predict(board, pair, settings) for pair in pairs]


def _by_claim(pair: Pair, results: Path) -> Prediction:
    claim, nothing = CLAIMS[pair.claim], (math.nan, math.nan)
    folder = results / claim.sweep
    records = store.find(folder) if folder.is_dir() else None
    if records:
        verdict = judge_claim(claim, [read_evidence(folder, records)])
    elif results == data_folder("results"):  # of an installed package, which has the verdict only
        verdict = verdict_of(committed()[claim.name])
    else:
        return Prediction(pair, NOT_ON_BOARD, None, nothing, f"no runs of the sweep {claim.sweep} in {results}")
    word = {REPRODUCED: A, CONTRADICTED: B, NO_EFFECT: NO_DIFFERENCE}.get(verdict.verdict, OPEN)
    return Prediction(pair, word, Interval(-verdict.effect, -verdict.high, -verdict.low, verdict.seeds), nothing)


def _predict(board: Board, pair: Pair, settings: Sequence[Setting]) -> Prediction:
    nothing = (math.nan, math.nan)
    if pair.why_not:
        return Prediction(pair, NOT_ON_BOARD, None, nothing, pair.why_not)
    both = _both(board, pair, settings)
    if both is None:
        missing = [arm for arm in (pair.a, pair.b) if all(board.find(arm, one) is None for one in settings)]
        named = listed("+".join(arm) or REFERENCE for arm in missing or (pair.a, pair.b))
        return Prediction(pair, NOT_ON_BOARD, None, nothing, f"no runs of {named}{' together' * (not missing)}")
    setting, a, b = both
    grid = max((one.lrs for one in board.curves), key=[one.lrs for one in board.curves].count)
    for arm, curve in ((pair.a, a), (pair.b, b)):
        if board.meaning("+".join(arm), curve, grid) != SAME:
            reason = f"the learning rate of {'+'.join(arm)} means something else"
            return Prediction(pair, NOT_ON_BOARD, None, nothing, reason)
    measure = measures()[pair.measure]
    values = [curve.seeds[measure.key] for curve in (a, b)]
    seeds = values[0].index.intersection(values[1].index)
    interval = student_t((values[0].loc[seeds] - values[1].loc[seeds]).astype(float))
    word = _word(interval, _adjusted(board, a, b, setting, grid, measure), measure)
    trend = _trend(board, pair, setting, settings, measure)
    means = (float(values[0].mean()), float(values[1].mean()))
    return Prediction(pair, word, interval, means, trend=trend, is_censored=_is_censored(a, b, measure))


def _is_censored(a: Curve, b: Curve, measure: Measure) -> bool:
    if measure.key not in CENSORED:
        return False
    first, second = (curve.seeds[CENSORED[measure.key]].astype(bool) for curve in (a, b))
    return bool((first & second.reindex(first.index, fill_value=False)).mean() > 0.5)


def _trend(board: Board, pair: Pair, mine: Setting, settings: Sequence[Setting], measure: Measure) -> Interval | None:
    """How the difference of two arms grows with the size, in settings that are this one but for the size.

    Of several sweeps that with the most sizes: others may have other seeds.
    """
    by_sweep = dict[Hashable, dict[float, pd.Series]]()
    for setting in settings:
        a, b = board.find(pair.a, setting), board.find(pair.b, setting)
        if a is not None and b is not None and _but_for_size(setting) == _but_for_size(mine):
            of_sweep = by_sweep.setdefault(dict(setting).get("sweep"), {})
            of_sweep[float(b.parameters)] = a.seeds[measure.key] - b.seeds[measure.key]
    by_size = max(by_sweep.values(), key=len, default={})
    if len(by_size) < FEWEST_SIZES:
        return None
    return student_t(slope(pd.DataFrame(by_size).dropna().astype(float)))


def _but_for_size(setting: Setting) -> Setting:
    return tuple((key, value) for key, value in setting if key != "sweep" and not key.startswith("model."))


def _both(board: Board, pair: Pair, settings: Sequence[Setting]) -> tuple[Setting, Curve, Curve] | None:
    """The first setting in which both arms were trained, and their curves."""
    for setting in settings:
        a, b = board.find(pair.a, setting), board.find(pair.b, setting)
        if a is not None and b is not None:
            return setting, a, b
    return None


def _adjusted(
    board: Board,
    a: Curve,
    b: Curve,
    setting: Setting,
    grid: tuple[float, ...],
    measure: Measure,
) -> float:
    """The p of a against b, adjusted by Holm over all arms of b's panel, each compared with b."""
    family = [
        one
        for one in board.curves
        if one.setting == setting
        and (QK in one.interventions) == (QK in b.interventions)
        and board.meaning("+".join(board.change(one)), one, grid) == SAME
        and one is not b
        and one is not a
    ]
    ps = [p_of(one, b, measure.key) for one in (a, *family)]
    return holm(ps)[0]


def _word(interval: Interval, p_adjusted: float, measure: Measure) -> str:
    if interval.n < FEWEST_SEEDS:
        return OPEN
    if interval.p_outside(-measure.margin, measure.margin) < 2 * ALPHA:
        return NO_DIFFERENCE
    if p_adjusted < ALPHA:
        return A if measure.sign * interval.mean < 0 else B
    return OPEN


class Score(NamedTuple):
    """How often the predictions of the board agree with published outcomes.

    Attributes:
        agreeing: number of decided pairs that agree.
        opposite: number of pairs of which the arm that was published as the less stable is predicted.
        share: share of decided pairs that agree, with its exact 95 % interval.
    """

    decided: int
    agreeing: int
    opposite: int
    share: Interval


def score(predictions: Sequence[Prediction]) -> Score:
    """The score of decided predictions against published outcomes."""
    decided = [one for one in predictions if one.is_decided]
    agreeing = sum(one.agrees for one in decided)
    opposite = sum({one.word, one.pair.outcome} == {A, B} for one in decided)
    return Score(len(decided), agreeing, opposite, share_interval(agreeing, len(decided)))


def agreement(counted: Score) -> str:
    """How many decided pairs agree, and their share with its interval."""
    mean, low, high = (f"{100 * value:.0f} %" for value in counted.share[:3])
    return f"{counted.agreeing} of {counted.decided} decided pairs agree: {mean}, 95 % interval {low} to {high}"


def by_prediction(predictions: Sequence[Prediction]) -> str:
    """How many predictions agree where the board names an arm, and where it predicts no difference."""
    decided = [one for one in predictions if one.is_decided]
    named = [one for one in decided if one.word != NO_DIFFERENCE]
    none = [one for one in decided if one.word == NO_DIFFERENCE]
    return (
        f"Where the board names an arm, {sum(one.agrees for one in named)} of {len(named)} agree; where it predicts no "
        f"difference, {sum(one.agrees for one in none)} of {len(none)}"
    )


def without_runs(predictions: Sequence[Prediction]) -> str:
    """How often the one answer that agrees most would agree, given to all decided pairs: what any score must beat."""
    outcomes = [one.pair.outcome for one in predictions if one.is_decided]
    answer, agreeing = Counter(outcomes).most_common(1)[0]
    return f"Without any run, always answering {ANSWERS[answer]} would agree in {agreeing} of {len(outcomes)}"


def rank_correlations(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Spearman's rank correlation of published places and measure, for each ordering of four arms or more.

    An arm's published place is the number of arms that are less stable, minus the number that are more stable.
    """
    correlations = {}
    for ordering in dict.fromkeys(one.pair.ordering for one in predictions):
        mine = [one for one in predictions if one.pair.ordering == ordering and one.difference is not None]
        for key in dict.fromkeys(one.pair.measure for one in mine if one.pair.measure):
            places, values = dict[tuple[str, ...], int](), dict[tuple[str, ...], float]()
            for one in mine:
                if one.pair.measure != key:
                    continue
                won = {A: 1, B: -1, EQUAL: 0}[one.pair.outcome]
                for arm, wins, value in ((one.pair.a, won, one.values[0]), (one.pair.b, -won, one.values[1])):
                    places[arm], values[arm] = places.get(arm, 0) + wins, -measures()[key].sign * value
            if len(places) >= FEWEST_RANKS:
                published_rank, our_rank = (pd.Series(list(side.values())).rank() for side in (places, values))
                spreads = min(published_rank.nunique(), our_rank.nunique()) > 1
                correlations[ordering] = published_rank.corr(our_rank) if spreads else math.nan
    return correlations


def table(predictions: Sequence[Prediction]) -> pd.DataFrame:
    """A row for each pair."""
    return pd.DataFrame(
        {
            "ordering": [one.pair.ordering for one in predictions],
            "a": [one.pair.arms[0] for one in predictions],
            "b": [one.pair.arms[1] for one in predictions],
            "measure": [one.pair.measure or one.pair.claim for one in predictions],
            "a minus b": [_shown(one.difference) for one in predictions],
            "per decade of size": ["" if one.trend is None else _shown(one.trend) for one in predictions],
            "predicted": [one.word for one in predictions],
            "published": [one.pair.outcome for one in predictions],
            "agrees": [("yes" if one.agrees else "no") if one.is_decided else "" for one in predictions],
            "source": [f"{one.pair.source}{one.pair.size and f' ({one.pair.size})'}" for one in predictions],
        }
    )


def as_json(predictions: Sequence[Prediction]) -> str:
    """The pairs and the score as a JSON object; null where unknown."""
    counted = score(predictions)
    content = {
        "pairs": [_plain(one) for one in predictions],
        "decided": counted.decided,
        "agreeing": counted.agreeing,
        "opposite": counted.opposite,
        "share": {end: finite(getattr(counted.share, end)) for end in ("mean", "low", "high")},
        "rank_correlations": {name: finite(value) for name, value in rank_correlations(predictions).items()},
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)


def _plain(one: Prediction) -> dict[str, Any]:
    pair, (value_a, value_b) = one.pair, one.values
    a, b = pair.arms
    return {
        "ordering": pair.ordering,
        "source": pair.source,
        "size": pair.size,
        "a": a,
        "b": b,
        "measure": pair.measure or None,
        "claim": pair.claim or None,
        "published": pair.outcome,
        "predicted": one.word,
        "agrees": one.agrees if one.is_decided else None,
        "reason": one.reason or None,
        "value_a": finite(value_a),
        "value_b": finite(value_b),
        "difference": _ends(one.difference),
        "per_decade_of_size": _ends(one.trend),
        "is_censored": one.is_censored,
    }


def _ends(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    return {"mean": finite(interval.mean), "low": finite(interval.low), "high": finite(interval.high), "n": interval.n}


def _shown(difference: Interval | None) -> str:
    if difference is None:
        return ""
    if difference.n < FEWEST_SEEDS:
        return difference.bare
    return f"{difference.mean:.3f} [{difference.low:.3f}, {difference.high:.3f}]"


def lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield lines with the pairs, the score, the rank correlations, and the pairs on which the board is wrong."""
    yield from plain_text(table(predictions))
    yield ""
    counted = score(predictions)
    if counted.decided:
        yield f"{agreement(counted)}. The interval takes pairs as independent, and pairs of one ordering share arms."
        yield f"{without_runs(predictions)}."
        yield f"{by_prediction(predictions)}."
        where = (
            f"In {counted.opposite} pairs the board predicts"
            if counted.opposite
            else "In no pair does the board predict"
        )
        yield f"{where} the arm that was published as the less stable."
        free = score([one for one in predictions if not one.is_censored])
        if free.decided < counted.decided:
            yield (
                f"{counted.decided - free.decided} decided pairs compare arms at the end of the scale, such as two "
                f"without an unstable learning rate in the grid. Without these, {agreement(free)}."
            )
    else:
        yield "No pair is decided."
    for word in (OPEN, NOT_ON_BOARD):
        if number := sum(one.word == word for one in predictions):
            yield f"{number} pairs {word}."
    for reason in dict.fromkeys(f"{one.pair.ordering}: {one.reason}." for one in predictions if one.reason):
        yield f"  {reason}"
    for ordering, correlation in rank_correlations(predictions).items():
        shown = "undefined, since all its arms are equal" if math.isnan(correlation) else f"{correlation:.2f}"
        yield f"Spearman's rank correlation in {ordering}: {shown}."
    if wrong := [one for one in predictions if one.is_decided and not one.agrees]:
        yield "Where the board is wrong:"
        for one in wrong:
            a, b = one.pair.arms
            said = {A: f"{a} above {b}", B: f"{b} above {a}"}
            predicted, outcome = said.get(one.word, "no difference"), said.get(one.pair.outcome, "no difference")
            yield f"  {one.pair.ordering}: of {a} and {b} it predicts {predicted}; published: {outcome}."
