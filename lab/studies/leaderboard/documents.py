"""A page of Markdown for every arm of the leaderboard, its description and its results, and a drawing of its curves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.analysis.rendering import html
from lab.studies.leaderboard.arms import ArmCard, arm_cards, left_out, not_here
from lab.studies.leaderboard.board import ALPHA, MARGIN, NOT_COMPARABLE, QK, WITH, WITHOUT, Board, Row
from lab.studies.leaderboard.curves import PART
from lab.studies.leaderboard.listing import change, format_p, headline, ranks_shown
from lab.studies.leaderboard.page import linear

INDEX = "index.md"
LR_MEANINGS = {
    "same": "means the same as that of the reference",
    "shifted": "has the same unit, and its best value elsewhere",
    "other": "has another unit, so sensitivities are not compared",
}
COLUMNS = (
    *("arm", "panel", "verdict", "instability part", "p (Holm)", "rank", "best loss", "log10 unstable/best LR"),
    *("parameters", "time", "seeds"),
)
DRAWING = html.pieces(Path(__file__).with_name("arm.svg"))
# Of a panel of a drawing: its size, and the ends of its axes.
WIDTH, HEIGHT, IN_A_ROW = 380, 272, 2
LEFT, RIGHT, TOP, BOTTOM = 44, 368, 54, 222
SCHEDULE = "constant"  # that an optimizer needs for itself, and that then stands in the name of its row
DECADES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Interventions of the default recipe, which an example command combines with an arm.
BESIDE = ("z_loss",)


def markdown_pages(board: Board | None, excludes: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The pages and drawings by file name, including the index.

    Args:
        board: the board; None before it is trained.
        excludes: the interventions that exclude each intervention, by its name.
    """
    rows = board.rows if board else []
    pages = {f"{name}.md": _page(card, rows, excludes.get(name, ())) for name, card in arm_cards().items()}
    drawings = {f"{name}.svg": _drawing(name, mine) for name in arm_cards() if (mine := _drawn(name, rows))}
    return {INDEX: _index(board, excludes), **pages, **drawings}


def _alone(name: str, rows: Collection[Row]) -> list[Row]:
    """The comparisons of an arm without others, but with the schedule that an optimizer needs."""
    return [row for row in rows if row.name in (name, f"{name}+{SCHEDULE}")]


def _drawn(name: str, rows: Collection[Row]) -> list[Row]:
    return [row for row in _alone(name, rows) if row.curve.losses and row.reference.losses]


def _drawing(name: str, rows: Collection[Row]) -> str:
    columns = min(IN_A_ROW, len(rows))
    return f"{DRAWING.curves(name, [_panel(row) for row in rows], WIDTH, HEIGHT, columns)}\n"


def _panel(row: Row) -> dict[str, Any]:
    """The places of both curves and of the ticks, in units of the drawing."""
    curves = (row.curve.losses, row.reference.losses)
    lrs, losses = [lr for curve in curves for lr in curve], [loss for curve in curves for loss in curve.values()]
    low, high = min(losses), max(losses)
    x, y = linear(list(map(math.log, lrs)), (LEFT + 8, RIGHT - 8)), linear(losses, (BOTTOM - 8, TOP + 8))

    def points(curve: Mapping[float, float]) -> str:
        return " ".join(f"{x(math.log(lr)):.1f},{y(loss):.1f}" for lr, loss in sorted(curve.items()))

    beside, _, setting = row.panel.partition(", ")
    return {
        "beside": beside,
        "setting": setting,
        "of_arm": points(row.curve.losses),
        "of_reference": points(row.reference.losses),
        "lrs": [(round(x(math.log(lr)), 1), f"{lr:g}") for lr in DECADES if min(lrs) <= lr <= max(lrs)],
        "losses": [(round(y(loss), 1), f"{loss:.2f}") for loss in (low, (low + high) / 2, high)],
        "left": LEFT,
        "right": RIGHT,
        "bottom": BOTTOM,
    }


def _page(card: ArmCard, rows: Collection[Row], excluded: Collection[str]) -> str:
    group = "optimizer" if card.is_optimizer else "intervention"
    source = f"[{card.source}]({card.link})" if card.link else card.source
    numbers = ", ".join(f"`{key}: {value}`" for key, value in card.defaults.items()) or "no numbers"
    facts = {
        "formula": f"`{card.formula}`",
        "source": source,
        "attaches to": ", ".join(place.replace("_", " ") for place in card.at),
        "default": f"{numbers} (`conf/{group}/{card.name}.yaml`)",
        "learning rate": LR_MEANINGS[card.lr],
    }
    if card.nothing_under:
        facts["does nothing under"] = card.nothing_under
    if excluded:
        facts["cannot stand beside"] = ", ".join(map(_linked, sorted(excluded)))
    lines = [f"# {card.title}", "", f"`{card.name}`, an {group}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    return "\n".join(
        [*lines, "", "```sh", _command(card), "```", "", "## On the board", "", *_on_board(card, rows), ""]
    )


def _command(card: ArmCard) -> str:
    sweep = "optimizer.lr=1e-3,1e-2,1e-1 seed=0,1,2 out=runs/" + card.name
    if card.is_optimizer:
        return f"lab train -m optimizer=adamw,{card.name} {sweep}"
    plain = [name for name in BESIDE if name != card.name]
    choices = ",".join(f"[{','.join(sorted(names))}]" for names in (plain, [*plain, card.name]))
    return f"lab train -m 'intervention={choices}' {sweep}"


def _linked(name: str) -> str:
    return f"[{name}]({name}.md)" if name in arm_cards() else f"`{name}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _on_board(card: ArmCard, rows: Collection[Row]) -> Iterator[str]:
    mine = [row for row in rows if card.name in row.name.split("+")]
    if not mine:
        yield "Not trained yet; `lab sweep leaderboard` trains the board."
        return
    yield (
        "Differences from the reference, paired by seed, with 95 % intervals; "
        "[the board](index.md) says what the columns are."
    )
    yield ""
    if _drawn(card.name, rows):
        yield f"![Final loss against learning rate, with {card.name} and without it]({card.name}.svg)"
        yield ""
    yield from _table(mine)
    for source in dict.fromkeys(row.curve.source for row in mine):
        first, *others = source.command.split("; ")
        more = f" and {len(others)} more ([results](../../results/README.md#what-the-folders-hold))" if others else ""
        about = " · ".join(part for part in (source.days, f"`{first}`{more}" if first else "", source.versions) if part)
        yield ""
        yield f"From {about}."


def _table(rows: Collection[Row]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in rows:
        is_comparable = row.verdict != NOT_COMPARABLE
        cells = (
            row.name,
            row.panel,
            row.verdict,
            change(row.differences[PART]) if is_comparable else "",
            format_p(row.p_adjusted),
            ranks_shown(row.ranks),
            change(row.differences["best"]),
            change(row.differences["range"]),
            f"{row.parameters_added:+,}",
            "" if math.isnan(row.cost) else f"x {row.cost:.2f}",
            str(row.seeds),
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _index(board: Board | None, excludes: Mapping[str, Collection[str]]) -> str:
    rows, panels = (board.rows, board.panels) if board else ([], [])
    lines = [
        "# Interventions and optimizers",
        "",
        "The arms of the board: each is a published change of the recipe, trained alone beside the recipe without it.",
        "`lab leaderboard` shows how they compare, `lab transfer` whether that predicts what was published of large",
        "models. The rule stands in the header of `sweeps/leaderboard.yaml` and was fixed before its runs. An arm",
        "*helps* or *harms* where the instability part of learning-rate sensitivity differs from that of the reference",
        f"with a Holm-adjusted p below {ALPHA:g}. It makes *no difference* where the 90 % interval lies within",
        f"{MARGIN:g} nats/token, even if a smaller difference is certain. Ranks are the ranges that pairwise 95 %",
        "intervals leave open.",
        "",
        "On the page of an arm `p (Holm)` is adjusted over the arms of its panel. Best loss, and log10 of the smallest",
        "unstable learning rate over the best one, are differences from the reference. `parameters` is how many are",
        "added, and `time` that of a run over that of the reference. Other work ran on the machine, so small",
        "differences in time say nothing. Below, each arm has the verdict of the first sweep that trained it.",
        "",
        "`lab leaderboard --html board.html` writes the board as a page that sorts and filters;",
        "`lab leaderboard --recipe mine.yaml` tries the arms on a recipe of your own.",
        "",
    ]
    if panels:
        lines += ["## What helps", "", *(f"- {panel.title}: {headline(panel)}." for panel in panels), ""]
    for is_optimizer, title in ((False, "Interventions"), (True, "Optimizers")):
        cards = [card for card in arm_cards().values() if card.is_optimizer == is_optimizer]
        if cards:
            lines += [f"## {title}", "", "| arm | what it is | without qk-layernorm | with it |", "|---|---|---|---|"]
            lines += [_index_row(card, rows, excludes.get(card.name, ())) for card in cards] + [""]
    lines += ["## Left out", "", *(f"- `{name}`: {reason}." for name, reason in left_out().items()), ""]
    lines += ["## Not in the lab", "", *(f"- {name}: {reason}." for name, reason in not_here().items()), ""]
    names = "\n".join(arm_cards())
    return "\n".join([*lines, "```{toctree}", ":hidden:", names, "```", ""])


def _index_row(card: ArmCard, rows: Collection[Row], excluded: Collection[str]) -> str:
    words = []
    for panel in (WITHOUT, WITH):
        mine = [row.verdict for row in _alone(card.name, rows) if row.panel.startswith(panel)]
        applies = panel == WITHOUT or (card.name != QK and QK not in {*excluded, *card.not_beside})
        words.append(mine[0] if mine else "not trained" if applies else "not applicable")
    return f"| [{card.name}]({card.name}.md) | {_cell(card.title)} | {' | '.join(words)} |"
