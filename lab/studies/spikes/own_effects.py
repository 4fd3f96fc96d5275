"""Effects of claims on loss spikes of a run's own: how often they come, what goes before them, which alarms warn."""

from __future__ import annotations

import pandas as pd

from lab.analysis.events.scores import PER_STEPS
from lab.analysis.judging.effects import Effects, Qualified, exceeds, mean, parts
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.verdicts import ON, QK
from lab.studies.spikes.effects import HALF
from lab.studies.spikes.own_alarms import alarm_traits
from lab.studies.spikes.own_spikes import STAGES, spike_traits

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


def small_models_spike_by_themselves(*arms: ArmTables) -> Effects:
    """Spikes in 10,000 steps that the held-out loss shows as well, minus 1; mean over arms at the top rate."""
    return mean([_trait(arm, "rate") for arm in arms]) - FEW


def spikes_grow_rarer_at_a_lower_rate(*arms: ArmTables) -> Effects:
    """A third of the spikes in 10,000 steps at the highest learning rate minus those at the lowest, mean over arms.

    The control: they are more than 10 at the highest.

    Raises:
        MissingRunsError: there is one learning rate only.
    """
    if len(arms[0].lrs) == 1:
        raise MissingRunsError("runs at one learning rate only", arms_exist=False)
    highest, lowest = (mean([_trait(arm, "rate", lr) for arm in arms]) for lr in (arms[0].lrs[-1], arms[0].lrs[0]))
    return Qualified(highest / 3 - lowest, control=exceeds(highest, MANY))


def qk_layernorm_does_not_prevent_them(without: ArmTables, with_it: ArmTables) -> Effects:
    """Spikes in 10,000 steps with qk-layernorm minus half of those without it; the control: those are more than 10."""
    rate, usual = _trait(with_it, "rate"), _trait(without, "rate")
    return Qualified(rate - HALF * usual, control=exceeds(usual, MANY))


def the_change_makes_them_rarer(usual: ArmTables, changed: ArmTables) -> Effects:
    """Spikes in 10,000 steps of the recipe minus those after a change; the control: those are more than 10."""
    rate = _trait(usual, "rate")
    return Qualified(rate - _trait(changed, "rate"), control=exceeds(rate, MANY))


def they_come_without_sampling(usual: ArmTables, full: ArmTables) -> Effects:
    """Spikes in 10,000 steps with the full batch minus 10; the control: the recipe has more than 10."""
    return Qualified(_trait(full, "rate") - MANY, control=exceeds(_trait(usual, "rate"), MANY))


def first_layers_move_first(*arms: ArmTables) -> Effects:
    """Share of spikes before which a signal crosses minus that of like steps without one, of two signals.

    They are the gradient of the embedding, and the update of the keys of the first block; and minus 0.5 each.
    """
    moved = {
        name: _share(arms, name) - _share(arms, name, "_control") - HALF
        for name in ("embedding_gradient", "attention_update")
    }
    return Qualified(parts(**moved), control=_spikes(arms))


def five_stages_go_before(*arms: ArmTables) -> Effects:
    """Of each stage, the share of spikes that it goes before minus that of like steps without one."""
    return Qualified(
        parts(**{stage: _share(arms, stage) - _share(arms, stage, "_control") for stage in STAGES}),
        1 / 100,
        control=_spikes(arms),
    )


def the_gradient_of_the_embedding_returns(*arms: ArmTables) -> Effects:
    """Share of spikes at which the embedding's gradient has grown tenfold, minus that of like steps, minus 0.5."""
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


def _alarmed(arms: tuple[ArmTables, ...]) -> Qualified:
    """The control that every seed has a spike."""
    return exceeds(mean([_alarm(arm, "spikes") for arm in arms]), 0.0)


def gradient_norms_warn_of_own_spikes(*arms: ArmTables) -> Effects:
    """Mean lead of the gradient norm's alarm minus 4.5 steps, and 1 minus its false alarms in 1000 clean steps.

    A spike that the alarm does not find has a lead of 0.
    """
    return _warns(arms, "gradient_spike")


def large_updates_warn_of_own_spikes(*arms: ArmTables) -> Effects:
    """The same of the alarm of large updates."""
    return _warns(arms, "update_rms")


def own_spikes_show_in_the_gradient_norm(*arms: ArmTables) -> Effects:
    """Share of spikes in which the alarm of the gradient norm sounds, minus 0.9."""
    share = _per_spike(arms, "gradient_spike.hits")
    return Qualified(share - NEARLY_ALL, 1 / 100, control=_alarmed(arms))


def own_spikes_pass_the_limit_of_stability(*arms: ArmTables) -> Effects:
    """Share of spikes in which the alarm of the curvature sounds, minus 0.9."""
    return Qualified(_per_spike(arms, "curvature.hits") - NEARLY_ALL, 1 / 100, control=_alarmed(arms))


def curvature_warns_before_updates_of_own_spikes(*arms: ArmTables) -> Effects:
    """Share of spikes in which curvature is no later than large updates, minus 0.5; and 1 minus its false alarms."""
    first = _per_spike(arms, "curvature.first") - HALF
    false = MOST_FALSE_ALARMS - _false(arms, "curvature")
    return Qualified(parts(first=first, false=false), 1 / 100, control=_alarmed(arms))
