"""Effects of claims on Adam's updates around loss spikes (Molybog et al. 2023): batch, descent, epsilon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.judging.arms import BURST, bursts_of
from lab.analysis.judging.effects import Effects, Qualified, exceeds, mean, parts, slope
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.quantities import cost, log10
from lab.analysis.judging.verdicts import BATCH
from lab.core.detectors import LEAST_RISE
from lab.studies.spikes.adam_updates import update_traits
from lab.studies.spikes.effects import HALF, PEAK_STEP

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


def _trait(arm: ArmTables, column: str) -> pd.Series:
    return arm.column(arm.top, update_traits, column).iloc[:, -1]


def _by_burst(arms: Sequence[ArmTables]) -> Iterator[tuple[str, list[ArmTables]]]:
    for burst in dict.fromkeys(arm.setting(BURST) for arm in arms):
        yield str(burst), [arm for arm in arms if arm.setting(BURST) == burst]


def _trends(arms: Sequence[ArmTables], value: Callable[[ArmTables], pd.Series]) -> pd.DataFrame:
    """The slope of a value over log10 of the batch size, for each burst."""
    tables = {burst: {arm.setting(BATCH): value(arm) for arm in of_burst} for burst, of_burst in _by_burst(arms)}
    return parts(**{burst: slope(pd.DataFrame(by_batch)) for burst, by_batch in tables.items()})


def gradients_agree_more_in_larger_batches(*arms: ArmTables) -> Effects:
    """Slope of the usual cosine of successive gradients over log10 of the batch size."""
    return _trends(arms, lambda arm: _trait(arm, "lag"))


def updates_grow_with_the_batch(*arms: ArmTables) -> Effects:
    """Slope of log10 of the usual RMS of the update over log10 of the batch size."""
    return _trends(arms, lambda arm: log10(_trait(arm, "rms").to_frame()).iloc[:, 0])


def spikes_are_higher_in_larger_batches(*arms: ArmTables) -> Effects:
    """Slope of the peak excess of the held-out loss over log10 of the batch size."""
    return Qualified(_trends(arms, lambda arm: cost(arm, "peak")), PEAK_STEP)


def _below_half_the_usual(arms: Sequence[ArmTables], column: str) -> Qualified:
    """Half the usual cosine with the descent minus another cosine, for each burst, a mean over batch sizes.

    The control: the held-out loss rises by more than 0.1 nats.
    """
    bursts = dict(_by_burst(arms))
    less = {
        burst: mean([HALF * _trait(arm, "cosine") - _trait(arm, column) for arm in of_burst])
        for burst, of_burst in bursts.items()
    }
    peaks = {burst: mean([cost(arm, "peak") for arm in of_burst]) for burst, of_burst in bursts.items()}
    return Qualified(parts(**less), control=exceeds(parts(**peaks), LEAST_RISE))


def the_update_leaves_the_descent_as_the_loss_rises(*arms: ArmTables) -> Effects:
    """Half the usual cosine minus the mean from the first batch of the burst to the highest held-out loss."""
    return _below_half_the_usual(arms, "rising_cosine")


def large_updates_leave_the_descent(*arms: ArmTables) -> Effects:
    """Half the usual cosine minus the mean over all large updates from the burst on, before and after the peak."""
    return _below_half_the_usual(arms, "large_cosine")


def a_lower_epsilon_prevents_the_freeze(*arms: ArmTables) -> Effects:
    """Usual RMS of the embedding's update at the lowest epsilon minus 0.05; a mean over batch sizes.

    The control: at the highest epsilon it is below 0.05.
    """
    lowest, highest = arms[::2], arms[1::2]
    rms, frozen = (mean([_trait(arm, "embedding_rms") for arm in side]) for side in (lowest, highest))
    return Qualified(rms - FROZEN, control=Qualified(FROZEN - frozen))


def a_lower_epsilon_lowers_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess at the highest epsilon minus that at the lowest, for each burst, a mean over batch sizes."""
    lower = {}
    for burst, of_burst in _by_burst(arms):
        pairs = zip(of_burst[::2], of_burst[1::2], strict=True)
        lower[burst] = mean([cost(highest, "peak") - cost(lowest, "peak") for lowest, highest in pairs])
    return Qualified(parts(**lower), PEAK_STEP)


def larger_updates_take_longer_to_recover(*arms: ArmTables) -> Effects:
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
