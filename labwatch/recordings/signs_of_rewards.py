"""Signs in the training of a policy: of its rewards, of the distance from its reference, and of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.core.windows import NORMAL
from labwatch.recordings.moves import TIMES_LARGEST, USUAL, Move, usual
from labwatch.recordings.readings import (
    FEWEST_ROWS,
    LASTS,
    Readings,
    Sign,
    constant_since,
    more_of_fewer,
    quantities,
    range_before,
    rows_from,
)

# A policy leaves its reference if in so many rows the KL divergence, whose growth had slowed down, grows so many times
# as fast as ever before, and to so many times what it was. That begins where it leaves what it was by the last factor,
# by which it also does not grow over ``USUAL`` rows if it grows no more.
# It is no longer apart from it, since that is renewed with it, if from one row on the divergence is below such a share.
# It is noisy if it fell by such a factor before. A divergence of the last size is rounding.
KL_ROWS, KL_GROWTH, KL_LEFT, KL_GONE, KL_NOISY, NO_KL = 5, 2.0, 1.25, 1e-3, 1.5, 1e-5
# A reward has fallen if it is below the rows before by this share of the highest, by more than they differ, by so many
# deviations of its noise, and by ``TIMES_LARGEST`` times as much as ever.
# It falls slowly if the median of ``USUAL`` rows is as far below the highest one, and by more than one of so many
# medians may be above another one by chance.
REWARD_FALL, REWARD_NOISE = 0.15, 2.6


def leaves_reference(read: Readings) -> Iterator[Sign]:
    """A KL divergence that grows faster over some rows than it ever did, to several times what it was.

    Or that grew no more, and then grows faster in one row than it ever did, and stays there; or that always is zero.
    """
    row_n = np.flatnonzero(np.isfinite(read.column("kl")))
    kl_n = read.column("kl")[row_n]
    if len(kl_n) >= FEWEST_ROWS and np.abs(kl_n).max() < NO_KL:
        if read.has("excess_surprisal"):  # else it is no model of tokens, and perhaps the divergence from what sampled
            yield Sign("policy", 0, moves=[Move("kl", "", 0, 1, 0.0, math.nan, math.inf)], is_exact=True)
        return
    highest_n = np.maximum.accumulate(kl_n)
    gone_n = np.maximum.accumulate(kl_n[::-1])[::-1] <= KL_GONE * highest_n  # and stays so
    if gone_n[1:].any() and kl_n.max() > 0:
        row = int(row_n[1 + np.argmax(gone_n[1:])])
        yield Sign("policy", row, moves=[read.change("kl", "", row)], is_exact=True)
        return
    if ((kl_n <= KL_GONE * highest_n) & (highest_n > 0)).any():
        return  # it is of what sampled, which is renewed again and again
    is_noisy_n = np.logical_or.accumulate((kl_n * KL_NOISY < highest_n) & (np.arange(len(kl_n)) > 0))
    least_later_n = np.fmin.reduce(rows_from(kl_n))
    growth_kn = [kl_n[rows:] - kl_n[:-rows] for rows in range(1, KL_ROWS + 1)]
    largest_kn = [np.maximum.accumulate(growth_n) for growth_n in growth_kn]
    for now in range(2, len(kl_n)):
        highest, growth = highest_n[now - 1], growth_kn[0][now - 1]
        is_calm = now > USUAL and highest <= KL_LEFT * highest_n[now - USUAL - 1]
        is_calm = is_calm and now + is_noisy_n[now - 1] < len(kl_n)  # a single row says little among noise
        if is_calm and least_later_n[now] > KL_LEFT * highest and growth > KL_GROWTH * largest_kn[0][now - 2]:
            row = int(row_n[now])
            yield Sign("policy", row, moves=[read.change("kl", "", row)])
            return
        rows = min(KL_ROWS, now // 2)
        begin = now - rows
        highest, largest = highest_n[begin], largest_kn[rows - 1][begin - rows]
        if growth_kn[rows - 1][begin - rows] * KL_GROWTH > largest:  # it is still on its way from zero
            continue
        left = int(np.flatnonzero(kl_n[: now + 1] <= KL_LEFT * highest)[-1:].max(initial=begin)) + 1
        least = KL_GROWTH if left < now else KL_GROWTH**2 * (1 + 1 / now)  # one row may be noise, and more so of few
        noise = (highest_n - kl_n)[: begin + 1].max()  # by which it fell again
        grown = kl_n[now - is_noisy_n[begin] : now + 1].min() - kl_n[begin]
        if highest > 0 and kl_n[now] > least * highest and grown > KL_GROWTH * (largest + noise):
            far = left + int(np.argmax(kl_n[left : now + 1] > KL_GROWTH * highest))
            if 2 * (kl_n[far] - kl_n[far - 1]) > kl_n[now] - kl_n[begin]:  # it left in that step, by most of the way
                left = far
            row = int(row_n[left])
            own = Move("kl", "", row, row + 1, float(kl_n[now]), float(highest), math.nan)
            known = [move for move in read.moves["kl", ""] if row <= move.row <= row_n[now]]
            yield Sign("policy", row, moves=known[:1] or [own])
            return


def lower_reward(read: Readings) -> Iterator[Sign]:
    """A reward that lies below the rows before, in some rows in a row, in their mean by more than these differ.

    And by far more than it ever did. Relative to the highest so far, since it rises as the policy learns, and soon
    learns again. Or one that falls slowly, or that is the same in all rows from one on, and not its highest.
    """
    reward_m = read.column("reward")
    row_n = np.flatnonzero(np.isfinite(reward_m) & (np.fmax.accumulate(np.abs(reward_m)) > 0))
    reward_n = reward_m[row_n]
    if len(reward_n) < FEWEST_ROWS:
        return
    first = constant_since(reward_n)
    if len(reward_n) - first >= LASTS and reward_n[first] < reward_n.max():
        row = int(row_n[first])
        yield Sign("reward", row, moves=[read.change("reward", "", row)], is_exact=True)
        return
    share_n = reward_n / np.maximum.accumulate(np.abs(reward_n))
    (lowest_n, highest_n), later_kn = range_before(share_n), rows_from(share_n)
    mean_n, noise = np.nanmean(later_kn, axis=0), NORMAL * float(np.nanmedian(np.abs(share_n - usual(share_n))))
    below_n = np.nan_to_num(lowest_n - mean_n)
    ever_n = np.append(np.zeros(LASTS), np.maximum.accumulate(below_n.clip(min=0))[:-LASTS])  # that ended before
    least_n = np.fmax(REWARD_FALL * more_of_fewer(later_kn), highest_n - lowest_n)
    least_n = np.maximum.reduce([least_n, TIMES_LARGEST * ever_n, np.full(len(ever_n), REWARD_NOISE * noise)])
    fell_n = (below_n > least_n) & (lowest_n - np.fmax.reduce(later_kn) > least_n / 2)
    rows = [row for row in row_n[fell_n].tolist() if row > read.settled]
    for row in rows[:1]:
        yield Sign("reward", row, moves=[read.change("reward", "", row)])
        return
    for row in _slow_fall(read, row_n):
        yield Sign("reward", row, moves=[read.change("reward", "", row)], is_vague=True)


def _slow_fall(read: Readings, row_n: NDArray[np.intp]) -> Iterator[int]:
    """The row from which the KL divergence or the reward stays away from where the reward was highest for some rows.

    If the reward falls from there by far more than it ever fell before, and the divergence does not stay what it was.
    """
    reward_n, kl_n = (read.column(name)[row_n] for name in ("reward", "kl"))
    if len(reward_n) < 2 * USUAL or np.isnan(kl_n).any():
        return
    window_nk = sliding_window_view(reward_n, USUAL)
    median_n, size_n = np.median(window_nk, axis=1), np.maximum.accumulate(np.abs(reward_n))[USUAL - 1 :]
    highest_n = np.maximum.accumulate(median_n)
    best_n = np.maximum.accumulate(np.where(median_n == highest_n, np.arange(len(median_n)), 0))
    at_n, now_n = best_n[:-USUAL], np.arange(USUAL, len(median_n))
    noise = NORMAL * float(np.nanmedian(np.abs(reward_n - usual(reward_n))))
    ever_n = np.maximum.accumulate(highest_n - median_n)[at_n]
    least_n = np.maximum.reduce(
        [REWARD_FALL * size_n[now_n], noise * np.sqrt(2 * np.log(now_n)), TIMES_LARGEST * ever_n]
    )
    fell_n = (median_n[at_n] - median_n[now_n] > least_n) & (window_nk[now_n].max(1) < window_nk[at_n].min(1))
    for now in now_n[fell_n].tolist()[:1]:
        best = slice(int(best_n[now - USUAL]), int(best_n[now - USUAL]) + USUAL)
        left_m = reward_n[best.stop : now + USUAL] < reward_n[best].min() - noise
        middle = (kl_n[best].min() + kl_n[best].max()) / 2
        turned_m = np.abs(kl_n[best.stop : now + USUAL] - middle) > 1.5 * np.ptp(kl_n[best])
        left, turned = (int(np.flatnonzero(~of_m).max(initial=-1)) + 1 for of_m in (left_m, turned_m))
        row = int(row_n[best.stop + min(left, turned)]) if turned < len(turned_m) else 0
        if row > read.settled:
            yield row


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
    later_kn = rows_from(value_n)
    if grows:
        away_n = np.fmin.reduce(later_kn) - np.append(math.inf, np.maximum.accumulate(value_n)[:-1])
        least_n = np.full(len(value_n), least)
    else:
        lowest_n, highest_n = range_before(value_n)
        above_n, below_n = np.fmin.reduce(later_kn) - highest_n, lowest_n - np.fmax.reduce(later_kn)
        away_n, least_n = np.fmax(above_n, below_n), np.fmax(least * more_of_fewer(later_kn), highest_n - lowest_n)
    for n in np.flatnonzero(away_n > least_n).tolist():
        if row_n[n] > read.settled and n >= FEWEST_ROWS - (name != "update_signs"):  # the first update has all signs
            row, own_n = int(row_n[n]), read.column(name)[row_n]
            before = float(np.median(own_n[max(0, n - USUAL) : n]))
            move = Move(name, "", row, len(read.step_m), float(own_n[n]), before, math.nan)
            yield Sign(quantities()[name]["kind"], row, moves=[move])
            return
