"""Effects of claims on loss spikes: arms for each burst, and the effects of responses, recipes and earlier states."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.judging.arms import BURST, bursts_of
from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config
from lab.analysis.judging.quantities import cost, loss_at_top
from lab.analysis.judging.verdicts import OPTIMIZER, STEPS
from lab.analysis.probe_values import near
from lab.core.detectors import LEAST_RISE
from lab.studies.spikes.state_and_data import EARLIER, Cell

RESPONSE = "response"
# Half a spike: the bound between none and one, and the resolution of counts.
HALF = 0.5
# Resolution of peaks, nats/token, since held-out losses along training are on a slice of the text.
PEAK_STEP = 0.01
# The largest share of updates left out that still counts as training (Zhang et al. 2022, run 11.6).
LARGEST_SHARE = 0.2
HALVING = 1.0  # the loss scale changes by factors of two


class Responses(NamedTuple):
    """A response to spikes: its name, and a predicate that its curve must fulfil."""

    name: str
    also: Callable[[Config], bool] = lambda curve: True

    def of(self, burst: object) -> Callable[[Config], bool]:
        """A predicate: whether a curve has this response, and this burst."""
        return lambda curve: curve.get(BURST) == burst and curve.get(RESPONSE) == self.name and self.also(curve)


def _number(curve: Config, key: str) -> float:
    return float(curve[f"response.{key}"])


RESPONSES = {
    "none": Responses("none"),
    "skip": Responses("rewind_and_skip", lambda curve: _number(curve, "skip") > 0 and _number(curve, "lr_factor") == 1),
    "same_batches": Responses("rewind_and_skip", lambda curve: _number(curve, "skip") == 0),
    "skip_and_lower": Responses(
        "rewind_and_skip", lambda curve: _number(curve, "skip") > 0 and _number(curve, "lr_factor") < 1
    ),
    "lower": Responses("lower_lr"),
    "restart": Responses("restart_and_lower", lambda curve: _number(curve, "rewind") > 1),
    "restart_newest": Responses("restart_and_lower", lambda curve: _number(curve, "rewind") == 1),
    "reset": Responses("adam_reset_warmup"),
    "leave_out": Responses("skip_update"),
    "clamp": Responses("activation_clamp"),
    "guard": Responses("soft_lr_guard"),
}


def each_burst_met_by(group: ComparisonGroup, *responses: str) -> list[ArmTables]:
    """An arm for each burst and response, bursts outermost."""
    return group.arms(*(RESPONSES[name].of(burst) for burst in bursts_of(group) for name in responses))


# Whether weights and moments are those of the spike, or earlier ones.
STATES = {
    "own": (True, True),
    "earlier": (False, False),
    "earlier_weights": (False, True),
    "earlier_moments": (True, False),
}


def each_burst_in(group: ComparisonGroup, *states: str) -> list[ArmTables]:
    """Two arms for each burst and state: with the batches of the burst, and with ordinary ones."""
    cells = [Cell(*STATES[name], data=data) for name in states for data in (True, False)]
    return group.arms(*(_in(cell).of(burst) for burst in bursts_of(group) for cell in cells))


def _in(cell: Cell) -> Responses:
    return Responses(EARLIER, lambda curve: Cell.of(curve) == cell)


USUAL: Config = {
    OPTIMIZER: "adamw",
    "optimizer.beta2": 0.95,
    "optimizer.clip": 1.0,
    "intervention.embedding_gradient_shrink": None,
}


def each_burst_with(group: ComparisonGroup, *changes: Config) -> list[ArmTables]:
    """An arm for each burst and each change of the default recipe, bursts outermost."""
    return group.arms(*({**USUAL, **change, BURST: burst} for burst in bursts_of(group) for change in changes))


def the_whole_recipe_is_no_worse_than_its_parts(
    none: ArmTables, whole: ArmTables, skip: ArmTables, lower: ArmTables
) -> Effects:
    """Spikes with the better of the two parts minus those with the whole recipe."""
    better = pd.concat([cost(skip, "spikes"), cost(lower, "spikes")], axis=1).min(axis=1, skipna=False)
    return better - cost(whole, "spikes")


def going_back_gains_beyond_the_rate(none: ArmTables, restart: ArmTables, lower: ArmTables) -> Effects:
    """A control: the peak exceeds 0.1 nats, and the lower rate without going back ends 0.01 nats above the restart.

    A lower learning rate late in training lowers the loss by itself.
    """
    beyond = (lower.loss(lower.top) - restart.loss(restart.top)).iloc[:, -1] - PEAK_STEP
    return parts(peak=cost(none, "peak") - LEAST_RISE, beyond_the_rate=beyond)


def leaving_out_large_gradients_helps_little(none: ArmTables, leave_out: ArmTables) -> Effects:
    """The larger of two shares: of the peak that stays, minus 0.5, and of the batches left out, minus 0.2."""
    stays = cost(leave_out, "peak") / cost(none, "peak") - HALF
    share = cost(leave_out, "skipped") / float(leave_out.setting(STEPS)) - LARGEST_SHARE
    return pd.concat([stays, share], axis=1).max(axis=1, skipna=False)


def the_soft_guard_lowers_the_peak(*arms: ArmTables) -> Effects:
    """Peak without a response minus that with the guard, nats; and 1.02 times the final loss minus the guard's."""
    pairs = {str(none.setting(BURST)): (none, guard) for none, guard in zip(arms[::2], arms[1::2], strict=True)}
    lower = {f"peak of {name}": cost(none, "peak") - cost(guard, "peak") for name, (none, guard) in pairs.items()}
    price = {
        f"final loss of {name}": 1.02 * loss_at_top(none) - loss_at_top(guard) for name, (none, guard) in pairs.items()
    }
    return parts(**lower, **price)


def interaction(own_burst: ArmTables, own: ArmTables, other_burst: ArmTables, other: ArmTables) -> Effects:
    """Rise of the peak by the batches of a burst in the state of the spike, minus their rise in another state."""
    return (cost(own_burst, "peak") - cost(own, "peak")) - (cost(other_burst, "peak") - cost(other, "peak"))


def a_divided_sum_takes_a_larger_loss_scale(divided: ArmTables, undivided: ArmTables, exact: ArmTables) -> Effects:
    """Log2 of the final loss scale with division before and after the sum, minus that with division after it.

    The control: a sum in fp32 takes a larger scale than the undivided sum, so that it is the sum that overflows.
    """
    gain = _doublings(divided) - _doublings(undivided)
    return Qualified(gain, HALVING, control=exceeds(_doublings(exact) - _doublings(undivided), 0.0))


def _doublings(arm: ArmTables) -> pd.DataFrame:
    """Log2 of the loss scale at the end."""
    return pd.DataFrame(np.log2(arm.probe(min(arm.lrs), "loss_scale", "", near, part=1.0)))
