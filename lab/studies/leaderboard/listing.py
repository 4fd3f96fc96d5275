"""The leaderboard as text for a terminal, as JSON and as CSV, with its headlines and notes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.events.scores import PER_STEPS
from lab.analysis.rendering import html
from lab.analysis.sensitivity import WINDOW, Window
from lab.analysis.statistics import FEWEST_SEEDS, Interval, format_3_decimals
from lab.analysis.text import finite, format_p, listed, plain_text
from lab.core import shipped
from lab.core.errors import RequestError
from lab.studies.leaderboard.arms import meanings
from lab.studies.leaderboard.board import (
    ALPHA,
    HARMS,
    HELPS,
    MARGIN,
    NOT_COMPARABLE,
    OPEN,
    VERDICTS,
    Board,
    Panel,
    Row,
    read_board,
)
from lab.studies.leaderboard.curves import MEASURES, PART, SPIKES, Curve
from lab.studies.leaderboard.pairs import pair_panels, sum_word
from lab.studies.leaderboard.planted_spikes import planted_of

MEASURE_NAMES = {
    "above": "instability part",
    "total": "sensitivity",
    "best": "best loss",
    "range": "log10 unstable / best LR",
    "at_3": "loss at 3x",
    "at_10": "loss at 10x",
    "spikes": f"spikes / {PER_STEPS:,} steps",
}
INSTABILITY = MEASURE_NAMES[PART]
NONE = Interval(math.nan, math.nan, math.nan, 0)
TICK = "\N{CHECK MARK}"


def board_folders(given: Sequence[Path]) -> list[Path]:
    """The given folders, or those of the committed results.

    Raises:
        RequestError: no folder is given, and there are no committed results.
    """
    results = shipped.results()
    folders = list(given) or sorted(path.parent for path in results.glob("leaderboard*/store.json"))
    if not folders:
        raise RequestError(f"no results of the leaderboard in {results}; train `lab sweep leaderboard`, or give a DIR")
    return folders


def board_of(folders: Sequence[Path], window: Window = WINDOW) -> Board:
    """The board of these folders, or of the committed results; sensitivity is a mean over ``window``.

    Raises:
        RequestError: see ``read_board`` and ``board_folders``.
    """
    return read_board(board_folders(folders), meanings(), window=window)


def all_panels(board: Board) -> list[Panel]:
    """The panels of single arms, then those of pairs."""
    return [*board.panels, *pair_panels(board)]


def headline(panel: Panel) -> str:
    """Which arms help or harm, and how many are open: ``2 of 39 arms help: nope and peri_ln; 3 open; 6 seeds``.

    It marks arms that help but raise the whole sensitivity, and says if there is too little to take off.
    """
    judged = [row for row in panel.rows if row.verdict != NOT_COMPARABLE]
    helping, harming, unsure = ([row for row in judged if row.verdict == word] for word in (HELPS, HARMS, OPEN))
    part = panel.reference.seeds[PART]
    return html.render(
        "board_headline.txt",
        has_pairs=panel.has_pairs,
        judged=judged,
        helping=[
            f"{row.name} (raises LR sensitivity as a whole)" if row.differences["total"].low > 0 else row.name
            for row in helping
        ],
        harming=[row.name for row in harming],
        unsure=unsure,
        small_part=level(part) if not panel.has_pairs and part.mean() < MARGIN else "",
        margin=f"{MARGIN:g}",
        seeds=max((row.seeds for row in judged), default=0),
    )


def board_notes(board: Board) -> list[str]:
    """Notes for the reader, a line each: counts, the rule, what was left out, and what pairs and spikes mean."""
    rows, runs = board.rows, [row.curve.runs for row in board.rows]
    pairs = [row for panel in pair_panels(board) for row in panel.rows]
    counted = [curve.spikes for curve in board.curves if not math.isnan(curve.spikes.lr)]
    text = html.render(
        "board_notes.txt",
        rows=rows,
        counts=_counts(rows),
        margin=f"{MARGIN:g}",
        alpha=f"{ALPHA:g}",
        windows={curve.window for curve in board.curves} - {WINDOW},
        own=_names(row for panel in board.panels for row in panel.rows if row.curve is panel.reference),
        others=_names(row for row in rows if row.verdict == NOT_COMPARABLE),
        open_ended=len({row.name for row in rows if row.curve.seeds["censored"].any()}),
        panels=[
            (
                panel.heading,
                _names(row for row in panel.rows if row.curve.losses and row.curve.losses == row.reference.losses),
                _names(row for row in panel.rows if row.seeds and not row.curve.seeds["trains"].any()),
            )
            for panel in board.panels
        ],
        fewest_runs=min(runs, default=0),
        most_runs=max(runs, default=0),
        partial=sum(curve.incomplete for curve in board.curves),
        pairs=pairs,
        pair_counts=_counts(pairs),
        per_steps=PER_STEPS,
        has_spikes=bool(counted),
        has_top=any(spikes.is_top for spikes in counted),
        has_planted=any(planted_of(panel, row) for panel in board.panels for row in panel.rows),
    )
    return text.splitlines()


def _counts(rows: Sequence[Row]) -> str:
    verdicts = [row.verdict for row in rows]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in VERDICTS if word in verdicts)


def _names(rows: Iterable[Row]) -> str:
    names = sorted({row.name for row in rows})
    return listed(names) if names else ""


def change(interval: Interval) -> str:
    """A difference with its 95 % interval, ``-0.106 [-0.127, -0.085]``; below three seeds the values of the seeds."""
    if interval.n < FEWEST_SEEDS:
        return interval.bare if interval.n else ""
    scale = max(abs(interval.low), abs(interval.high))
    return "{:} [{:}, {:}]".format(*(format_3_decimals(value, scale) for value in interval[:3]))


def level(values: pd.Series) -> str:
    """The mean of a measure over seeds; empty if no seed has a value."""
    mean = float(values.mean()) if values.notna().any() else math.nan
    return "" if math.isnan(mean) else format_3_decimals(mean)


def ranks_shown(ranks: tuple[int, int] | None) -> str:
    """A rank, or a range of ranks: ``1 to 3``."""
    return "" if ranks is None else " to ".join(dict.fromkeys(map(str, ranks)))


def table(panel: Panel) -> pd.DataFrame:
    """A row for each arm of a panel, below that of the reference, which has its own values instead of differences.

    Columns that no row of the panel can fill are left out: spikes that were not recorded, spikes that were not planted,
    and ranks of pairs, which have a better half and a sum instead.
    """
    reference = panel.reference
    levels = {MEASURE_NAMES[measure]: level(reference.seeds[measure]) for measure in MEASURES}
    spikes = MEASURE_NAMES[SPIKES]
    first = {
        "arm": "(reference)",
        "verdict": "",
        "better half": "",
        INSTABILITY: levels.pop(INSTABILITY),
        "p (Holm)": "",
        "sum of both": "",
        "interaction": "",
        "rank": ranks_shown(panel.rank),
        "beats reference": "",
        "beats next": "",
        **levels,
        spikes: _at_lr(levels[spikes], reference),
        "planted spike": "",
        "parameters": f"{reference.parameters:,}",
        "runs": str(reference.runs),
        "seeds": str(len(reference.seeds)),
    }
    cells = pd.DataFrame([first, *(_cells(row, planted_of(panel, row)) for row in panel.rows)])
    if panel.has_pairs:
        unused = ["rank", "beats reference", "beats next"]
    else:
        unused = ["better half", "sum of both", "interaction"]
    unused += [name for name in (spikes, "planted spike") if (cells[name] == "").all()]
    return cells.drop(columns=unused)


def _at_lr(text: str, curve: Curve) -> str:
    """A rate of spikes with the learning rate at which they were counted."""
    return f"{text} at {curve.spikes.lr:g}{' (top)' * curve.spikes.is_top}" if text else ""


def _cells(row: Row, planted: Mapping[str, Interval]) -> dict[str, str]:
    comparable = row.verdict != NOT_COMPARABLE
    differences = {MEASURE_NAMES[measure]: change(row.differences[measure]) for measure in MEASURES}
    if not comparable:
        differences |= {MEASURE_NAMES[measure]: "" for measure in ("above", "total")}
    spikes = MEASURE_NAMES[SPIKES]
    return {
        "arm": row.name,
        "verdict": row.verdict,
        "better half": row.pair.better if row.pair else "",
        INSTABILITY: differences.pop(INSTABILITY),
        "p (Holm)": format_p(row.p_adjusted),
        "sum of both": sum_word(row.pair.interaction) if row.pair else "",
        "interaction": change(row.pair.interaction) if row.pair else "",
        "rank": ranks_shown(row.ranks),
        "beats reference": TICK if row.beats_reference else "",
        "beats next": TICK if row.beats_neighbour else "",
        **differences,
        spikes: _at_lr(differences[spikes], row.curve),
        "planted spike": "; ".join(f"{burst} {updates(interval)}" for burst, interval in planted.items()),
        "parameters": f"{row.parameters_added:+,}",
        "runs": str(row.curve.runs),
        "seeds": str(row.seeds),
    }


def updates(interval: Interval) -> str:
    """A difference of durations with its interval: ``+7.2 [+2.8, +11.7]``."""
    return f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def lines(board: Board) -> Iterator[str]:
    """Yield the lines of the board for a terminal."""
    for panel in all_panels(board):
        yield f"{panel.title}:"
        yield from (f"  {line}" for line in plain_text(table(panel)))
        yield ""
    yield from board_notes(board)


def as_json(board: Board) -> str:
    """A list of objects, one for each comparison; null where unknown."""
    return json.dumps(_plain_rows(board), indent=1, allow_nan=False, ensure_ascii=False)


def _plain_rows(board: Board) -> list[dict[str, Any]]:
    return [plain(row, planted_of(panel, row)) for panel in all_panels(board) for row in panel.rows]


def plain(row: Row, planted: Mapping[str, Interval]) -> dict[str, Any]:
    """A row in plain values.

    Args:
        planted: durations of planted spikes, as ``planted_of`` gives them.
    """
    ranks = row.ranks or (None, None)
    differences = {
        measure: {**_ends(interval), "reference": finite(float(row.reference.seeds[measure].mean()))}
        for measure, interval in row.differences.items()
    }
    spikes = row.curve.spikes
    return {
        "arm": row.name,
        "panel": row.panel,
        "verdict": row.verdict,
        "window": [*row.curve.window],
        "lr": row.lr_meaning,
        **differences,
        "spikes_at_lr": finite(spikes.lr),
        "spikes_at_top": spikes.is_top,
        "planted_spike": {burst: _ends(interval) for burst, interval in planted.items()} or None,
        "better_half": row.pair.better if row.pair else None,
        "interaction": _ends(row.pair.interaction if row.pair else NONE),
        "sum_of_both": sum_word(row.pair.interaction) if row.pair else None,
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


def _ends(interval: Interval) -> dict[str, float | None]:
    return {"difference": finite(interval.mean), "low": finite(interval.low), "high": finite(interval.high)}


def as_csv(board: Board) -> str:
    """A line for each comparison, with the columns of ``as_json``; nested keys are joined by a point."""
    rows, reference = _plain_rows(board), board.bases[0].curve
    # without a comparison the columns are those of the reference beside itself
    shown = rows or [plain(board.draft("", "", reference, reference, reference.lrs), {})]
    flat = pd.json_normalize([{**row, "loss_by_lr": None} for row in shown]).drop(columns="loss_by_lr")[: len(rows)]
    return flat.to_csv(index=False, lineterminator="\n", float_format="%.6g").rstrip("\n")
