"""Effects of claims on planted bursts: responses, damage, state against data, and Adam's updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.probe_values import near
from lab.core.schema import batches_of_bursts
from lab.core.spike_trigger import LEAST_RISE
from labwatch.events.scores import REPEATS
from studies.claims.effects import Effects, Qualified, exceeds, mean, parts, slope
from studies.claims.evidence import BURST, ArmTables, ComparisonGroup, Config, MissingRunsError, bursts_of
from studies.claims.points import RUN_TABLES
from studies.claims.quantities import Quantity, cost, loss_at_top, quantity, run_column
from studies.claims.verdicts import BATCH, OPTIMIZER, STEPS
from studies.spikes.planted import EARLIER, FRACTION, START, Cell, update_traits

RESPONSE = "response"
# Half a spike: the bound between none and one, and the resolution of counts.
HALF = 0.5
# Resolution of peaks, nats/token, since held-out losses along training are on a slice of the text.
PEAK_STEP = 0.01
# The largest share of updates left out that still counts as training (Zhang et al. 2022, run 11.6).
LARGEST_SHARE = 0.2
HALVING = 1.0  # the loss scale changes by factors of two
RUN_TABLES["update"] = update_traits


# By name, a response to spikes, and the conditions that its settings fulfil.
RESPONSES: dict[str, tuple[str, dict[str, Callable[[float], bool]]]] = {
    "none": ("none", {}),
    "skip": ("rewind_and_skip", {"skip": lambda skip: skip > 0, "lr_factor": lambda factor: factor == 1}),
    "same_batches": ("rewind_and_skip", {"skip": lambda skip: skip == 0}),
    "skip_and_lower": ("rewind_and_skip", {"skip": lambda skip: skip > 0, "lr_factor": lambda factor: factor < 1}),
    "lower": ("lower_lr", {}),
    "restart": ("restart_and_lower", {"rewind": lambda rewind: rewind > 1}),
    "restart_newest": ("restart_and_lower", {"rewind": lambda rewind: rewind == 1}),
    "reset": ("adam_reset_warmup", {}),
    "leave_out": ("skip_update", {}),
    "clamp": ("activation_clamp", {}),
    "guard": ("soft_lr_guard", {}),
}


def is_met_by(curve: Config, burst: object, name: str) -> bool:
    """Whether runs with this config have the burst and, of ``RESPONSES``, the response."""
    response, conditions = RESPONSES[name]
    return (
        curve.get(BURST) == burst
        and curve.get(RESPONSE) == response
        and all(holds(float(curve[f"response.{key}"])) for key, holds in conditions.items())
    )


def each_burst_met_by(group: ComparisonGroup, *responses: str) -> list[ArmTables]:
    """An arm for each burst and response, bursts outermost."""
    return group.arms(*(partial(is_met_by, burst=burst, name=name) for burst in bursts_of(group) for name in responses))


# Whether weights and moments are the ones at the spike, or earlier ones.
STATES = {
    "own": (True, True),
    "earlier": (False, False),
    "earlier_weights": (False, True),
    "earlier_moments": (True, False),
}


def each_burst_in(group: ComparisonGroup, *states: str) -> list[ArmTables]:
    """Two arms for each burst and state: with the batches of the burst, and with ordinary ones."""
    cells = [Cell(*STATES[name], data=data) for name in states for data in (True, False)]

    def is_in(curve: Config, burst: str, cell: Cell) -> bool:
        return curve.get(BURST) == burst and curve.get(RESPONSE) == EARLIER and Cell.of(curve) == cell

    return group.arms(*(partial(is_in, burst=burst, cell=cell) for burst in bursts_of(group) for cell in cells))


USUAL: Config = {
    OPTIMIZER: "adamw",
    "optimizer.beta2": 0.95,
    "optimizer.clip": 1.0,
    "intervention.embedding_gradient_shrink": None,
}


def each_burst_with(group: ComparisonGroup, *changes: Config) -> list[ArmTables]:
    """An arm for each burst and each change of the default recipe, bursts outermost."""
    return group.arms(*({**USUAL, **change, BURST: burst} for burst in bursts_of(group) for change in changes))


def spikes_of_better_part_minus_whole(none: ArmTables, whole: ArmTables, skip: ArmTables, lower: ArmTables) -> Effects:
    """Spikes with the better of the two parts minus those with the whole recipe."""
    better = pd.concat([cost(skip, "spikes"), cost(lower, "spikes")], axis=1).min(axis=1, skipna=False)
    return better - cost(whole, "spikes")


def going_back_gains_beyond_the_rate(none: ArmTables, restart: ArmTables, lower: ArmTables) -> Effects:
    """A control: the peak exceeds 0.1 nats, and the lower rate without going back ends 0.01 nats above the restart.

    A lower learning rate late in training lowers the loss by itself.
    """
    beyond = (lower.loss(lower.top) - restart.loss(restart.top)).iloc[:, -1] - PEAK_STEP
    return parts(peak=cost(none, "peak") - LEAST_RISE, beyond_the_rate=beyond)


def larger_share_of_peak_or_batches(none: ArmTables, leave_out: ArmTables) -> Effects:
    """The larger of two shares: of the peak that stays, minus 0.5, and of the batches left out, minus 0.2."""
    stays = cost(leave_out, "peak") / cost(none, "peak") - HALF
    share = cost(leave_out, "skipped") / float(leave_out.setting(STEPS)) - LARGEST_SHARE
    return pd.concat([stays, share], axis=1).max(axis=1, skipna=False)


def peak_and_loss_lowered_by_guard(*arms: ArmTables) -> Effects:
    """Peak without a response minus that with the guard, nats; and 1.02 times the final loss minus the guard's."""
    pairs = {str(none.setting(BURST)): (none, guard) for none, guard in zip(arms[::2], arms[1::2], strict=True)}
    lower = {f"peak of {name}": cost(none, "peak") - cost(guard, "peak") for name, (none, guard) in pairs.items()}
    price = {
        f"final loss of {name}": 1.02 * loss_at_top(none) - loss_at_top(guard) for name, (none, guard) in pairs.items()
    }
    return parts(**lower, **price)


def doublings_of_loss_scale_by_early_division(divided: ArmTables, undivided: ArmTables, exact: ArmTables) -> Effects:
    """Log2 of the final loss scale with division before and after the sum, minus that with division after it.

    The control: a sum in fp32 takes a larger scale than the undivided sum, so that it is the sum that overflows.
    """
    gain = _doublings(divided) - _doublings(undivided)
    return Qualified(gain, HALVING, control=exceeds(_doublings(exact) - _doublings(undivided), 0.0))


def _doublings(arm: ArmTables) -> pd.DataFrame:
    """Log2 of the loss scale at the end."""
    return pd.DataFrame(np.log2(arm.probe(min(arm.lrs), "loss_scale", "", near, part=1.0)))


LENGTH = "bad_batches.length"


def _clean_and_repeated(group: ComparisonGroup) -> tuple[Config, list[Config]]:
    """The longest run without a burst, and those whose burst comes several times, in rising order of their number.

    Raises:
        MissingRunsError: no burst comes several times.
    """
    repeats = group.values(REPEATS)
    if not repeats:
        raise MissingRunsError("no burst comes several times", arms_exist=False)
    usual = {START: min(group.values(START)), STEPS: max(group.values(STEPS))}
    return {**usual, FRACTION: 0.0, REPEATS: None}, [{**usual, FRACTION: 1.0, REPEATS: number} for number in repeats]


def by_number(group: ComparisonGroup) -> list[ArmTables]:
    """An arm with one burst, and one with each larger number."""
    clean, repeated = _clean_and_repeated(group)
    return group.arms({**clean, FRACTION: 1.0}, *repeated)


def beside_the_last(group: ComparisonGroup) -> list[ArmTables]:
    """Four arms: without a burst; shorter by the batches of all bursts; with the last burst alone; with all bursts."""
    clean, repeated = _clean_and_repeated(group)
    length, steps = max(group.values(LENGTH)), int(clean[STEPS])
    bursts = batches_of_bursts(clean[START], length, steps, int(repeated[-1][REPEATS]))
    shorter = {**clean, STEPS: steps - sum(map(len, bursts))}

    def is_last(curve: Config) -> bool:
        once = {**clean, FRACTION: 1.0, START: curve.get(START)}
        is_alone = all(curve.get(key) == value for key, value in once.items())
        return is_alone and batches_of_bursts(curve[START], length, steps)[0] == bursts[-1]

    return group.arms(clean, shorter, is_last, repeated[-1])


def loss_added_by_each_burst(*arms: ArmTables) -> Effects:
    """Final loss with each number of bursts minus that with the next smaller one, at each learning rate."""
    finals = [quantity(arm, {"loss": "each", "size": "largest"}) for arm in arms]
    names = [str(arm.setting(REPEATS)) for arm in arms[1:]]
    rises = {name: after - before for name, before, after in zip(names, finals, finals[1:], strict=False)}
    return pd.concat(rises, axis=1)


# The epsilon of the default recipe, far below the gradients.
USUAL_EPSILON = 1e-8
# Fewest bursts over which a rank correlation is computed.
FEWEST_BURSTS = 4
FROZEN = 0.05  # RMS of an update, below which a tensor hardly moves


def _crossed(group: ComparisonGroup, epsilons: Sequence[float]) -> list[ArmTables]:
    """An arm for each burst, batch size and epsilon, bursts outermost, epsilons innermost."""
    settings = (
        {BURST: burst, BATCH: batch, EPSILON: epsilon}
        for burst in bursts_of(group)
        for batch in group.values(BATCH)
        for epsilon in epsilons
    )
    return group.arms(*settings)


def at_the_usual_epsilon(group: ComparisonGroup) -> list[ArmTables]:
    return _crossed(group, [USUAL_EPSILON])


def at_both_epsilons(group: ComparisonGroup) -> list[ArmTables]:
    """Arms at the lowest and at the highest epsilon."""
    epsilons = group.values(EPSILON)
    if len(epsilons) < 2:
        raise MissingRunsError("runs at one epsilon only", arms_exist=False)
    return _crossed(group, [epsilons[0], epsilons[-1]])


def _by_burst(arms: Sequence[ArmTables]) -> Iterator[tuple[str, list[ArmTables]]]:
    for burst in dict.fromkeys(arm.setting(BURST) for arm in arms):
        yield str(burst), [arm for arm in arms if arm.setting(BURST) == burst]


def slope_over_batch(*arms: ArmTables, of: Quantity) -> Effects:
    """Slope of a quantity over log10 of the batch size, for each burst."""
    tables = {
        burst: pd.DataFrame({arm.setting(BATCH): quantity(arm, of) for arm in of_burst})
        for burst, of_burst in _by_burst(arms)
    }
    return parts(**{burst: slope(table) for burst, table in tables.items()})


def fall_of_descent_cosine(*arms: ArmTables, column: str) -> Effects:
    """Half the usual cosine with the descent minus another cosine of ``update_traits``, for each burst.

    Each is a mean over batch sizes. The control: the held-out loss rises by more than 0.1 nats.
    """
    less, peaks = {}, {}
    for burst, of_burst in _by_burst(arms):
        less[burst] = mean([HALF * _trait(arm, "cosine") - _trait(arm, column) for arm in of_burst])
        peaks[burst] = mean([cost(arm, "peak") for arm in of_burst])
    return Qualified(parts(**less), control=exceeds(parts(**peaks), LEAST_RISE))


def _trait(arm: ArmTables, column: str) -> pd.Series:
    return run_column(arm, "update", column)


def embedding_update_at_lowest_epsilon(*arms: ArmTables) -> Effects:
    """Usual RMS of the embedding's update at the lowest epsilon minus 0.05; a mean over batch sizes.

    The control: at the highest epsilon it is below 0.05.
    """
    lowest, highest = arms[::2], arms[1::2]
    rms, frozen = (mean([_trait(arm, "embedding_rms") for arm in side]) for side in (lowest, highest))
    return Qualified(rms - FROZEN, control=Qualified(FROZEN - frozen))


def peak_lowered_by_lowest_epsilon(*arms: ArmTables) -> Effects:
    """Peak excess at the highest epsilon minus that at the lowest, for each burst, a mean over batch sizes."""
    lower = {}
    for burst, of_burst in _by_burst(arms):
        pairs = zip(of_burst[::2], of_burst[1::2], strict=True)
        lower[burst] = mean([cost(highest, "peak") - cost(lowest, "peak") for lowest, highest in pairs])
    return Qualified(parts(**lower), PEAK_STEP)


def rank_correlation_of_update_and_recovery(*arms: ArmTables) -> Effects:
    """Rank correlation of the update's largest RMS and the recovery, over bursts and batch sizes; 0 if undefined."""
    if len(arms) < FEWEST_BURSTS:
        raise MissingRunsError(f"{len(arms)} bursts, an order takes {FEWEST_BURSTS}")
    rms, recovery = (
        pd.concat([value(arm, column) for arm in arms], axis=1).rank(axis=1)
        for value, column in ((_trait, "largest_rms"), (cost, "recovery"))
    )
    is_whole = rms.notna().all(axis=1) & recovery.notna().all(axis=1)
    columns = range(len(arms))
    correlation = rms.set_axis(columns, axis=1).corrwith(recovery.set_axis(columns, axis=1), axis=1)
    return correlation.fillna(0.0).where(is_whole)
