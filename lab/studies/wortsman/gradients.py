"""Claims on gradients, updates and Adam's epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from lab.analysis.curves import LR
from lab.analysis.judging.effects import Effects, Qualified, at_each_size, exceeds, log10, mean, parts, slope
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.verdicts import ON, QK, TO_SPARE, WIDTH, Presumption, claim
from lab.analysis.probe_values import late

EPS = "optimizer.eps"
MLP, KEY = "block0.mlp_up", "block0.attention.key"
TablesByLr = Mapping[float, pd.DataFrame]

trend = partial(claim, holds={QK: ON}, sweep="qk_layernorm")


def late_log(arm: ArmTables, probe: str, where: str) -> dict[float, pd.DataFrame]:
    """Log10 of what a probe recorded at the end of training, by learning rate."""
    return {lr: log10(arm.probe(lr, probe, where, late)) for lr in arm.lrs}


def over_lr(tables: TablesByLr) -> pd.DataFrame:
    """Slope over log10 of the learning rate, at each size."""
    return pd.DataFrame({size: slope(table) for size, table in at_each_size(tables).items()})


def over_size(tables: TablesByLr) -> pd.Series:
    """Slope over log10 size, mean over the learning rates."""
    return mean([slope(table) for table in tables.values()])


def _corner(tables: TablesByLr) -> pd.Series:
    """Decades by which the largest size and learning rate lies below the smallest of all others."""
    cells = pd.concat(tables, axis=1)
    return cells.iloc[:, :-1].min(axis=1, skipna=False) - cells.iloc[:, -1]


def _shrinking(figure: str, name: str, subject: str, tensor: str, shown_in: str) -> None:
    """File that the gradients of a tensor fall with learning rate and size."""
    rules: dict[str, tuple[str, str, Callable[[TablesByLr], pd.DataFrame | pd.Series]]] = {
        "fall_with_lr": (
            "falls with the learning rate, at every size",
            "decades per decade",
            lambda logs: -over_lr(logs),
        ),
        "fall_with_size": (
            "falls with size, mean over learning rates",
            "decades per decade",
            lambda logs: -over_size(logs),
        ),
        "are_smallest_at_the_corner": ("is smallest at the largest size and LR", "decades", _corner),
    }
    for rule, (predicate, unit, effect) in rules.items():

        def effects(arm: ArmTables, effect: Callable[[TablesByLr], pd.DataFrame | pd.Series] = effect) -> Effects:
            return effect(late_log(arm, "grad_rms", tensor))

        effects.__name__ = f"gradients_of_{name}_{rule}"
        sentence = f"late in training the gradient RMS of {subject} {predicate}"
        cause = [LR] if rule == "fall_with_lr" else [WIDTH]
        trend(figure, sentence, cause=cause, unit=unit, shown_in=shown_in)(effects)


_shrinking("11", "mlp", "the first MLP layer", MLP, "gradient_with_size")


@trend(
    "11",
    "late in training the gradient RMS of the first MLP layer comes within tenfold of Adam's epsilon",
    cause=[LR, WIDTH],
    side=(-math.inf, 1),
    unit="decades",
    shown_in="gradient_with_size",
)
def gradients_reach_epsilon(arm: ArmTables) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer over epsilon, at the largest size and LR.

    The control: at the smallest size and LR it is over tenfold.
    """
    eps = float(arm.setting(EPS))
    if eps <= 0:
        raise MissingRunsError("epsilon is zero", arms_exist=False)
    over_eps = {lr: table - math.log10(eps) for lr, table in late_log(arm, "grad_rms", MLP).items()}
    return Qualified(over_eps[arm.top].iloc[:, -1], control=exceeds(over_eps[arm.lrs[0]].iloc[:, 0], 1))


_shrinking("E.12", "key", "the first key projection", KEY, "key_gradient_with_size")

block_output = partial(trend, shown_in="block_output_with_size")


def _blocks(arm: ArmTables) -> list[str]:
    blocks = arm.locations("block_rms")
    if len(blocks) < 2:
        raise MissingRunsError("outputs of fewer than two blocks")
    return blocks


@block_output(
    "C.1",
    "the RMS of the last block's output rises with LR, by more than its power 0.3",
    cause=[LR],
    side=(0.3, math.inf),
    unit="decades per decade",
)
def block_output_rises_with_lr(arm: ArmTables) -> Effects:
    """Slope of the late log10 RMS over log10 LR, at each size."""
    return over_lr(late_log(arm, "block_rms", _blocks(arm)[-1]))


@block_output(
    "C.1",
    "the RMS of the last block's output is flat over size, by less than its power 0.1",
    cause=[LR],
    side=(-0.1, 0.1),
    unit="decades per decade",
)
def block_output_is_flat_over_size(arm: ArmTables) -> Effects:
    """Slope of the late log10 RMS over log10 size, mean over learning rates; the control: over LR it is above 0.1."""
    heights = late_log(arm, "block_rms", _blocks(arm)[-1])
    return Qualified(over_size(heights), control=exceeds(over_lr(heights), 0.1))


@block_output("C.1", "the RMS of a block's output grows from block to block", cause=["where"], unit="decades")
def block_output_grows_with_depth(arm: ArmTables) -> Effects:
    """Log10 of the late RMS over that of the block before, mean over learning rates, at each size."""
    heights = [mean([*late_log(arm, "block_rms", block).values()]) for block in _blocks(arm)]
    return pd.concat([after - before for before, after in pairwise(heights)], axis=1)


update = partial(trend, shown_in="updates_over_steps")


@update("E.13", "the unscaled update of the first MLP layer is smallest at the largest size and LR", unit="decades")
def updates_are_smallest_at_the_corner(arm: ArmTables) -> Effects:
    """Log10 of the next smallest late update RMS over the one there."""
    return _corner(late_log(arm, "update_rms", MLP))


@update(
    "E.13",
    "at the largest size and LR the unscaled update is less than half of that at the smallest",
    cause=[LR, WIDTH],
    side=(-math.inf, 0.5),
    unit="ratio",
)
def updates_halve_at_the_corner(arm: ArmTables) -> Effects:
    """Late update RMS of the first MLP layer at the largest size and LR over that at the smallest of both."""
    cells = pd.concat(late_log(arm, "update_rms", MLP), axis=1)
    return 10 ** (cells.iloc[:, -1] - cells.iloc[:, 0])


epsilon = partial(claim, frees=[EPS], holds={QK: ON}, sweep="epsilon", shown_in="loss_against_setting")
epsilon_update = partial(epsilon, shown_in="updates_by_epsilon")
TINY, USUAL, LARGE = {EPS: 1e-15}, {EPS: 1e-8}, {EPS: 1e-6}


def loss_at_top(arm: ArmTables) -> pd.Series:
    """Final loss at the top learning rate and the largest size."""
    return arm.loss(arm.top).iloc[:, -1]


@epsilon("12", "at the top LR epsilon 1e-15 ends lower than 1e-8", arms=[USUAL, TINY])
def smaller_epsilon_lowers_the_loss(usual: ArmTables, tiny: ArmTables) -> Effects:
    """Loss at 1e-8 minus that at 1e-15, largest size."""
    return loss_at_top(usual) - loss_at_top(tiny)


@epsilon("12", "at the top LR epsilon 1e-15 keeps gradients larger than 1e-8", arms=[TINY, USUAL], unit="decades")
def smaller_epsilon_keeps_gradients(tiny: ArmTables, usual: ArmTables) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer at 1e-15 over that at 1e-8, largest size."""
    larger, smaller = (late_log(arm, "grad_rms", MLP)[arm.top].iloc[:, -1] for arm in (tiny, usual))
    return larger - smaller


def _epsilon_over_gradient(large: ArmTables, usual: ArmTables) -> Effects:
    """Log10 of the large epsilon over the late gradient RMS of the first MLP layer at 1e-8, top LR and largest size."""
    return math.log10(large.setting(EPS)) - late_log(usual, "grad_rms", MLP)[usual.top].iloc[:, -1]


REACHED = Presumption(
    _epsilon_over_gradient, "gradients stay above the large epsilon: the log10 of epsilon over their RMS is {}"
)


@epsilon("12", "at the top LR epsilon 1e-6 ends higher than 1e-8", arms=[LARGE, USUAL], presumes=REACHED)
def larger_epsilon_raises_the_loss(large: ArmTables, usual: ArmTables) -> Effects:
    """Loss at 1e-6 minus that at 1e-8, largest size."""
    return loss_at_top(large) - loss_at_top(usual)


@epsilon(
    "E.15",
    "at the top LR training is lost with epsilon 1e-6 and not with 1e-8",
    arms=[LARGE, USUAL],
    unit=TO_SPARE,
    presumes=REACHED,
)
def larger_epsilon_loses_training(large: ArmTables, usual: ArmTables) -> Effects:
    """Loss minus the best one + 0.3 at 1e-6, the reverse at 1e-8, largest size."""
    above, below = (arm.lost_by(arm.top).iloc[:, -1] for arm in (large, usual))
    return parts(large=above, usual=-below)


def rising_epsilon(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(EPS)
    if len(values) < 2:
        raise MissingRunsError("one epsilon", arms_exist=False)
    return group.arms(*({EPS: value} for value in values))


@epsilon_update(
    "13",
    "wherever gradients are below epsilon the update is less than half of that with the smallest epsilon",
    arms=rising_epsilon,
    side=(-math.inf, 0.5),
    unit="ratio",
)
def updates_shrink_below_epsilon(smallest: ArmTables, *others: ArmTables) -> Effects:
    """Largest ratio of late update RMS (unscaled) of the first MLP layer, over all such epsilons, LRs and sizes."""
    base, ratios = late_log(smallest, "update_rms", MLP), []
    for arm in others:
        gradients, updates = (late_log(arm, probe, MLP) for probe in ("grad_rms", "update_rms"))
        log_eps = math.log10(arm.setting(EPS))
        ratios += [(updates[lr] - base[lr]).where(~(gradients[lr] >= log_eps), -math.inf) for lr in arm.lrs]
    largest = pd.concat(ratios, axis=1).max(axis=1, skipna=False)
    if (largest == -math.inf).all():
        raise MissingRunsError("no gradient RMS below an epsilon")
    return 10 ** largest.replace(-math.inf, math.nan)


def _tiny_and_largest(group: ComparisonGroup) -> list[ArmTables]:
    return group.arms(TINY, {EPS: max(group.values(EPS))})


@epsilon_update(
    "13",
    "with epsilon 1e-15 the update stays the same over learning rates, within a factor of two",
    arms=_tiny_and_largest,
    side=(-math.inf, math.log10(2)),
    unit="decades",
)
def updates_are_level_without_epsilon(tiny: ArmTables, largest: ArmTables) -> Effects:
    """Log10 of the largest over the smallest late update RMS (unscaled) of the first MLP layer, at each size.

    The control: with the largest epsilon it is more than a factor of two.
    """
    return Qualified(_span_over_lr(tiny), control=exceeds(_span_over_lr(largest), math.log10(2)))


def _span_over_lr(arm: ArmTables) -> pd.DataFrame:
    updates = [*late_log(arm, "update_rms", MLP).values()]
    span = np.ptp(np.stack([table.to_numpy() for table in updates]), axis=0)
    return pd.DataFrame(span, updates[0].index, updates[0].columns)
