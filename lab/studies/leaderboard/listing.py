"""The leaderboard as text for a terminal, as JSON and as CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.statistics import FEWEST_SEEDS, Interval, thousandths
from lab.analysis.text import finite, listed, plain_text
from lab.core.errors import RequestError
from lab.studies.leaderboard.arms import meanings
from lab.studies.leaderboard.board import (
    ALPHA,
    MARGIN,
    MEASURES,
    NOT_COMPARABLE,
    PART,
    VERDICTS,
    Board,
    Panel,
    Row,
    read_board,
)

RESULTS = Path("results")
MEASURE_NAMES = {
    "above": "instability part",
    "total": "sensitivity",
    "best": "best loss",
    "range": "log10 unstable / best LR",
    "at_3": "loss at 3x",
    "at_10": "loss at 10x",
}
INSTABILITY = MEASURE_NAMES[PART]
TICK = "\N{CHECK MARK}"


def board_folders(given: Sequence[Path]) -> list[Path]:
    """The given folders, or those of the committed results.

    Raises:
        RequestError: no folder is given, and there are no committed results.
    """
    folders = list(given) or sorted(path.parent for path in RESULTS.glob("leaderboard*/store.json"))
    if not folders:
        raise RequestError(f"no results of the leaderboard in {RESULTS}; train `lab sweep leaderboard`, or give a DIR")
    return folders


def board_of(folders: Sequence[Path]) -> Board:
    """The board of these folders, or of the committed results.

    Raises:
        RequestError: see ``read_board`` and ``board_folders``.
    """
    return read_board(board_folders(folders), meanings())


def change(interval: Interval) -> str:
    """A difference with its 95 % interval, ``-0.106 [-0.127, -0.085]``; below three seeds the values of the seeds."""
    if interval.n < FEWEST_SEEDS:
        return interval.bare if interval.n else ""
    scale = max(abs(interval.low), abs(interval.high))
    return "{:} [{:}, {:}]".format(*(thousandths(value, scale) for value in interval[:3]))


def level(values: pd.Series) -> str:
    """The mean of a measure over seeds; empty if no seed has a value."""
    mean = float(values.mean()) if values.notna().any() else math.nan
    return "" if math.isnan(mean) else thousandths(mean)


def p_shown(p: float) -> str:
    """A p value; empty without a test."""
    return "" if math.isnan(p) else f"{p:.2g}" if p >= 1e-4 else "<0.0001"


def ranks_shown(ranks: tuple[int, int] | None) -> str:
    """A rank, or a range of ranks: ``1 to 3``."""
    return "" if ranks is None else " to ".join(dict.fromkeys(map(str, ranks)))


def table(panel: Panel) -> pd.DataFrame:
    """A row for each arm of a panel, below that of the reference, which has its own values instead of differences."""
    reference = panel.reference
    levels = {MEASURE_NAMES[measure]: level(reference.seeds[measure]) for measure in MEASURES}
    first = {
        "arm": "(reference)",
        "verdict": "",
        INSTABILITY: levels.pop(INSTABILITY),
        "p (Holm)": "",
        "rank": ranks_shown(panel.rank),
        "beats reference": "",
        "beats next": "",
        **levels,
        "parameters": f"{reference.parameters:,}",
        "runs": str(reference.runs),
        "seeds": str(len(reference.seeds)),
    }
    return pd.DataFrame([first, *map(_cells, panel.rows)])


def _cells(row: Row) -> dict[str, str]:
    comparable = row.verdict != NOT_COMPARABLE
    differences = {MEASURE_NAMES[measure]: change(row.differences[measure]) for measure in MEASURES}
    if not comparable:
        differences |= {MEASURE_NAMES[measure]: "" for measure in ("above", "total")}
    return {
        "arm": row.name,
        "verdict": row.verdict,
        INSTABILITY: differences.pop(INSTABILITY),
        "p (Holm)": p_shown(row.p_adjusted),
        "rank": ranks_shown(row.ranks),
        "beats reference": TICK if row.beats_reference else "",
        "beats next": TICK if row.beats_neighbour else "",
        **differences,
        "parameters": f"{row.parameters_added:+,}",
        "runs": str(row.curve.runs),
        "seeds": str(row.seeds),
    }


def lines(board: Board) -> Iterator[str]:
    """Yield the lines of the board for a terminal."""
    for panel in board.panels:
        yield f"{panel.title}:"
        yield from (f"  {line}" for line in plain_text(table(panel)))
        yield ""
    yield from notes(board)


def notes(board: Board) -> Iterator[str]:
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
    counts_of_runs = sorted({row.curve.runs for row in rows})
    if len(counts_of_runs) > 1:
        yield f"Arms have from {counts_of_runs[0]} to {counts_of_runs[-1]} runs; the protocol asks for equal numbers."
    if partial := sum(one.incomplete for one in board.curves):
        yield f"{partial} seeds of arms lack a learning rate and are left out."


def as_json(board: Board) -> str:
    """A list of objects, one for each comparison; null where unknown."""
    return json.dumps([plain(row) for row in board.rows], indent=1, allow_nan=False, ensure_ascii=False)


def plain(row: Row) -> dict[str, Any]:
    """A row in plain values."""
    ranks = row.ranks or (None, None)
    differences = {
        measure: {
            "difference": finite(one.mean),
            "low": finite(one.low),
            "high": finite(one.high),
            "reference": finite(float(row.reference.seeds[measure].mean())),
        }
        for measure, one in row.differences.items()
    }
    return {
        "arm": row.name,
        "panel": row.panel,
        "verdict": row.verdict,
        "lr": row.lr_meaning,
        **differences,
        "p": finite(row.p),
        "p_holm": finite(row.p_adjusted),
        "rank_low": ranks[0],
        "rank_high": ranks[1],
        "beats_reference": row.beats_reference,
        "beats_next": row.beats_neighbour,
        "next": row.neighbour or None,
        "parameters_added": row.parameters_added,
        "time_ratio": finite(row.cost),
        "runs": row.curve.runs,
        "seeds": row.seeds,
        "loss_by_lr": {f"{lr:g}": finite(loss) for lr, loss in row.curve.losses.items()},
        **row.curve.source._asdict(),
    }


def as_csv(board: Board) -> str:
    """A line for each comparison, with the columns of ``as_json``; nested keys are joined by a point."""
    flat = pd.json_normalize([{**plain(row), "loss_by_lr": None} for row in board.rows]).drop(columns="loss_by_lr")
    return flat.to_csv(index=False, lineterminator="\n", float_format="%.6g").rstrip("\n")
