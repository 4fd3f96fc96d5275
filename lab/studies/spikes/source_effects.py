"""Effects of claims on sources of a mixture that cause gradient-norm spikes, and on spikes after one is left out."""

from __future__ import annotations

import math

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.studies.spikes.effects import HALF
from lab.studies.spikes.sources import ALL, COUNTS, WITHOUT, ranked, source_traits

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


def leaving_out_the_source_ranked_first_removes_spikes(usual: ArmTables, *without: ArmTables) -> Effects:
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
