"""Effects of claims on spikes that nobody plants: their stages, remedies, sources of text, and held-out losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd

from lab.analysis.spikes.trend import PER_STEPS
from studies.claims.effects import Effects, Qualified, exceeds, mean, parts
from studies.claims.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from studies.claims.points import RUN_TABLES
from studies.claims.quantities import run_column
from studies.claims.verdicts import ON, QK, STEPS
from studies.spikes.effects import HALF, is_met_by
from studies.spikes.own_spikes import (
    ALL,
    CHANGE,
    COUNTS,
    SAME,
    SHRINK,
    WITHOUT,
    alarm_traits,
    branch_counts,
    ranked,
    remedy_traits,
    source_traits,
    spike_traits,
)

BETA1 = "optimizer.beta1"
# Spikes in 10,000 steps that are enough to speak of what they do; and in 1,000, without which there are none to remove.
MANY, FEW = 10.0, 1.0
LEAST_LEAD, NEARLY_ALL = 5, 0.9
STEP = 0.5  # a median of whole steps is known to a half
RUN_TABLES.update(
    own=spike_traits, alarm=alarm_traits, remedy=remedy_traits, source=source_traits, branch=branch_counts
)


def with_beta1(group: ComparisonGroup, beta1: float) -> list[ArmTables]:
    """Arms with this decay of the first moment, without qk-layernorm and with it."""
    return group.arms({BETA1: beta1, QK: None}, {BETA1: beta1, QK: ON})


def _mean(arms: Sequence[ArmTables], table: str, column: str, at: str = "top") -> pd.Series:
    return mean([run_column(arm, table, column, at) for arm in arms])


def third_of_spikes_at_highest_minus_lowest_rate(*arms: ArmTables) -> Effects:
    """A third of the spikes in 10,000 steps at the highest learning rate minus those at the lowest, mean over arms.

    The control: they are more than 10 at the highest.

    Raises:
        MissingRunsError: there is one learning rate only.
    """
    if len(arms[0].lrs) == 1:
        raise MissingRunsError("runs at one learning rate only", arms_exist=False)
    highest, lowest = (_mean(arms, "own", "rate", at) for at in ("highest", "lowest"))
    return Qualified(highest / 3 - lowest, control=exceeds(highest, MANY))


def excess_share_of_spikes(*arms: ArmTables, traits: Sequence[str], minus: float = 0.0) -> Effects:
    """Of each trait, the share of spikes that have it minus the share of like steps without a spike, minus a constant.

    Shares are over all arms, and 0 where there are none. The control: there are more than 10 spikes in 10,000 steps.
    """
    spikes, like_steps = _mean(arms, "own", "spikes"), _mean(arms, "own", "controls")
    excess = {
        trait: (_mean(arms, "own", trait) / spikes).where(spikes != 0, 0.0)
        - (_mean(arms, "own", f"{trait}_control") / like_steps).where(like_steps != 0, 0.0)
        - minus
        for trait in traits
    }
    return Qualified(parts(**excess), control=exceeds(_mean(arms, "own", "rate"), MANY))


def _per_spike(arms: Sequence[ArmTables], column: str) -> pd.Series:
    """What alarms have of a column per spike, over these arms; 0 where there are none."""
    spikes = _mean(arms, "alarm", "spikes")
    return (_mean(arms, "alarm", column) / spikes).where(spikes != 0, 0.0)


def _spikes_of(arms: Sequence[ArmTables]) -> pd.Series:
    """How many spikes the alarms of these arms could find."""
    return len(arms) * _mean(arms, "alarm", "spikes")


def _margin_of_false_alarms(arms: Sequence[ArmTables], kind: str) -> pd.Series:
    """1 minus the false alarms in 1000 clean steps."""
    return 1 - PER_STEPS * _mean(arms, "alarm", f"{kind}.false") / _mean(arms, "alarm", f"{kind}.clean")


def lead_and_false_alarms_before_own_spikes(*arms: ArmTables, kind: str) -> Effects:
    """Mean lead of a kind of alarm minus 4.5 steps, and 1 minus its false alarms in 1000 clean steps.

    A spike that the alarm does not find has a lead of 0. The control: every seed has a spike.
    """
    lead = _per_spike(arms, f"{kind}.lead") - LEAST_LEAD + STEP
    margins = parts(lead=lead, false=_margin_of_false_alarms(arms, kind))
    return Qualified(margins, STEP, control=exceeds(_mean(arms, "alarm", "spikes"), 0.0))


def share_of_own_spikes_with_alarm(*arms: ArmTables, kind: str) -> Effects:
    """Share of spikes in which a kind of alarm sounds, minus 0.9; the control: every seed has a spike."""
    found = exceeds(_per_spike(arms, f"{kind}.hits"), NEARLY_ALL, _spikes_of(arms))
    return found._replace(control=exceeds(_mean(arms, "alarm", "spikes"), 0.0))


def share_of_own_spikes_with_early_curvature(*arms: ArmTables) -> Effects:
    """Share of spikes in which curvature is no later than large updates, minus 0.5; and 1 minus its false alarms."""
    first, spikes = _per_spike(arms, "curvature.first") - HALF, _spikes_of(arms)
    return Qualified(
        parts(first=first, false=_margin_of_false_alarms(arms, "curvature")),
        1 / 100,
        control=exceeds(_mean(arms, "alarm", "spikes"), 0.0),
        trials=parts(first=spikes, false=math.nan * spikes),
        minus=HALF,
    )


def own_spikes_met_by(group: ComparisonGroup, *responses: str) -> list[ArmTables]:
    """An arm for each response to spikes of the run's own; the embedding's gradient is whole."""

    def has(curve: Config, name: str) -> bool:
        return is_met_by(curve, None, name) and curve.get(SHRINK) is None  # no run of the group has a burst

    return group.arms(*(partial(has, name=name) for name in responses))


def share_of_rewinds_without_return(same_batches: ArmTables, skip: ArmTables) -> Effects:
    """Share of rewinds after which no spike begins up to 20 updates after the one that was met, minus a half.

    The control: with the same batches one begins after more than half of them.
    """
    rewinds = [run_column(arm, "remedy", "answered") for arm in (skip, same_batches)]
    returned = [  # 0 for a run that never went back
        (run_column(arm, "remedy", "returned") / answered).where(answered != 0, 0.0)
        for arm, answered in zip((skip, same_batches), rewinds, strict=True)
    ]
    return exceeds(1 - returned[0], HALF, rewinds[0])._replace(control=exceeds(returned[1], HALF, rewinds[1]))


def _one_spike(arm: ArmTables) -> float:
    """The rate of a single spike in a run, to which rates are known."""
    return PER_STEPS / float(arm.setting(STEPS))


def difference_in_spike_rates(usual: ArmTables, changed: ArmTables, *, column: str) -> Effects:
    """A rate of ``remedy_traits``, spikes in 1,000 updates, of the first arm minus the second's.

    The control: the first has more than 1.
    """
    rate = run_column(usual, "remedy", column)
    return Qualified(rate - run_column(changed, "remedy", column), _one_spike(usual), control=exceeds(rate, FEW))


def further_spikes_of_parts_minus_whole(
    none: ArmTables, whole: ArmTables, skip: ArmTables, lower: ArmTables
) -> Effects:
    """Further spikes in 1,000 updates with each part of a recipe minus those with all of it.

    The control: without a remedy there are more than with all of it, by over half of 1.
    """
    without, rate, skipping, lowering = (run_column(arm, "remedy", "rate") for arm in (none, whole, skip, lower))
    gained = parts(skipping=skipping - rate, lowering=lowering - rate)
    return Qualified(gained, _one_spike(none), control=exceeds(without - rate, HALF))


def left_out(group: ComparisonGroup) -> list[ArmTables]:
    """The whole mixture, then an arm for each source that was left out.

    Raises:
        MissingRunsError: fewer than two sources were, the one ranked first and another as the control.
    """
    names = [name for name in group.values(WITHOUT) if name != ALL]
    if len(names) < 2:
        raise MissingRunsError("fewer than two sources were left out", arms_exist=False)
    return group.arms(*({WITHOUT: name} for name in (ALL, *names)))


def spikes_removed_by_source_ranked_first(usual: ArmTables, *without: ArmTables) -> Effects:
    """Half the gradient-norm spikes in 1000 steps minus those without one source; those without another minus half.

    The one is the source whose batches have most spikes, the other that with fewest.  Each seed with runs of every arm
    is tested with the ranking by all other such seeds, so no run that tests a source has ranked it.  The control: the
    whole mixture has more than one spike in 1000 steps.
    """
    arms = {str(arm.setting(WITHOUT)): arm for arm in without}
    rate = run_column(usual, "source", "rate")
    rates = pd.DataFrame({name: run_column(arm, "source", "rate") for name, arm in arms.items()}).reindex(rate.index)
    counts = {f"{name}.{column}": run_column(usual, "source", f"{name}.{column}") for name in arms for column in COUNTS}
    first, last = (pd.Series(math.nan, rate.index) for _ in range(2))
    complete = rates.assign(usual=rate).dropna().index
    for seed in complete if len(complete) > 1 else ():
        sums = pd.DataFrame(counts).loc[complete.drop(seed)].sum()
        ranking = ranked({name: {column: float(sums[f"{name}.{column}"]) for column in COUNTS} for name in arms})
        first[seed], last[seed] = rates.loc[seed, ranking[0]], rates.loc[seed, ranking[-1]]
    return Qualified(
        parts(ranked_first=HALF * rate - first, ranked_last=last - HALF * rate), control=exceeds(rate, FEW)
    )


OWN_LOSS, CLEAN_LOSS = "val_loss", "clean_val_loss"
KNOWN_TO = 0.01  # a share of few spikes is known to no less


def branches(group: ComparisonGroup, *changes: str) -> list[ArmTables]:
    """The untouched twin and these changes, in this order, without qk-layernorm and then with it."""
    switches = [switch for switch in (None, ON) if any(curve.get(QK) == switch for curve in group.curves.values())]
    return group.arms(*({CHANGE: change, QK: switch} for switch in switches for change in (SAME, *changes)))


def _by_change(arms: Sequence[ArmTables]) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Of the twin and of each change, the share of the spikes that it removed, and how many there were, by seed."""
    for change in dict.fromkeys(arm.setting(CHANGE) for arm in arms):
        having = [arm for arm in arms if arm.setting(CHANGE) == change]
        removed, spikes = (len(having) * _mean(having, "branch", column) for column in ("removed", "spikes"))
        yield removed / spikes.where(spikes > 0), spikes.where(spikes > 0)


def share_of_spikes_removed(*arms: ArmTables) -> Effects:
    """Share of spikes that a change removes minus a half; the control: the twin keeps more than half of them."""
    (share_of_twin, spikes_of_twin), (share, spikes) = _by_change(arms)
    return exceeds(share, HALF, spikes)._replace(control=exceeds(1 - share_of_twin, HALF, spikes_of_twin))


def difference_of_shares_removed(*arms: ArmTables) -> Effects:
    """Share of spikes that the second change removes minus the first's; the control is the twin's."""
    (share_of_twin, spikes_of_twin), (first, _), (second, _) = _by_change(arms)
    return Qualified(second - first, KNOWN_TO, control=exceeds(1 - share_of_twin, HALF, spikes_of_twin))
