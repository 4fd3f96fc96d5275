"""`lab compare LOG LOG`: whether logs share their batches, and what lies between their losses, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np

from lab.analysis.statistics import Interval
from lab.analysis.text import capitalized, listed
from lab.core.errors import RequestError, similar_names
from lab.records import store
from labwatch.events.collapse import FEWEST, Departure, departure
from labwatch.events.detectors import LAST_WORDS, SPIKE, UNRECOVERED, Event, Log, detect
from labwatch.events.logs import logs_of, read_logs
from labwatch.events.twins import (
    LEVEL,
    POWER,
    Bump,
    Gap,
    Sharing,
    bumps,
    finite_losses,
    gaps,
    shared_batches,
    shares_event,
)
from labwatch.watch.words import sentence

METHOD = (
    f"Intervals: {100 * LEVEL:g} %, of a least-squares line; HAC by orthonormal series (Sun 2013; Lazarus et al. 2018)."
)


MOST_BUMPS = 8  # that are named
# Losses at initialization are logarithms of sizes of vocabularies, which lie within these bounds; those of two
# vocabularies are so many nats apart, and more for each step by which a log begins later.
FIRST_LOSSES, LEAST_APART, PER_STEP = (3.0, 13.0), 0.7, 0.15


class Pair(NamedTuple):
    """A log against the first one.

    There are no gaps of logs of reinforcement learning, where the loss tells little, nor of logs of two vocabularies.
    ``lost`` are of both the steps of the loss spike from which they did not recover; None without one.
    """

    first: Log
    second: Log
    sharing: Sharing
    gaps: list[Gap]
    bumps: list[Bump]
    lost: tuple[int | None, int | None]


class SharedEvent(NamedTuple):
    """An event of a log, and the names of its twins that have it at the same step, and of those that do not.

    Twins are the logs that share their batches there.
    """

    log: Log
    event: Event
    in_twins: list[str]
    not_in_twins: list[str]


class ComparedLogs(NamedTuple):
    """Logs, each of the later ones against the first, their events, and remarks on how they were read."""

    pairs: list[Pair]
    events: list[SharedEvent]
    notes: list[str]

    @property
    def letters(self) -> dict[str, str]:
        """The letter of each log by its name: A for the first."""
        names = [self.pairs[0].first.name, *(pair.second.name for pair in self.pairs)]
        letters = [*ascii_uppercase, *(f"log {number}" for number in range(27, len(names) + 1))]
        return dict(zip(names, letters, strict=False))


def compare_logs(paths: Sequence[Path], margin: float | None = None) -> ComparedLogs:
    """Compare logs of any program, or runs of a results folder, with the first of them.

    Args:
        paths: logs, folders of logs, or runs as ``FOLDER/ID``.
        margin: nats per token within which losses are equal; see ``gaps``.

    Raises:
        RequestError: a path cannot be read or names several runs of a results folder, or there are fewer than two logs.
    """
    logs, notes = _read_all(paths)
    if len(logs) < 2:
        raise RequestError(f"compare {logs[0].name} with which log? lab compare LOG LOG [...]")
    return compared(logs, notes, margin)


def compared(logs: Sequence[Log], notes: Sequence[str] = (), margin: float | None = None) -> ComparedLogs:
    """Logs that were read already, under names that may be the same, compared with the first of them."""
    first, *others = _distinct(logs)
    events = {log.name: detect(log) for log in (first, *others)}
    pairs = []
    for other in others:
        sharing = shared_batches(first, other)
        of_rewards = first.is_of_rewards or other.is_of_rewards
        both = [*events[first.name], *events[other.name]]
        found = (
            []
            if of_rewards or are_of_two_vocabularies(first, other, sharing)
            else gaps(first, other, sharing, both, margin)
        )
        lost = _lost_at(events[first.name]), _lost_at(events[other.name])
        pairs.append(Pair(first, other, sharing, found, bumps(first, other, sharing), lost))
    return ComparedLogs(pairs, list(_shared_events(first, pairs, events)), list(notes))


def are_of_two_vocabularies(first: Log, second: Log, sharing: Sharing) -> bool:
    """Whether the first losses show that logs are of two vocabularies.

    A model at initialization predicts all tokens alike, so its loss is near the logarithm of its vocabulary's size, and
    the first losses of two logs of one vocabulary that begin with training are near each other.
    """
    logs = (first, second)
    losses = [float(log.columns["loss"][0]) for log in logs]
    apart = LEAST_APART + PER_STEP * max(0, *(int(log.step_n[0]) - 1 for log in logs))
    return (
        sharing.until is None
        and not any(log.is_of_rewards for log in logs)
        and all(FIRST_LOSSES[0] <= loss <= FIRST_LOSSES[1] for loss in losses)
        and all(np.nanmin(log.columns["loss"]) < loss for log, loss in zip(logs, losses, strict=True))
        and abs(losses[0] - losses[1]) >= apart
    )


def vocabularies_phrase(letter: str, pair: Pair) -> str:
    """Why no gap is judged between losses per token of two vocabularies; empty elsewhere."""
    if not are_of_two_vocabularies(pair.first, pair.second, pair.sharing):
        return ""
    first, second = (float(log.columns["loss"][0]) for log in (pair.first, pair.second))
    sizes = f"{first:.3g} of A and {second:.3g} of {letter}, are near ln {_size(first)} and ln {_size(second)}"
    return (
        f"no gap is judged, since the first losses, {sizes}, so of two vocabularies: nats per token do not compare, "
        "bits per byte of the same text do"
    )


def _size(loss: float) -> str:
    """The size of a vocabulary, in two digits, by the loss at initialization."""
    size = math.exp(loss)
    return f"{round(size, 1 - math.floor(math.log10(size))):,.0f}"


def _lost_at(events: Sequence[Event]) -> int | None:
    """The step from which a log did not recover, that of a loss spike or of the program's last words."""
    kinds = (SPIKE, LAST_WORDS)
    return next((event.step for event in events if event.kind in kinds and event.ending in UNRECOVERED), None)


class Siblings(NamedTuple):
    """A run, and how it follows the curve of its siblings of other sizes."""

    run: Log
    siblings: list[Log]
    found: Departure


def follow_siblings(paths: Sequence[Path]) -> Siblings:
    """Compare a run with siblings of other sizes, at least two.

    Args:
        paths: the run first; as in ``compare_logs``.

    Raises:
        RequestError: a path cannot be read, a log has rewards or a constant loss, there are fewer than two siblings, or
            they have too few steps in common.
    """
    logs = _distinct(_read_all(paths)[0])
    run, *siblings = logs
    if len(siblings) < 2:
        raise RequestError("--siblings needs a run and at least two siblings: lab compare LOG LOG LOG [...] --siblings")
    for log in logs:
        if log.is_of_rewards or len(np.unique(finite_losses(log)[1])) == 1:
            which = "rewards" if log.is_of_rewards else "a loss that never changes"
            raise RequestError(f"{log.name} has {which}; --siblings compares losses that fall along one curve")
    found = departure(run, siblings)
    if found is None:
        raise RequestError(f"{run.name} and its siblings have fewer than {FEWEST} steps in common")
    return Siblings(run, siblings, found)


def _read_all(paths: Sequence[Path]) -> tuple[list[Log], list[str]]:
    """All logs, under names that differ, and remarks on how they were read."""
    missing = [path for path in paths if not path.exists() and not store.is_results_folder(path.parent)]
    if missing:
        raise RequestError(f"no results folder or log {missing[0]}")
    logs, notes = list[Log](), list[str]()
    for path in paths:
        more, remarks = _read(path)
        logs += more
        notes += remarks
    return logs, notes


def _shared_events(first: Log, pairs: Sequence[Pair], events: Mapping[str, Sequence[Event]]) -> Iterator[SharedEvent]:
    """The events of all logs in the order of their steps, each with the twins that have it, and those that do not."""
    until = {first.name: math.inf} | {pair.second.name: pair.sharing.until or -1 for pair in pairs}
    logs = {first.name: first} | {pair.second.name: pair.second for pair in pairs}
    every = [(log, event) for name, log in logs.items() for event in events[name]]
    for log, event in sorted(every, key=lambda pair: pair[1].step):
        twins = [
            twin for name, twin in logs.items() if name != log.name and min(until[name], until[log.name]) >= event.step
        ]
        shared = {twin.name: shares_event(event, log, twin, events[twin.name]) for twin in twins}
        with_it, without = ([name for name, has in shared.items() if has is wanted] for wanted in (True, False))
        yield SharedEvent(log, event, with_it, without)


def margin_of(text: str) -> float:
    """The margin that was given, nats per token.

    Raises:
        RequestError: it is no positive number.
    """
    try:
        margin = float(text)
    except ValueError:
        margin = math.nan
    if not 0 < margin < math.inf:
        raise RequestError(f"--within wants a positive number of nats, such as 0.01, not {text!r}")
    return margin


def _read(path: Path) -> tuple[list[Log], list[str]]:
    """The logs that a path names, and remarks on how they were read."""
    if not path.exists():
        records = store.read(path.parent)
        found = list(logs_of(records.of([path.name])))
        if not found:
            ids = sorted(records.runs["id"].astype(str))
            close = similar_names(path.name, ids) or ids[:1]
            raise RequestError(f"{path.parent} has no run {path.name} with losses, but for example {listed(close)}")
        return [log._replace(name=str(path)) for log in found], []
    logs, notes = read_logs(path)
    if store.is_results_folder(path) and len(logs) > 1:
        raise RequestError(f"{path} holds {len(logs)} runs; name each that is a log, such as {path / logs[0].name}")
    return [log._replace(name=str(path)) for log in logs] if len(logs) == 1 else logs, notes


def _distinct(logs: Sequence[Log]) -> list[Log]:
    """The logs under names that differ: a number follows a name that was there before."""
    names = list[str]()
    for log in logs:
        again = sum(name.partition(" #")[0] == log.name for name in names)
        names.append(f"{log.name} #{again + 1}" if again else log.name)
    return [log._replace(name=name) for log, name in zip(logs, names, strict=True)]


def described(log: Log) -> str:
    """The name of a log, and its rows and steps."""
    return f"{log.name}, {len(log.step_n)} rows, steps {log.step_n[0]} to {log.step_n[-1]}"


def event_sentence(shared: SharedEvent, letters: Mapping[str, str]) -> str:
    """``B step 350: loss spike, 2.01 to 4.5, recovered at step 410; not in A``."""
    log, event, with_it, without = shared
    parts = [
        f"{words} {listed([letters[name] for name in names])}"
        for words, names in (("also in", with_it), ("not in", without))
        if names
    ]
    return "; ".join([sentence(log, event._replace(run=letters[log.name])), *(parts or ["no twin to compare"])])


def _shared_sentence(letter: str, pair: Pair) -> str:
    """Whether batches are shared, and until when."""
    sharing = pair.sharing
    chance = f"unrelated batches: 0 ± {2 * sharing.error:.2f}"
    found = f"de-trended losses correlate at {sharing.correlation:.2f} ({chance})"
    if not sharing.is_known:
        return f"Batches: {sharing.rows} steps with losses in both logs are too few to tell whether they share batches."
    if sharing.until is None:
        return f"Batches: no sign that {letter} shares them with A: {found} at {sharing.rows} steps."
    if sharing.is_lasting:
        return f"Batches: shared with A at all {sharing.rows} steps that both have; {found}."
    after = f"afterwards at {sharing.afterwards:.2f}"
    return f"Batches: shared with A up to about step {sharing.until}, and not after that; {found}, {after}."


def pair_sentences(letter: str, pair: Pair) -> Iterator[str]:
    """All that is said of a pair."""
    yield _shared_sentence(letter, pair)
    for phrase in (lost_phrase(letter, pair), rewards_phrase(letter, pair), vocabularies_phrase(letter, pair)):
        if phrase:
            yield f"{capitalized(phrase)}."
    for gap in pair.gaps:
        yield from _gap_sentences(letter, gap)
    if pair.bumps:
        shown = [f"{bump.size:+.3f} at steps {bump.first} to {bump.last}" for bump in pair.bumps[:MOST_BUMPS]]
        more = f", and {len(pair.bumps) - MOST_BUMPS} more" if len(pair.bumps) > MOST_BUMPS else ""
        yield f"Bumps of the gap, nats/token: {', '.join(shown)}{more}."


def lost_phrase(letter: str, pair: Pair) -> str:
    """``B is worse, since B is lost from step 110 on and A is not``; empty unless one of them is."""
    first, second = pair.lost
    if (first is None) == (second is None):
        return ""
    if first is None:
        return f"{letter} is worse, since {letter} is lost from step {second} on and A is not"
    return f"{letter} is better, since A is lost from step {first} on and {letter} is not"


def rewards_phrase(letter: str, pair: Pair) -> str:
    """What is said in place of a gap where a log is of reinforcement learning; empty elsewhere."""
    logs = (pair.first, pair.second)
    if not any(log.is_of_rewards for log in logs):
        return ""
    why = "no gap is judged, since the loss of reinforcement learning does not say which log is better"
    if not all("reward" in log.columns for log in logs):
        return why
    first, last = max(log.step_n[0] for log in logs), min(log.step_n[-1] for log in logs)
    medians = [
        float(np.nanmedian(log.columns["reward"][(log.step_n >= (first + last) / 2) & (log.step_n <= last)]))
        for log in logs
    ]
    where = f"in the second half of the steps that both have, up to {last}"
    return f"{why}; the median reward {where}, is {medians[0]:.3g} of A and {medians[1]:.3g} of {letter}"


def _gap_sentences(letter: str, gap: Gap) -> Iterator[str]:
    """The gap, its verdict and what would have been seen."""
    kind = "paired" if gap.is_paired else "unpaired, with the noise of both"
    rows = f"{gap.rows} rows{f' without {gap.left_out} in spikes or bumps' if gap.left_out else ''}"
    where = f"Gap {letter} - A at steps {gap.first} to {gap.last} ({rows}, {kind})"
    if math.isnan(gap.error):
        mean = "" if math.isnan(gap.mean) else f"{gap.mean:+.4f} nats/token; "
        yield f"{where}: {mean}too few rows for an interval."
        yield f"Verdict: {verdict_phrase(letter, gap)}."
        return
    middle = Interval.around(gap.mean, gap.half_width())
    slope = Interval.around(gap.per_thousand * gap.change, gap.per_thousand * gap.change_half_width())
    yield f"{where}: {middle:+.4f} nats/token, slope {slope:+.4f} per 1000 steps."
    yield f"Verdict: {verdict_phrase(letter, gap)}."
    seen = f"a constant gap of {gap.smallest_gap:.2g}, or a change by {gap.smallest_change:.2g} over these steps"
    yield f"Power: {seen}, would have been seen in {100 * POWER:g} of 100 cases."


def verdict_phrase(letter: str, gap: Gap) -> str:
    """``equal within 0.004 nats``, ``B is worse by 0.2 nats``, or another verdict with its numbers or its reason."""
    margin = f"{gap.margin:.2g} nats"
    who = f"{letter} is {_worse(gap.mean)}"
    if gap.verdict == "equal":
        return f"equal within {margin} (even within {gap.equal_within:.2g})"
    if gap.verdict == "constant gap":
        return f"{who} by {abs(gap.mean):.3g} nats throughout (constant gap)"
    if gap.verdict == "gap of one sign":
        size = "its size wanders" if gap.wanders else f"there are too few rows for an interval, {gap.rows}"
        return f"{who} by about {abs(gap.mean):.2g} nats in all rows; {size}"
    if gap.verdict != "open":
        begin, end = gap.mean - gap.change / 2, gap.mean + gap.change / 2
        how = f"{who}, {'and ever more' if gap.verdict == 'growing gap' else 'but ever less'}"
        how = how if begin * end > 0 else f"{letter} is {_worse(begin)} at first and {_worse(end)} at the end"
        return f"{how}: from {begin:+.3g} to {end:+.3g} nats ({gap.verdict})"
    if math.isnan(gap.error):
        rows = "the only one" if gap.rows == 1 else f"all {gap.rows}"
        all_rows = f", though {who} in {rows}" if gap.is_of_one_sign else ""
        return f"open, since there are too few rows{all_rows}"
    if gap.wanders:
        return f"open, since the gap wanders, so that {gap.rows} rows are worth about {gap.rows / gap.lasting:.0f}"
    if abs(gap.mean) > gap.half_width():
        return f"{who} by {abs(gap.mean):.3g} nats (whether the gap grows is open)"
    return f"open, since no gap is seen, but equality holds within {gap.equal_within:.2g} nats only, not {margin}"


def _worse(gap: float) -> str:
    """What the second log is, by its gap from the first."""
    return "worse" if gap > 0 else "better"
