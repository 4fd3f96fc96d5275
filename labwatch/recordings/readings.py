"""A recording with what is read off it: its moves, and the rises of its loss; and what a sign in it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.analysis.runaway import read_runaways
from lab.analysis.spikes.trend import loss_spikes
from lab.core import shipped
from lab.core.windows import Numbers
from labwatch.recordings.moves import USUAL, Move, moves_of
from labwatch.recordings.recording import OF_LOSS, Recording

# All changes while a model learns its first things, and no row tells yet what is usual. So only changes are judged that
# come after a row by which the learning rate has warmed up and the fall of the loss slowed down: over the steps so far,
# so many at least, it fell as much from the first quarter to the middle as from there to the last quarter, and to such
# a share of the first one if the model knew nothing then.
FEWEST_STEPS, BEGUN = 25, 0.95
# The loss rose in one step if that has half of the usual rise, which lasted so many steps: an instability builds up.
STEP_LASTS = 10
# What is constant does not differ by this share from its first value; it changes by this factor at least.
SAME, CONSTANT_CHANGE = 1e-3, 1.5
CALM_STEPS = 20  # after which what did not change in them is not changed by a habit of the optimizer or of the loop
LEAST_RATE = 0.06  # the share of its peak up to which a learning rate is near its end
BACK = 0.5  # the share of what it was at which a learning rate is as high again
SOLVED = 0.02  # so near to its highest, relatively, a reward is as good as that
LARGEST = 600.0  # of which the exponential is finite
ALIKE = 1.05  # the factor between weights of blocks that were drawn alike
LIKELIER = 0.5  # deviations by which logits of labels lie above the others at most where a model knows nothing
OF_OTHERS = 0.4  # nats by which the surprisal at samples that are those of others differs from the entropy
LOST = 0.15  # the share of weights that rounding leaves as they were at an update, if these are many
FAR_FROM_RANGE = 1e3  # an RMS up to which no number is near the largest one of fp16
LASTS = 3  # rows after which a move is not that of single batches
LASTING = 2  # rows in which something that is exactly zero stays so
FEWEST_ROWS = 3
MOST = 0.7  # the share of parts in which something is so, if it is so of most


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
        is_vague: some rows show it, and none alone, so a sign of one row that comes soon after it tells more.
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
    is_vague: bool = False


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
        self.given = recording.names.get(("given", ""), {})  # what the model gets, by the rows in which it changed
        # so that the loss says little, and is in no unit
        self.is_of_rewards = self.has("reward") and not self._imitates()
        settled = _settled_step(
            recording.loss_step_n,
            recording.loss_n,
            is_of_rewards=self.is_of_rewards,
            falls_to=BEGUN if len(self.step_m) and self.knows_nothing else None,
        )
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
    def lists(self) -> list[list[str]]:
        """The blocks of each list, as of an encoder and of a decoder."""
        names, lists = self.recording.header.get("blocks", {}), defaultdict[str, list[str]](list)
        for block in self.blocks:
            lists[names.get(block, "").rpartition(".")[0]].append(block)
        return [*lists.values()]

    @cached_property
    def initial_deviation(self) -> float:
        """The standard deviation of the output logits in the first row."""
        rms, mean = (float(self.column(name)[0]) for name in ("output_logit_rms", "output_logit_mean"))
        return math.sqrt(max(rms**2 - mean**2, 0.0))

    def _imitates(self) -> bool:
        """Whether it learns all samples that it gets, and would not draw them itself."""
        surprisal_m = self.column("excess_surprisal")
        known_m = np.isfinite(surprisal_m)
        learns_all = (self.column("cross_entropy")[known_m] > 1 - SAME).all()
        return bool(known_m.any() and learns_all and np.median(np.abs(surprisal_m[known_m])) > OF_OTHERS)

    @cached_property
    def knows_nothing(self) -> bool:
        """Whether labels are no more likely than other tokens in the first row; False where this is not known."""
        mean, log_z, label_loss = (float(self.column(name)[0]) for name in ("output_logit_mean", "log_z", "label_loss"))
        return log_z - mean - label_loss < LIKELIER * self.initial_deviation

    @cached_property
    def is_untrained(self) -> bool:
        """Whether it knows nothing, and norms of blocks are not those of a model that was trained for another task."""
        norms = [share for share in self.at_start("constant_norms").values() if math.isfinite(share)]
        return self.knows_nothing and (not norms or max(norms) > 0)

    @cached_property
    def is_fresh(self) -> bool:
        """Whether it has just been made: it is untrained, and weights of all blocks have one size in the first row."""
        sizes = [size for size in self.at_start("param_rms").values() if size > 0]
        return self.is_untrained and len(sizes) > 1 and max(sizes) < ALIKE * min(sizes)

    @cached_property
    def rounded_since(self) -> int | None:
        """The row from which on weights are in 16 bits, if rounding leaves many as they were at an update."""
        lost_pm = np.array([self.column("updates_lost", place) for place in self.recording.places("updates_lost")])
        return int(np.isfinite(lost_pm).any(0).argmax()) if len(lost_pm) and np.nanmedian(lost_pm) > LOST else None

    def rate_of(self, place: str) -> Numbers:
        """``[m]`` the learning rate of the weights of a part, or of all."""
        for setting in self.recording.settings:
            if setting.name == "lr" and place in setting.parts:
                return setting.at(self.step_m)
        return self.column("lr")

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

    def kind_of_overflow(self, row: int) -> str:
        """The kind of cause of gradients that overflow under a loss scale: what blocks return may be NaN by itself."""
        outputs = [self.change("block_rms", block, row) for block in self.blocks]
        spoiled = any(math.isinf(output.value) and output.usual < FAR_FROM_RANGE for output in outputs)
        return "not_finite" if spoiled else "precision"

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
    least_m = (1 - SOLVED * np.sign(highest_m)) * highest_m
    lowest_m = sliding_window_view(np.append(np.full(LASTS - 1, -math.inf), reward_m), LASTS).min(1)
    solved_m: NDArray[np.bool_] = (lowest_m >= least_m) & (least_m > reward_m[:1])
    return solved_m


def _settled_step(
    step_n: NDArray[np.int64], loss_n: Numbers, *, is_of_rewards: bool = False, falls_to: float | None = None
) -> float:
    """The first step by which the fall of the loss slowed down, if it need fall, and to such a share of what it was.

    Infinite if there is none.
    """
    end = FEWEST_STEPS
    while end <= len(loss_n):
        first, middle, last = (np.median(part_n) for part_n in np.split(loss_n[:end], [end // 4, end - end // 4]))
        has_begun = falls_to is None or not last > falls_to * loss_n[0]
        if is_of_rewards or (first - middle >= middle - last and has_begun):
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


def is_harmless(read: Readings, row: int) -> bool:
    """Whether neither the loss nor gradients grew as the loss changed, as they need not where that is planned."""
    norm_m = read.column("grad_norm")
    before, after = (norm_m[max(0, row - LASTS) : row], norm_m[row : row + LASTS])
    grew = read.rise_before(row) is not None or not np.median(after) < CONSTANT_CHANGE * np.median(before)
    return not (grew or read.is_of_rewards)


def factor(ratio: float) -> float:
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def rows_from(value_n: Numbers) -> Numbers:
    """``[k n]`` each value and those of the rows after it, NaN after the last."""
    return np.array([np.append(value_n, np.full(k, math.nan))[k:] for k in range(LASTS)])


def more_of_fewer(later_kn: Numbers) -> Numbers:
    """``[n]`` by how much more fewer rows, at the end, must be away."""
    more_n: Numbers = np.sqrt(LASTS / np.isfinite(later_kn).sum(0))
    return more_n


def constant_since(value_n: Numbers) -> int:
    """The number of the first of the last values, which are all the same; that of all, if two before were so, too."""
    is_same_n = np.diff(value_n) == 0
    first = int(np.flatnonzero(np.append(True, ~is_same_n))[-1])
    return len(value_n) if is_same_n[:first].any() else first


def range_before(value_n: Numbers) -> tuple[Numbers, Numbers]:
    """``[n]`` the lowest and the highest of the ``USUAL`` values before each."""
    before_kn = np.array([np.append(np.full(k + 1, math.nan), value_n)[: len(value_n)] for k in range(USUAL)])
    return np.fmin.reduce(before_kn), np.fmax.reduce(before_kn)
