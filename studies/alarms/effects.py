"""Effects of claims on alarms: how often they are raised before the loss spikes, and how often they are false."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lab.analysis.spikes.trend import PER_STEPS
from lab.records.store import Records
from labwatch.events.scores import score_runs
from studies.claims.costs import NONE
from studies.claims.effects import Effects, Qualified, exceeds, parts
from studies.claims.evidence import BURST, ArmTables, ComparisonGroup, MissingRunsError, bursts_of

# Bounds of the claims: lead in steps, and share of the bursts that the alarm must find.
LEAST_LEAD, LEAST_SHARE, HALF = 5, 0.9, 0.5
LOSS, GRADIENT, UPDATES, CURVATURE = "spike", "gradient_spike", "update_rms", "curvature"


def clean_and_bursts(group: ComparisonGroup) -> list[ArmTables]:
    """An arm without a burst, then one for each burst."""
    return group.arms(*({BURST: burst} for burst in (NONE, *bursts_of(group))))


def _scores(records: Records) -> pd.DataFrame:
    """``score_runs`` with a row per run and a column per kind of alarm and score, such as ``spike.hit``."""
    scores = score_runs(records).drop_duplicates(["id", "kind"], keep="last").pivot(index="id", columns="kind")
    scores.columns = scores.columns.map(lambda pair: f"{pair[1]}.{pair[0]}")
    return scores


def _alarm(arms: Sequence[ArmTables], kind: str, column: str) -> pd.DataFrame:
    """A score of an alarm per seed (row), for each arm and learning rate (column)."""
    name = f"{kind}.{column}"
    if name not in arms[0].evidence.run_table(_scores):
        raise MissingRunsError(f"no run recorded the measurement of the alarm {kind}")
    return pd.concat([arm.column(lr, _scores, name).iloc[:, -1] for arm in arms for lr in arm.lrs], axis=1)


def _spikes_of_bursts(clean: ArmTables, bursts: Sequence[ArmTables]) -> Qualified:
    """The control: share of bursts with a loss spike minus the share of runs without a burst that have one."""
    share = _alarm(bursts, LOSS, "hit").mean(axis=1, skipna=False)
    return Qualified(share - _alarm([clean], LOSS, "false_alarms").mean(axis=1, skipna=False))


def _where_the_loss_spikes(bursts: Sequence[ArmTables], value: pd.DataFrame) -> pd.DataFrame:
    """A value for each burst with a loss spike, and NaN for the others; for a seed without any, 0 throughout."""
    spikes = _alarm(bursts, LOSS, "hit")
    kept = value.where(spikes > 0)
    kept.loc[~(spikes > 0).any(axis=1)] = 0.0
    kept.loc[spikes.isna().any(axis=1)] = math.nan
    return kept


def _margin_of_false_alarms(arms: Sequence[ArmTables], kind: str) -> pd.Series:
    """1 minus the false alarms in 1000 clean steps."""
    alarms, steps = (_alarm(arms, kind, column).sum(axis=1, skipna=False) for column in ("false_alarms", "clean_steps"))
    return 1 - PER_STEPS * alarms / steps


def lead_and_false_alarms_of_gradient_norms(clean: ArmTables, *bursts: ArmTables) -> Effects:
    """Median lead of the gradient norm's alarm minus 4.5 steps; and 1 minus its false alarms in 1000 clean steps.

    If the loss spikes without an alarm of the gradient norm, the lead counts as 0.
    """
    warned = _alarm(bursts, GRADIENT, "lead").where(_alarm(bursts, GRADIENT, "hit") > 0, 0.0)
    lead = _where_the_loss_spikes(bursts, warned).median(axis=1) - LEAST_LEAD + 0.5
    return Qualified(parts(lead=lead, false=_margin_of_false_alarms([clean, *bursts], GRADIENT)), 0.5)


def share_of_spikes_with_alarm(clean: ArmTables, *bursts: ArmTables, kind: str) -> Effects:
    """Share of the bursts with a loss spike in which a kind of alarm is raised, too, minus 0.9.

    The control: the loss spikes in more bursts than in runs without one.
    """
    found = _where_the_loss_spikes(bursts, _alarm(bursts, kind, "hit"))
    share = exceeds(found.mean(axis=1), LEAST_SHARE, found.notna().sum(axis=1))
    return share._replace(control=_spikes_of_bursts(clean, bursts))


def share_of_curvature_alarms_no_later_than_updates(clean: ArmTables, *bursts: ArmTables) -> Effects:
    """How often the curvature's alarm is no later than the alarm of large updates, and how seldom it is false.

    The first part is the share of the bursts with a loss spike in which it is no later, minus a half. The second part
    is 1 minus its false alarms in 1000 clean steps. The comparison is the lab's own. The control is that of
    ``share_of_spikes_with_alarm``.
    """
    delays = [_alarm(bursts, kind, "delay") for kind in (CURVATURE, UPDATES)]
    is_known = _alarm(bursts, CURVATURE, "hit").notna()
    is_first = (delays[0] <= delays[1].fillna(math.inf)).astype(float).where(is_known)
    first = _where_the_loss_spikes(bursts, is_first)
    found = first.notna().sum(axis=1)
    return Qualified(
        parts(first=first.mean(axis=1) - HALF, false=_margin_of_false_alarms([clean, *bursts], CURVATURE)),
        1 / is_first.size,
        control=_spikes_of_bursts(clean, bursts),
        trials=parts(first=found, false=math.nan * found),
        minus=HALF,
    )
