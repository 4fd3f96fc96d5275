"""Signs in the learning rate and in other settings of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, takewhile

import numpy as np

from labwatch.recordings.moves import TINY
from labwatch.recordings.readings import (
    BACK,
    CALM_STEPS,
    LASTING,
    LEAST_RATE,
    SAME,
    STEP_LASTS,
    Change,
    Readings,
    Sign,
    factor,
)
from labwatch.recordings.recording import DECAYS, MAX_NORM, STATES_LOST, SWITCHES, UPDATES, Setting

# The learning rate jumps if it rises by this factor, and by as many times its largest rise per step before; or if it
# falls in one step to zero, or for good by a factor that no step decay has, from more than ``LEAST_RATE`` of its peak.
RATE_JUMP, RATE_FALL = 3.0, 15.0
# Other settings jump if they, or what a decay leaves to the next number, change by this factor after ``CALM_STEPS`` in
# which they did not: numbers that jump more often are kept by the optimizer itself.
SETTING_JUMP = 3.0
# A learning rate that falls by ``RATE_JUMP`` in one step and only rises after it, to ``BACK`` of what it was, warms up
# once more. A schedule has ended too early if for this share of all steps the rate is below such a share of its peak,
# and before that fell, per step, so many times as fast as ever, and by so much more; or fell all the way in such a
# share of the steps in which it had been constant; or if it is zero.
ENDED_STEPS, ENDED_RATE, FASTER, STEEPER, QUICK = 0.1, 0.008, 5.0, 1.5, 0.5
NO_RATE = 1e-5  # of the peak, which is as good as zero if the row before was near the peak
# A rate that did not rise for ``CALM_STEPS`` rises to another peak if that is so many times the one before.
BEYOND_PEAK = 10.0
# Another setting leaves what it was if after so many rows it begins to go, step by step, so many times away from that.
CONSTANT_ROWS, FAR = 5, 10.0
# The rate of a group jumps apart from the others if it does by this factor, and they had one ratio until then.
RATE_APART = 1.6


def changed_settings(read: Readings) -> Iterator[Sign]:
    """Settings of the optimizer that jump, each with all that jumped at the same update."""
    found = dict[tuple[str, int], list[Change]]()
    settings = read.recording.settings
    if not settings:  # a recording that has the learning rate alone
        rate_m = read.column("lr")
        known_m = np.isfinite(rate_m)
        settings = [Setting("lr", [], read.step_m[known_m].tolist(), rate_m[known_m].tolist())]
    last = int(max([0, *read.step_m[-1:], *read.recording.loss_step_n[-1:]]))
    places = {place for setting in settings for place in setting.parts}
    rates = [setting for setting in settings if setting.name == "lr" and setting.step_n]
    for setting in settings:
        of_setting = [*_jumps(setting, last)]
        if setting in rates:
            of_setting += [*_ended_early(setting, last), *_beyond_peak(setting), *_leaves_others(setting, rates)]
        else:
            of_setting += _goes_away(read, setting)
        for change in of_setting:
            if setting.name == MAX_NORM:  # which is read at measured updates alone
                change = change._replace(since=int(read.step_m[read.row_of(change.step) - 1]))
            if places <= {*change.parts}:
                change = change._replace(parts=())
            if change not in (changes := found.setdefault((_kind(read, change), change.step), [])):
                changes.append(change)
    for (kind, step), changes in found.items():
        parts = {place for change in changes for place in change.parts}
        everywhere = parts == places or not all(change.parts for change in changes)
        yield Sign(kind, read.row_of(step), [] if everywhere else sorted(parts), changes=changes, is_exact=True)


def _kind(read: Readings, change: Change) -> str:
    """The kind of cause of a setting that changed; a loss scaler leaves out updates whose gradients overflow."""
    if change.name == "lr":
        return "rate"
    if change.name != UPDATES or change.value:
        return "optimizer"
    row = read.row_of(change.step)
    is_left_out = read.has("loss_scale") and row in read.named("gradient_not_finite")
    return read.kind_of_overflow(row) if is_left_out else "frozen"


def _jumps(setting: Setting, last: int) -> Iterator[Change]:
    """The jumps of a setting; schedules warm up, decay by tens, and end at zero."""
    rise, calm_since = 0.0, setting.step_n[0] if setting.step_n else 0
    pairs = list(zip(setting.step_n, setting.value_n, strict=True))
    highest_n, later_n = list(accumulate(setting.value_n, max)), _highest_later(setting)
    for number, ((since, before), (step, value)) in enumerate(pairwise(pairs), 1):
        ratio = 1.0 if value == before else value / before if before else math.inf
        if setting.name == "lr":
            per_step = (value - before) / (step - since)
            jumps = ratio > RATE_JUMP and before > 0 and per_step > RATE_JUMP * rise and number > 1
            rise = max(rise, per_step)
            if step - since == 1 and step < last:
                is_high = before > LEAST_RATE * highest_n[number - 1]
                jumps |= (value == 0 or later_n[number] < before / RATE_FALL) and is_high
                if value < before / RATE_JUMP:
                    rises = takewhile(lambda pair: pair[0] <= pair[1], pairwise(setting.value_n[number:]))
                    jumps |= max((to for _, to in rises), default=0.0) >= BACK * before
        elif setting.name in (*SWITCHES, STATES_LOST):
            jumps = value > before if setting.name == STATES_LOST else value != before
        elif setting.name == UPDATES:  # which a loss scaler may leave out
            jumps = value != setting.value_n[0] and last - step >= STEP_LASTS and {*setting.value_n[number:]} == {value}
        else:
            left = (1 - value) / (1 - before) if setting.name.startswith(DECAYS) and before != 1 else 1.0
            is_jump = max(factor(ratio), factor(left)) > SETTING_JUMP
            jumps = is_jump and step - calm_since >= CALM_STEPS and (step - since == 1 or setting.name == MAX_NORM)
            calm_since = step if is_jump else calm_since
        if jumps:
            yield Change(setting.name, setting.parts, since, step, before, value)


def _highest_later(setting: Setting) -> list[float]:
    """Of each value the highest from it on."""
    return list(accumulate(reversed(setting.value_n), max))[::-1]


def _ended_early(setting: Setting, last: int) -> Iterator[Change]:
    """Where a rate that has ended before the run began to fall so fast, or after it had been constant for long."""
    peak = int(np.argmax(setting.value_n))
    pairs = list(zip(setting.step_n[peak:], setting.value_n[peak:], strict=True))
    end = next((n for n, (_, value) in enumerate(pairs) if value <= ENDED_RATE * pairs[0][1]), None)
    if not end or last - pairs[end][0] < ENDED_STEPS * last or max(value for _, value in pairs[end:]) > pairs[end][1]:
        return
    fastest, steepest = 0.0, 0.0
    for (since, before), (step, value) in pairwise(pairs[: end + 1]):
        fall, slope = (of / (step - since) for of in (math.log(before / max(value, TINY)), before - value))
        is_quick = fastest == 0 < fall and pairs[end][0] - since < QUICK * (since - pairs[0][0])
        if is_quick or (fall > FASTER * fastest > 0 and slope > STEEPER * steepest):
            yield Change(setting.name, setting.parts, since, step, before, value)
            return
        fastest, steepest = max(fastest, fall), max(steepest, slope)
    for (since, before), (step, value) in pairwise(pairs):
        is_gone = value <= NO_RATE * pairs[0][1] and before > LEAST_RATE * pairs[0][1]
        if (is_gone or value == 0 < before) and last - step >= ENDED_STEPS * last:
            yield Change(setting.name, setting.parts, since, step, before, value)


def _beyond_peak(setting: Setting) -> Iterator[Change]:
    """Where a rate that had risen no more begins to rise far above its peak."""
    highest, calm_since, later_n = 0.0, setting.step_n[0], _highest_later(setting)
    pairs = zip(setting.step_n, setting.value_n, strict=True)
    for number, ((since, before), (step, value)) in enumerate(pairwise(pairs), 1):
        highest = max(highest, before)
        if value > before:
            if since - calm_since >= CALM_STEPS and later_n[number] > BEYOND_PEAK * highest > 0:
                yield Change(setting.name, setting.parts, since, step, before, value)
                return
            calm_since = step


def _goes_away(read: Readings, setting: Setting) -> Iterator[Change]:
    """Where a setting other than the rate, which was constant, begins to rise far, or the norm of clipping to fall.

    A weight decay may end with the rate.
    """
    if setting.name in (*SWITCHES, STATES_LOST, UPDATES) or len(setting.value_n) < 2:
        return
    (begin, step), (before, value) = setting.step_n[:2], setting.value_n[:2]
    way_n = setting.value_n[::-1] if setting.name == MAX_NORM and value < before else setting.value_n
    row, is_far = read.row_of(step), 0 < before < math.inf and factor(setting.value_n[-1] / before) > FAR
    if is_far and row - read.row_of(begin) > CONSTANT_ROWS and way_n == sorted(way_n):
        since = int(read.step_m[row - 1])  # slow changes are told at measured updates alone
        yield Change(setting.name, setting.parts, since, step, before, value)


def _leaves_others(setting: Setting, rates: Sequence[Setting]) -> Iterator[Change]:
    """Where the rate of a group jumps and those of other groups do not, though a schedule had moved all alike."""
    pairs = list(zip(setting.step_n, setting.value_n, strict=True))
    for number, ((since, before), (step, value)) in enumerate(pairwise(pairs), 1):
        if step - since > 1 or not before or not value or factor(value / before) <= RATE_APART:
            continue
        for other in rates:
            both = np.intersect1d(other.step_n, setting.step_n[:number])
            mine_n, other_n = setting.at(both), other.at(both)
            ratios = mine_n[other_n != 0] / other_n[other_n != 0]
            other_before, other_now = other.at([since, step]).tolist()
            apart = factor(value / before * other_before / (other_now or TINY))
            if apart > RATE_APART and step - pairs[0][0] >= CALM_STEPS:
                if len(ratios) >= LASTING and ratios.max() < (1 + SAME) * ratios.min():
                    yield Change(setting.name, setting.parts, since, step, before, value)
                return
