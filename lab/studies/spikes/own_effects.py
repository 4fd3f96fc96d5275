"""Effects of claims on spikes that nobody plants: their stages, remedies, sources of text, and held-out losses."""

from __future__ import annotations

import math

import pandas as pd

from lab.analysis.events.scores import PER_STEPS
from lab.analysis.judging.effects import Effects, Qualified, exceeds, mean, parts
from lab.analysis.judging.evidence import ArmTables, Choice, ComparisonGroup, MissingRunsError
from lab.analysis.judging.verdicts import ON, QK, STEPS
from lab.analysis.probe_values import late, near
from lab.studies.spikes.effects import HALF, RESPONSES
from lab.studies.spikes.own_spikes import (
    ALL,
    CHANGE,
    COUNTS,
    SAME,
    SHRINK,
    STAGES,
    WITHOUT,
    alarm_traits,
    branch_counts,
    ranked,
    remedy_traits,
    source_traits,
    spike_traits,
)

BETA1 = "optimizer.beta1"
# Spikes in 10,000 steps: as many as in a large model (about 20 in PaLM's 255,000), and enough to speak of what they do.
FEW, MANY = 1.0, 10.0
LEAST_LEAD, MOST_FALSE_ALARMS, NEARLY_ALL = 5, 1.0, 0.9
STEP = 0.5  # a median of whole steps is known to a half


def with_beta1(group: ComparisonGroup, beta1: float) -> list[ArmTables]:
    """Arms with this decay of the first moment, without qk-layernorm and with it."""
    return group.arms({BETA1: beta1, QK: None}, {BETA1: beta1, QK: ON})


def _trait(arm: ArmTables, column: str, lr: float | None = None) -> pd.Series:
    return arm.column(arm.top if lr is None else lr, spike_traits, column).iloc[:, -1]


def _share(arms: tuple[ArmTables, ...], column: str, suffix: str = "") -> pd.Series:
    """Share of the spikes, or of the controls, that have a trait, over these arms at the top learning rate.

    It is 0 where there are none.
    """
    found, every = (_sum(arms, name) for name in (column + suffix, "controls" if suffix else "spikes"))
    return (found / every).where(every != 0, 0.0)


def _sum(arms: tuple[ArmTables, ...], column: str) -> pd.Series:
    return len(arms) * mean([_trait(arm, column) for arm in arms])


def own_spikes_at_top_rate(*arms: ArmTables) -> Effects:
    """Spikes in 10,000 steps that the held-out loss shows as well, minus 1; mean over arms at the top rate."""
    return mean([_trait(arm, "rate") for arm in arms]) - FEW


def third_of_spikes_at_highest_minus_lowest_rate(*arms: ArmTables) -> Effects:
    """A third of the spikes in 10,000 steps at the highest learning rate minus those at the lowest, mean over arms.

    The control: they are more than 10 at the highest.

    Raises:
        MissingRunsError: there is one learning rate only.
    """
    if len(arms[0].lrs) == 1:
        raise MissingRunsError("runs at one learning rate only", arms_exist=False)
    highest, lowest = (mean([_trait(arm, "rate", lr) for arm in arms]) for lr in (arms[0].lrs[-1], arms[0].lrs[0]))
    return Qualified(highest / 3 - lowest, control=exceeds(highest, MANY))


def spikes_with_minus_half_without(without: ArmTables, with_it: ArmTables) -> Effects:
    """Spikes in 10,000 steps with qk-layernorm minus half of those without it; the control: those are more than 10."""
    rate, usual = _trait(with_it, "rate"), _trait(without, "rate")
    return Qualified(rate - HALF * usual, control=exceeds(usual, MANY))


def difference_in_own_spikes(usual: ArmTables, changed: ArmTables) -> Effects:
    """Spikes in 10,000 steps of the recipe minus those after a change; the control: those are more than 10."""
    rate = _trait(usual, "rate")
    return Qualified(rate - _trait(changed, "rate"), control=exceeds(rate, MANY))


def spikes_without_sampling(usual: ArmTables, full: ArmTables) -> Effects:
    """Spikes in 10,000 steps with the full batch minus 10; the control: the recipe has more than 10."""
    return Qualified(_trait(full, "rate") - MANY, control=exceeds(_trait(usual, "rate"), MANY))


def excess_share_of_early_signals(*arms: ArmTables) -> Effects:
    """Share of spikes before which a signal crosses minus the share of like steps without a spike, of two signals.

    They are the gradient of the embedding, and the update of the keys of the first block; and minus 0.5 each.
    """
    moved = {
        name: _share(arms, name) - _share(arms, name, "_control") - HALF
        for name in ("embedding_gradient", "attention_update")
    }
    return Qualified(parts(**moved), control=_spikes(arms))


def excess_share_of_each_stage(*arms: ArmTables) -> Effects:
    """Of each stage, the share of spikes that it goes before minus the share of like steps without one."""
    return Qualified(
        parts(**{stage: _share(arms, stage) - _share(arms, stage, "_control") for stage in STAGES}),
        1 / 100,
        control=_spikes(arms),
    )


def excess_share_of_embedding_gradient(*arms: ArmTables) -> Effects:
    """Share of spikes at which the embedding's gradient has grown tenfold, minus the share of like steps, minus 0.5."""
    returned = [_share(arms, "gradient_returns", suffix) for suffix in ("", "_control")]
    return Qualified(returned[0] - returned[1] - HALF, 1 / 100, control=_spikes(arms))


def _spikes(arms: tuple[ArmTables, ...]) -> Qualified:
    """The control that there are spikes."""
    return exceeds(mean([_trait(arm, "rate") for arm in arms]), MANY)


def _per_spike(arms: tuple[ArmTables, ...], column: str) -> pd.Series:
    """What alarms have of a column per spike, over these arms; 0 where there are none."""
    spikes, every = (mean([_alarm(arm, name) for arm in arms]) for name in ("spikes", column))
    return (every / spikes).where(spikes != 0, 0.0)


def _alarm(arm: ArmTables, column: str) -> pd.Series:
    return arm.column(arm.top, alarm_traits, column).iloc[:, -1]


def _false(arms: tuple[ArmTables, ...], kind: str) -> pd.Series:
    """False alarms in 1000 clean steps."""
    alarms, steps = (mean([_alarm(arm, f"{kind}.{column}") for arm in arms]) for column in ("false", "clean"))
    return PER_STEPS * alarms / steps


def _warns(arms: tuple[ArmTables, ...], kind: str) -> Qualified:
    """Mean lead minus 4.5 steps, and 1 minus the false alarms in 1000 clean steps."""
    lead = _per_spike(arms, f"{kind}.lead") - LEAST_LEAD + STEP
    return Qualified(parts(lead=lead, false=MOST_FALSE_ALARMS - _false(arms, kind)), STEP, control=_alarmed(arms))


def _spikes_of(arms: tuple[ArmTables, ...]) -> pd.Series:
    """How many spikes the alarms of these arms could find."""
    return len(arms) * mean([_alarm(arm, "spikes") for arm in arms])


def _alarmed(arms: tuple[ArmTables, ...]) -> Qualified:
    """The control that every seed has a spike."""
    return exceeds(mean([_alarm(arm, "spikes") for arm in arms]), 0.0)


def lead_of_gradient_norm_before_own_spikes(*arms: ArmTables) -> Effects:
    """Mean lead of the gradient norm's alarm minus 4.5 steps, and 1 minus its false alarms in 1000 clean steps.

    A spike that the alarm does not find has a lead of 0.
    """
    return _warns(arms, "gradient_spike")


def lead_of_large_updates_before_own_spikes(*arms: ArmTables) -> Effects:
    """The same of the alarm of large updates."""
    return _warns(arms, "update_rms")


def _found(arms: tuple[ArmTables, ...], kind: str) -> Qualified:
    """Share of spikes in which an alarm sounds, minus 0.9."""
    found = exceeds(_per_spike(arms, f"{kind}.hits"), NEARLY_ALL, _spikes_of(arms))
    return found._replace(control=_alarmed(arms))


def share_of_own_spikes_with_gradient_norm_alarm(*arms: ArmTables) -> Effects:
    """Share of spikes in which the alarm of the gradient norm sounds, minus 0.9."""
    return _found(arms, "gradient_spike")


def share_of_own_spikes_with_curvature_alarm(*arms: ArmTables) -> Effects:
    """Share of spikes in which the alarm of the curvature sounds, minus 0.9."""
    return _found(arms, "curvature")


def share_of_own_spikes_with_early_curvature(*arms: ArmTables) -> Effects:
    """Share of spikes in which curvature is no later than large updates, minus 0.5; and 1 minus its false alarms."""
    first, spikes = _per_spike(arms, "curvature.first") - HALF, _spikes_of(arms)
    false = MOST_FALSE_ALARMS - _false(arms, "curvature")
    return Qualified(
        parts(first=first, false=false),
        1 / 100,
        control=_alarmed(arms),
        trials=parts(first=spikes, false=math.nan * spikes),
        minus=HALF,
    )


# Spikes in 1,000 updates: fewer without a remedy leave it nothing to do.
FEW = 1.0


def own_spikes_met_by(group: ComparisonGroup, *responses: str) -> list[ArmTables]:
    """An arm for each response to spikes of the run's own; the embedding's gradient is whole."""

    def answers(name: str) -> Choice:
        is_met = RESPONSES[name].of(None)  # no run of the group has a burst
        return lambda curve: is_met(curve) and curve.get(SHRINK) is None

    return group.arms(*map(answers, responses))


def _remedy_trait(arm: ArmTables, column: str) -> pd.Series:
    return arm.column(arm.top, remedy_traits, column).iloc[:, -1]


def _one_spike(arm: ArmTables) -> float:
    """The rate of a single spike in a run, to which rates are known."""
    return PER_STEPS / float(arm.setting(STEPS))


def share_of_rewinds_without_return(same_batches: ArmTables, skip: ArmTables) -> Effects:
    """Share of rewinds after which no spike begins up to 20 updates after the one that was met, minus a half.

    The control: with the same batches one begins after more than half of them.
    """
    away = exceeds(1 - _returned(skip), HALF, _remedy_trait(skip, "answered"))
    return away._replace(control=exceeds(_returned(same_batches), HALF, _remedy_trait(same_batches, "answered")))


def _returned(arm: ArmTables) -> pd.Series:
    """Share of rewinds after which the spike comes back; 0 for a run that never went back."""
    answered = _remedy_trait(arm, "answered")
    return (_remedy_trait(arm, "returned") / answered).where(answered != 0, 0.0)


def difference_in_further_spikes(usual: ArmTables, changed: ArmTables) -> Effects:
    """Spikes after the first, in 1,000 of the updates trained after it, of the first arm minus the second's.

    The control: the first has more than 1.
    """
    rate = _remedy_trait(usual, "rate")
    return Qualified(rate - _remedy_trait(changed, "rate"), _one_spike(usual), control=exceeds(rate, FEW))


def difference_in_spikes_of_run(usual: ArmTables, changed: ArmTables) -> Effects:
    """Spikes in 1,000 updates trained, of the first arm minus the second's; control as above."""
    rate = _remedy_trait(usual, "overall")
    return Qualified(rate - _remedy_trait(changed, "overall"), _one_spike(usual), control=exceeds(rate, FEW))


def further_spikes_of_parts_minus_whole(
    none: ArmTables, whole: ArmTables, skip: ArmTables, lower: ArmTables
) -> Effects:
    """Further spikes in 1,000 updates with each part of a recipe minus those with all of it.

    The control: without a remedy there are more than with all of it, by over half of 1.
    """
    rate = _remedy_trait(whole, "rate")
    gained = parts(skipping=_remedy_trait(skip, "rate") - rate, lowering=_remedy_trait(lower, "rate") - rate)
    return Qualified(gained, _one_spike(none), control=exceeds(_remedy_trait(none, "rate") - rate, HALF))


def further_spikes_beyond_one(none: ArmTables, *others: ArmTables) -> Effects:
    """A control: further spikes in 1,000 updates without a remedy, minus 1."""
    return _remedy_trait(none, "rate") - FEW


# Spikes in 1000 steps, without which there are none to remove.
FEW = 1.0
FEWEST_LEFT_OUT = 2  # sources that were left out, each in turn: the one ranked first, and another as the control


def left_out(group: ComparisonGroup) -> list[ArmTables]:
    """The whole mixture, then an arm for each source that was left out.

    Raises:
        MissingRunsError: fewer than two sources were.
    """
    names = [name for name in group.values(WITHOUT) if name != ALL]
    if len(names) < FEWEST_LEFT_OUT:
        raise MissingRunsError("fewer than two sources were left out", arms_exist=False)
    return group.arms(*({WITHOUT: name} for name in (ALL, *names)))


def _column(arm: ArmTables, column: str) -> pd.Series:
    return arm.column(arm.top, source_traits, column).iloc[:, -1]


def _ranking(usual: ArmTables, names: list[str], ranking: pd.Index) -> list[str]:
    """These sources in the order of their spikes, by runs of the whole mixture with these seeds."""
    counts = {
        name: {column: float(_column(usual, f"{name}.{column}")[ranking].sum()) for column in COUNTS} for name in names
    }
    return ranked(counts)


def spikes_removed_by_source_ranked_first(usual: ArmTables, *without: ArmTables) -> Effects:
    """Half the gradient-norm spikes in 1000 steps minus those without one source; those without another minus half.

    The one is the source whose batches have most spikes, the other that with fewest.  Each seed with runs of every arm
    is tested with the ranking by all other such seeds, so no run that tests a source has ranked it.  The control: the
    whole mixture has more than one spike in 1000 steps.
    """
    arms = {str(arm.setting(WITHOUT)): arm for arm in without}
    rate = _column(usual, "rate")
    rates = pd.DataFrame({name: _column(arm, "rate") for name, arm in arms.items()}).reindex(rate.index)
    first, last = (pd.Series(math.nan, rate.index) for _ in range(2))
    complete = rates.assign(usual=rate).dropna().index
    for seed in complete if len(complete) > 1 else ():
        ranking = _ranking(usual, list(arms), complete.drop(seed))
        first[seed], last[seed] = rates.loc[seed, ranking[0]], rates.loc[seed, ranking[-1]]
    return Qualified(
        parts(ranked_first=HALF * rate - first, ranked_last=last - HALF * rate), control=exceeds(rate, FEW)
    )


OWN_LOSS, CLEAN_LOSS = "val_loss", "clean_val_loss"
EARLY = 0.1  # the share of a run after which a model has learned which tokens are frequent
LEAST = 0.1  # nats/token by which a loss must fall or rise


def _early(arm: ArmTables, probe: str) -> pd.Series:
    return arm.probe(arm.top, probe, "", near, part=EARLY).iloc[:, -1]


def _late(arm: ArmTables, probe: str) -> pd.Series:
    return arm.probe(arm.top, probe, "", late).iloc[:, -1]


def parting_of_held_out_losses(clean: ArmTables, damaged: ArmTables) -> Effects:
    """Of damaged text, the fall of its own held-out loss and the rise of the clean one, each minus 0.1 nats/token.

    Both are from a tenth of the run to its last tenth. The control: with undamaged text the clean one falls by as much.
    """
    fall = _early(damaged, OWN_LOSS) - _late(damaged, OWN_LOSS)
    rise = _late(damaged, CLEAN_LOSS) - _early(damaged, CLEAN_LOSS)
    usual = _early(clean, CLEAN_LOSS) - _late(clean, CLEAN_LOSS)
    return Qualified(parts(own_falls=fall - LEAST, clean_rises=rise - LEAST), control=exceeds(usual, LEAST))


def late_loss_changes_by_escapes(clean: ArmTables, damaged: ArmTables) -> Effects:
    """Held-out losses in the last tenth: damage lowers the loss on the corpus by so much, and raises it on clean text.

    The first minus 0.1 nats/token.
    """
    lower = _late(clean, OWN_LOSS) - _late(damaged, OWN_LOSS)
    higher = _late(damaged, CLEAN_LOSS) - _late(clean, CLEAN_LOSS)
    return Qualified(parts(own_is_lower=lower - LEAST, clean_is_higher=higher))


KNOWN_TO = 0.01  # a share of few spikes is known to no less


def branches(group: ComparisonGroup, *changes: str) -> list[ArmTables]:
    """The untouched twin and these changes, in this order, without qk-layernorm and then with it."""
    switches = [switch for switch in (None, ON) if any(curve.get(QK) == switch for curve in group.curves.values())]
    return group.arms(*({CHANGE: change, QK: switch} for switch in switches for change in (SAME, *changes)))


def _counts(arms: tuple[ArmTables, ...], change: str) -> tuple[pd.Series, pd.Series]:
    """How many of the spikes of each seed a change removed, and these; over the arms with it that had one."""
    having = [arm for arm in arms if arm.setting(CHANGE) == change]
    removed, spikes = (
        len(having) * mean([arm.column(arm.top, branch_counts, column).iloc[:, -1] for arm in having])
        for column in ("removed", "spikes")
    )
    return removed, spikes.where(spikes > 0)


def _by_change(arms: tuple[ArmTables, ...]) -> list[tuple[pd.Series, pd.Series]]:
    """The counts of the twin and of each change."""
    return [_counts(arms, str(name)) for name in dict.fromkeys(arm.setting(CHANGE) for arm in arms)]


def _kept(twin: tuple[pd.Series, pd.Series]) -> Qualified:
    """A control: the share of its spikes that the twin keeps, minus a half."""
    removed, spikes = twin
    return exceeds(1 - removed / spikes, HALF, spikes)


def share_of_spikes_removed(*arms: ArmTables) -> Effects:
    """Share of spikes that a change removes minus a half; the control: the twin keeps more than half of them."""
    twin, (removed, spikes) = _by_change(arms)
    return exceeds(removed / spikes, HALF, spikes)._replace(control=_kept(twin))


def difference_of_shares_removed(*arms: ArmTables) -> Effects:
    """Share of spikes that the second change removes minus the first's; the control is the twin's."""
    twin, first, second = _by_change(arms)
    return Qualified(second[0] / second[1] - first[0] / first[1], KNOWN_TO, control=_kept(twin))
