"""Baselines, of a recipe's curves or of its card: save one, show one, and hold a folder against one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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
    is_card = cards.is_card(folder)
    new, old = _read(folder, window, is_card), _read(path, None, is_card) if path.is_file() else None
    if isinstance(new, CardBaseline):
        files.write_output(path, baseline_text(new))
    else:
        check_window(new.runs, new.window)
        curves.save(new, path)
    changes: list[Part] = []
    if old is not None:
        before, now = _facts(old), _facts(new)
        changed = [name for name in now if before.get(name, []) != now[name]]
        changes = [f"{name}: {'; '.join(before.get(name, []))} -> {'; '.join(now[name])}" for name in changed]
        if OVER not in changed:
            compare: Callable[..., Comparison] = cards.compare_cards if is_card else compare_baselines
            compared = answer_of(compare(old, new, MARGIN))
            changes.append(Section(compared.headline, compared.parts))
    return Answer(f"{path}: the baseline of {folder}", [*changes, *_parts(new)])


def show(path: Path) -> Answer:
    """How the runs of a baseline were made, and a row for each curve, or for each number of a card."""
    return Answer("", _parts(_read(path, None, cards.is_card(path))))


def _read(path: Path, window: Window | None, is_card: bool) -> Baseline | CardBaseline:
    return cards.read_card(path) if is_card else curves.read(path, window)


def _parts(baseline: Baseline | CardBaseline) -> list[Part]:
    facts = [{"made with": name, "": line} for name, lines in _facts(baseline).items() for line in lines]
    if isinstance(baseline, CardBaseline):
        return [pd.DataFrame(facts), pd.DataFrame(cards.rows(baseline)), cards.ABOUT]
    return [pd.DataFrame(facts), pd.DataFrame(_curve_rows(baseline))]


def _facts(baseline: Baseline | CardBaseline) -> Mapping[str, list[str]]:
    """How the runs were made, and for curves the learning rates of the sensitivity, lines by name."""
    return baseline.made if isinstance(baseline, CardBaseline) else {**baseline.made, OVER: [str(baseline.window)]}


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
