"""Logs for the detectors, made from the lab's own records and from the logs of other programs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pandas as pd

from lab.core import files
from lab.core.errors import RequestError
from lab.records import store
from labwatch.events.attempts import HELD_OUT, Parts, logs_of_run, made_log
from labwatch.events.detectors import Log
from labwatch.events.event_logs import RunReader, is_event_file
from labwatch.events.log_lines import Fields
from labwatch.events.log_names import LOSS, OR, Given, described, missing_column
from labwatch.events.log_reader import LONGEST_LINE, LONGEST_PREAMBLE, LogReader, Row
from labwatch.events.logit_rounding import BF16, MANTISSA_BITS, RESULTS_IN_FP32
from labwatch.events.mlflow_logs import MlflowReader
from labwatch.tables.run_folders import LOGS, PARQUET, STATE, content_of, log_suffix, parquet_rows
from labwatch.tables.table_files import flat, json_rows

# Probes of the lab by the column that they fill with their largest value over the model.
PROBES = {
    "train_loss": "loss",
    **{name: name for name in ("grad_norm", "attention_logit_max", "update_rms", "eps_ratio", "update_curvature")},
    **{name: name for name in ("log_z", "log_z_square", "val_loss", "clean_val_loss")},
    **{name: name for name in ("expert_load_max", "router_balance", "router_logit_max")},
}


STANDARD_INPUT = "-"
PIECE = 2**16  # bytes that are read at once
TOO_LARGE = (
    f"{{0}} is larger than {files.LARGEST_FILE // files.MIB} MiB; lab watch {{0}} --follow reads it piece by piece"
)


class Logs(NamedTuple):
    """Runs to be watched, and remarks on how they were read, one line each."""

    runs: list[Log]
    notes: list[str]


def read_logs(
    path: Path, mantissa_bits: int | None = None, columns: Given | None = None, *, with_parts: bool = False
) -> Logs:
    """Read the runs of a results folder, a log of another program, or a folder of logs, of event files, or of MLflow.

    A log may be compressed by gzip, or come from standard input, ``-``.

    Args:
        path: the folder or the log.
        mantissa_bits: stored mantissa bits of the format that rounds output logits; None takes those of the records, or
            of bf16 for other logs.
        columns: the names of the columns ``step``, ``loss`` and so on, if they are unusual, or a pattern of lines.
        with_parts: whether losses without a total, and parts of one that were NaN, are runs of their own.

    Raises:
        RequestError: there is no such file or folder, it holds no runs, or no measurement in it recurs.
    """
    given, bits = columns or {}, BF16 if mantissa_bits is None else mantissa_bits
    if store.is_results_folder(path):
        return Logs(list(logs_of(store.read(path), mantissa_bits)), [])
    if reader := reader_of_runs(path):
        return _runs(path, reader, names_given(given, path), bits)
    if path.is_dir():
        return _folder(path, given, bits, with_parts)
    if str(path) == STANDARD_INPUT:
        return _log(Path("standard input"), sys.stdin.buffer, given, bits, with_parts)
    try:
        with files.open_file(path) as file:
            if path.stat().st_size > files.LARGEST_FILE:
                raise RequestError(TOO_LARGE.format(path))
            return _log(path, file, given, bits, with_parts)
    except FileNotFoundError:
        raise RequestError(f"no results folder or log {path}") from None
    except (OSError, EOFError) as error:
        raise RequestError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def reader_of_runs(path: Path) -> type[RunReader] | None:
    """What reads the runs in a folder, or in a file of theirs: event files of TensorBoard, or MLflow's measurements."""
    return next((reader for reader in (RunReader, MlflowReader) if reader.runs_of(path)), None)


def names_given(given: Given, path: Path) -> Mapping[str, str]:
    """The names of columns that a person gives for a log whose measurements have names and no lines.

    Raises:
        RequestError: a pattern of lines is given.
    """
    if isinstance(given, re.Pattern):
        raise RequestError(f"--pattern reads lines, and {path} has none; --columns names its measurements")
    return given


def _runs(path: Path, reader: type[RunReader], given: Mapping[str, str], bits: int) -> Logs:
    """The runs of event files or of MLflow, with a remark on the names that were taken, once for runs with the same.

    Raises:
        RequestError: TensorBoard is not installed, a file cannot be read, or no run has a loss.
    """
    readers = {reader(run, given): paths for run, paths in reader.runs_of(path).items()}
    logs = _logs(path.name, (row for each, paths in readers.items() for rows in each.read(paths) for row in rows), bits)
    if not logs.runs:
        names = sorted({tag for each in readers for tag in each.tags})
        raise RequestError(f"{path} {missing_column(LOSS, names, given)}")
    chosen = dict.fromkeys(described(each.columns) for each in readers if LOSS in each.columns)
    return Logs(logs.runs, [*(f"{path.name}: {names}" for names in chosen), *logs.notes])


def _folder(path: Path, given: Given, bits: int, with_parts: bool) -> Logs:
    """The logs in a folder, those of one name under the name of their file, too; other files are named in a note."""

    def is_log(file: Path) -> bool:
        return file.is_file() and log_suffix(file) in LOGS

    found = [file for file in sorted(path.iterdir()) if is_log(file) or is_event_file(file)]
    if not found:  # the newest checkpoint of Transformers holds the history of all
        states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda state: (len(str(state)), state))
        found = states[-1:]
    logs, notes, refusals = list[tuple[Path, Log]](), list[str](), list[str]()
    for file in found:
        try:
            more = read_logs(file, bits, given, with_parts=with_parts)
        except RequestError as refusal:
            refusals.append(f"not read: {refusal!s}")
            continue
        logs += [(file, log) for log in more.runs]
        notes += more.notes
    if not logs:
        raise RequestError(f"no results folder or log {path}: {'; '.join(refusals) or 'no run of the lab and no log'}")
    times = Counter(log.name for _, log in logs)
    runs = [log._replace(name=f"{file.name}: {log.name}") if times[log.name] > 1 else log for file, log in logs]
    return Logs(runs, [*notes, *refusals])


def _log(path: Path, file: BinaryIO, given: Given, bits: int, with_parts: bool) -> Logs:
    """The runs in a file.

    Raises:
        RequestError: it is larger than a log may be, or no measurement in it recurs.
        OSError: it cannot be read.
    """
    reader = LogReader(given)
    rows = _rows(reader, files.unpacked(path, file), path)
    logs = _logs(path.name, (row for row in rows if with_parts or not row.run.startswith(" ")), bits)
    if not logs.runs:
        raise RequestError(f"{path} {reader.fault()}")
    dropped = [f"{path.name}: left out {count} {reason}" for reason, count in reader.dropped.items()]
    return Logs(logs.runs, [f"{path.name}: {reader.chosen()}", *dropped, *logs.notes])


def _rows(reader: LogReader, file: Any, path: Path) -> Iterator[Row]:
    history: Iterable[Fields] = []
    if log_suffix(path) == STATE:
        history = history_of(path)
    is_table = log_suffix(path) == PARQUET
    if is_table:
        history = (dict(flat(row, "/")) for row in parquet_rows(content_of(file, path), path))
    for fields in history:
        yield from reader.add(fields)
    read = 0
    for text in () if is_table or history else _texts(file, path):
        yield from reader.read_lines(text)
        read += len(text)
        if read > LONGEST_PREAMBLE and not reader.columns:
            break
    yield from reader.rest()


def _texts(file: Any, path: Path) -> Iterator[str]:
    """The text of a file, some lines at a time.

    Raises:
        RequestError: the file or a line of it is too long for a log, or it is binary.
    """
    read, rest = 0, b""
    while piece := file.read(PIECE):
        read += len(piece)
        if read > files.LARGEST_FILE:
            raise RequestError(TOO_LARGE.format(path))
        if b"\0" in piece:
            raise RequestError(f"{path} is binary")
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        lines, rest = (rest + piece[:end], piece[end:]) if end else (b"", rest + piece)
        if len(rest) > LONGEST_LINE:
            raise RequestError(f"{path} has a line of more than {LONGEST_LINE // 1024} KiB, as no log has")
        yield lines.decode("utf-8", errors="replace")
    yield rest.decode("utf-8", errors="replace")


def history_of(path: Path) -> list[Fields]:
    """The entries of a ``trainer_state.json`` of Transformers, of a list of objects, or an object; else none.

    Raises:
        OSError, EOFError: the file cannot be read, or is too large.
    """
    try:
        with files.open_file(path) as file:
            text = content_of(files.unpacked(path, file), path, files.LARGEST_JSON).decode()
        entries = json_rows(text)
    except ValueError:
        return []
    with contextlib.suppress(ValueError):  # lists of measurements by name, as Keras keeps them
        entries = entries or [files.parse_json(text.encode(), dict)]
    return [dict(flat(entry, "/")) for entry in entries]


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
            each.pivot(index="step", columns="column", values="value").sort_index().astype(float)
            for each in (rows[~is_held_out], rows[is_held_out])
        )
        if LOSS in values:
            columns = {str(column): values[column].to_numpy() for column in values}
            losses = {str(column): held_out[column].dropna() for column in held_out}
            known = bits[name] if mantissa_bits is None else mantissa_bits
            yield made_log(str(name), values.index.to_numpy(dtype="int64"), columns, float(known), losses)


def _logs(name: str, rows: Iterable[Row], bits: int) -> Logs:
    """The runs among the rows of a log."""
    runs = defaultdict[str, Parts](Parts)
    for row in rows:
        runs[row.run].add(row)
    logs = Logs([], [])
    for run, parts in runs.items():
        if parts.losses:
            of_part = f"{name}{run}" if run.startswith(" ") else run
            more, notes = logs_of_run(of_part or name, parts, bits)
            logs.runs.extend(more)
            logs.notes.extend(notes)
    return logs


def measurements(log: Path) -> dict[str, pd.Series]:
    """The measurements in a log of one run, by name, each by step.

    Raises:
        RequestError: the log holds several runs.
    """
    *others, run = read_logs(log).runs
    if others:
        raise RequestError(f"{log} holds {len(others) + 1} runs; give each a file")
    return {name: pd.Series(values, run.step_n) for name, values in run.columns.items() if OR not in name}


def mantissa_bits_by_run(runs: pd.DataFrame) -> pd.Series[float]:
    """Stored mantissa bits of the logits of each run, by run id; bf16's if the records do not say."""
    by_id = runs.set_index("id").reindex(columns=["precision", "mantissa_bits", "kept_in_bf16"])
    chosen = pd.to_numeric(by_id["mantissa_bits"], errors="coerce").where(by_id["precision"] == "mantissa")
    fp32 = by_id["precision"].isin(RESULTS_IN_FP32) & (by_id["kept_in_bf16"] != "ends")
    bits = by_id["precision"].map(MANTISSA_BITS).astype(float).fillna(chosen)
    return bits.where(~fp32, MANTISSA_BITS["fp32"]).fillna(BF16)
