"""The gate: a results folder held against a baseline, and baselines saved, shown and compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.analysis.guard import baseline as baselines
from lab.analysis.guard import render
from lab.analysis.guard.baseline import Baseline
from lab.analysis.guard.compare import Comparison, compare_baselines, measured, runs_of, where
from lab.analysis.statistics import student_t
from lab.analysis.text import count, spell
from lab.core.errors import RequestError

MARGIN = 0.05


def margin_of(text: str) -> float:
    """``5%`` or ``0.05`` as a fraction.

    Raises:
        RequestError: it is neither.
    """
    try:
        fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise RequestError(f"--margin must be a part of the best loss, as in 5% or 0.05, not {text!r}")
    return fraction


class CheckedFolder(NamedTuple):
    """A check and what was held against each other, as far as it could be read."""

    check: Comparison
    curves: tuple[Baseline, Baseline] | None

    def page(self) -> str:
        """The check as HTML."""
        return render.as_html(self.check, self.curves)


def check_folder(folder: Path, baseline: Path, margin: float = MARGIN) -> CheckedFolder:
    """Hold a results folder against a baseline file or another results folder (``regression.compare``).

    What cannot be read is a reason for which nothing can be judged, not an error.
    """
    try:
        old, new = baselines.read(baseline), baselines.from_folder(folder)
    except RequestError as refusal:
        return CheckedFolder(Comparison(str(baseline), str(folder), margin, [], [str(refusal)], []), None)
    return CheckedFolder(compare_baselines(old, new, margin), (old, new))


def save(folder: Path, place: Path) -> Iterator[str]:
    """Write the baseline of a results folder, and say what it holds, or how it differs from what stood there."""
    new = baselines.from_folder(folder)
    before = baselines.read(place) if place.exists() else None
    baselines.save(new, place)
    yield f"{place}: {len(new.runs)} runs of {folder}"
    yield from show(new) if before is None else diff(before, new)


def show(baseline: Baseline) -> Iterator[str]:
    """What a baseline holds: how it was made, and a row per arm and size."""
    for name, lines in baseline.made.items():
        yield from (f"{name}: {line}" for line in lines)
    rows = list(_rows(baseline))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _rows(baseline: Baseline) -> Iterator[list[str]]:
    names = {"total": "sensitivity", "below": "under-training", "above": "instability", "best": "best loss"}
    names |= {"logit_growth": "logit growth (decades)"}
    yield ["arm", "parameters", "learning rates", "seeds", *names.values()]
    for number, known in measured(baseline).items():
        (arm, size), lrs = where(baseline, number), sorted(set(runs_of(baseline, number)["lr"]))
        numbers = [student_t(known[column]).bare for column in names]
        yield [arm, count(size), f"{len(lrs)} from {spell(lrs[0])} to {spell(lrs[-1])}", str(len(known)), *numbers]


def diff(old: Baseline, new: Baseline) -> Iterator[str]:
    """How one baseline differs from another."""
    found = compare_baselines(old, new, MARGIN)
    for name in ("commands", "versions", "data"):
        if old.made.get(name) != new.made.get(name):
            yield f"{name}: {'; '.join(old.made.get(name, []))} -> {'; '.join(new.made.get(name, []))}"
    yield from render.text(found)
