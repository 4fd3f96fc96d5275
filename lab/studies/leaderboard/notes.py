"""Notes below the board for its readers: counts, the rule, what was left out, and what pairs and spikes mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lab.analysis.events.scores import PER_STEPS
from lab.analysis.sensitivity import WINDOW
from lab.analysis.text import listed
from lab.studies.leaderboard.board import ALPHA, MARGIN, NOT_COMPARABLE, VERDICTS, Board, Row
from lab.studies.leaderboard.pairs import pair_panels
from lab.studies.leaderboard.planted_spikes import planted_of


def board_notes(board: Board) -> Iterator[str]:
    """Yield notes for the reader, a sentence each: counts, the rule, and what was left out."""
    rows = board.rows
    counts = [f"{n} {name}" for name in VERDICTS if (n := sum(row.verdict == name for row in rows))]
    yield f"{len(rows)} comparison{'s' * (len(rows) != 1)}: {', '.join(counts) or 'none'}."
    yield (
        "The row of the reference has its values; the other rows have differences from it, paired by seed, with 95 % "
        "intervals (nats/token; decades of learning rate)."
    )
    yield (
        f"Rule: no difference if the 90 % interval of the instability part lies within {MARGIN:g} nats; else helps "
        f"or harms if its Holm-adjusted p in the panel is below {ALPHA:g}."
    )
    for low, high in {one.window for one in board.curves} - {WINDOW}:
        yield f"Sensitivity is a mean over learning rates from {low:g} to {high:g}."
    yield "Ranks are the ranges that pairwise 95 % intervals leave open, not corrected for the number of pairs."
    if own := sorted({row.name for panel in board.panels for row in panel.rows if row.curve is panel.reference}):
        yield f"The reference has {listed(own)}: the row compares it with the arm that lacks this, and has no rank."
    if others := sorted({row.name for row in rows if row.verdict == NOT_COMPARABLE}):
        yield (
            f"Not comparable by sensitivity, since their learning rate means something else: {listed(others)}. "
            "Comparable are their best loss, the smallest unstable learning rate over the best one, and the loss at 3 "
            "and 10 times the best one."
        )
    if open_ended := sorted({row.name for row in rows if row.curve.seeds["censored"].any()}):
        yield (
            f"{len(open_ended)} arms have seeds without an unstable learning rate; for these it counts as one step "
            "above the grid."
        )
    for panel in board.panels:
        if idle := [row.name for row in panel.rows if _equal(row)]:
            yield f"{panel.heading}, runs of {listed(idle)} end as those of the reference do: the change never acted."
        if untrained := [row.name for row in panel.rows if row.seeds and not row.curve.seeds["trains"].any()]:
            yield (
                f"{panel.heading}, no run of {listed(untrained)} ended better than a bigram model, so the instability "
                "part says little."
            )
    counts_of_runs = sorted({row.curve.runs for row in rows})
    if len(counts_of_runs) > 1:
        yield f"Arms have from {counts_of_runs[0]} to {counts_of_runs[-1]} runs; the protocol asks for equal numbers."
    if partial := sum(one.incomplete for one in board.curves):
        yield f"{partial} seeds of arms lack a learning rate and are left out."
    yield from _pair_notes(board)
    yield from _spike_notes(board)


def _equal(row: Row) -> bool:
    """Whether an arm and its reference have the same losses to the last bit."""
    return bool(row.curve.losses) and row.curve.losses == row.reference.losses


def _pair_notes(board: Board) -> Iterator[str]:
    pairs = [row for panel in pair_panels(board) for row in panel.rows]
    if not pairs:
        return
    counts = [f"{n} {name}" for name in VERDICTS if (n := sum(row.verdict == name for row in pairs))]
    yield (
        f"{len(pairs)} pair{'s' * (len(pairs) != 1)}: {', '.join(counts)}. A pair is compared with its better "
        "half, the member with the lower instability part on the same seeds. The rule is the same, and Holm counts "
        "pairs."
    )
    yield (
        "The interaction is the effect of a pair minus the sum of both members' effects. The sum is reached if the "
        f"90 % interval of the interaction lies below {MARGIN:g} nats. Else it is not reached if the 95 % interval "
        "lies above zero. The instability part cannot fall below zero, so two large effects cannot add up."
    )


def _spike_notes(board: Board) -> Iterator[str]:
    counted = [one for one in board.curves if not math.isnan(one.spikes.lr)]
    if counted:
        yield (
            f"Spikes are loss spikes in {PER_STEPS:,} steps, at the largest learning rate that is at most half "
            "the smallest unstable one of the arm. The detector needs 20 losses before it, so steps from 20 on count."
        )
    if any(one.spikes.is_top for one in counted):
        yield "Arms marked (top) have no unstable learning rate in the grid: their spikes are counted at the highest."
    elif not counted:
        yield "Spikes are not counted: these runs did not record their training loss at every step."
    if any(planted_of(panel, row) for panel in board.panels for row in panel.rows):
        yield (
            "A planted spike is one that bad batches cause in the sweep optimizer_arms, in the recipe with "
            "qk-layernorm. Shown are the updates that it lasts with the arm minus those without, by burst. "
            "Below zero it ends sooner."
        )
