"""Effects of claims on damage by loss spikes, in runs whose burst comes several times."""

from __future__ import annotations

import pandas as pd

from lab.analysis.events.costs import REPEATS
from lab.analysis.judging.effects import Effects
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from lab.analysis.judging.quantities import by_rate
from lab.analysis.judging.verdicts import STEPS
from lab.core.schema import batches_of_bursts
from lab.studies.spikes.repeats import FRACTION, START

LENGTH = "burst.length"


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


def _final(arm: ArmTables) -> pd.DataFrame:
    """Final loss of the largest model per seed (row) and learning rate (column)."""
    return by_rate(arm.lrs, lambda lr: arm.loss(lr).iloc[:, -1])


def the_final_loss_rises_with_the_number_of_bursts(*arms: ArmTables) -> Effects:
    """Final loss with each number of bursts minus that with the next smaller one, at each learning rate."""
    finals = [_final(arm) for arm in arms]
    names = [str(arm.setting(REPEATS)) for arm in arms[1:]]
    rises = {name: after - before for name, before, after in zip(names, finals, finals[1:], strict=False)}
    return pd.concat(rises, axis=1)


def damage_outlasts_the_spike_and_the_batches(
    clean: ArmTables, shorter: ArmTables, last: ArmTables, most: ArmTables
) -> Effects:
    """Final loss with most bursts minus that with the last of them alone, minus the cost of as many batches fewer."""
    lost_batches = _final(shorter) - _final(clean)
    return _final(most) - _final(last) - lost_batches
