"""Claims on loss spikes: what going back, leaving out batches, lower learning rates and fresh moments do about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from lab.analysis.events.costs import HELD_OUT, spike_costs
from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from lab.analysis.judging.verdicts import STEPS, TO_SPARE, claim
from lab.analysis.probe_values import near
from lab.core.detectors import LEAST_RISE
from lab.studies.spikes.state_and_data import DATA, EARLIER, MOMENTS, WEIGHTS, Cell

PALM, OPT, WELM, GLM = "PaLM-540B", "OPT-175B", "WeLM-10B", "GLM-130B"
BURST, RESPONSE = "burst", "response"
# A spike more or less is a whole number, so a half lies between none and one, and counts are known to a half.
HALF = 0.5
# Held-out losses along training are those of a slice of the text, and peaks are known to a hundredth of a nat.
PEAK_STEP = 0.01
# The largest share of updates left out that still counts as training (Zhang et al. 2022, run 11.6).
LARGEST_SHARE = 0.2


class Responses(NamedTuple):
    """Predicates that pick the curve of a response from those of one burst."""

    name: str
    also: Callable[[Config], bool] = lambda curve: True

    def of(self, burst: object) -> Callable[[Config], bool]:
        """Whether a curve has this response, and this burst."""
        return lambda curve: curve.get(BURST) == burst and curve.get(RESPONSE) == self.name and self.also(curve)


def held_out(arm: ArmTables, lr: float, part: float) -> pd.Series:
    """Held-out loss of the largest model at a part of the run; at a restart, with what it brings."""
    return arm.probe(lr, HELD_OUT, "", near, part=part).iloc[:, -1]


def _number(curve: Config, key: str) -> float:
    return float(curve[f"response.{key}"])


NONE = Responses("none")
SKIP = Responses("rewind_and_skip", lambda curve: _number(curve, "skip") > 0 and _number(curve, "lr_factor") == 1)
SAME_BATCHES = Responses("rewind_and_skip", lambda curve: _number(curve, "skip") == 0)
SKIP_AND_LOWER = Responses("rewind_and_skip", lambda c: _number(c, "skip") > 0 and _number(c, "lr_factor") < 1)
LOWER = Responses("lower_lr")
RESTART = Responses("restart_and_lower", lambda curve: _number(curve, "rewind") > 1)
RESTART_NEWEST = Responses("restart_and_lower", lambda curve: _number(curve, "rewind") == 1)
RESET = Responses("adam_reset_warmup")
LEAVE_OUT = Responses("skip_update")
CLAMP = Responses("activation_clamp")
GUARD = Responses("soft_lr_guard")


def _crossed(*responses: Responses) -> Callable[[ComparisonGroup], list[ArmTables]]:
    """An arm for each burst and response, bursts outermost."""

    def arms(group: ComparisonGroup) -> list[ArmTables]:
        bursts = [burst for burst in group.values(BURST) if burst != "none"]
        if not bursts:
            raise MissingRunsError("no run has a burst", arms_exist=False)
        return group.arms(*(response.of(burst) for burst in bursts for response in responses))

    return arms


# Runs of one sweep meet the same bad batches again, and bring no spike of their own.
IN_THE_BATCHES = "the spike lies in the planted batches: with them every run has it, without them none can"
CHANGED = 1e-6  # nats, below which two runs are alike


def planted(figure: str, sentence: str, *responses: Responses, **others: object) -> Callable[..., object]:
    """As ``claim``, for the arms of these responses, crossed with the bursts."""
    filed: Callable[..., Callable[..., object]] = partial(
        claim, frees=(BURST, RESPONSE), cause=[RESPONSE], sweep="spike_responses", shown_in="responses"
    )
    return filed(figure, sentence, arms=_crossed(*responses), **others)


def _by_burst(arms: Sequence[ArmTables], responses: int) -> dict[str, Sequence[ArmTables]]:
    """The arms of ``_crossed`` by burst."""
    starts = range(0, len(arms), responses)
    return {str(arms[start].setting(BURST)): arms[start : start + responses] for start in starts}


def _cost(arm: ArmTables, column: str) -> pd.Series:
    """A cost per seed, of the largest model at the largest learning rate."""
    return arm.column(arm.top, spike_costs, column).iloc[:, -1]


def _final(arm: ArmTables) -> pd.Series:
    return arm.loss(arm.top).iloc[:, -1]


def _change(arms: Sequence[ArmTables], effect: Callable[[ArmTables, ArmTables], pd.Series]) -> Qualified:
    """An effect of two arms in each burst, nats/token; the control is that the first, without a response, takes harm.

    Harm is a held-out loss more than 0.1 nats above the usual.
    """
    bursts = _by_burst(arms, 2)
    control = exceeds(parts(**{name: _cost(none, "peak") for name, (none, _) in bursts.items()}), LEAST_RISE)
    return Qualified(parts(**{name: effect(*pair) for name, pair in bursts.items()}), PEAK_STEP, control=control)


def _spared(bursts: Mapping[str, Sequence[ArmTables]]) -> Qualified:
    """The control that the second arm's peak lies more than 0.1 nats below the first's."""
    return exceeds(parts(**{name: _cost(g[0], "peak") - _cost(g[1], "peak") for name, g in bursts.items()}), LEAST_RISE)


@planted(
    "sec. 5.1",
    "going back and leaving out the batches around a spike ends it: it does not come back",
    *(NONE, SKIP),
    side=(-math.inf, HALF),
    unit="spikes",
    source=PALM,
    untestable=IN_THE_BATCHES,
)
def skipped_spikes_stay_away(*arms: ArmTables) -> Effects:
    """Spikes after the first in runs that went back and left out batches.

    The control: they lower the peak of the held-out loss by more than 0.1 nats.
    """
    bursts = _by_burst(arms, 2)
    again = {name: _cost(skip, "spikes") - 1 for name, (_, skip) in bursts.items()}
    return Qualified(parts(**again), HALF, control=_spared(bursts))


@planted(
    "sec. 5.1",
    "it takes the data: after going back, the same batches spike again, and other batches do not",
    *(SAME_BATCHES, SKIP),
    side=(HALF, math.inf),
    unit="spikes",
    source=PALM,
    untestable=IN_THE_BATCHES,
)
def the_same_batches_spike_again(*arms: ArmTables) -> Effects:
    """Spikes in runs that went back to the same batches, minus those in runs that left them out."""
    bursts = _by_burst(arms, 2)
    more = {name: _cost(same, "spikes") - _cost(skip, "spikes") for name, (same, skip) in bursts.items()}
    return Qualified(parts(**more), HALF)


@planted(
    "sec. 2",
    "leaving out batches and lowering the learning rate brings no more spikes than either alone",
    *(NONE, SKIP_AND_LOWER, SKIP, LOWER),
    side=(-HALF, math.inf),
    unit="spikes",
    source=WELM,
    untestable=IN_THE_BATCHES,
)
def the_whole_recipe_is_no_worse_than_its_parts(*arms: ArmTables) -> Effects:
    """Spikes with the better of the two parts minus those with the whole recipe.

    The control: the recipe lowers the peak of the held-out loss by more than 0.1 nats.
    """
    bursts = _by_burst(arms, 4)
    effects = {
        name: pd.concat([_cost(skip, "spikes"), _cost(lower, "spikes")], axis=1).min(axis=1, skipna=False)
        - _cost(whole, "spikes")
        for name, (_, whole, skip, lower) in bursts.items()
    }
    return Qualified(parts(**effects), HALF, control=_spared(bursts))


@planted(
    "training log",
    "leaving out the range of batches around a spike saves the run: it ends lower than one that goes through them",
    *(NONE, SKIP),
    source=GLM,
)
def a_range_left_out_saves_the_run(*arms: ArmTables) -> Effects:
    """Final loss without a response minus that of runs that left the batches out."""
    return _change(arms, lambda none, skip: _final(none) - _final(skip))


@planted(
    "run 11.6",
    "leaving out updates with a gradient norm above 1 helps little: half the peak stays, or a fifth of the batches go",
    *(NONE, LEAVE_OUT),
    unit="share of the peak, or of batches",
    source=OPT,
)
def leaving_out_large_gradients_helps_little(*arms: ArmTables) -> Effects:
    """The larger of two: the share of the peak that stays, minus a half; and the share of batches left out minus 0.2.

    The control: some updates are left out.
    """
    effects, lost = {}, {}
    for name, (none, leave_out) in _by_burst(arms, 2).items():
        lost[name] = _cost(leave_out, "skipped")
        stays = _cost(leave_out, "peak") / _cost(none, "peak") - HALF
        share = lost[name] / float(leave_out.setting(STEPS)) - LARGEST_SHARE
        effects[name] = pd.concat([stays, share], axis=1).max(axis=1, skipna=False)
    return Qualified(parts(**effects), control=Qualified(parts(**lost)))


@planted(
    "run 12.16",
    "forgetting Adam's moments at a spike, with a new warm-up, lowers the peak of the held-out loss",
    *(NONE, RESET),
    source=OPT,
)
def fresh_moments_lower_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss without a response minus that with fresh moments."""
    return _change(arms, lambda none, reset: _cost(none, "peak") - _cost(reset, "peak"))


@planted(
    "runs 12.42 to 12.53",
    "going back with a lower learning rate, lower still if the spike returns, ends below a run that goes on",
    *(NONE, RESTART),
    source=OPT,
)
def restarts_with_lower_rates_end_lower(*arms: ArmTables) -> Effects:
    """Final loss without a response minus that with restarts at lower learning rates."""
    return _change(arms, lambda none, restart: _final(none) - _final(restart))


@planted(
    "sec. 2.5",
    "a restart from a checkpoint well before the spike spikes less often again than one from the newest",
    *(RESTART_NEWEST, RESTART),
    side=(HALF, math.inf),
    unit="spikes",
    source=OPT,
    untestable=IN_THE_BATCHES,
)
def healthy_checkpoints_spike_less(*arms: ArmTables) -> Effects:
    """Spikes of runs that restart from the newest snapshot minus those of runs that go back further."""
    bursts = _by_burst(arms, 2)
    fewer = {name: _cost(newest, "spikes") - _cost(older, "spikes") for name, (newest, older) in bursts.items()}
    return Qualified(parts(**fewer), HALF)


@planted("chronicles, 56 %", "clamping activations to ten times their RMS lowers the peak", *(NONE, CLAMP), source=OPT)
def clamped_activations_lower_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss without a response minus that with clamped activations.

    The control: clamping changes the peak at all.
    """
    lower = _change(arms, lambda none, clamp: _cost(none, "peak") - _cost(clamp, "peak"))
    return lower._replace(control=exceeds(pd.DataFrame(lower.table).abs(), CHANGED))


@planted(
    "metaseq",
    "the soft guard of the learning rate lowers the peak of the held-out loss, for less than 2 % of the final loss",
    *(NONE, GUARD),
    source=OPT,
    unit=TO_SPARE,
)
def the_soft_guard_lowers_the_peak(*arms: ArmTables) -> Effects:
    """Peak without a response minus that with the guard, nats; and 1.02 times the final loss minus the guard's."""
    bursts = _by_burst(arms, 2)
    lower = {name: _cost(none, "peak") - _cost(guard, "peak") for name, (none, guard) in bursts.items()}
    price = {f"{name}, final": 1.02 * _final(none) - _final(guard) for name, (none, guard) in bursts.items()}
    return parts(**lower, **price)


def _state(*, weights: bool, moments: bool) -> tuple[Responses, Responses]:
    """The two cells of one state: with the batches of the burst, and with ordinary ones."""
    return _in(Cell(weights, moments, data=True)), _in(Cell(weights, moments, data=False))


def _in(cell: Cell) -> Responses:
    return Responses(EARLIER, lambda curve: Cell.of(curve) == cell)


OF_THE_SPIKE = _state(weights=True, moments=True)
ablation = partial(
    planted,
    "sec. 5.1",
    sweep="state_and_data",
    shown_in="state_and_data",
    side=(LEAST_RISE, math.inf),
    source=PALM,
)


def _rise(with_burst: ArmTables, ordinary: ArmTables) -> pd.Series:
    """What the batches of a burst add to the peak in one state."""
    return _cost(with_burst, "peak") - _cost(ordinary, "peak")


def _interaction(arms: Sequence[ArmTables]) -> Qualified:
    """What the batches add in the state of the spike minus what they add in another, in each burst.

    The control: in the state of the spike they add more than 0.1 nats.
    """
    bursts = _by_burst(arms, 4)
    own = {burst: _rise(*cells[:2]) for burst, cells in bursts.items()}
    less = {burst: own[burst] - _rise(*cells[2:]) for burst, cells in bursts.items()}
    return Qualified(parts(**less), control=exceeds(parts(**own), LEAST_RISE))


@ablation(
    "a spike takes its data: in the same state ordinary batches bring a peak that is lower by over 0.1 nats",
    *OF_THE_SPIKE,
    cause=[DATA],
)
def a_spike_takes_its_data(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss with the burst's batches minus that with ordinary ones in the same state."""
    return parts(**{burst: _rise(*cells) for burst, cells in _by_burst(arms, 2).items()})


@ablation(
    "a spike takes its state: in an earlier state of the run the same batches add less to the peak, by over 0.1 nats",
    *OF_THE_SPIKE,
    *_state(weights=False, moments=False),
    cause=[WEIGHTS, MOMENTS],
)
def a_spike_takes_its_state(*arms: ArmTables) -> Effects:
    """What the batches add to the peak in the state of the spike, minus what they add in the earlier state."""
    return _interaction(arms)


@ablation(
    "its weights are part of that state: with earlier weights alone the batches add less, by over 0.1 nats",
    *OF_THE_SPIKE,
    *_state(weights=False, moments=True),
    cause=[WEIGHTS],
)
def a_spike_takes_its_weights(*arms: ArmTables) -> Effects:
    """What the batches add to the peak in the state of the spike, minus what they add with earlier weights."""
    return _interaction(arms)


@ablation(
    "Adam's moments are part of that state: with earlier moments alone the batches add less, by over 0.1 nats",
    *OF_THE_SPIKE,
    *_state(weights=True, moments=False),
    cause=[MOMENTS],
)
def a_spike_takes_its_moments(*arms: ArmTables) -> Effects:
    """What the batches add to the peak in the state of the spike, minus what they add with earlier moments."""
    return _interaction(arms)
