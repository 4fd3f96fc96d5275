"""Logs for the detectors, made from the lab's own records and from the logs of other programs."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.analysis.events import event_logs
from lab.analysis.events.detectors import Log
from lab.analysis.events.held_out_losses import parting
from lab.analysis.events.log_formats import LONGEST_LINE, LONGEST_PREAMBLE, LOSS, LogReader, Row, trainer_state
from lab.analysis.logit_rounding import BF16, mantissa_bits_by_run, rounding_cost
from lab.core import files
from lab.core.errors import RequestError
from lab.records import store

# Columns from which the level of output logits follows: log Z, the mean of its square, the mean logit.
OUTPUT_LOGITS = ["log_z", "log_z_square", "output_logit_mean"]
# Held-out losses, of the corpus as it is and of clean text, from which follows whether they part.
HELD_OUT = ["val_loss", "clean_val_loss"]
# Probes of the lab by the column that they fill with their largest value over the model.
PROBES = {
    "train_loss": "loss",
    **{name: name for name in ("grad_norm", "attention_logit_max", "update_rms", "eps_ratio", "update_curvature")},
    **{name: name for name in ("log_z", "log_z_square", "val_loss", "clean_val_loss")},
}


# Files of a folder that may be logs.
SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".log", ".txt", ".out", ".err")
PARTS_OF_RECORDS = ("store.json", "runs", "runs.parquet")


class Logs(NamedTuple):
    """Runs to be watched, and remarks on how they were read, one line each."""

    runs: list[Log]
    notes: list[str]


def read_logs(path: Path, mantissa_bits: int | None = None, columns: Mapping[str, str] | None = None) -> Logs:
    """Read the runs of a results folder, a log of another program, a folder of logs, or of TensorBoard's event files.

    Args:
        path: the folder or the log.
        mantissa_bits: stored mantissa bits of the format that rounds output logits; None takes those of the records, or
            of bf16 for other logs.
        columns: the names of the columns ``step``, ``loss`` and so on, if they are unusual.

    Raises:
        RequestError: there is no such file or folder, it holds no runs, is in no known format, or lacks a column of
            steps or of losses.
    """
    given, bits = columns or {}, BF16 if mantissa_bits is None else mantissa_bits
    if is_results_folder(path):
        return Logs(list(logs_of(store.read(path), mantissa_bits)), [])
    if path.is_dir() and event_logs.runs_of(path):
        return _logs(path, event_logs.read_rows(path, given), bits)
    if path.is_dir():
        return _folder(path, given, bits)
    if not path.is_file():
        raise RequestError(f"no results folder or log {path}")
    return _logs(path, read_rows(path, given), bits)


def is_results_folder(path: Path) -> bool:
    """Whether a folder holds records of the lab."""
    return path.is_dir() and any((path / part).exists() for part in PARTS_OF_RECORDS)


def _folder(path: Path, given: Mapping[str, str], bits: int) -> Logs:
    """The logs in a folder; its other files are named in a note."""
    found = [each for each in sorted(path.iterdir()) if each.suffix in SUFFIXES and each.is_file()]
    if not found:  # the newest checkpoint of Transformers holds the history of all
        states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda each: (len(str(each)), each))
        found = states[-1:]
    logs, refusals = Logs([], []), list[str]()
    for each in found:
        try:
            more = read_logs(each, bits, given)
        except RequestError as refusal:
            refusals.append(f"not read: {str(refusal).partition('; known')[0]}")
            continue
        logs.runs.extend(more.runs)
        logs.notes.extend(more.notes)
    if not logs.runs:
        raise RequestError(f"no results folder or log {path}: {'; '.join(refusals) or 'no run of the lab and no log'}")
    return Logs(logs.runs, [*logs.notes, *refusals])


def read_rows(path: Path, given: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of a log file, in the order in which they were written.

    Raises:
        RequestError: see ``read_logs``.
    """
    reader, is_empty = LogReader(given), True
    try:
        with files.open_file(path) as file:
            if path.suffix == ".json" and (state := trainer_state(path, given)) is not None:
                yield from state
                return
            if path.stat().st_size > files.LARGEST_FILE:
                limit = f"larger than {files.LARGEST_FILE // files.MIB} MiB"
                raise RequestError(f"{path} is {limit}; lab watch {path} --follow reads it piece by piece")
            for line in short_lines(file, path):
                for row in reader.read(line):
                    is_empty = False
                    yield row
                if reader.lines is None and file.tell() > LONGEST_PREAMBLE:
                    break
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    if is_empty:
        raise RequestError(f"{path} {reader.fault()}")


def short_lines(file: BinaryIO, path: Path) -> Iterator[str]:
    """The lines of a file.

    Raises:
        RequestError: a line is too long for a log.
    """
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise RequestError(f"{path} has a line of more than {LONGEST_LINE // 1024} KiB, as no log has")
        yield line.decode("utf-8", errors="replace")


def logs_of(records: store.Records, mantissa_bits: int | None = None) -> Iterator[Log]:
    """The runs of records that recorded a training loss, as logs; ``mantissa_bits`` as in ``read_logs``."""
    bits = mantissa_bits_by_run(records.runs)
    wanted = records.metrics[records.metrics["probe"].isin(PROBES)]
    table = wanted.assign(column=wanted["probe"].map(PROBES)).sort_values("value", kind="stable", na_position="last")
    # the largest value, but NaN if any part of the model has NaN, so that no other part hides it
    largest = table.drop_duplicates(["id", "step", "column"], keep="last")
    for name, rows in largest.groupby("id"):
        is_held_out = rows["column"].isin(HELD_OUT)
        values, held_out = (
            each.pivot(index="step", columns="column", values="value").sort_index()
            for each in (rows[~is_held_out], rows[is_held_out])
        )
        if "loss" in values:
            known = bits[name] if mantissa_bits is None else mantissa_bits
            yield _made_log(str(name), values, float(known), held_out)


def _made_log(
    name: str,
    values: pd.DataFrame,
    mantissa_bits: float,
    held_out: Mapping[str, pd.Series] | pd.DataFrame,
    note: str = "",
) -> Log:
    """The log of measurements indexed by step, with the level of output logits and the cost of rounding them.

    Args:
        name: of the log.
        values: a row for each step with a loss.
        mantissa_bits: as in ``Log``.
        held_out: held-out losses by column, indexed by steps of their own; each holds up to the next.
        note: as in ``Log``.
    """
    left_out = {*OUTPUT_LOGITS, *HELD_OUT}
    columns = {str(column): values[column].to_numpy(dtype=float) for column in values if column not in left_out}
    if all(column in held_out for column in HELD_OUT):
        both = {column: held_out[column].dropna() for column in HELD_OUT}
        both["parting"] = parting(*both.values())
        for column, each in both.items():
            columns[column] = each.reindex(values.index, method="ffill").to_numpy(dtype=float)
    level_n = _output_logits(values)
    if not np.isnan(level_n).all():
        columns |= {"output_logit": level_n, "logit_rounding": rounding_cost(level_n, mantissa_bits)}
    return Log(name, values.index.to_numpy(dtype=np.int64), columns, note, mantissa_bits)


def _output_logits(values: pd.DataFrame) -> NDArray[np.float64]:
    """Level ``[n]`` of output logits: that of log Z, or else of the mean logit; NaN without either."""
    log_z_n, square_n, mean_n = values.reindex(columns=OUTPUT_LOGITS).to_numpy(dtype=float).T
    with np.errstate(invalid="ignore"):
        level_n = np.fmax(np.abs(log_z_n), np.sqrt(square_n))
    return np.asarray(np.abs(mean_n) if np.isnan(level_n).all() else level_n)


def _logs(path: Path, rows: Iterable[Row], bits: int) -> Logs:
    """The runs among the rows of a log."""
    runs: dict[str, dict[str, Column]] = defaultdict(lambda: defaultdict(Column))
    for run, step, values in rows:
        for column, value in values.items():
            runs[run][column].add(step, value)
    logs = [log_of(run or path.name, columns, bits) for run, columns in runs.items() if LOSS in columns]
    if not logs:
        raise RequestError(f"{path} has no row with a step and a loss")
    return Logs(logs, [f"{log.name}: {log.note}" for log in logs if log.note])


class Column:
    """Values of one measurement in the order in which they were written, with their steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def rewind(self, step: int) -> None:
        """Drop the last values back to a step."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def trim(self, rows: int) -> None:
        """Keep the last rows only."""
        del self.steps[:-rows], self.values[:-rows]

    def latest(self) -> pd.Series:
        """The last value of each step, in the order of the steps."""
        values = pd.Series(np.array(self.values), np.array(self.steps), dtype=float)
        return values[~values.index.duplicated(keep="last")].sort_index()


def log_of(name: str, columns: Mapping[str, Column], bits: int) -> Log:
    """The log of a run: a row for each step with a loss, in the order of the steps."""
    losses = columns[LOSS].latest()
    step_n = np.array(columns[LOSS].steps)
    is_as_written = bool((np.diff(step_n) > 0).all())
    note = f"sorted by step, the last row of each kept: {len(losses)} of {len(step_n)} rows"
    latest = {column: each.latest() for column, each in columns.items()}
    table = pd.DataFrame({column: each.reindex(losses.index) for column, each in latest.items()})
    return _made_log(name, table, bits, latest, "" if is_as_written else note)
