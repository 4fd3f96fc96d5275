"""Claims on what restarts by hand swap in flight: the optimizer and the activation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pandas as pd

from lab.analysis.events.costs import HELD_OUT
from lab.analysis.judging.effects import Effects, Qualified, by_rate, exceeds
from lab.analysis.judging.evidence import ArmTables
from lab.analysis.judging.verdicts import claim
from lab.analysis.probe_values import recovery
from lab.studies.spikes.claims import HALF, OPT, held_out
from lab.studies.spikes.ledgers import LEDGER, NONE

# Shares of the run at which the ledgers restart it, and of the last measurement on the slice of the held-out text.
SWAP, END = 0.4, 0.99
EVERY = 4.0  # steps between measurements
LITTLE, AT_ONCE, SOON = 0.05, 0.05, 200.0  # share of a gain; nats/token; updates

swapped: Callable[..., Callable[..., object]] = partial(
    claim, frees=(LEDGER,), cause=[LEDGER], sweep="hot_swaps", shown_in="ledger", source=OPT
)


def _gain(arm: ArmTables) -> pd.Series:
    """By how much the held-out loss falls from the restart to the end, at the lowest learning rate."""
    lr = min(arm.lrs)
    return held_out(arm, lr, SWAP) - held_out(arm, lr, END)


def _jump(arm: ArmTables, unchanged: ArmTables) -> pd.DataFrame:
    """By how much a restart changes the held-out loss before the next update, at each learning rate."""
    return by_rate(arm.lrs, lambda lr: held_out(arm, lr, SWAP) - held_out(unchanged, lr, SWAP))


@swapped(
    "run 12.41",
    "SGD in place of Adam at the same learning rate makes no progress: less than 5 % of what Adam gains",
    arms=({LEDGER: NONE}, {LEDGER: "sgd"}, {LEDGER: "same"}),
    side=(-math.inf, LITTLE),
    unit="share of the gain",
)
def sgd_at_the_same_rate_makes_no_progress(adam: ArmTables, sgd: ArmTables, same: ArmTables) -> Effects:
    """What the loss gains after the switch over what it gains in the same steps without, at the lowest learning rate.

    The larger a model, the smaller are the entries of its gradient, and the steps of SGD beside those of Adam.  So the
    lowest rate of the sweep, a tenth of Adam's best, is nearest to large models.

    The control: of a restart that changes nothing, the same share is above 5 %.
    """
    return Qualified(_gain(sgd) / _gain(adam), control=exceeds(_gain(same) / _gain(adam), LITTLE))


@swapped(
    "run 12.41",
    "the rate was too low for SGD: at 1,000 times that rate it gains more than half as much as Adam",
    arms=({LEDGER: NONE}, {LEDGER: "sgd"}, {LEDGER: "sgd_1000"}),
    side=(HALF, math.inf),
    unit="share of the gain",
    restates="sgd_at_the_same_rate_makes_no_progress",
)
def sgd_makes_progress_at_a_thousandfold_rate(adam: ArmTables, sgd: ArmTables, faster: ArmTables) -> Effects:
    """What the loss gains with SGD at 1,000 times the lowest learning rate over what it gains with Adam at that rate.

    The control: SGD at Adam's rate gains less than 5 % of it.
    """
    return Qualified(_gain(faster) / _gain(adam), control=exceeds(-_gain(sgd) / _gain(adam), -LITTLE))


@swapped(
    "run 11.10",
    "ReLU in place of GELU, in flight, raises the loss at once by more than 0.05 nats",
    arms=({LEDGER: NONE}, {LEDGER: "relu"}, {LEDGER: "same"}),
    side=(AT_ONCE, math.inf),
    restates="the_loss_is_back_after_relu_in_flight",
)
def relu_in_flight_raises_the_loss_at_once(gelu: ArmTables, relu: ArmTables, same: ArmTables) -> Effects:
    """Held-out loss with ReLU minus that with GELU, of the same weights, at each learning rate.

    The control: a restart that changes nothing raises it by less than 0.05 nats.
    """
    return Qualified(_jump(relu, gelu), control=exceeds(-_jump(same, gelu), -AT_ONCE))


@swapped(
    "run 11.10",
    "the activation can be changed in flight: 200 steps after ReLU came in place of GELU the loss is back",
    arms=({LEDGER: NONE}, {LEDGER: "relu"}),
    side=(-math.inf, SOON),
    unit="updates",
)
def the_loss_is_back_after_relu_in_flight(gelu: ArmTables, relu: ArmTables) -> Effects:
    """Updates until the held-out loss is no higher than before the restart, at each learning rate.

    The control: the restart raises the loss at once.
    """
    back = by_rate(relu.lrs, lambda lr: relu.probe(lr, HELD_OUT, "", recovery, part=SWAP).iloc[:, -1])
    return Qualified(back, EVERY, control=exceeds(_jump(relu, gelu), 0.0))
