"""Signs in a recording that something is wrong: each means so by itself, and no healthy loop shows it."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate, chain, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.analysis.runaway import read_runaways
from lab.analysis.spikes.trend import loss_spikes
from lab.core import shipped
from lab.core.windows import Numbers
from labwatch.recordings.moves import TIMES_LARGEST, TINY, USUAL, Move, moves_of
from labwatch.recordings.recording import (
    DECAYS,
    MAX_NORM,
    OF_LOSS,
    STATES_LOST,
    SWITCHES,
    UPDATES,
    Recording,
    Setting,
)

# The learning rate jumps if it rises by this factor, and by as many times its largest rise per step before; or if it
# falls in one step to zero, or for good by a factor that no step decay has, from more than this share of its peak.
RATE_JUMP, RATE_FALL, LEAST_RATE = 3.0, 15.0, 0.06
# Other settings jump if they, or what a decay leaves to the next number, change by this factor after so many steps in
# which they did not: numbers that jump more often are kept by the optimizer itself.
SETTING_JUMP, CALM_STEPS = 3.0, 20
# What is constant does not differ by this share from its first value; it changes by this factor at least.
SAME, CONSTANT_CHANGE = 1e-3, 1.5
# The loss is that of the labels seen in a sample if the two are apart by so many times as much as ever before.
LABELS_APART = 5.0
# A block is unlike the others from the first row on if its weights are larger by this factor than their median.
# Or if its attention logits are so many times smaller, as those of small queries and keys.
UNLIKE, SMALLER_LOGITS = 4.0, 30.0
# Attention has collapsed if its entropy is so small, in nats.
COLLAPSED = 0.05
# A model is sure of what it predicts if its output logits have this standard deviation. It has learned nothing if those
# of labels lie by less than so many deviations above the others. Attention and routers are sure if their largest logits
# are so large. Initial matrices are wide if one makes random numbers so many times as large, and narrow if none makes
# them more than so large; a gain of one keeps their size.
SURE, LIKELIER, SURE_LOGITS, WIDE, NARROW = 3.0, 0.5, 8.0, 3.0, 0.02
# Weights have moved by more than their updates can if it is so many times what these explain. The first are small. They
# stay behind their updates if the logarithm of that is so far below the rows before, for some rows.
BEYOND_UPDATES, OF_FIRST, BEHIND_UPDATES = 3.4, 2.0, 0.65
# What a block makes of its input, or its attention logits, change apart from the others if their logarithm changes by
# so much more, by so many times the median spread of the others, and by ``TIMES_LARGEST`` times as much as ever: blocks
# drift apart while they learn, each at its own time. Logits smaller than the least are harmless.
APART, LOGITS_APART, SPREADS, LEAST_LOGIT = 0.7, 2.0, 8.0, 1.0
# Gradients change apart from those of the next part by this factor.
GRADIENTS_APART = 3.0
# What functions and weights of attention are called. Code that changes is of attention, too, if in the first of its
# blocks logits change by this factor, or what its mask leaves does by this share. What only gradients notice: functions
# that keep all values, and a weight that is taken out of the graph.
OF_ATTENTION = r"att(n|ention)(\.|_func|_forward)|dot_product_attention|flex_attention"
ATTENTION_LEAPS, OTHER_MASK = 2.0, 0.01
OF_ATTENTION_MODULE = r"[ .](self_)?att(n|ention)\."
KEEPS_VALUES, TAKEN_OUT = re.compile("(no longer|now) (detach|clone|contiguous|alias|requires_grad_)"), "now detach of"
FORMAT = re.compile(r" in b?float\d+$")
CAST = re.compile(r"^(no longer|now) (to|float|half|bfloat16|double|type|type_as)\b")
NUMBER = re.compile(r"-?\d[\d.e+-]*")
NOT_USED = "which is not used"
# A loss scale has fallen if it is so many times below the largest before. Gradients overflow at any scale if they do in
# so many rows in a row.
SCALE_FALL, OVERFLOWS = 64.0, 3
# The same batches come again and again, or a few in turn, if over so many steps the loss bends less by this factor than
# just before, from each step to those that many before it.
REPEATED_STEPS, REPEATED_BENDS, IN_TURN = 16, 8.0, (1, 2, 3, 4)
# The loss rose in one step if that has half of the usual rise, which lasted so many steps: an instability builds up. It
# fell in one step if its logarithm is by so much, and by all that it varied in as many steps, below all of these.
STEP_LASTS, LOSS_FALL = 10, 0.25
# A learning rate that falls by ``RATE_JUMP`` in one step and only rises after it, to this share of what it was, warms
# up once more. A schedule has ended too early if for this share of all steps the rate is below such a share of its
# peak, and before that fell, per step, so many times as fast as ever, and by so much more; or fell all the way in such
# a share of the steps in which it had been constant; or if it is zero.
BACK, ENDED_STEPS, ENDED_RATE, FASTER, STEEPER, QUICK = 0.5, 0.1, 0.008, 5.0, 1.5, 0.5
# A rate that did not rise for ``CALM_STEPS`` rises to another peak if that is so many times the one before.
BEYOND_PEAK = 10.0
# The rate of a group jumps apart from the others if it does by this factor, and they had one ratio until then.
RATE_APART = 1.6
# What writes weights in more steps than this that lie apart, or in the first steps, does so by habit, unless it began
# later than so many times the steps that lie between.
HABIT, LATE_HABIT = 2, 5
# So many steps after the loss moved, parts may differ because they have learned from what came.
LEARNED_STEPS = 5
# All changes while a model learns its first things, and no row tells yet what is usual. So only changes are judged that
# come after a row by which the learning rate has warmed up and the fall of the loss slowed down: over the steps so far,
# so many at least, it fell as much from the first quarter to the middle as from there to the last quarter.
FEWEST_STEPS = 25
# A policy leaves its reference if in so many rows the KL divergence, whose growth had slowed down, grows so many times
# as fast as ever before, and to so many times what it was. That begins where it leaves what it was by the last factor,
# by which it also does not grow over ``USUAL`` rows if it grows no more.
# It is no longer apart from it, since that is renewed with it, if from one row on the divergence is below such a share.
KL_ROWS, KL_GROWTH, KL_LEFT, KL_GONE = 5, 2.0, 1.25, 1e-3
# A policy has other samples if in three rows its surprisal at them, less its entropy, is off from what it was by so
# many nats, and other weights of them if their mean over their RMS is by so much; in fewer rows, at the end, by more,
# since 512 tokens may be off by 0.1. Weights are larger if the logarithm of their RMS is so far above all before.
OF_SAMPLES = {"excess_surprisal": 0.2, "sample_weight": 0.3, "sample_weight_rms": 1.1}
# A reward has fallen if it is below the rows before by this share of the highest, and by more than they differ.
REWARD_FALL = 0.15
# The optimizer is another one if in three rows the signs of updates agree by so much more or less with gradients.
OTHER_SIGNS = 0.3
# What is stationary has shifted if, after so many rows, some lie apart from all before, in their mean by so many standard
# errors, and its logarithm by so much.
SHIFT_ROWS, SHIFT_ERRORS, SHIFT = 8, 7.0, 0.1
SOLVED = 0.02  # so near to its highest, relatively, a reward is as good as that
LEAPS = 4.0  # times what a share ever was
LARGEST = 600.0  # of which the exponential is finite
LASTS = 3  # rows after which a move is not that of single batches
MOST = 0.7  # the share of parts in which something is so, if it is so of most
MOST_HABITS = 0.5  # the share of parts in which a loop changes something by habit, so that small changes mean nothing
LASTING = 2  # rows in which something that is exactly zero stays so
FEWEST_ROWS = 3
FEWEST_TO_SKIP = 6  # rows after which it is no chance if a part skips something in the last ones alone


@cache
def quantities() -> Mapping[str, Mapping[str, Any]]:
    """What is known of each quantity, by its name; see the file."""
    table: dict[str, dict[str, Any]] = shipped.load(Path(__file__).with_name("quantities.yaml"))
    for known in table.values():
        if "runs_away" in known:
            known["level"] = read_runaways()[known["runs_away"]].level
    return table


class Change(NamedTuple):
    """A setting of some parts of the model, or of all, which was one value at a step and another at the next one."""

    name: str
    parts: Sequence[str]
    since: int
    step: int
    before: float
    value: float


class Sign(NamedTuple):
    """Something that is wrong, seen first at a row of a recording.

    Attributes:
        kind: of cause, a key of ``causes.yaml``.
        row: of the recording.
        parts: of the model; none for the whole.
        moves: the measurements that show it, as far as it is a move.
        weights: names of single ones, where they are known.
        changes: of settings, if these are what is wrong.
        is_exact: it is known without noise, so what moved at the same row follows from it.
        functions: of torch that are called no longer, or now.
        at: the step at which it began, if that is known and lies between rows.
        begins: of several parts of which gradients changed, it names the one from which the backward pass did so.
        is_harmless: it is no alarm, since neither the loss nor gradients grew with it.
    """

    kind: str
    row: int
    parts: Sequence[str] = ()
    moves: Sequence[Move] = ()
    weights: Sequence[str] = ()
    changes: Sequence[Change] = ()
    is_exact: bool = False
    functions: Sequence[str] = ()
    at: int | None = None
    begins: bool = False
    is_harmless: bool = False


class Rise(NamedTuple):
    """The first and the last step at which the loss lies above what it was, and whether it went there at once."""

    first: int
    last: int
    is_step: bool


class Readings:
    """A recording, its moves, and the rises of its loss."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.step_m = recording, recording.step_m
        self.places = sorted({place for _, place in recording.columns if place} - {OF_LOSS})
        blocks = [place for place in self.places if place.startswith("block")]
        self.blocks = sorted(blocks, key=lambda block: int(block[5:]))
        warm = int(np.argmin(np.append(np.diff(self.column("lr")) > 0, False)))
        self.is_of_rewards = self.has("reward")  # where the loss says little, and is in no unit
        settled = _settled_step(recording.loss_step_n, recording.loss_n, is_of_rewards=self.is_of_rewards)
        self.settled = max(warm, self.row_of(settled))  # the row after which changes are judged
        self.moves = {
            (name, place): self._moves(name, place)
            for name, known in quantities().items()
            for place in recording.places(name)
            if "kind" in known and ("alarm" in known or known.keys().isdisjoint(("share", "constant", "counts")))
        }
        self.solved_m = _solved(self.column("reward"))
        # so that gradients are zero, or small
        self.teach_nothing_m = (self.column("zero_variance_groups") == 1) | self.solved_m
        self.rises = [] if self.is_of_rewards else rises_of_loss(recording.loss_step_n, recording.loss_n)

    @cached_property
    def takes_turns(self) -> bool:
        """Whether parts that had no gradients get some, as in a loop that freezes and unfreezes parts by plan."""
        has_pm = np.isfinite([self.column("grad_rms", place) for place in self.recording.places("grad_rms")])
        return bool((np.diff(has_pm[:, has_pm.any(0)].astype(int), axis=1) > 0).any()) if len(has_pm) else False

    def means_nothing(self, known: Mapping[str, Any]) -> NDArray[np.bool_]:
        """``[m]`` where a quantity, of which this is known, says nothing."""
        nothing_m = np.zeros(len(self.step_m), dtype=bool)
        return getattr(self, f"{known['unless']}_m") if "unless" in known else nothing_m

    def column(self, name: str, place: str = "") -> Numbers:
        """A measurement ``[m]``; gradients of a part are those before they were clipped by the norm of all."""
        columns = self.recording.columns
        value_m = columns.get((name, place), np.full(len(self.step_m), math.nan))
        if name != "grad_rms" or ("grad_norm", "") not in columns or ("grad_norm_clipped", "") not in columns:
            return value_m
        with np.errstate(invalid="ignore", divide="ignore"):
            factor_m = columns["grad_norm", ""] / columns["grad_norm_clipped", ""]
            return np.where(np.isfinite(factor_m) & (factor_m > 0), value_m * factor_m, value_m)

    def _moves(self, name: str, place: str) -> list[Move]:
        value_m = self.column(name, place)
        if name != "reward":
            return list(moves_of(name, place, value_m, self.settled))
        size = float(np.nanmedian(np.abs(value_m))) or 1.0  # rewards may be negative, so they differ by no factor
        moves = moves_of(name, place, np.exp(np.clip(value_m / size, -LARGEST, LARGEST)), self.settled)
        return [move._replace(value=size * math.log(move.value), usual=size * math.log(move.usual)) for move in moves]

    def has(self, name: str) -> bool:
        return bool(self.recording.places(name))

    def row_of(self, step: float) -> int:
        """The first recorded row that shows a step, or else the last one."""
        return min(int(np.searchsorted(self.step_m, step)), len(self.step_m) - 1)

    def rise_before(self, row: int) -> Rise | None:
        """The rise of the loss that began after the row before and up to this row; None if there is none."""
        since = self.step_m[row - 1] if row else -1
        return next((rise for rise in self.rises if since < rise.first <= self.step_m[row]), None)

    def change(self, name: str, place: str, row: int) -> Move:
        """What a measurement did from the row before, also where that is no move against its own noise."""
        known = next((move for move in self.moves.get((name, place), []) if move.row == row), None)
        value_m = self.column(name, place)
        before = float(value_m[self.row_before(row, value_m)])
        return known or Move(name, place, row, row + 1, float(value_m[row]), before, math.nan)

    def row_before(self, row: int, value_m: Numbers) -> int:
        """The last row before in which a number was recorded; at a rise of the loss some rows have only a few."""
        known = np.flatnonzero(~np.isnan(value_m[:row]))
        return int(known[-1]) if len(known) else row - 1

    def at_start(self, name: str) -> dict[str, float]:
        """By block what was measured in the first row; NaN where nothing was."""
        return {block: float(self.column(name, block)[0]) for block in self.blocks}

    def named(self, what: str) -> dict[int, dict[str, list[str]]]:
        """By row and part the names of weights of which something is so."""
        found = dict[int, dict[str, list[str]]]()
        for (name, place), of_rows in self.recording.names.items():
            for row, names in of_rows.items() if name == what else ():
                found.setdefault(row, {})[place] = names
        return dict(sorted(found.items()))


def _solved(reward_m: Numbers) -> NDArray[np.bool_]:
    """Where rewards have been nearly the highest for some rows, and were lower at first: nothing is left to learn."""
    highest_m = np.fmax.accumulate(reward_m)
    least_m = highest_m - SOLVED * np.abs(highest_m)
    lowest_m = sliding_window_view(np.append(np.full(LASTS - 1, -math.inf), reward_m), LASTS).min(1)
    solved_m: NDArray[np.bool_] = (lowest_m >= least_m) & (least_m > reward_m[:1])
    return solved_m


def _settled_step(step_n: NDArray[np.int64], loss_n: Numbers, *, is_of_rewards: bool = False) -> float:
    """The first step by which the fall of the loss slowed down, if it need fall; infinite if none is."""
    end = FEWEST_STEPS
    while end <= len(loss_n):
        first, middle, last = (np.median(part_n) for part_n in np.split(loss_n[:end], [end // 4, end - end // 4]))
        if is_of_rewards or first - middle >= middle - last:
            return int(step_n[end - 1])
        end += end // 4
    return math.inf


def rises_of_loss(step_n: NDArray[np.int64], loss_n: Numbers) -> list[Rise]:
    """The loss spikes ``[n]``, from the first step to that of the ending, without those of the first steps."""
    settled, found = _settled_step(step_n, loss_n), list[Rise]()
    if math.isinf(settled):
        settled = int(step_n[:FEWEST_STEPS].max(initial=0))
    for span in loss_spikes(step_n, loss_n):
        end = len(step_n) - 1 if span.end is None or span.ending in ("stuck", "diverged", "anew") else span.end
        before = np.median(loss_n[max(0, span.first - STEP_LASTS) : span.first])
        rise_n = loss_n[span.first : end + 1] - span.usual
        is_step = end - span.first >= STEP_LASTS and rise_n[0] >= np.median(rise_n) / 2
        falls = loss_n[span.first : end + 1].mean() < before  # more slowly than before, as after a steep fall
        if step_n[span.first] > settled and not falls:
            found.append(Rise(int(step_n[span.first]), int(step_n[end]), bool(is_step)))
    return found


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
        of_schedule = (*_ended_early(setting, last), *_beyond_peak(setting))
        for change in (*_jumps(setting, last), *of_schedule, *_leaves_others(setting, rates)):
            if setting.name == MAX_NORM:  # which is read at measured updates alone
                change = change._replace(since=int(read.step_m[read.row_of(change.step) - 1]))
            if places <= {*change.parts}:
                change = change._replace(parts=())
            kinds = {"lr": "rate", UPDATES: "optimizer" if change.value else "frozen"}
            kind = kinds.get(setting.name, "optimizer")
            if change not in (changes := found.setdefault((kind, change.step), [])):
                changes.append(change)
    for (kind, step), changes in found.items():
        parts = {place for change in changes for place in change.parts}
        everywhere = parts == places or not all(change.parts for change in changes)
        yield Sign(kind, read.row_of(step), [] if everywhere else sorted(parts), changes=changes, is_exact=True)


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
            is_jump = max(_factor(ratio), _factor(left)) > SETTING_JUMP
            jumps = is_jump and step - calm_since >= CALM_STEPS and (step - since == 1 or setting.name == MAX_NORM)
            calm_since = step if is_jump else calm_since
        if jumps:
            yield Change(setting.name, setting.parts, since, step, before, value)


def _highest_later(setting: Setting) -> list[float]:
    """Of each value the highest from it on."""
    return list(accumulate(reversed(setting.value_n), max))[::-1]


def _ended_early(setting: Setting, last: int) -> Iterator[Change]:
    """Where a rate that has ended before the run began to fall so fast, or after it had been constant for long."""
    if setting.name != "lr" or not setting.value_n:
        return
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
        if value == 0 < before and last - step >= ENDED_STEPS * last:
            yield Change(setting.name, setting.parts, since, step, before, value)


def _beyond_peak(setting: Setting) -> Iterator[Change]:
    """Where a rate that had risen no more begins to rise far above its peak."""
    highest, calm_since, later_n = 0.0, 0, _highest_later(setting)
    pairs = list(zip(setting.step_n, setting.value_n, strict=True)) if setting.name == "lr" else []
    for number, ((since, before), (step, value)) in enumerate(pairwise(pairs), 1):
        highest = max(highest, before)
        if value > before:
            if since - calm_since >= CALM_STEPS and later_n[number] > BEYOND_PEAK * highest > 0:
                yield Change(setting.name, setting.parts, since, step, before, value)
                return
            calm_since = step


def _leaves_others(setting: Setting, rates: Sequence[Setting]) -> Iterator[Change]:
    """Where the rate of a group jumps and those of other groups do not, though a schedule had moved all alike."""

    def rate(of: Setting, step: int) -> float:
        return of.value_n[max(bisect_right(of.step_n, step) - 1, 0)]

    if setting.name != "lr":
        return
    pairs = list(zip(setting.step_n, setting.value_n, strict=True))
    for number, ((since, before), (step, value)) in enumerate(pairwise(pairs), 1):
        if step - since > 1 or not before or not value or _factor(value / before) <= RATE_APART:
            continue
        for other in rates:
            both = {*other.step_n} & {at for at, _ in pairs[:number]}
            ratios = [rate(setting, at) / rate(other, at) for at in both if rate(other, at)]
            apart = _factor(value / before * rate(other, since) / (rate(other, step) or TINY))
            if apart > RATE_APART and step - pairs[0][0] >= CALM_STEPS:
                if len(ratios) >= LASTING and max(ratios) < (1 + SAME) * min(ratios):
                    yield Change(setting.name, setting.parts, since, step, before, value)
                return


def _factor(ratio: float) -> float:
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def not_finite(read: Readings) -> Iterator[Sign]:
    """The first row with numbers that are not finite, by the parts in which they are."""
    scaled = read.has("loss_scale")
    of_names = {what: read.named(f"{what}_not_finite") for what in ("weight", "gradient", "update")}
    rows = [next(iter(rows)) for what, rows in of_names.items() if rows and not (scaled and what == "gradient")]
    names = ("block_rms", "param_rms", "attention_logit_max", *(() if scaled else ("grad_rms",)), "update_rms")
    infinite = {
        (name, place): int(np.argmax(value_m))
        for (name, place), column_m in read.recording.columns.items()
        if name in names and place and (value_m := np.isinf(column_m)).any()
    }
    bad_step_n = read.recording.loss_step_n[~np.isfinite(read.recording.loss_n)]
    began_well = len(bad_step_n) and bad_step_n[0] > read.recording.loss_step_n[0]
    loss_at = int(bad_step_n[0]) if began_well and not scaled else None
    if not rows and not infinite:
        if loss_at is not None and read.column("row_share")[read.row_of(loss_at)] != 0:  # of no label, which is of data
            yield Sign("not_finite", read.row_of(loss_at), at=loss_at)
        return
    first = min([*rows, *infinite.values()])
    at = loss_at if loss_at is not None and loss_at <= read.step_m[first] else None
    for what in ("weight", "activation", "gradient", "update"):
        parts = of_names.get(what, {}).get(first, {})
        if what == "activation":
            found = [
                place for (name, place), row in infinite.items() if row == first and name.startswith(("block", "att"))
            ]
            parts = {place: [] for place in found[:1]} if len(found) < len(read.blocks) or len(found) == 1 else {}
        if parts and not (what == "gradient" and scaled):
            yield Sign(
                "not_finite", first, sorted(parts), weights=[name for of in parts.values() for name in of], at=at
            )
            return
    yield Sign("not_finite", first, sorted({place for (_, place), row in infinite.items() if row == first}), at=at)


def zero_gradients(read: Readings) -> Iterator[Sign]:
    """Weights whose gradients are exactly zero in some rows in a row."""
    rows = {row: parts for row, parts in read.named("gradient_zero").items() if not read.teach_nothing_m[row]}
    end = len(read.step_m)
    for row, parts in rows.items():
        lasts = LASTING + (row == 0)  # behind two matrices that are zero at first there are no gradients in two updates
        is_first = row == next(filter(None, rows), None) and row >= LASTING  # and the last row may show it alone
        then = [rows.get(later, {}) for later in range(row + 1, min(row + lasts, end) if is_first else row + lasts)]
        lasting = {
            place: kept
            for place, names in parts.items()
            if (kept := [name for name in names if all(name in zero.get(place, []) for zero in then)])
        }
        if lasting:
            yield Sign("dead", row, sorted(lasting), weights=[name for of in lasting.values() for name in of])
            return


def silent(read: Readings) -> Iterator[Sign]:
    """Blocks of which something is zero from one row on that never was; one block whose attention has collapsed."""
    for name in ("block_rms", "attention_logit_max", "attention_entropy", "router_logit_max"):
        least = COLLAPSED if name == "attention_entropy" else 0.0
        rows = dict[str, int]()
        for block in read.blocks:
            value_m = np.abs(read.column(name, block))
            row_n = np.flatnonzero(np.isfinite(value_m))
            usual = int((value_m[row_n] > least).sum())
            if LASTING <= usual < len(row_n) and (value_m[row_n[usual:]] <= least).all():
                rows[block] = int(row_n[usual])
        for block, row in rows.items() if not least or len(rows) == 1 else ():  # it collapses in all by what they get
            yield Sign(quantities()[name]["kind"], row, [block], [read.change(name, block, row)], is_exact=not least)


def frozen(read: Readings) -> Iterator[Sign]:
    """Parts that lose their gradients, or whose updates become zero, while others are trained."""
    places = read.recording.places("grad_rms")
    for place in () if read.takes_turns else places:
        is_trained_m = np.isfinite(read.column("grad_rms", place)) & ~(read.column("update_ratio", place) == 0)
        others_m = np.zeros(len(is_trained_m), dtype=bool)
        for other in places:
            others_m |= np.isfinite(read.column("grad_rms", other)) & (other != place)
        lost = np.flatnonzero(~is_trained_m & others_m & (read.column("lr") != 0))
        if len(lost) and not is_trained_m[lost[0] :].any() and is_trained_m[: lost[0]].any():
            yield Sign("frozen", int(lost[0]), [place])


def lost_gradients(read: Readings) -> Iterator[Sign]:
    """Weights that get no gradient any more, in no row from one on, though they did in those before."""
    yield from _never_again(read, read.named("gradient_missing"))


def lost_updates(read: Readings) -> Iterator[Sign]:
    """Weights of some parts whose updates are zero in each row from one on, while the rate is not much lower.

    Unless those of others are so by chance, now and then, as of scalars under an optimizer that masks signs.
    """
    rate_m, places = read.column("lr"), read.recording.places("update_ratio")
    high_m = rate_m >= BACK * np.fmax.accumulate(rate_m)
    rows = {row: of for row, of in read.named("update_zero").items() if len(of) < MOST * len(places)}
    signs = list(_never_again(read, rows))
    if {name for sign in signs for name in sign.weights} == {x for of in rows.values() for x in chain(*of.values())}:
        yield from (sign for sign in signs if high_m[sign.row])


def _never_again(read: Readings, lacking: Mapping[int, Mapping[str, list[str]]]) -> Iterator[Sign]:
    """Weights that lack something in each row from one on, and in none before."""
    updates_pm = [read.column("update_ratio", place) for place in read.recording.places("update_ratio")]
    missing, found = defaultdict[tuple[str, str], list[int]](list), defaultdict[int, list[tuple[str, str]]](list)
    measured = [
        row for row in range(len(read.step_m)) if row in lacking or any(np.isfinite(m[row]) for m in updates_pm)
    ]
    for row, parts in lacking.items():
        for place, names in parts.items():
            for name in names:
                missing[place, name].append(row)
    for key, rows in missing.items():
        if rows == [row for row in measured if row >= rows[0]]:
            found[rows[0]].append(key)
    for row, lost in () if read.takes_turns else found.items():
        weights = [name for _, name in lost]
        yield Sign("frozen", row, sorted({place for place, _ in lost}), weights=weights, is_exact=True)


def written_weights(read: Readings) -> Iterator[Sign]:
    """Weights that something else than the optimizer writes, unless it always did or does so again and again."""
    start = int(read.recording.loss_step_n[0]) if len(read.recording.loss_step_n) else 0
    early = start + CALM_STEPS
    of_habit = {
        name for step, parts in read.recording.written.items() if step < early for of in parts.values() for name in of
    }  # as an average of the weights that is a part of the model
    written = [
        (step, {place: rest for place, names in parts.items() if (rest := [x for x in names if x not in of_habit])})
        for step, parts in read.recording.written.items()
    ]
    begun = [(step, parts) for (_, before), (step, parts) in pairwise([(0, {}), *written]) if parts and not before]
    if len(begun) > HABIT:
        (first, _), (second, _), *_ = begun
        is_late = first - start > LATE_HABIT * (second - first)
        begun = begun[:1] if is_late else []
    for step, parts in begun:
        names = [name for of in parts.values() for name in of]
        yield Sign("weights", read.row_of(step), sorted(parts), weights=names, is_exact=True, at=step)


def other_functions(read: Readings) -> Iterator[Sign]:
    """Parts that call other functions of torch, or with other numbers, than in all rows before, from one row on."""
    found = defaultdict[int, dict[str, list[str]]](dict)
    for (what, place), of_rows in read.recording.names.items():
        if what == "functions" and (change := _one_change(of_rows)):
            row, words = change
            found[row][place] = words
    yield from _other_loss(read, found)
    for row, of in found.items():
        if taken := {place: names for place in of if (names := [x for x in of[place] if x.startswith(TAKEN_OUT)])}:
            of = taken
        if of.keys() == {"embedding"} and row in read.recording.names.get(("given", ""), {}):
            continue  # positions and masks of a batch of another shape are made by other calls
        functions = list(dict.fromkeys(name for names in of.values() for name in names))
        if of:
            kind = _kind_of_code(read, row, of.keys(), functions)
            yield Sign(kind, row, sorted(of), functions=functions, is_exact=True)
    yield from _other_calls(read, found)


def _other_loss(read: Readings, found: Mapping[int, dict[str, list[str]]]) -> Iterator[Sign]:
    """The code of the loss changed: what a policy is trained for, or what labels mean, or a factor of all gradients.

    Its functions are taken out of those that were found.
    """
    rows = {row: of.pop(OF_LOSS) for row, of in found.items() if OF_LOSS in of}
    one_row = _one_other(read.column("code", OF_LOSS))
    if one_row is not None and one_row not in found:
        rows[one_row] = []
    for row, functions in rows.items():
        if found.get(row) or (
            row != one_row and _differ_little(functions)
        ):  # it follows code of parts, or hardly changed
            continue
        move = Move("loss_code", "", row, row + 1, 1.0, 1.0, math.nan)
        calls = read.recording.names.get(("calls", OF_LOSS), {}).get(row, [])
        changed = {
            name
            for name in ("loss_weight", "cross_entropy")
            if any(sign.row == row for sign in no_longer_constant(read, name))
        }
        kind = "gradients" if changed == {"loss_weight"} else "policy" if read.is_of_rewards else "data"
        functions = [*functions, *calls]
        yield Sign(kind, row, (), [move], functions=functions, is_exact=True, is_harmless=_is_harmless(read, row))


def _is_harmless(read: Readings, row: int) -> bool:
    """Whether neither the loss nor gradients grew as the loss changed, as they need not where that is planned."""
    norm_m = read.column("grad_norm")
    before, after = (norm_m[max(0, row - LASTS) : row], norm_m[row : row + LASTS])
    grew = read.rise_before(row) is not None or not np.median(after) < CONSTANT_CHANGE * np.median(before)
    return not (grew or read.is_of_rewards)


def _differ_little(functions: Sequence[str]) -> bool:
    """Whether functions that are gone and new are the same, with numbers that differ by little."""
    gone, new = (
        [name.removeprefix(how) for name in functions if name.startswith(how)] for how in ("no longer ", "now ")
    )
    without = [sorted(NUMBER.sub("", name) for name in of) for of in (gone, new)]
    pairs = zip(*([float(x) for name in sorted(of) for x in NUMBER.findall(name)] for of in (gone, new)), strict=False)
    return without[0] == without[1] and all(_factor(a / b if b else math.inf) < CONSTANT_CHANGE for a, b in pairs)


def _changes_once(rows: Sequence[int]) -> bool:
    """Whether code that changed in these rows did so once, or once more in the next row, and not among the first."""
    return bool(rows) and rows[-1] <= rows[0] + 1 and rows[0] >= FEWEST_ROWS - 1


def _one_other(code_m: Numbers) -> int | None:
    """The row in which a number that is written where it changes did so."""
    row_n = np.flatnonzero(np.isfinite(code_m))
    changed = [int(row) for before, row in pairwise(row_n) if code_m[before] != code_m[row]]
    return changed[0] if _changes_once(changed) and code_m[row_n[0]] != code_m[row_n[-1]] else None


def _one_change(of_rows: Mapping[int, Sequence[str]]) -> tuple[int, list[str]] | None:
    """The row in which a list that is written where it changes did so, and what is gone and new, in words."""
    told = [(row, {*names}) for row, names in sorted(of_rows.items())]
    changes = [(row, before, now) for (_, before), (row, now) in pairwise(told) if before != now]
    if not _changes_once([row for row, *_ in changes]):
        return None
    (row, before, _), (*_, now) = changes[0], changes[-1]
    if before == now:
        return None
    gone, new = sorted(before - now), sorted(now - before)
    return row, [*(f"no longer {name}" for name in gone), *(f"now {name}" for name in new)]


def _other_calls(read: Readings, other_functions: Mapping[int, Collection[str]]) -> Iterator[Sign]:
    """Parts that call the same functions more or less often, or with the outputs of others.

    Few rows do not tell this of a single part, in which chance may skip something, nor of a batch of another shape.
    """
    found = defaultdict[int, list[str]](list)
    for place in read.recording.places("code"):
        row, told = _one_other(read.column("code", place)), read.recording.names.get(("functions", place), {})
        is_added = row in told and row == min(told)  # a part that was not used until then
        if row is not None and place != OF_LOSS and not is_added:
            found[row].append(place)
    reshaped = read.recording.names.get(("given", ""), {})
    for row, places in found.items():
        is_of_most = len({*places} & {*read.blocks}) >= max(2, MOST * len(read.blocks))
        if row in reshaped or row in other_functions or not (is_of_most or len(read.step_m) >= FEWEST_TO_SKIP):
            continue
        calls = [name for place in places for name in read.recording.names.get(("calls", place), {}).get(row, [])]
        functions = list(dict.fromkeys(calls)) or ["other calls than before"]
        yield Sign(_kind_of_code(read, row, places, functions), row, sorted(places), functions=functions, is_exact=True)


def other_arguments(read: Readings) -> Iterator[Sign]:
    """Arguments of the model that are missing or new from one row on, or of another number format or number of axes."""
    rows = read.recording.names.get(("given", ""), {})
    without_sizes = {row: [re.sub(r"\d+(?=[,\]])", "n", name) for name in of] for row, of in rows.items()}
    if change := _one_change(without_sizes):
        row, functions = change
        move = Move("given", "", row, row + 1, 1.0, 1.0, math.nan)
        yield Sign("data", row, (), [move], functions=functions, is_exact=True)


def written_buffers(read: Readings) -> Iterator[Sign]:
    """Buffers that had the same values in all rows, and have others in all rows from one on."""
    found, rows_of = defaultdict[int, dict[str, list[str]]](dict), defaultdict[tuple[str, str], list[int]](list)
    for (what, place), of_rows in read.recording.names.items():
        for row, names in of_rows.items() if what == "buffer_written" else ():
            for name in names:
                rows_of[place, name].append(row)
    for (place, name), rows in rows_of.items():
        if len(rows) == 1 and rows[0] >= FEWEST_ROWS - 1:
            found[rows[0]].setdefault(place, []).append(name)
    for row, of in found.items():
        moves = [Move("buffer_written", place, row, row + 1, 1.0, 0.0, math.nan) for place in of]
        yield Sign("weights", row, sorted(of), moves, [name for names in of.values() for name in names], is_exact=True)


def _kind_of_code(read: Readings, row: int, places: Collection[str], functions: Sequence[str]) -> str:
    """What changes with the functions of some parts: gradients alone, the head, the choice of experts, or attention."""
    told = [name for name in functions if not name.endswith(NOT_USED)]
    if any("no part of the model" in name for name in told) or (told and all(map(KEEPS_VALUES.search, told))):
        return "gradients"
    gone, new = (
        {name.removeprefix(how) for name in told if name.startswith(how) and not CAST.search(name)}
        for how in ("no longer ", "now ")
    )
    in_gone, in_new = ({FORMAT.sub("", name) for name in of} for of in (gone, new))
    others = (gone - in_new - {*filter(FORMAT.search, gone)}) | (new - in_gone - {*filter(FORMAT.search, new)})
    if not others and any(FORMAT.search(name) or CAST.search(name) for name in told):
        return "precision"
    if {*places} == {"head"}:
        return "output_logits"
    calls = [name for place in places for name in read.recording.names.get(("calls", place), {}).get(row, [])]
    if calls and not all(re.search(OF_ATTENTION_MODULE, name.partition("(")[0]) for name in calls):
        return "activations"
    if all("topk" in name for name in functions):
        return "router"
    first = [block for block in read.blocks if block in places][:1]
    change = [abs(read.change("attention_logit_max", block, row).change) for block in first]
    masks = [read.change(name, block, row) for name in ("attention_ahead", "attention_seen") for block in first]
    leaps = any(math.log(ATTENTION_LEAPS) < size < math.inf for size in change)
    leaps |= any(abs(mask.value - mask.usual) > OTHER_MASK for mask in masks)
    return "attention" if leaps or all(re.search(OF_ATTENTION, name) for name in functions) else "activations"


def lost_counts(read: Readings) -> Iterator[Sign]:
    """Optimizers that have counted fewer updates than at the row before."""
    found = dict[int, list[Move]]()
    for place in read.recording.places("state_updates"):
        count_m = read.column("state_updates", place)
        for row in (np.flatnonzero(np.diff(count_m) < 0) + 1).tolist():
            move = Move("state_updates", place, row, row + 1, float(count_m[row]), float(count_m[row - 1]), math.nan)
            found.setdefault(row, []).append(move)
    for row, moves in found.items():
        yield Sign("optimizer", row, [move.place for move in moves], moves, is_exact=True)


def unlike_weights(read: Readings) -> Iterator[Sign]:
    """Blocks whose weights are larger than those of the other blocks from the first row on."""
    rms = read.at_start("param_rms")
    for block, value in rms.items():
        usual = float(np.median([other for name, other in rms.items() if name != block] or [math.nan]))
        if len(rms) >= 3 and value > UNLIKE * usual:
            yield Sign("weights", 0, [block], [Move("param_rms", block, 0, 1, value, usual, math.inf)])
    logits = read.at_start("attention_logit_max")
    for block, value in logits.items():
        least = min([other for name, other in logits.items() if name != block], default=math.nan)
        if len(logits) >= 3 and 0 < value * SMALLER_LOGITS < least:
            yield Sign("weights", 0, [block], [Move("attention_logit_max", block, 0, 1, value, least, math.inf)])


def unusual_initial_values(read: Readings) -> Iterator[Sign]:
    """Initial matrices that are all too small; or ones that are too large, as logits may show, too.

    These may be so after training, so labels are no more likely than other tokens.
    """
    gains = [
        Move("weight_gain", place, 0, 1, float(read.column("weight_gain", place)[0]), math.nan, math.inf)
        for place in read.recording.places("weight_gain")
    ]
    if gains and max(gain.value for gain in gains) < NARROW:
        yield Sign("weights", 0, [gain.place for gain in gains], gains)
    names = ("output_logit_rms", "output_logit_mean", "log_z", "label_loss")
    rms, mean, log_z, label_loss = (float(read.column(name)[0]) for name in names)
    deviation = math.sqrt(max(rms**2 - mean**2, 0.0))
    if not log_z - mean - label_loss < LIKELIER * deviation:
        return
    if wide := [gain for gain in gains if gain.value > WIDE]:
        yield Sign("weights", 0, [gain.place for gain in wide], wide)
    if deviation > SURE:
        yield Sign("output_logits", 0, moves=[Move("output_logit_rms", "", 0, 1, rms, math.nan, math.inf)])
    for name in ("attention_logit_max", "router_logit_max"):
        logits = read.at_start(name)
        if logits and min(logits.values()) > SURE_LOGITS:
            of_blocks = [Move(name, block, 0, 1, of, math.nan, math.inf) for block, of in logits.items()]
            yield Sign(quantities()[name]["kind"], 0, moves=of_blocks)


def weights_beyond_updates(read: Readings) -> Iterator[Sign]:
    """Weights that are farther from where they were at the row before than all updates between can have moved them."""
    least_m = BEYOND_UPDATES * np.where(np.arange(len(read.step_m)) < 2, OF_FIRST, 1.0)
    for place in read.recording.places("change_over_updates"):
        beyond_m = read.column("change_over_updates", place)
        if (beyond_m > least_m).any():
            row = int(np.argmax(beyond_m > least_m))
            names = read.recording.names.get(("weight_moved", place), {}).get(row, [])
            move = Move("change_over_updates", place, row, row + 1, float(beyond_m[row]), 1.0, math.nan)
            yield Sign("weights", row, [place], [move], names, is_exact=True)


def weights_behind_updates(read: Readings) -> Iterator[Sign]:
    """Weights that, in some rows in a row, move less far with the same updates than in the rows before."""
    name = "change_over_updates"
    for place in read.recording.places(name):
        row_n = np.flatnonzero(read.column(name, place) > 0)
        log_n = np.log(read.column(name, place)[row_n])
        later_kn, (lowest_n, _) = _later(log_n), _range_before(log_n)
        for n in np.flatnonzero(lowest_n - np.fmax.reduce(later_kn) > BEHIND_UPDATES * _of_fewer(later_kn)).tolist():
            if n >= FEWEST_ROWS and row_n[n] > read.settled:
                yield Sign("optimizer", int(row_n[n]), [place], [read.change(name, place, int(row_n[n]))])
                break


def outputs_apart(read: Readings) -> Iterator[Sign]:
    """Blocks whose output changed against their input, and apart from the outputs of other blocks."""
    gain_pm, entering_m = dict[str, Numbers](), read.column("input_rms")
    for block in read.blocks:
        leaving_m = read.column("block_rms", block)
        with np.errstate(invalid="ignore", divide="ignore"):
            gain_pm[block] = leaving_m / entering_m
        entering_m = leaving_m
    yield from _apart(read, gain_pm, APART, "block_rms", "activations")


def logits_apart(read: Readings) -> Iterator[Sign]:
    """Blocks whose largest attention logit changed apart from those of the other blocks."""
    logit_pm = {block: read.column("attention_logit_max", block) for block in read.blocks}
    of_size_pm = {block: np.maximum(logit_m, LEAST_LOGIT) for block, logit_m in logit_pm.items()}
    yield from _apart(read, of_size_pm, LOGITS_APART, "attention_logit_max", "attention")


def gradients_apart(read: Readings) -> Iterator[Sign]:
    """Parts whose gradients changed against those of the next part on the way to the loss, and for some rows.

    So a part counts from which on the backward pass goes wrong, and not all to which it comes after that.
    """
    parts = [part for part in ("embedding", *read.blocks, "head") if part in read.places]
    for part, later in pairwise(parts):
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio_m = read.column("grad_rms", part) / read.column("grad_rms", later)
        for move in moves_of("grad_rms", part, ratio_m, read.settled):
            lasts = move.end - move.row >= LASTS or move.end == len(read.step_m)
            if move.row > read.settled and lasts and abs(move.change) > math.log(GRADIENTS_APART):
                own, other = (read.change("grad_rms", each, move.row) for each in (part, later))
                farther = own if abs(own.change) >= abs(other.change) else other
                yield Sign("gradients", move.row, [farther.place], [farther], begins=True)
                return


def _changes(value_m: Numbers) -> Numbers:
    """The logarithm of the factor to each row from the last one before that is finite; NaN where it is not."""
    row_n = np.flatnonzero(np.isfinite(value_m))
    change_m = np.full(len(value_m) - 1, math.nan)
    change_m[row_n[1:] - 1] = np.diff(np.log(np.maximum(value_m[row_n], TINY)))
    return change_m


def _apart(read: Readings, value_pm: Mapping[str, Numbers], least: float, quantity: str, kind: str) -> Iterator[Sign]:
    """The first row at which the logarithm of a block changed by so much more or less than those of the others."""
    change_pm = {block: _changes(value_m) for block, value_m in value_pm.items()}
    for block, change_m in change_pm.items():
        others_pm = np.array([of_other_m for other, of_other_m in change_pm.items() if other != block])
        if len(others_pm) > 1:
            usual_m = np.median(others_pm, axis=0)
            spread_m = np.median(np.abs(others_pm - usual_m), axis=0)
            away_m = np.nan_to_num(np.abs(change_m - usual_m))
            largest_m = np.append(0.0, np.maximum.accumulate(away_m)[:-1])
            is_apart_m = away_m > np.maximum(least, np.maximum(SPREADS * spread_m, TIMES_LARGEST * largest_m))
            is_apart_m[: read.settled] = False
            if is_apart_m.any():
                row = int(np.argmax(is_apart_m)) + 1
                moves = [read.change(quantity, block, row)]  # without code or weights that changed, it may be learned
                yield Sign(kind, row, [block], moves, is_harmless=_is_harmless(read, row))


def _differs(value_n: Numbers) -> NDArray[np.bool_]:
    """Where a measurement is not what it was at first."""
    differs_n: NDArray[np.bool_] = np.abs(value_n - value_n[:1]) > SAME * np.maximum(np.abs(value_n[:1]), SAME)
    return differs_n


def no_longer_constant(read: Readings, name: str) -> Iterator[Sign]:
    """What the loop itself decides, and what was the same in all rows until it changed."""
    known, places = quantities()[name], read.recording.places(name)
    found, evaluating_m = dict[int, list[Move]](), read.column("in_evaluation")
    known_rows, least = known.get("rows", FEWEST_ROWS - 1), known.get("change", CONSTANT_CHANGE)
    of_places = {place: read.column(name, place) for place in ([*places, ""] if "outside" in known else places)}
    rows_of = {place: np.flatnonzero(np.isfinite(value_m)) for place, value_m in of_places.items()}
    habits = [_differs(of_places[place][row_n])[:known_rows].any() for place, row_n in rows_of.items()]
    if sum(habits) > MOST_HABITS * len(places):
        least = max(least, CONSTANT_CHANGE)
    for place, row_n in rows_of.items():
        value_n = of_places[place][row_n]
        if len(value_n) <= known_rows:
            continue
        usual, changed_n = value_n[0], _differs(value_n)
        if "lost" in known and (value_n[:known_rows] > known["lost"]).all():  # it varies, but is not zero
            changed_n = value_n == 0
        if "full" in known and (value_n[:known_rows] < known["full"]).all():
            changed_n = value_n > 1 - SAME
            changed_n[:-1] &= changed_n[1:]
        first = int(np.argmax(changed_n))
        if first < known_rows or not changed_n[first]:
            continue
        if "may_end" in known and value_n[first] < usual and evaluating_m[row_n[first]] == 0:
            continue
        ratio = value_n[first] / usual if usual else math.inf
        enough = least
        if changed_n[first : first + LASTING].all():
            enough = known.get("lasting", least)
        if _factor(ratio) > enough and max(usual, value_n[first]) >= known.get("above", -math.inf):
            row, end = int(row_n[first]), int(row_n[-1]) + 1
            found.setdefault(row, []).append(Move(name, place, row, end, float(value_n[first]), float(usual), math.inf))
    for row, moves in found.items():
        parts = [move.place for move in moves if move.place]
        kind = "data" if name == "row_share" and _counts_all(read, row) else known["kind"]
        kind = known.get("of_some", kind) if 0 < len(parts) < len(places) else kind
        harmless = "of_loss" in known and _is_harmless(read, row)
        parts = [] if len(parts) == len(places) else parts
        yield Sign(kind, row, parts, moves, is_exact=True, is_harmless=harmless)
    yield from moved(read, name) if "alarm" in known else ()


def other_token_weights(read: Readings) -> Iterator[Sign]:
    """Weights of tokens in the loss that differ more, or less, from each other than they always did."""
    mean_m, rms_m = read.column("sample_weight"), read.column("sample_weight_rms")
    row_n = np.flatnonzero(np.isfinite(rms_m) & (mean_m != 0))
    spread_n = rms_m[row_n] / np.abs(mean_m[row_n])
    first = int(np.argmax(np.append(_differs(spread_n), True)))
    if read.is_of_rewards or not FEWEST_ROWS - 1 <= first < len(row_n):
        return
    if _factor(spread_n[first] / spread_n[0]) > CONSTANT_CHANGE:
        row = int(row_n[first])
        move = Move("token_weights", "", row, row + 1, float(spread_n[first]), float(spread_n[0]), math.inf)
        yield Sign("data", row, moves=[move], is_exact=True, is_harmless=_is_harmless(read, row))


def _counts_all(read: Readings, row: int) -> bool:
    """Whether the loss is that of the labels which give gradients, as before, so that no other was in it."""
    loss_m = np.interp(read.step_m, read.recording.loss_step_n, read.recording.loss_n)
    apart_m = np.abs(loss_m - read.column("label_loss"))
    known_m = apart_m[:row][np.isfinite(apart_m[:row])]
    has_none = read.column("row_share")[row] == 0
    return has_none or bool(len(known_m) and apart_m[row] <= max(LABELS_APART * known_m.max(), SAME * abs(loss_m[row])))


def moved(read: Readings, name: str) -> Iterator[Sign]:
    """Moves of a quantity that are larger than those of healthy loops, or beyond its level."""
    known = quantities()[name]
    nothing_m = read.means_nothing(known)
    for place in read.recording.places(name):
        parts = [place] if place else []
        for move in read.moves.get((name, place), []) if "alarm" in known else ():
            if nothing_m[move.row]:
                continue
            rise = read.rise_before(move.row)
            is_learned = rise is not None and rise.first < read.step_m[move.row] - LEARNED_STEPS
            least = known.get("lasting", known["alarm"]) if move.end - move.row >= LASTS else known["alarm"]
            if (move.change < 0) != bool(known.get("falls")):  # the other direction
                least = known.get("otherwise", math.inf)
            away = abs(move.change) if max(move.value, move.usual) >= known.get("above", -math.inf) else 0.0
            if "of_batch" in known:  # which changes at once
                away = min(away, abs(move._replace(value=float(read.column(name, place)[move.row])).change))
            if "of_batch" in known and away > math.log(least):
                yield Sign(known["kind"], move.row, parts, [move], is_exact=True)
            elif known["kind"] in ("gradients", "optimizer") and _falls_faster(read, move.row):
                continue  # it grows with what is learned
            elif move.row > read.settled and away > math.log(least) * (1 + is_learned):
                yield Sign(known["kind"], move.row, parts, [move])
    yield from _stays_away(read, name, known) if known.keys() & {"stays_above", "stays_below"} else ()
    yield from _shifted(read, name, known) if known.get("stationary") else ()
    yield from _beyond_level(read, name, known) if "level" in known else ()


def _stays_away(read: Readings, name: str, known: Mapping[str, Any]) -> Iterator[Sign]:
    """The first of some rows that all lie by so much above, or below, all before; or of fewer, at the end, by more."""
    value_m = np.where(read.means_nothing(known), math.nan, read.column(name))
    sign, least = (1, known["stays_above"]) if "stays_above" in known else (-1, known["stays_below"])
    row_n = np.flatnonzero(np.isfinite(value_m))
    if len(row_n) < FEWEST_ROWS:
        return
    later_kn = _later(sign * value_m[row_n])
    away_n = np.fmin.reduce(later_kn)[1:] - np.maximum.accumulate(sign * value_m[row_n])[:-1]
    for n in np.flatnonzero(away_n > least * _of_fewer(later_kn)[1:]).tolist():
        row = int(row_n[n + 1])
        if n + 1 >= FEWEST_ROWS - 1 and row > read.settled:
            moves = [read.change(name, "", row)]
            yield Sign(known["kind"], row, moves=moves, is_exact="of_batch" in known)
            return


def _shifted(read: Readings, name: str, known: Mapping[str, Any]) -> Iterator[Sign]:
    """The first of ``USUAL`` rows that all lie beyond all before, in their mean by many times what is chance."""
    row_n = np.flatnonzero(read.column(name) > 0)
    log_n = np.log(read.column(name)[row_n])
    if len(log_n) < SHIFT_ROWS + USUAL:
        return
    after_nk = sliding_window_view(log_n, USUAL)[SHIFT_ROWS:]
    before = slice(SHIFT_ROWS - 1, -USUAL)
    count_n = np.arange(1, len(log_n) + 1)
    mean_n = log_n.cumsum() / count_n
    error_n = np.sqrt(np.maximum((log_n**2).cumsum() / count_n - mean_n**2, 0) * (1 / USUAL + 1 / count_n))
    is_above_n = after_nk.min(1) > np.maximum.accumulate(log_n)[before]
    is_below_n = after_nk.max(1) < np.minimum.accumulate(log_n)[before]
    shift_n = np.abs(after_nk.mean(1) - mean_n[before])
    is_shifted_n = (is_above_n | is_below_n) & (shift_n > np.maximum(SHIFT_ERRORS * error_n[before], SHIFT))
    for n in np.flatnonzero(is_shifted_n).tolist():
        row = int(row_n[n + SHIFT_ROWS])
        yield Sign(known["kind"], row, moves=[read.change(name, "", row)], is_exact=True)
        return


def _later(value_n: Numbers) -> Numbers:
    """``[k n]`` each value and those of the rows after it, NaN after the last."""
    return np.array([np.append(value_n, np.full(k, math.nan))[k:] for k in range(LASTS)])


def _of_fewer(later_kn: Numbers) -> Numbers:
    """``[n]`` by how much more fewer rows, at the end, must be away."""
    more_n: Numbers = np.sqrt(LASTS / np.isfinite(later_kn).sum(0))
    return more_n


def _falls_faster(read: Readings, row: int) -> bool:
    """Whether the loss falls faster from a row on than before."""
    recording = read.recording
    at = int(np.searchsorted(recording.loss_step_n, read.step_m[row]))
    windows = [slice(max(0, at + k * STEP_LASTS), max(0, at + (k + 1) * STEP_LASTS)) for k in (-2, -1, 0)]
    earlier_n, before_n, after_n = (recording.loss_n[window] for window in windows)
    if not len(earlier_n) or not len(after_n):
        return False
    earlier, before, after = map(np.median, (earlier_n, before_n, after_n))
    return bool(after < before_n.min() and before - after > earlier - before)


def leaves_reference(read: Readings) -> Iterator[Sign]:
    """A KL divergence that grows faster over some rows than it ever did, to several times what it was.

    Or that grew no more, and then grows faster in one row than it ever did, and stays there.
    """
    row_n = np.flatnonzero(np.isfinite(read.column("kl")))
    kl_n = read.column("kl")[row_n]
    gone_n = np.maximum.accumulate(kl_n[::-1])[::-1] <= KL_GONE * np.fmax.accumulate(kl_n)  # and stays so
    if gone_n[1:].any() and kl_n.max() > 0:
        row = int(row_n[1 + np.argmax(gone_n[1:])])
        yield Sign("policy", row, moves=[read.change("kl", "", row)], is_exact=True)
        return
    least_later_n, highest_n = np.fmin.reduce(_later(kl_n)), np.maximum.accumulate(kl_n)
    growth_kn = [kl_n[rows:] - kl_n[:-rows] for rows in range(1, KL_ROWS + 1)]
    largest_kn = [np.maximum.accumulate(growth_n) for growth_n in growth_kn]
    for now in range(2, len(kl_n)):
        highest, growth = highest_n[now - 1], growth_kn[0][now - 1]
        is_calm = now > USUAL and highest <= KL_LEFT * highest_n[now - USUAL - 1]
        if is_calm and least_later_n[now] > KL_LEFT * highest and growth > KL_GROWTH * largest_kn[0][now - 2]:
            row = int(row_n[now])
            yield Sign("policy", row, moves=[read.change("kl", "", row)])
            return
        rows = min(KL_ROWS, now // 2)
        begin = now - rows
        highest, largest = highest_n[begin], largest_kn[rows - 1][begin - rows]
        if growth_kn[rows - 1][begin - rows] * KL_GROWTH > largest:  # it is still on its way from zero
            continue
        left_n = begin + 1 + np.flatnonzero(kl_n[begin + 1 : now + 1] > KL_LEFT * highest)
        least = KL_GROWTH if len(left_n) > 1 else KL_GROWTH**2  # one row may be noise
        if highest > 0 and kl_n[now] > least * highest and kl_n[now] - kl_n[begin] > KL_GROWTH * largest:
            row = int(row_n[left_n[0]])
            own = Move("kl", "", row, row + 1, float(kl_n[now]), float(highest), math.nan)
            known = [move for move in read.moves["kl", ""] if row <= move.row <= row_n[now]]
            yield Sign("policy", row, moves=known[:1] or [own])
            return


def lower_reward(read: Readings) -> Iterator[Sign]:
    """A reward that lies below the rows before, in some rows in a row, in their mean by more than these differ.

    Relative to the highest so far, since it rises as the policy learns, and soon learns again.
    """
    row_n = np.flatnonzero(np.isfinite(read.column("reward")))
    reward_n = read.column("reward")[row_n]
    if len(reward_n) < FEWEST_ROWS or not reward_n.any():
        return
    with np.errstate(invalid="ignore"):
        share_n = reward_n / np.maximum.accumulate(np.abs(reward_n))
    (lowest_n, highest_n), later_kn = _range_before(share_n), _later(share_n)
    least_n = np.fmax(REWARD_FALL * _of_fewer(later_kn), highest_n - lowest_n)
    fell_n = (lowest_n - np.nanmean(later_kn, axis=0) > least_n) & (lowest_n - np.fmax.reduce(later_kn) > least_n / 2)
    for row in row_n[fell_n].tolist():
        if row > read.settled:
            yield Sign("reward", row, moves=[read.change("reward", "", row)])
            return


def _range_before(value_n: Numbers) -> tuple[Numbers, Numbers]:
    """``[n]`` the lowest and the highest of the ``USUAL`` values before each."""
    before_kn = np.array([np.append(np.full(k + 1, math.nan), value_n)[: len(value_n)] for k in range(USUAL)])
    return np.fmin.reduce(before_kn), np.fmax.reduce(before_kn)


def leaves_range(read: Readings, name: str, least: float) -> Iterator[Sign]:
    """What lies by so much beyond the rows before, in some rows in a row, as of the samples of a policy."""
    value_m = read.column(name)
    grows = name == "sample_weight_rms"
    with np.errstate(invalid="ignore", divide="ignore"):
        if name == "sample_weight":
            value_m = value_m / read.column("sample_weight_rms")
        elif grows:
            value_m = np.log(value_m)
    row_n = np.flatnonzero(np.isfinite(value_m))
    value_n = value_m[row_n]
    if len(value_n) < FEWEST_ROWS:
        return
    later_kn = _later(value_n)
    if grows:
        away_n = np.fmin.reduce(later_kn) - np.append(math.inf, np.maximum.accumulate(value_n)[:-1])
        least_n = np.full(len(value_n), least)
    else:
        lowest_n, highest_n = _range_before(value_n)
        above_n, below_n = np.fmin.reduce(later_kn) - highest_n, lowest_n - np.fmax.reduce(later_kn)
        away_n, least_n = np.fmax(above_n, below_n), least * _of_fewer(later_kn)
    for n in np.flatnonzero(away_n > least_n).tolist():
        if row_n[n] > read.settled and n >= FEWEST_ROWS - 1:
            row, own_n = int(row_n[n]), read.column(name)[row_n]
            before = float(np.median(own_n[max(0, n - USUAL) : n]))
            move = Move(name, "", row, len(read.step_m), float(own_n[n]), before, math.nan)
            yield Sign(quantities()[name]["kind"], row, moves=[move])
            return


def _beyond_level(read: Readings, name: str, known: Mapping[str, Any]) -> Iterator[Sign]:
    """The first row at which a part is beyond the level, or at which most parts are."""
    places = [place for place in read.recording.places(name) if not place or place in read.blocks]
    if not places:
        return
    value_pm = np.array([read.column(name, place) for place in places])
    known_pm = np.where(np.isfinite(value_pm) & ~read.means_nothing(known), value_pm, 0)
    limit_pm = np.full(known_pm.shape, known["level"], dtype=float)
    if "leap" in known:
        highest_pm = np.maximum.accumulate(known_pm, axis=1)[:, 1:-1]
        limit_pm[:, 2:] = np.clip(LEAPS * highest_pm, known["leap"], known["level"])
        if read.is_of_rewards:
            limit_pm[:, : read.settled + 1] = known["level"]
    beyond_pm, least = known_pm > limit_pm, MOST if known.get("everywhere") else 1 / len(places)
    enough_m = beyond_pm.mean(0) >= least
    if known.get("share"):  # what one row alone may show by chance, or because it is the first
        later_pm = known_pm.copy()
        for m in reversed(range(len(enough_m) - 1)) if "leap" in known else ():  # zero: the policy has just sampled
            later_pm[:, m] = np.where(later_pm[:, m] == 0, later_pm[:, m + 1], later_pm[:, m])
        enough_m[:-1] &= (later_pm[:, 1:] > limit_pm[:, :-1]).mean(0) >= least
    if not enough_m.any():
        return
    row = int(np.argmax(enough_m))
    moves = [
        Move(name, place, row, row + 1, float(value_m[row]), float(value_m[row - 1]) if row else math.nan, math.nan)
        for place, value_m, beyond_m in zip(places, value_pm, beyond_pm, strict=True)
        if beyond_m[row]
    ]
    parts = [] if known.get("everywhere") else [move.place for move in moves if move.place]
    yield Sign(known["kind"], row, parts, moves, is_exact="of_batch" in known)


def lost_scale(read: Readings) -> Iterator[Sign]:
    """A loss scale that fell far, or gradients that overflow in row after row at any scale."""
    scale_m = read.column("loss_scale")
    if not np.isfinite(scale_m).any():
        return
    bad = read.named("gradient_not_finite")
    found = next((row for row in range(len(scale_m)) if row not in bad), 0)  # a scaler searches for the first scale
    highest_m = np.fmax.accumulate(np.where(np.arange(len(scale_m)) < found, math.nan, scale_m))
    fallen = np.flatnonzero(scale_m * SCALE_FALL <= highest_m).tolist()
    fallen += [row for row in bad if row >= found and all(row + later in bad for later in range(OVERFLOWS))]
    if fallen:
        row = min(fallen)
        move = Move("loss_scale", "", row, row + 1, float(scale_m[row]), float(highest_m[row]), math.nan)
        of_parts = bad.get(row, {}) if scale_m[row] * SCALE_FALL <= highest_m[row] else {}
        parts = [*of_parts] if len(of_parts) == 1 else []  # what one part has at any scale is no overflow
        yield Sign("precision", row, parts, [move], weights=[name for part in parts for name in of_parts[part]])


def repeated_batches(read: Readings) -> Iterator[Sign]:
    """A loss that no longer varies as it did, from step to step or from one turn of a few batches to the next."""
    loss_n, steps = read.recording.loss_n, REPEATED_STEPS
    if len(loss_n) < 4 * steps or not np.isfinite(loss_n).all():
        return
    level_n = np.log(loss_n) if (loss_n > 0).all() else loss_n  # noise falls with a loss near zero
    for turn in IN_TURN:
        bend_n = np.abs(level_n[2 * turn :] - 2 * level_n[turn:-turn] + level_n[: -2 * turn])
        median_n = np.median(sliding_window_view(bend_n, steps), axis=1)[2 * steps :]
        before_n = np.median(sliding_window_view(bend_n, 2 * steps), axis=1)[:-steps]
        small = np.flatnonzero(median_n * REPEATED_BENDS < before_n)
        if len(small):
            first = int(small[0]) + 2 * steps
            between = math.sqrt(before_n[small[0]] * np.median(bend_n[first + steps // 2 : first + steps]))
            last = first + int(np.flatnonzero(bend_n[first : first + steps] > between).max(initial=-1))
            yield Sign("data", read.row_of(int(read.recording.loss_step_n[last + 1])))
            return


def falls_at_once(read: Readings) -> Iterator[Sign]:
    """A loss that falls in one step, by more than those before it differ, below what it ever was, and stays there."""
    step_n, loss_n = read.recording.loss_step_n, read.recording.loss_n
    if len(loss_n) < 2 * STEP_LASTS:
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        log_nk = sliding_window_view(np.where(loss_n > 0, np.log(loss_n), -math.inf), STEP_LASTS)
        before_nk, after_nk, usual_n = log_nk[:-STEP_LASTS], log_nk[STEP_LASTS:], np.median(log_nk, axis=1)
        is_apart_n = before_nk.min(1) - after_nk.max(1) > np.maximum(LOSS_FALL, np.ptp(before_nk, axis=1))
        fell_n = is_apart_n & (np.fmin.accumulate(usual_n)[:-STEP_LASTS] - usual_n[STEP_LASTS:] > LOSS_FALL)
    for n in np.flatnonzero(fell_n).tolist():
        step = int(step_n[n + STEP_LASTS])
        if step > read.step_m[read.settled]:
            row, before, after = read.row_of(step), math.exp(usual_n[n]), math.exp(usual_n[n + STEP_LASTS])
            yield Sign("data", row, moves=[Move("loss", "", row, row + 1, after, before, math.inf)], at=step)
            return


Check = Callable[[Readings], Iterator[Sign]]
# By what is checked: how, and the column of which it takes some rows.
CHECKS: dict[str, tuple[Check, str]] = {
    "settings of the optimizer": (changed_settings, "lr"),
    "finite numbers": (not_finite, "param_rms"),
    "loss scale": (lost_scale, "loss_scale"),
    "initial weights": (unlike_weights, "param_rms"),
    "initial values": (unusual_initial_values, "label_loss"),
    "weights that others write": (written_weights, "lr"),
    "functions that are called": (other_functions, "block_rms"),
    "arguments of the model": (other_arguments, "in_evaluation"),
    "buffers that are constant": (written_buffers, "in_evaluation"),
    "weights of tokens in the loss": (other_token_weights, "loss_weight"),
    "steps of the optimizer": (lost_counts, "state_updates"),
    "gradients that are missing": (lost_gradients, "grad_rms"),
    "updates that are zero": (lost_updates, "update_ratio"),
    "weights against updates": (weights_beyond_updates, "param_rms"),
    "weights behind updates": (weights_behind_updates, "change_over_updates"),
    "output against other blocks": (outputs_apart, "block_rms"),
    "logits against other blocks": (logits_apart, "attention_logit_max"),
    "gradients against the next part": (gradients_apart, "grad_rms"),
    "zero gradients": (zero_gradients, "grad_rms"),
    "silent blocks": (silent, "block_rms"),
    "frozen parts": (frozen, "grad_rms"),
    "KL divergence": (leaves_reference, "kl"),
    "repeated batches": (repeated_batches, "loss"),
    "falls of the loss": (falls_at_once, "loss"),
    "signs of updates": (partial(leaves_range, name="update_signs", least=OTHER_SIGNS), "update_signs"),
    "falls of the reward": (lower_reward, "reward"),
    **{
        quantities()[name]["name"]: (partial(leaves_range, name=name, least=least), name)
        for name, least in OF_SAMPLES.items()
    },
    **{
        known["name"]: (partial(no_longer_constant if "constant" in known else moved, name=name), name)
        for name, known in quantities().items()
        if known.keys() & {"alarm", "level", "constant"}
    },
}
