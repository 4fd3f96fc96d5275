"""What each arm of a board takes off the instability part, as the answer of a report on it."""

from __future__ import annotations

from lab.analysis.contrasts import Contrast, Measure, by_column, own_points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.sensitivity import Study
from lab.studies.leaderboard.curves import PART
from lab.studies.leaderboard.figures import comparable
from lab.studies.leaderboard.listing import NONE

CHANGE = Measure("Change of the instability part", "nats/token", own_points, by_column)


def contrasts(study: Study) -> list[Contrast]:
    """Of each arm in each panel, minus the arm that lacks its change; empty unless the records are a board."""
    try:
        names, panels = comparable(study.records, study.window, study.points["arm"].nunique())
    except NothingToDrawError:
        return []
    # a report speaks of the last column, which here is the panel without qk-layernorm
    columns = dict(reversed(panels.items()))
    levels = {
        name: {title: rows[name].differences[PART] if name in rows else NONE for title, rows in columns.items()}
        for name in names
    }
    return [Contrast(CHANGE, "", levels, {})]
