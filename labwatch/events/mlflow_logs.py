"""Logs from MLflow: below a run's folder ``metrics``, each file holds the time, value and step of a measurement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.core import files
from lab.core.errors import RequestError
from labwatch.events.event_logs import RunReader
from labwatch.events.log_lines import number
from labwatch.events.log_reader import Row

METRICS = "metrics"
# Those of a run, of the runs of an experiment, or of all experiments.
BELOW = (METRICS, f"*/{METRICS}", f"*/*/{METRICS}", f"mlruns/*/*/{METRICS}")
NAME = re.compile(r"^run_name: *(.+)$", re.MULTILINE)
LINE = re.compile(r"(\d{9,}) (\S+) (\d+)(?: .*)?\r?\n")  # the time in milliseconds


def runs_of(path: Path) -> dict[str, list[Path]]:
    """The files of measurements of each run below a folder by the name of the run; or a file that is one of these."""
    if path.is_file():
        return {path.name: [path]} if not path.suffix and _is_metric(path) else {}
    found = [path] if path.name == METRICS else [metrics for below in BELOW for metrics in path.glob(below)]
    runs = dict[str, list[Path]]()
    for metrics in sorted(found):
        if measured := list(filter(_is_metric, sorted(metrics.rglob("*")))):
            name = _name(metrics.parent)
            runs[name if name not in runs else f"{name} {metrics.parent.name}"] = measured
    return runs


def _name(run: Path) -> str:
    """The name that was given to a run, or else that of its folder."""
    about = run / "meta.yaml"
    given = NAME.search(files.read_text(about)) if about.is_file() else None
    return given[1].strip("'\" ") if given else run.resolve().name


def _is_metric(path: Path) -> bool:
    """Whether a path is a file that begins with a line of MLflow's."""
    if not path.is_file():
        return False
    with files.open_file(path) as file:
        return bool(LINE.fullmatch(file.readline(files.MIB).decode(errors="replace")))


class MlflowReader(RunReader):
    """Reads the measurements of one run, and later those that were added to their files."""

    runs_of = staticmethod(runs_of)

    def __init__(self, run: str, given: Mapping[str, str]) -> None:
        super().__init__(run, given)
        self.ends = dict[Path, int]()  # up to where files were read
        self.rows = dict[Path, int]()  # how many measurements were read that were logged without steps

    def read(self, paths: list[Path], events: int | None = None) -> Iterator[list[Row]]:
        """Yield the rows that were not read before, all at once and in the order in which they were logged.

        Raises:
            RequestError: a file cannot be read.
        """
        timed = [each for path in paths for each in self._new_scalars(path)]
        yield self._rows([scalar for _, scalar in sorted(timed, key=lambda each: each[0])])

    def _new_scalars(self, path: Path) -> Iterator[tuple[int, tuple[str, int, float]]]:
        """The time of each measurement, and its name, step and value."""
        try:
            with files.open_file(path) as file:
                file.seek(self.ends.get(path, 0))
                text = file.read()
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None
        text = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self.ends[path] = self.ends.get(path, 0) + len(text)
        lines = list(filter(None, map(LINE.fullmatch, text.decode(errors="replace").splitlines(keepends=True))))
        if path in self.rows or (lines and len({line[3] for line in lines}) == 1 < len(lines)):
            first = self.rows.get(path, 0)
            self.rows[path] = first + len(lines)
            steps = [*range(first, first + len(lines))]
        else:
            steps = [int(line[3]) for line in lines]
        name = path.as_posix().rpartition(f"/{METRICS}/")[2] if f"/{METRICS}/" in path.as_posix() else path.name
        for line, step in zip(lines, steps, strict=True):
            if (value := number(line[2])) is not None:
                yield int(line[1]), (name, step, value)
