"""Signs in single columns, of batches and of the loss: what moved, is no longer constant or is beyond a level."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.core.windows import Numbers
from labwatch.recordings.moves import USUAL, Move
from labwatch.recordings.readings import (
    CONSTANT_CHANGE,
    FEWEST_ROWS,
    LASTING,
    LASTS,
    MOST,
    SAME,
    STEP_LASTS,
    Readings,
    Sign,
    constant_since,
    factor,
    is_harmless,
    more_of_fewer,
    quantities,
    rows_from,
)
from labwatch.recordings.recording import MAX_NORM, OF_LOSS

# The loss is that of the labels seen in a sample if the two are apart by so many times as much as ever before.
LABELS_APART = 5.0
# A loss scale has fallen if it is so many times below the largest before. Gradients overflow at any scale if they do in
# so many rows in a row.
SCALE_FALL, OVERFLOWS = 64.0, 3
# The same batches come again and again, or a few in turn, if over so many steps the loss bends less by this factor than
# just before, from each step to those that many before it.
REPEATED_STEPS, REPEATED_BENDS, IN_TURN = 16, 8.0, (1, 2, 3, 4)
# The loss fell in one step if its logarithm is by so much, and by all that it varied in ``STEP_LASTS``, below all of
# these. However little it has learned, no model learns at once what makes the loss so many times smaller. A learning
# rate that fell to such a share explains it.
LOSS_FALL, NEVER_LEARNED, RATE_FELL = 0.25, 4.0, 0.7
# So many steps after the loss moved, parts may differ because they have learned from what came.
LEARNED_STEPS = 5
# What is stationary has shifted if, after so many rows, some lie apart from all before, in their mean by so many
# standard errors, and in its logarithm by so much. Neighbours are correlated by so much at most.
SHIFT_ROWS, SHIFT_ERRORS, SHIFT, MOST_ALIKE = 8, 6.0, 0.1, 0.95
LEAPS = 4.0  # times what a share ever was
MOST_HABITS = 0.5  # the share of parts in which a loop changes something by habit, so that small changes mean nothing
OF_ONE_BATCH = ("token_perplexity", "label_perplexity", "batch_rms")  # which hardly any two have in common


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
        value_n, fewest = of_places[place][row_n], known_rows
        if "zero" in known and len(value_n) > 1 and value_n[0] > value_n[1] == 0:
            row_n, value_n, fewest = row_n[1:], value_n[1:], 1  # the first row shows what was before the loop
        if len(value_n) <= fewest:
            continue
        usual, changed_n = value_n[0], _differs(value_n)
        if "lost" in known and (value_n[:fewest] > known["lost"]).all():  # it varies, but is not zero
            changed_n = value_n == 0
        if "full" in known and (value_n[:fewest] < known["full"]).all():
            changed_n = value_n > 1 - SAME
            changed_n[:-1] &= changed_n[1:]
            changed_n[-1] &= int(row_n[-1]) not in read.given  # whose rows may have one length by chance
        first = int(np.argmax(changed_n))
        if first < fewest or not changed_n[first]:
            continue
        if "may_end" in known and value_n[first] < usual and evaluating_m[row_n[first]] == 0:
            continue
        ratio = value_n[first] / usual if usual else math.inf
        enough = least
        if changed_n[first : first + LASTING].all():
            enough = known.get("lasting", least)
        if factor(ratio) > enough and max(usual, value_n[first]) >= known.get("above", -math.inf):
            row, end = int(row_n[first]), int(row_n[-1]) + 1
            found.setdefault(row, []).append(Move(name, place, row, end, float(value_n[first]), float(usual), math.inf))
    for row, moves in found.items():
        parts = [move.place for move in moves if move.place]
        kind = "data" if name == "row_share" and _counts_all(read, row) else known["kind"]
        kind = known.get("of_some", kind) if 0 < len(parts) < len(places) else kind
        harmless = "of_loss" in known and (is_harmless(read, row) or _has_the_same_loss(read, row))
        parts = [] if len(parts) == len(places) else parts
        yield Sign(kind, row, parts, moves, is_exact=True, is_harmless=harmless)
    yield from moved(read, name) if "alarm" in known else ()


def _has_the_same_loss(read: Readings, row: int) -> bool:
    """Whether the loss is computed as before and did not rise, so that its gradient changed by what was learned."""
    code = [read.recording.names.get((what, OF_LOSS), {}) for what in ("functions", "calls")]
    return bool(code[0]) and not any(row in rows for rows in code) and read.rise_before(row) is None


def _differs(value_n: Numbers) -> NDArray[np.bool_]:
    """Where a measurement is not what it was at first."""
    differs_n: NDArray[np.bool_] = np.abs(value_n - value_n[:1]) > SAME * np.maximum(np.abs(value_n[:1]), SAME)
    return differs_n


def other_token_weights(read: Readings) -> Iterator[Sign]:
    """Weights of tokens in the loss that differ more, or less, from each other than they always did."""
    mean_m, rms_m = read.column("sample_weight"), read.column("sample_weight_rms")
    row_n = np.flatnonzero(np.isfinite(rms_m) & (mean_m != 0))
    spread_n = rms_m[row_n] / np.abs(mean_m[row_n])
    first = int(np.argmax(np.append(_differs(spread_n), True)))
    if read.is_of_rewards or not FEWEST_ROWS - 1 <= first < len(row_n):
        return
    if factor(spread_n[first] / spread_n[0]) > CONSTANT_CHANGE:
        row = int(row_n[first])
        move = Move("token_weights", "", row, row + 1, float(spread_n[first]), float(spread_n[0]), math.inf)
        yield Sign("data", row, moves=[move], is_exact=True, is_harmless=is_harmless(read, row))


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
        yield from _stays_away(read, name, place, known) if known.keys() & {"stays_above", "stays_below"} else ()
    yield from _shifted(read, name, known) if known.get("stationary") else ()
    yield from _beyond_level(read, name, known) if "level" in known else ()


def _stays_away(read: Readings, name: str, place: str, known: Mapping[str, Any]) -> Iterator[Sign]:
    """The first of some rows that all lie by so much above, or below, all before; or of fewer, at the end, by more."""
    value_m = np.where(read.means_nothing(known), math.nan, read.column(name, place))
    sign, least = (1, known["stays_above"]) if "stays_above" in known else (-1, known["stays_below"])
    row_n = np.flatnonzero(np.isfinite(value_m))
    if len(row_n) < FEWEST_ROWS:
        return
    later_kn = rows_from(sign * value_m[row_n])
    away_n = np.fmin.reduce(later_kn)[1:] - np.maximum.accumulate(sign * value_m[row_n])[:-1]
    for n in np.flatnonzero(away_n > least * more_of_fewer(later_kn)[1:]).tolist():
        row = int(row_n[n + 1])
        if n + 1 >= FEWEST_ROWS - 1 and row > read.settled:
            moves, parts = [read.change(name, place, row)], [place] if place else []
            yield Sign(known["kind"], row, parts, moves, is_exact="of_batch" in known)
            return


def _shifted(read: Readings, name: str, known: Mapping[str, Any]) -> Iterator[Sign]:
    """The first of ``USUAL`` rows that all lie beyond all before, in their mean by many times what is chance.

    That is more where neighbours are alike. Batches of another size are left out, since that changes an entropy, too.
    """
    value_m = read.column(name)
    row_n = np.flatnonzero(np.isfinite(value_m) & (value_m > 0))
    log_n = np.log(value_m[row_n])
    if len(log_n) < SHIFT_ROWS + USUAL:
        return
    after_nk, before = sliding_window_view(log_n, USUAL)[SHIFT_ROWS:], slice(SHIFT_ROWS - 1, -USUAL)
    count_n = np.arange(1, len(log_n) + 1)
    mean_n = log_n.cumsum() / count_n
    variance_n = np.maximum((log_n**2).cumsum() / count_n - mean_n**2, 0)
    steps_n = np.append(0, np.diff(log_n) ** 2).cumsum() / np.maximum(count_n - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        alike_n = np.nan_to_num(1 - steps_n / (2 * variance_n)).clip(0, MOST_ALIKE)  # the correlation of neighbours
    error_n = np.sqrt(variance_n * (1 / USUAL + 1 / count_n) * (1 + alike_n) / (1 - alike_n))
    is_above_n = after_nk.min(1) > np.maximum.accumulate(log_n)[before]
    is_below_n = after_nk.max(1) < np.minimum.accumulate(log_n)[before]
    least_n = np.maximum(SHIFT_ERRORS * error_n[before], SHIFT)
    is_shifted_n = (is_above_n | is_below_n) & (np.abs(after_nk.mean(1) - mean_n[before]) > least_n)

    def spread(n: int) -> float:
        """The variance within both sides of a row, since rows before it may lie there by chance."""
        return float(n * log_n[:n].var() + USUAL * log_n[n : n + USUAL].var()) / (n + USUAL)

    shifted = np.flatnonzero(is_shifted_n) + SHIFT_ROWS
    if len(shifted):
        n = min(shifted[shifted < shifted[0] + USUAL].tolist(), key=spread)
        rows = [int(row) for row in row_n[n : n + USUAL]]
        if read.given.keys().isdisjoint(rows):
            yield Sign(known["kind"], rows[0], moves=[read.change(name, "", rows[0])], is_exact=True, is_vague=True)


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
        more_m = 1 + 2 / np.arange(2, known_pm.shape[1])  # since few rows say little of what it ever was
        limit_pm[:, 2:] = np.clip(LEAPS * more_m * highest_pm, known["leap"], known["level"])
        if read.is_of_rewards:
            limit_pm[:, : read.settled + 1] = known["level"]
    beyond_pm, least = known_pm > limit_pm, MOST if known.get("everywhere") else 1 / len(places)
    enough_m = beyond_pm.mean(0) >= least
    if known.get("share"):  # what one row alone may show by chance, or because it is the first
        later_pm = known_pm.copy()
        # of ratios zero says that the policy has just sampled
        for m in reversed(range(len(enough_m) - 1)) if "leap" in known and "of_batch" not in known else ():
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
        if read.kind_of_overflow(row) == "not_finite":
            yield Sign("not_finite", row)
            return
        move = Move("loss_scale", "", row, row + 1, float(scale_m[row]), float(highest_m[row]), math.nan)
        of_parts = bad.get(row, {}) if scale_m[row] * SCALE_FALL <= highest_m[row] else {}
        parts = [*of_parts] if len(of_parts) == 1 else []  # what one part has at any scale is no overflow
        yield Sign("precision", row, parts, [move], weights=[name for part in parts for name in of_parts[part]])


def scaled_clipping(read: Readings) -> Iterator[Sign]:
    """Gradients that are clipped while they hold the loss scale: to the clipping norm over the scale."""
    clipped_m, scale_m = (read.column(name) for name in ("grad_norm_clipped", "loss_scale"))
    for setting in read.recording.settings:
        if setting.name != MAX_NORM:
            continue
        is_scaled_m = np.abs(clipped_m * scale_m - setting.at(read.step_m)) < SAME * clipped_m * scale_m
        is_scaled_m &= scale_m > SCALE_FALL
        if is_scaled_m.any():
            row = int(is_scaled_m.argmax())
            move = Move("grad_norm_clipped", "", row, row + 1, float(clipped_m[row]), math.nan, math.inf)
            yield Sign("precision", row, moves=[move], is_exact=True)


def same_batch(read: Readings) -> Iterator[Sign]:
    """What is measured of batches alone is the same in all rows from one on, and was not in any two before."""
    for name in OF_ONE_BATCH:
        row_n = np.flatnonzero(np.isfinite(read.column(name)))
        value_n = read.column(name)[row_n]
        first = constant_since(value_n)
        if first >= FEWEST_ROWS and len(value_n) - first > LASTS:
            row = int(row_n[first])
            yield Sign("data", row, moves=[Move("same_batch", "", row, row + 1, 1.0, 1.0, math.nan)], is_exact=True)
            return


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
    """A loss that falls in one step, by more than those before it differ, below what it ever was, and stays there.

    Where the learning rate falls, it may do so.
    """
    step_n, loss_n = read.recording.loss_step_n, read.recording.loss_n
    if len(loss_n) < 2 * STEP_LASTS:
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        log_nk = sliding_window_view(np.where(loss_n > 0, np.log(loss_n), -math.inf), STEP_LASTS)
        before_nk, after_nk, usual_n = log_nk[:-STEP_LASTS], log_nk[STEP_LASTS:], np.median(log_nk, axis=1)
        is_apart_n = before_nk.min(1) - after_nk.max(1) > np.maximum(LOSS_FALL, np.ptp(before_nk, axis=1))
        fell_n = is_apart_n & (np.fmin.accumulate(usual_n)[:-STEP_LASTS] - usual_n[STEP_LASTS:] > LOSS_FALL)
    lr_m = read.column("lr")
    for n in np.flatnonzero(fell_n).tolist():
        step = int(step_n[n + STEP_LASTS])
        row, before, after = read.row_of(step), math.exp(usual_n[n]), math.exp(usual_n[n + STEP_LASTS])
        is_judged = step > read.step_m[read.settled] or before > NEVER_LEARNED * after
        if is_judged and not (row and lr_m[row] < RATE_FELL * lr_m[row - 1]):
            yield Sign("data", row, moves=[Move("loss", "", row, row + 1, after, before, math.inf)], at=step)
            return
