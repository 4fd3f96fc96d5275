"""The gathered tables of a results folder lie in parts; runs that are added later begin another part.

The first part is ``runs.parquet``, ``metrics.parquet`` and, if there are events, ``events.parquet``; the second is
``runs.2.parquet`` and so on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.core import files
from lab.core.errors import RequestError

NAME = r"[\w-]+"  # of a run and its folder, here and in a tracker
TABLE = re.compile(r"(?:runs|metrics|events)(?:\.([1-9]\d{0,2}))?\.parquet")


class Part(NamedTuple):
    """The files of one part; without events the last is absent."""

    runs: Path
    metrics: Path
    events: Path


def part(folder: Path, number: int) -> Part:
    """The part of this number, counted from 1, whether it was written or not."""
    return Part(*(folder / (f"{name}.parquet" if number == 1 else f"{name}.{number}.parquet") for name in Part._fields))


def written(folder: Path) -> list[Part]:
    """The parts of a folder, oldest first; one that is absent between others counts as damaged."""
    numbers = [int(match[1] or 1) for path in folder.glob("*.parquet") if (match := TABLE.fullmatch(path.name))]
    return [part(folder, number) for number in range(1, max(numbers, default=0) + 1)]


def counts(part: Part) -> dict[str, int]:
    """The number of rows of each table besides the runs; 0 where it is absent."""
    beside = {"metrics": part.metrics, "events": part.events}
    return {name: files.read_footer(path)[0] if path.exists() else 0 for name, path in beside.items()}


def _check_counts(part: Part) -> None:
    """Check that each table beside the runs has the rows that the table of runs notes; an older one notes nothing.

    More rows are left by a gathering that was killed before it wrote the runs.

    Raises:
        OSError, ValueError: a table has fewer rows, or cannot be read.
    """
    _, note = files.read_footer(part.runs)
    found, noted = counts(part), json.loads(note or "{}")
    for name, rows in noted.items():
        if found[name] < rows:
            raise ValueError(f"{found[name]:,} of {rows:,} {name} are there")


def read(folder: Path, run_folders: Collection[str]) -> list[list[pd.DataFrame]]:
    """Of each part the two tables, and the events if there are any.

    The newest part is left out if it is damaged and can be made again, from these folders of runs.

    Raises:
        RequestError: a part is damaged, and holds runs that exist nowhere else.
    """
    read_parts, found = list[list[pd.DataFrame]](), written(folder)
    for paths in found:
        tables, faults = list[pd.DataFrame](), []
        for path in (path for path in paths if path != paths.events or path.exists()):
            try:
                table = files.read_table(path)
                if not table["id"].drop_duplicates().str.fullmatch(NAME).all():
                    raise ValueError("a run's id is not a valid name")
                tables.append(table)
            except Exception as fault:  # a damaged file fails in many ways
                faults.append(f"{path.name}: {fault}".split("\n")[0])
        if not faults:
            try:
                _check_counts(paths)
            except Exception as fault:  # a damaged file fails in many ways
                faults.append(str(fault))
        readable = {name for table in tables for name in table["id"].unique()}
        if not faults:
            read_parts.append(tables)
        elif paths != found[-1] or not run_folders or not readable <= set(run_folders):
            raise RequestError(
                f"the tables in {folder} are damaged: {'; '.join(faults)}; without them their runs are missing"
            )
    return read_parts


def statuses(folder: Path) -> tuple[dict[str, str], dict[str, str]] | None:
    """By id, the statuses in the tables of runs that need not be looked for elsewhere, and of the others.

    Returns:
        None if the tables are damaged.
    """
    final, all_runs = dict[str, str](), dict[str, str]()
    for paths in written(folder):
        try:
            runs = files.read_table(paths.runs, ["id", "status"])
            measured = set(files.read_distinct(paths.metrics, "id"))
            _check_counts(paths)
        except Exception:  # a damaged file fails in many ways
            return None
        status_of = dict(zip(runs["id"], runs["status"], strict=True))
        if not all(re.fullmatch(NAME, name) for name in measured | set(status_of)):
            return None
        all_runs |= status_of
        final |= {name: status for name, status in status_of.items() if status != "failed" and name in measured}
    return final, {name: status for name, status in all_runs.items() if name not in final}
