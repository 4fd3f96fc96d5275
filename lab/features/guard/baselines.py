"""Baselines, of a recipe's curves or of its card: save one, show one, and hold a folder against one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import lab.analysis.guard.baseline as curves
from lab.analysis.guard.baseline import Baseline
from lab.analysis.guard.compare import MARGIN, Comparison, check_folder, compare_baselines
from lab.analysis.guard.matching import grid_of, where
from lab.analysis.guard.quantities import measured
from lab.analysis.sensitivity import WINDOW, Window, check_window
from lab.analysis.statistics import student_t
from lab.analysis.stress.card_json import CardBaseline, baseline_text
from lab.analysis.text import count, format_value
from lab.core import files
from lab.core.errors import RequestError
from lab.features.guard import cards
from lab.features.guard.answer import answer_of
from lab.report.answer import Answer, Part, Section

COLUMN_NAMES = {
    "total": "sensitivity",
    "below": "under-training",
    "above": "instability",
    "best": "best loss",
    "loss_at_init": "loss at initialization",
    "logit_growth": "logit growth (decades)",
}
OVER = "sensitivity over learning rates from"


class Kind(NamedTuple):
    """How the baselines of a kind are read, written, compared and shown."""

    read: Callable[[Path, Window | None], Any]
    write: Callable[[Any, Path], None]
    compare: Callable[[Any, Any, float], Comparison]
    rows: Callable[[Any], Iterable[dict[str, str]]]
    about: str = ""


def check(
    folder: Path, baseline: Path, margin: float = MARGIN, strict: bool = False, window: Window | None = None
) -> Comparison:
    """Compare a folder with a baseline: cards if the baseline is of one, else curves, as ``check_folder`` does.

    What cannot be read is not an error: the verdict is ``cannot judge``.
    """
    if not cards.is_card(baseline):
        return check_folder(folder, baseline, margin, strict, window)
    try:
        return cards.compare_cards(cards.read_card(baseline), cards.read_card(folder), margin, strict)
    except RequestError as refusal:
        return Comparison(str(baseline), str(folder), margin, strict, [], [], [], [str(refusal)], [], of_cards=True)


def save(folder: Path, path: Path, window: Window = WINDOW) -> Answer:
    """Write the baseline of a folder; the answer holds its content, and its differences from the old file.

    Raises:
        RequestError: the folder holds nothing to guard, or the file is no baseline of its kind.
    """
    kind = _kind(folder)
    new, old = kind.read(folder, window), kind.read(path, None) if path.is_file() else None
    kind.write(new, path)
    changes: list[Part] = []
    if old is not None:
        before, now = _facts(old), _facts(new)
        changed = [name for name in now if before.get(name, []) != now[name]]
        changes = [f"{name}: {'; '.join(before.get(name, []))} -> {'; '.join(now[name])}" for name in changed]
        if OVER not in changed:
            compared = answer_of(kind.compare(old, new, MARGIN))
            changes.append(Section(compared.headline, compared.parts))
    return Answer(f"{path}: the baseline of {folder}", [*changes, *_parts(kind, new)])


def show(path: Path) -> Answer:
    """How the runs of a baseline were made, and a row for each curve, or for each number of a card."""
    kind = _kind(path)
    return Answer("", _parts(kind, kind.read(path, None)))


def _parts(kind: Kind, baseline: Any) -> list[Part]:
    facts = [{"made with": name, "": line} for name, lines in _facts(baseline).items() for line in lines]
    return [pd.DataFrame(facts), pd.DataFrame(kind.rows(baseline)), kind.about]


def _facts(baseline: Baseline | CardBaseline) -> Mapping[str, list[str]]:
    """How the runs were made, and for curves the learning rates of the sensitivity, lines by name."""
    return baseline.made if isinstance(baseline, CardBaseline) else {**baseline.made, OVER: [str(baseline.window)]}


def _kind(path: Path) -> Kind:
    return CARDS if cards.is_card(path) else CURVES


def _save_curves(baseline: Baseline, path: Path) -> None:
    check_window(baseline.runs, baseline.window)
    curves.save(baseline, path)


def _curve_rows(baseline: Baseline) -> Iterator[dict[str, str]]:
    for number, seeds in measured(baseline).items():
        (arm, size), lrs, own = where(baseline, number), grid_of(baseline, number), baseline.recipe_lrs.get(number)
        yield {
            "arm": arm,
            "parameters": count(size),
            "learning rates": f"{len(lrs)} from {format_value(lrs[0])} to {format_value(lrs[-1])}",
            "recipe's own": format_value(own) if own else "not on record",
            "seeds": str(len(seeds)),
            **{name: f"{student_t(seeds[column]):±}" for column, name in COLUMN_NAMES.items()},
        }


CURVES = Kind(curves.read, _save_curves, compare_baselines, _curve_rows)
CARDS = Kind(
    lambda path, _: cards.read_card(path),
    lambda card, path: files.write_output(path, baseline_text(card)),
    cards.compare_cards,
    cards.rows,
    cards.ABOUT,
)
