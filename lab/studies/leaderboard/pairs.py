"""Pairs of arms on the board: each is compared with the better of its members, and with the sum of their effects.

The rule is the board's, with these additions, which were fixed before any pair was trained:

- The better half of a pair is the member with the lower mean of the instability part on the seeds that all three share.
  That choice favours the better half, so it makes a pair look no better than it is.
- A pair is judged as an arm whose reference is its better half. Holm counts the pairs of the panel.
- The interaction is the effect of the pair minus the sum of the effects of its members, all against the reference of
  the panel. The sum is *reached* if the 90 % interval of the interaction lies below ``MARGIN``, *not reached* if else
  its 95 % interval lies above zero, and otherwise *open*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t
from lab.studies.leaderboard.board import ALPHA, MARGIN, OPEN, Base, Board, Pair, Panel, Row, judged
from lab.studies.leaderboard.curves import PART, Curve

REACHED, NOT_REACHED = "reached", "not reached"


def pair_panels(board: Board) -> list[Panel]:
    """A panel of the pairs that were trained beside each reference; in rising order of the difference."""
    panels = []
    for base in board.bases:
        title = f"pairs {base.title}"
        pairs = [(curve, found) for curve in base.curves if (found := board.members(curve, base)) is not None]
        rows = judged([_draft(board, base, title, curve, found) for curve, found in pairs])
        rows.sort(key=lambda row: (math.isnan(row.differences[PART].mean), row.differences[PART].mean, row.name))
        panels += [Panel(title, base.curve, None, rows)] if rows else []
    return panels


def _draft(board: Board, base: Base, title: str, curve: Curve, members: Mapping[str, Curve]) -> Row:
    values = [value.seeds[PART] for value in (curve, *members.values(), base.curve)]
    seeds = values[0].index
    for values_s in values[1:]:
        seeds = seeds.intersection(values_s.index)
    pair_s, first_s, second_s, base_s = (value.loc[seeds].astype(float) for value in values)
    better = min(members, key=lambda name: float(members[name].seeds[PART].reindex(seeds).mean()))
    row = board.draft(title, "+".join(members), curve, members[better], grid=base.curve.lrs)
    return row._replace(pair=Pair(better, student_t(pair_s - first_s - second_s + base_s)))


def sum_word(interaction: Interval) -> str:
    """Whether a pair reaches the sum of the effects of its members, by the rule."""
    if interaction.n < FEWEST_SEEDS:
        return OPEN
    if interaction.p_outside(-math.inf, MARGIN) < 2 * ALPHA:
        return REACHED
    return NOT_REACHED if interaction.low > 0 else OPEN
