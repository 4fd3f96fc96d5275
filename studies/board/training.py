"""Train the board: every arm under every failure on a few seeds, then on fresh ones those that may cure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from lab.analysis.stress.arms import REFERENCE, Arm
from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.core.files import quoted
from lab.core.printing import say
from lab.core.registry import INTERVENTIONS
from lab.records import store
from lab.records.plans import Setting
from lab.sweeping import launch
from lab.sweeping.bench import Bench, reason_of_config, trees_of_setting
from lab.sweeping.compose import Composer, Tree
from lab.sweeping.progress import ProgressLog
from lab.sweeping.request import Request, read_request
from studies.board.failures import (
    CELLS,
    CURVE,
    FAMILIES,
    STRESSED,
    Cell,
    Failure,
    cells_table,
    chosen_arms,
    not_applicable,
    read_cells,
    read_failures,
    read_families,
    settings,
)
from studies.board.matrix import (
    Tables,
    families_table,
    family_of,
    is_trained,
    passes_screening,
    tables_of,
)

QUESTION = "Which published change cures which failure of training, and what does it cost?"

Ids = dict[Cell, dict[int, str]]


def train_board(folder: Path, command: str, *, arms: Sequence[str] = (), failures: Sequence[str] = ()) -> None:
    """Train what a board lacks; the folder notes which runs belong to which of its cells.

    Args:
        folder: of the records.
        command: the command line as the user can type it again.
        arms: names of arms; by default those that the folder has tried, on the failures that they were tried on, or all
            if it has tried none.
        failures: names of failures; all by default.

    Raises:
        RequestError: a name is unknown, or the folder cannot take records.
        SystemExit: with status 1 when a run failed.
    """
    rule, known = read_failures().rule, read_failures().failures
    if unknown := [name for name in failures if name not in known]:
        raise RequestError(f"unknown failure {unknown[0]!r}; {nearest(unknown[0], known)}")
    chosen, tried = [known[name] for name in failures or known], chosen_arms(arms)
    request = read_request([*read_failures().runs, f"out={quoted(folder)}"], command, name="board")
    request = replace(request, question=QUESTION)
    known_pairs = set() if arms else _tried(folder)
    every = {
        cell: setting
        for arm in tried
        for cell, setting in settings(arm, rule.screened, excludes(), chosen).items()
        if not known_pairs or (cell.failure, cell.arm) in known_pairs
    }
    _train(request, folder, tried, every)
    runs, _ = read_cells(folder)
    tables, fresh = tables_of(folder, runs), dict[Cell, Setting]()
    _fix_families(folder, tables)
    for failure in chosen:
        passing = {REFERENCE, *passes_screening(failure, tables, rule)}
        for arm in tried:
            is_asked = not known_pairs or (failure.name, arm.name) in known_pairs
            if arm.name in passing and len(passing) > 1 and is_asked:
                again = settings(arm, rule.fresh, excludes(), [failure])
                fresh |= {cell: setting for cell, setting in again.items() if cell.failure != CURVE}
    if fresh:
        say(f"{len(fresh)} settings pass the screening, and are trained on fresh seeds", error=True)
        _train(request, folder, tried, fresh)
    store.gather(folder)


def _fix_families(folder: Path, tables: Tables) -> None:
    """Fix, for this edition, the family of each failure that has none yet and whose control is trained."""
    board, fixed = read_failures(), read_families(folder)
    new = {
        name: family_of(failure, tables, board.rule)
        for name, failure in board.failures.items()
        if name not in fixed and is_trained(failure, tables, board.rule)
    }
    if new:
        path = folder / FAMILIES
        earlier = [pd.read_csv(path)] if path.is_file() else []
        files.write_csv(path, pd.concat([*earlier, families_table(new)]))


def _tried(folder: Path) -> set[tuple[str, str]]:
    """The failures, or the curve, and the arms of which a folder has runs on all seeds of the screening, or on any."""
    if not (folder / CELLS).is_file():
        return set()
    tables, screened = tables_of(folder, read_cells(folder)[0]), {*read_failures().rule.screened}
    return {
        (cell.failure, cell.arm)
        for cell, table in tables.items()
        if cell.failure == CURVE or (cell.place == STRESSED and screened <= {*table.index})
    }


def excludes() -> dict[str, set[str]]:
    """By intervention, those that cannot stand beside it."""
    import lab.training.config  # noqa: F401  (fills the registry)

    named = {name: set(getattr(INTERVENTIONS[name], "excludes", ())) for name in INTERVENTIONS}
    return {name: named[name] | {other for other in named if name in named[other]} for name in named}


def _train(request: Request, folder: Path, arms: Sequence[Arm], wanted: Mapping[Cell, Setting]) -> None:
    """Train these settings, and note in the folder which runs are theirs, and why some cannot be trained."""
    bench = Bench(request)
    trees, reasons = _composed(request, {arm.name: arm for arm in arms}, wanted)
    planned = bench.plan({wanted[cell]: of_cell for cell, of_cell in trees.items()}, cautions=False)
    ids: Ids = {
        cell: dict(zip((int(tree["seed"]) for tree in of_cell), bench.ids[wanted[cell]], strict=True))
        for cell, of_cell in trees.items()
    }
    done, others = read_cells(folder) if (folder / CELLS).is_file() else ({}, {})
    merged = done | {cell: done.get(cell, {}) | of_cell for cell, of_cell in ids.items()}
    store.open_folder(folder, planned.engine)
    files.write_csv(folder / CELLS, cells_table(merged, others | reasons))  # first, in case of a stop
    bench.carry_out(planned, ProgressLog(len(planned.fleets), partial(say, error=True)))


def _composed(
    request: Request, arms: Mapping[str, Arm], wanted: Mapping[Cell, Setting]
) -> tuple[dict[Cell, list[Tree]], dict[tuple[str, str], str]]:
    """The configs of each setting, and by failure and arm why some settings have none."""
    trees, reasons = dict[Cell, list[Tree]](), dict[tuple[str, str], str]()
    failures: Mapping[str, Failure] = read_failures().failures
    composer = Composer(request.config_dir, request.files)
    for cell, setting in launch.show_planning(wanted.items(), len(wanted)):
        arm, at = arms[cell.arm], (cell.failure, cell.arm)
        if at in reasons:
            continue
        if reason := not_applicable(arm, failures.get(cell.failure)):
            reasons[at] = reason
            continue
        try:
            trees[cell] = trees_of_setting(composer, request, setting)
            reason = reason_of_config(arm.adds, trees[cell][0])
        except RequestError as refusal:
            reason = str(refusal)
        if reason:
            reasons[at] = reason
    return {cell: of_cell for cell, of_cell in trees.items() if (cell.failure, cell.arm) not in reasons}, reasons
