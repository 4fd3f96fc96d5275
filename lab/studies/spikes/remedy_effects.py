"""Effects of claims on remedies for loss spikes of a run's own: whether they make spikes rarer or end them."""

from __future__ import annotations

import pandas as pd

from lab.analysis.events.scores import PER_STEPS
from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, Choice, ComparisonGroup
from lab.analysis.judging.verdicts import STEPS
from lab.studies.spikes.effects import HALF, RESPONSES
from lab.studies.spikes.remedies import SHRINK, remedy_traits

KNOWN_TO = 0.01  # a share of few spikes is known to no less
# Spikes in 1,000 steps: fewer without a remedy leave it nothing to do.
FEW = 1.0


def own_spikes_met_by(group: ComparisonGroup, *responses: str) -> list[ArmTables]:
    """An arm for each response to spikes of the run's own; the embedding's gradient is whole."""

    def answers(name: str) -> Choice:
        is_met = RESPONSES[name].of(None)  # no run of the group has a burst
        return lambda curve: is_met(curve) and curve.get(SHRINK) is None

    return group.arms(*map(answers, responses))


def _trait(arm: ArmTables, column: str) -> pd.Series:
    return arm.column(arm.top, remedy_traits, column).iloc[:, -1]


def _one_spike(arm: ArmTables) -> float:
    """The rate of a single spike in a run, to which rates are known."""
    return PER_STEPS / float(arm.setting(STEPS))


def own_spikes_stay_away(same_batches: ArmTables, skip: ArmTables) -> Effects:
    """Share of rewinds after which no spike begins up to 20 updates after the one that was met, minus a half.

    The control: with the same batches one begins after more than half of them.
    """
    returned, again = _returned(skip, unanswered=1.0), _returned(same_batches, unanswered=0.0)
    return Qualified(HALF - returned, KNOWN_TO, control=exceeds(again, HALF))


def _returned(arm: ArmTables, unanswered: float) -> pd.Series:
    """Share of rewinds after which the spike comes back; ``unanswered`` for a run that never went back."""
    answered = _trait(arm, "answered")
    return (_trait(arm, "returned") / answered).where(answered != 0, unanswered)


def further_spikes_are_rarer(usual: ArmTables, changed: ArmTables) -> Effects:
    """Spikes after the first, in 1,000 steps that follow it, of the first arm minus those of the second.

    The control: the first has more than 1.
    """
    rate = _trait(usual, "rate")
    return Qualified(rate - _trait(changed, "rate"), _one_spike(usual), control=exceeds(rate, FEW))


def spikes_of_the_run_are_rarer(usual: ArmTables, changed: ArmTables) -> Effects:
    """Spikes in 1,000 steps of the run, of the first arm minus those of the second; control as above."""
    rate = _trait(usual, "overall")
    return Qualified(rate - _trait(changed, "overall"), _one_spike(usual), control=exceeds(rate, FEW))


def the_whole_recipe_has_no_more_own_spikes(
    none: ArmTables, whole: ArmTables, skip: ArmTables, lower: ArmTables
) -> Effects:
    """Further spikes in 1,000 steps with each part of a recipe minus those with all of it.

    The control: without a remedy there are more than with all of it, by over half of 1.
    """
    rate = _trait(whole, "rate")
    gained = parts(skipping=_trait(skip, "rate") - rate, lowering=_trait(lower, "rate") - rate)
    return Qualified(gained, _one_spike(none), control=exceeds(_trait(none, "rate") - rate, HALF))


def own_spikes_are_frequent(none: ArmTables, *others: ArmTables) -> Effects:
    """A control: further spikes in 1,000 steps without a remedy, minus 1."""
    return _trait(none, "rate") - FEW
