"""Signs in a recording that something is wrong: each means so by itself, and no healthy loop shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.analysis.spikes.trend import loss_spikes
from lab.core import shipped
from lab.core.windows import Numbers
from labwatch.recordings.moves import Move, moves_of
from labwatch.recordings.recording import Recording

# The learning rate jumps if it rises by this factor, and by as many times its largest rise per step before.
RATE_JUMP = 3.0
# A block is unlike the others from the first row on if its weights are larger by this factor than their median.
UNLIKE = 4.0
# Updates may change the RMS of weights by so many times their own size; and what is seen must be more than this.
BEYOND_UPDATES, LEAST_CHANGE = 2.0, 0.05
# A block's weights change apart from the others if their logarithm changes by so much more, and by so many times the
# spread of the others.
APART, SPREADS = 0.7, 8.0
# A loss scale has fallen if it is so many times below the largest before. Gradients overflow at any scale if they do in
# so many rows in a row.
SCALE_FALL, OVERFLOWS = 64.0, 3
# The same batch comes again and again if the loss bends less by this factor over so many steps than ever before.
REPEATED_STEPS, REPEATED_BENDS = 16, 8.0
# So many steps after the loss moved, parts may differ because they have learned from what came.
LEARNED_STEPS = 5
MOST = 0.7  # the share of parts in which something is so, if it is so of most
LASTING = 2  # rows in which something that is exactly zero stays so
FEWEST_ROWS = 3


@cache
def quantities() -> Mapping[str, Mapping[str, Any]]:
    """What is known of each quantity, by its name; see the file."""
    table: Mapping[str, Mapping[str, Any]] = shipped.load(Path(__file__).with_name("quantities.yaml"))
    return table


class Sign(NamedTuple):
    """Something that is wrong, seen first at a row of a recording.

    Attributes:
        kind: of cause, a key of ``causes.yaml``.
        row: of the recording.
        parts: of the model; none for the whole.
        moves: the measurements that show it, as far as it is a move.
        weights: names of single ones, where they are known.
    """

    kind: str
    row: int
    parts: Sequence[str] = ()
    moves: Sequence[Move] = ()
    weights: Sequence[str] = ()


class Rise(NamedTuple):
    """The first and the last step at which the loss lies above what it was."""

    first: int
    last: int


class Readings:
    """A recording, its moves, and the rises of its loss."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.step_m = recording, recording.step_m
        self.places = sorted({place for _, place in recording.columns if place})
        self.blocks = [place for place in self.places if place.startswith("block")]
        self.moves = {
            (name, place): list(moves_of(name, place, self.column(name, place)))
            for name, known in quantities().items()
            for place in recording.places(name)
            if "kind" in known and "share" not in known
        }
        self.rises = _rises_of_loss(recording)

    def column(self, name: str, place: str = "") -> Numbers:
        """A measurement ``[m]``; gradients of a part are those before they were clipped by the norm of all."""
        columns = self.recording.columns
        value_m = columns.get((name, place), np.full(len(self.step_m), math.nan))
        if name != "grad_rms" or ("grad_norm", "") not in columns or ("grad_norm_clipped", "") not in columns:
            return value_m
        with np.errstate(invalid="ignore", divide="ignore"):
            factor_m = columns["grad_norm", ""] / columns["grad_norm_clipped", ""]
            return np.where(np.isfinite(factor_m) & (factor_m > 0), value_m * factor_m, value_m)

    def has(self, name: str) -> bool:
        return bool(self.recording.places(name))

    def steps_before(self, row: int) -> int:
        """Steps since the recorded row before."""
        return int(self.step_m[row] - self.step_m[row - 1])

    def rise_before(self, row: int) -> Rise | None:
        """The rise of the loss that began after the row before and up to this row; None if there is none."""
        since = self.step_m[row - 1] if row else -1
        return next((rise for rise in self.rises if since < rise.first <= self.step_m[row]), None)

    def named(self, what: str) -> dict[int, dict[str, list[str]]]:
        """By row and part the names of weights of which something is so."""
        found = dict[int, dict[str, list[str]]]()
        for (name, place), of_rows in self.recording.names.items():
            for row, names in of_rows.items() if name == what else ():
                found.setdefault(row, {})[place] = names
        return dict(sorted(found.items()))


def _rises_of_loss(recording: Recording) -> list[Rise]:
    """The loss spikes, from the first step to that of the ending."""
    step_n = recording.loss_step_n
    spans = loss_spikes(step_n, recording.loss_n)
    ends = [None if span.ending in ("stuck", "diverged") else span.end for span in spans]
    return [
        Rise(int(step_n[span.first]), int(step_n[-1 if end is None else end]))
        for span, end in zip(spans, ends, strict=True)
    ]


def rate_jumps(read: Readings) -> Iterator[Sign]:
    """A learning rate that jumps, unless it warms up from the first row on."""
    lr_m, rise = read.column("lr"), 0.0
    for row in range(1, len(lr_m)):
        per_step = (lr_m[row] - lr_m[row - 1]) / read.steps_before(row)
        if row > 1 and lr_m[row] > RATE_JUMP * lr_m[row - 1] > 0 and per_step > RATE_JUMP * rise:
            move = Move("lr", "", row, len(lr_m), float(lr_m[row]), float(lr_m[row - 1]), math.inf)
            yield Sign("rate", row, moves=[move])
        rise = max(rise, per_step) if math.isfinite(per_step) else rise


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
    if not rows and not infinite:
        return
    first = min([*rows, *infinite.values()])
    for what in ("weight", "activation", "gradient", "update"):
        parts = of_names.get(what, {}).get(first, {})
        if what == "activation":
            found = [
                place for (name, place), row in infinite.items() if row == first and name.startswith(("block", "att"))
            ]
            parts = {place: [] for place in found[:1]} if len(found) < len(read.blocks) or len(found) == 1 else {}
        if parts and not (what == "gradient" and scaled):
            yield Sign("not_finite", first, sorted(parts), weights=[name for of in parts.values() for name in of])
            return
    yield Sign("not_finite", first, sorted({place for (_, place), row in infinite.items() if row == first}))


def zero_gradients(read: Readings) -> Iterator[Sign]:
    """Weights whose gradients are exactly zero in some rows in a row."""
    rows = read.named("gradient_zero")
    for row, parts in rows.items():
        lasting = {
            place: kept
            for place, names in parts.items()
            if (kept := [name for name in names if name in rows.get(row + LASTING - 1, {}).get(place, [])])
        }
        if lasting:
            yield Sign("dead", row, sorted(lasting), weights=[name for of in lasting.values() for name in of])
            return


def frozen(read: Readings) -> Iterator[Sign]:
    """Parts that lose their gradients, or whose updates become zero, while others are trained."""
    places = read.recording.places("grad_rms")
    for place in places:
        is_trained_m = np.isfinite(read.column("grad_rms", place)) & ~(read.column("update_ratio", place) == 0)
        others_m = np.zeros(len(is_trained_m), dtype=bool)
        for other in places:
            others_m |= np.isfinite(read.column("grad_rms", other)) & (other != place)
        lost = np.flatnonzero(~is_trained_m & others_m & (read.column("lr") != 0))
        if len(lost) and not is_trained_m[lost[0] :].any() and is_trained_m[: lost[0]].any():
            yield Sign("frozen", int(lost[0]), [place])


def unlike_weights(read: Readings) -> Iterator[Sign]:
    """Blocks whose weights are larger than those of the other blocks from the first row on."""
    rms = {block: float(read.column("param_rms", block)[0]) for block in read.blocks if len(read.step_m)}
    for block, value in rms.items():
        usual = float(np.median([other for name, other in rms.items() if name != block] or [math.nan]))
        if len(rms) >= 3 and value > UNLIKE * usual:
            yield Sign("weights", 0, [block], [Move("param_rms", block, 0, 1, value, usual, math.inf)])


def weights_beyond_updates(read: Readings) -> Iterator[Sign]:
    """Weights that changed by more than the updates between two rows explain, or apart from those of other blocks."""
    log_pm = dict[str, Numbers]()
    for place in read.recording.places("param_rms"):
        rms_m = read.column("param_rms", place)
        log_pm[place] = np.log(np.where(np.isfinite(rms_m) & (rms_m > 0), rms_m, math.nan))
    change_pm = {place: np.diff(log_m) for place, log_m in log_pm.items()}
    for place, change_m in change_pm.items():
        others_pm = np.array([change_pm[block] for block in read.blocks if block != place and block in change_pm])
        ratio_m = read.column("update_ratio", place)
        for row in np.flatnonzero(np.abs(change_m) > LEAST_CHANGE).tolist():
            largest = float(np.nanmax(ratio_m[row : row + 2], initial=0.0)) if place else math.inf
            change, usual = float(change_m[row]), 0.0
            if place in read.blocks and len(others_pm) > 1:
                usual = float(np.median(others_pm[:, row]))
                spread = float(np.abs(others_pm[:, row] - usual).max())
            is_apart = (
                place in read.blocks and len(others_pm) > 1 and abs(change - usual) > max(APART, SPREADS * spread)
            )
            if is_apart or abs(change) > LEAST_CHANGE + BEYOND_UPDATES * read.steps_before(row + 1) * largest:
                before, after = (math.exp(log_pm[place][at]) for at in (row, row + 1))
                known = next((move for move in read.moves["param_rms", place] if move.row == row + 1), None)
                yield Sign(
                    "weights",
                    row + 1,
                    [place] if place else [],
                    [known or Move("param_rms", place, row + 1, row + 2, after, before, math.nan)],
                )
                break


def moved(read: Readings, name: str) -> Iterator[Sign]:
    """Moves of a quantity that are larger than those of healthy loops, or beyond its level."""
    known = quantities()[name]
    for place in read.recording.places(name):
        parts = [place] if place else []
        for move in read.moves.get((name, place), []) if "alarm" in known else ():
            away = -move.change if known.get("falls") else move.change
            rise = read.rise_before(move.row)
            is_learned = rise is not None and rise.first < read.step_m[move.row] - LEARNED_STEPS
            if away > math.log(known["alarm"]) * (1 + is_learned):
                yield Sign(known["kind"], move.row, parts, [move])
    yield from _beyond_level(read, name, known) if "level" in known else ()


def _beyond_level(read: Readings, name: str, known: Mapping[str, Any]) -> Iterator[Sign]:
    """The first row at which a part is beyond the level, or at which most parts are."""
    places = [place for place in read.recording.places(name) if not place or place in read.blocks]
    if not places:
        return
    value_pm = np.array([read.column(name, place) for place in places])
    beyond_pm = np.where(np.isfinite(value_pm), value_pm, 0) > known["level"]
    enough_m = beyond_pm.mean(0) >= (MOST if known.get("everywhere") else 1 / len(places))
    if not enough_m.any():
        return
    row = int(np.argmax(enough_m))
    moves = [
        Move(name, place, row, row + 1, float(value_m[row]), float(value_m[row - 1]) if row else math.nan, math.nan)
        for place, value_m, beyond_m in zip(places, value_pm, beyond_pm, strict=True)
        if beyond_m[row]
    ]
    yield Sign(
        known["kind"], row, [] if known.get("everywhere") else [move.place for move in moves if move.place], moves
    )


def lost_scale(read: Readings) -> Iterator[Sign]:
    """A loss scale that fell far, or gradients that overflow in row after row at any scale."""
    scale_m = read.column("loss_scale")
    if not np.isfinite(scale_m).any():
        return
    highest_m = np.fmax.accumulate(scale_m)
    fallen = np.flatnonzero(scale_m * SCALE_FALL <= highest_m).tolist()
    bad = read.named("gradient_not_finite")
    fallen += [row for row in bad if all(row + later in bad for later in range(OVERFLOWS))]
    if fallen:
        row = min(fallen)
        move = Move("loss_scale", "", row, row + 1, float(scale_m[row]), float(highest_m[row]), math.nan)
        yield Sign("precision", row, moves=[move])


def repeated_batches(read: Readings) -> Iterator[Sign]:
    """A loss that no longer varies from step to step as it did."""
    loss_n, steps = read.recording.loss_n, REPEATED_STEPS
    if len(loss_n) < 4 * steps or not np.isfinite(loss_n).all():
        return
    bend_n = np.abs(np.diff(loss_n, 2))
    medians = np.array([np.median(bend_n[at : at + steps]) for at in range(0, len(bend_n) - steps)])
    usual_n = np.minimum.accumulate(medians[:-steps])  # of windows that ended before each window begins
    small = np.flatnonzero(medians[steps:] * REPEATED_BENDS < usual_n)
    if len(small):
        step = int(read.recording.loss_step_n[small[0] + steps])
        row = min(int(np.searchsorted(read.step_m, step)), len(read.step_m) - 1)
        yield Sign("data", row)


Check = Callable[[Readings], Iterator[Sign]]
# By what is checked: how, and the column of which it takes some rows.
CHECKS: dict[str, tuple[Check, str]] = {
    "learning rate": (rate_jumps, "lr"),
    "finite numbers": (not_finite, "param_rms"),
    "loss scale": (lost_scale, "loss_scale"),
    "initial weights": (unlike_weights, "param_rms"),
    "weights against updates": (weights_beyond_updates, "param_rms"),
    "zero gradients": (zero_gradients, "grad_rms"),
    "frozen parts": (frozen, "grad_rms"),
    "repeated batches": (repeated_batches, "loss"),
    **{
        known["name"]: (partial(moved, name=name), name)
        for name, known in quantities().items()
        if known.keys() & {"alarm", "level"}
    },
}
