"""Logs from folders of MLflow: below a run's ``metrics``, each file holds the time, value and step of a measurement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.analysis.events.log_reader import LOSS, STEP, Row, missing_column, number, usual_columns
from lab.core import files
from lab.core.errors import RequestError

METRICS = "metrics"
# Those of a run, of the runs of an experiment, or of all experiments.
BELOW = (METRICS, f"*/{METRICS}", f"*/*/{METRICS}", f"mlruns/*/*/{METRICS}")
NAME = re.compile(r"^run_name: *(.+)$", re.MULTILINE)


def runs_of(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of measurements by name, of each run below a folder by the name of the run."""
    found = [folder] if folder.name == METRICS else [path for below in BELOW for path in folder.glob(below)]
    runs = dict[str, dict[str, Path]]()
    for metrics in sorted(found):
        measured = {path.relative_to(metrics).as_posix(): path for path in sorted(metrics.rglob("*")) if path.is_file()}
        measured = {name: path for name, path in measured.items() if next(_values(path), None)}
        if measured:
            name = _name(metrics.parent)
            runs[name if name not in runs else f"{name} {metrics.parent.name}"] = measured
    return runs


def _name(run: Path) -> str:
    """The name that was given to a run, or else that of its folder."""
    about = run / "meta.yaml"
    given = NAME.search(files.read_text(about)) if about.is_file() else None
    return given[1].strip("'\" ") if given else run.resolve().name


def _values(path: Path) -> Iterator[tuple[float, float, int]]:
    """Time, value and step of each line; none of a file that is none of MLflow's."""
    with files.open_file(path) as lines:
        for line in lines:
            numbers = [value for word in line.split()[:3] if (value := number(word)) is not None]
            if len(numbers) < 3 or numbers[2] % 1:
                return
            time, value, step = numbers
            yield time, value, int(step)


def read_rows(folder: Path, given: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of all runs in a folder, those of each in the order in which they were logged.

    Raises:
        RequestError: no run has a loss.
    """
    runs = runs_of(folder)
    given = {column: name for column, name in given.items() if column != STEP}
    columns = {run: usual_columns(measured, given) for run, measured in runs.items()}
    if not any(LOSS in of_run for of_run in columns.values()):
        names = sorted({name for measured in runs.values() for name in measured})
        raise RequestError(f"{folder} {missing_column(LOSS, names, given)}")
    for run, measured in runs.items():
        chosen = {column: name for column, name in columns[run].items() if column != STEP}
        timed = [
            (time, Row(run, step, {column: value}))
            for column, name in chosen.items()
            for time, value, step in _values(measured[name])
        ]
        for _, row in sorted(timed, key=lambda each: each[0]):
            yield row
