"""A page of Markdown for every arm of the leaderboard: its description and its results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from lab.studies.leaderboard.arms import ArmCard, arm_cards, left_out, not_here
from lab.studies.leaderboard.board import ALPHA, MARGIN, NOT_COMPARABLE, QK, WITH, WITHOUT, Board, Row
from lab.studies.leaderboard.listing import change, p_shown, ranks_shown

INDEX = "index.md"
LR_MEANINGS = {
    "same": "means the same as that of the reference",
    "shifted": "has the same unit, and its best value elsewhere",
    "other": "has another unit, so sensitivities are not compared",
}
COLUMNS = (
    *("arm", "panel", "verdict", "instability part", "p (Holm)", "rank", "best loss", "log10 unstable/best LR"),
    *("parameters", "seeds"),
)
# Interventions of the default recipe, which an example command combines with an arm.
BESIDE = ("z_loss",)


def markdown_pages(board: Board | None, excludes: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The pages by file name, including the index.

    Args:
        board: the board; None before it is trained.
        excludes: the interventions that exclude each intervention, by its name.
    """
    rows = board.rows if board else []
    pages = {f"{name}.md": _page(card, rows, excludes.get(name, ())) for name, card in arm_cards().items()}
    return {INDEX: _index(rows, excludes), **pages}


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
    lines = [f"# {card.title}", "", f"`{card.name}`, {_article(group)}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in facts.items()]
    return "\n".join(
        [*lines, "", "```sh", _command(card), "```", "", "## On the board", "", *_on_board(card, rows), ""]
    )


def _article(group: str) -> str:
    return f"an {group}"


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
    yield from _table(mine)
    for source in dict.fromkeys(row.curve.source for row in mine):
        about = " · ".join(part for part in (source.days, f"`{source.command}`", source.versions) if part.strip("`"))
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
            change(row.differences["above"]) if is_comparable else "",
            p_shown(row.p_adjusted),
            ranks_shown(row.ranks),
            change(row.differences["best"]),
            change(row.differences["range"]),
            f"{row.parameters_added:+,}",
            str(row.seeds),
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _index(rows: Collection[Row], excludes: Mapping[str, Collection[str]]) -> str:
    lines = [
        "# Interventions and optimizers",
        "",
        "The arms of the board: each is a published change of the recipe, trained alone beside the recipe without it.",
        "`lab leaderboard` shows how they compare, `lab transfer` whether that predicts what was published of large",
        "models. The rule stands in the header of `sweeps/leaderboard.yaml` and was fixed before its runs. An arm",
        "*helps* or *harms* where the instability part of learning-rate sensitivity differs from that of the reference",
        f"with a Holm-adjusted p below {ALPHA:g}. It makes *no difference* where the 90 % interval lies within",
        f"{MARGIN:g} nats/token. Ranks are the ranges that pairwise 95 % intervals leave open.",
        "",
    ]
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
        mine = [row.verdict for row in rows if row.name == card.name and row.panel.startswith(panel)]
        applies = panel == WITHOUT or (card.name != QK and QK not in excluded)
        words.append(", ".join(dict.fromkeys(mine)) or ("not trained" if applies else "not applicable"))
    return f"| [{card.name}]({card.name}.md) | {_cell(card.title)} | {' | '.join(words)} |"
