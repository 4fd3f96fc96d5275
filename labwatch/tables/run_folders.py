"""A folder of runs of any trainer, made into a table of them: event files, logs, and settings beside them."""

from __future__ import annotations

import csv
import errno
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pandas as pd
import yaml

from lab.core import files
from lab.core.errors import RequestError
from lab.core.windows import noise_of
from labwatch.events import event_files
from labwatch.tables.columns import USUAL_NAMES, column_of, end_of
from labwatch.tables.run_names import number_or_word, settings_in
from labwatch.tables.table_files import flat, json_rows

# Files beside a log that hold settings, as Lightning, Hydra, Ray Tune and W&B leave them; later ones count.
CONFIGS = ("config.yaml", "config.json", "params.json", "hparams.yaml", ".hydra/config.yaml", ".hydra/overrides.yaml")
# Logs by the end of their names, which that of a compression may follow; the first counts, of one run.
OBJECTS, TABLES, TEXTS = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".log", ".txt", ".out", ".err")
STATE, PARQUET = ".json", ".parquet"
LOGS = (*OBJECTS, *TABLES, PARQUET, *TEXTS)
SURE = 0.01  # standard error of a final loss, in the unit of the losses
MOST_LAST = 8  # times as many losses a log has as its final loss is the median of, or more
FEWEST_LAST = 10  # losses from which noise is estimated
POINTER = 200  # bytes, of which a pointer of Git LFS has fewer

Series = Mapping[str, "pd.Series[float]"]
ReadLog = Callable[[Path], Series]


class RunTable(NamedTuple):
    """A table with a row per run, named by its path; which of its columns were measured; and remarks, in pairs."""

    table: pd.DataFrame
    measured: frozenset[str]
    remarks: list[tuple[str, str]]


class _Run(NamedTuple):
    """The measurements of a run, each a series by step, and its settings by name, dotted where they are nested."""

    series: Series
    config: Mapping[str, Any]


def read_run_folder(folder: Path, read_log: ReadLog, loss: str | None = None) -> RunTable:
    """Read all runs below a folder: each folder with event files, or with settings beside a log; else each log.

    Columns are settings; the final value of each measurement, though the largest of one that is called a learning
    rate, and of the loss see ``final_loss``; ``initial_loss``, the one of the first step, if that was logged; ``step``,
    the last one; and ``folder``, the path without settings. Settings come from TensorBoard's page of hyper-parameters,
    which may have a folder of its own below the run's; from files beside the log; or else from the path, as in
    ``clip/lr=0.01,seed=1``.

    Args:
        folder: searched with all folders below it.
        read_log: reads the measurements in a log of lines of text.
        loss: the name of the losses, if it is no usual one.

    Raises:
        RequestError: the extra ``tensorboard`` is not installed, there are no runs, a file cannot be read, or a run has
            no loss.
    """
    if not folder.is_dir():
        raise RequestError(f"no folder {folder}")
    rows: dict[str, dict[str, Any]] = {}
    logs: dict[str, Series] = {}
    measured, unread = {"step"}, list[str]()
    runs = dict([*_event_runs(folder), *_log_runs(folder, read_log, unread)])
    for (name, (series, config)), (pairs, rest) in zip(runs.items(), settings_in([*runs]), strict=True):
        settings = {**pairs, **config}
        row = {"folder": rest, "step": max(int(values.index[-1]) for values in series.values())}
        logged = {tag: values for tag, values in series.items() if tag not in settings or not _is_lr(tag)}
        measured |= {*logged}
        ends = {tag: float(values.max() if _is_lr(tag) else values.iloc[-1]) for tag, values in logged.items()}
        rows[name] = {**row, **settings, **ends}
        logs[name] = logged
    if not rows:
        raise RequestError(f"no event files with scalars and no logs below {folder}{'; '.join(['', *unread[:1]])}")
    table = pd.DataFrame.from_dict(rows, orient="index")
    tag = str(column_of(table, "loss", loss))
    for name in rows:
        if tag not in rows[name]:
            raise RequestError(f"run {name} has no values of {tag}")
    lasts = {name: final_loss(logs[name][tag]) for name in rows if tag in logs[name]}
    table[tag] = [lasts[name][0] if name in lasts else rows[name][tag] for name in rows]
    if column_of(table, "initial_loss", None) is None and all(logs[name][tag].index[0] <= 1 for name in rows):
        table["initial_loss"] = [float(logs[name][tag].iloc[0]) for name in rows]
    remarks = [("not read", why) for why in unread]
    if (most := max((count for _, count in lasts.values()), default=1)) > 1:
        remarks.append(("final losses", f"medians of the last rows of a log, up to {most} as their noise asks"))
    return RunTable(table, frozenset(measured), remarks)


def _event_runs(folder: Path) -> Iterator[tuple[str, _Run]]:
    """Yield name and content of the runs that left event files."""
    found = {path: event_files.read_events(paths) for path, paths in event_files.by_folder(folder).items()}
    for path, (scalars, config) in found.items():
        above = found.get(path.parent)
        if not scalars or (config and above and above.scalars and not above.config):
            continue  # the hyper-parameters of the folder above
        below = [other.config for place, other in found.items() if place.parent == path and other.config]
        given = config or _settings_beside(path) or (below[0] if len(below) == 1 else {})
        yield path.relative_to(folder).as_posix(), _Run(scalars, given)


def _log_runs(folder: Path, read_log: ReadLog, unread: list[str]) -> Iterator[tuple[str, _Run]]:
    """Yield name and content of the runs that left logs, and add why files are none; hidden folders hold none."""
    places: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if log_suffix(path) in LOGS and path.name not in CONFIGS and not any(part[0] == "." for part in inside.parts):
            places.setdefault(path.parent, []).append(path)
    for place, logs in places.items():
        config, found = _settings_beside(place), list[tuple[Path, Series, dict[str, Any]]]()
        for log in sorted(logs, key=lambda path: LOGS.index(log_suffix(path))):
            try:
                series, own = _read(log, read_log)
            except (RequestError, OSError, EOFError, ValueError) as fault:
                unread.append(f"{log.relative_to(folder)}: {' '.join(str(fault).split())}")
                continue
            if series:
                found.append((log, series, own))
                if config:
                    break
        is_run = bool(config) or (len(found) == 1 and place != folder)
        for log, series, own in found:
            alone = log.with_name(log.name.removesuffix(files.COMPRESSED)).with_suffix("")
            yield (place if is_run else alone).relative_to(folder).as_posix(), _Run(series, own | config)


def _read(log: Path, read_log: ReadLog) -> tuple[Series, dict[str, Any]]:
    """The measurements in a log, and the settings that its rows repeat under ``config``."""
    with files.open_file(log) as file:
        if files.is_lfs_pointer(file.read(POINTER)):
            raise ValueError(f"it {files.LFS_POINTER}")
        file.seek(0)
        suffix = log_suffix(log)
        content = b"" if suffix in TEXTS else content_of(files.unpacked(log, file), log)
    text = "" if suffix == PARQUET else content.decode("utf-8-sig")
    found: list[dict[str, Any]]
    if suffix == PARQUET:
        found = [dict(flat(row)) for row in parquet_rows(content, log)]
    elif suffix in TABLES:
        table = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=text.partition("\n")[0].count))
        found = [{str(name): cell for name, cell in cells.items() if isinstance(cell, str) and cell} for cells in table]
    else:
        found = [dict(flat(row)) for row in json_rows(text)]
    rows = [{name: number_or_word(value) for name, value in row.items()} for row in found]
    if not rows and suffix != PARQUET:
        return read_log(log), {}
    steps = next(
        (name for usual in USUAL_NAMES["steps"] for name in (rows[-1] if rows else ()) if end_of(name) == usual), None
    )
    if suffix == PARQUET and not steps:  # most tables are data
        return {}, {}
    values: dict[str, dict[int, float]] = {}
    config: dict[str, Any] = {}
    step = 0
    for number, row in enumerate(rows):
        step = int(row.get(steps, step)) if steps else number
        for name, value in row.items():
            if name.startswith("config."):
                config[name.removeprefix("config.")] = value
            elif isinstance(value, float | int) and name != steps:
                values.setdefault(name, {})[step] = float(value)
    return {name: pd.Series(of_name).sort_index() for name, of_name in values.items()}, config


def log_suffix(path: Path) -> str:
    """The end of a log's name by which its form is known, without that of its compression."""
    return Path(path.name.removesuffix(files.COMPRESSED)).suffix.lower()


def content_of(file: BinaryIO, path: Path, largest: int = files.LARGEST_FILE) -> bytes:
    """The content of an open log.

    Raises:
        OSError, EOFError: it cannot be read, or is too large.
    """
    content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest // files.MIB} MiB", str(path))
    return content


def parquet_rows(content: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log in Parquet, without what is null.

    Raises:
        RequestError: it is empty, damaged, or no table.
    """
    if not content:
        raise RequestError(f"{path} is empty")
    if files.is_lfs_pointer(content):
        raise RequestError(f"{path} {files.LFS_POINTER}")
    try:
        yield from files.table_rows(content, path.name)
    except (OSError, ValueError) as fault:
        raise RequestError(f"{path} cannot be read as Parquet: {str(fault).splitlines()[0]}") from None


def _settings_beside(folder: Path) -> dict[str, Any]:
    """Settings in files beside a log; what is null is left out."""
    settings: dict[str, Any] = {}
    for path in (folder / name for name in CONFIGS):
        if not path.is_file():
            continue
        try:
            text = files.read_bytes(path, files.LARGEST_JSON).decode()
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # few bytes may stand for many
                raise ValueError("it has aliases")
            content = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as fault:
            raise RequestError(f"{path} cannot be read: {' '.join(str(fault).split())}") from None
        if isinstance(content, list):  # overrides of Hydra
            words = [str(word).lstrip("+").partition("=") for word in content]
            content = {key: number_or_word(value) for key, is_set, value in words if is_set}
        settings |= dict(flat(content)) if isinstance(content, dict) else {}
    return {name: number_or_word(value) for name, value in settings.items()}  # YAML takes 1e-3 for a word


def final_loss(losses: pd.Series[float]) -> tuple[float, int]:
    """The median of as many of the last losses of a log as noise asks for, at most an eighth of it, and their number.

    So many bring the standard error of their mean down to ``SURE``. The noise is how far a row lies from the line
    through its neighbours, by the median over the last fifth of the log, so that neither a descent nor a spike counts.
    A log that ends in a loss that is not finite, or with few rows, ends at its last loss.
    """
    last = np.asarray(losses, np.float64)[-max(len(losses) // 5, FEWEST_LAST) :]
    is_long = len(losses) >= 2 * FEWEST_LAST and bool(np.isfinite(last).all())
    noise = noise_of(last) if is_long else 0.0
    # an odd number has a row as median
    rows = min(math.ceil((noise / SURE) ** 2), len(losses) // MOST_LAST) // 2 * 2 + 1
    return float(np.median(last[-rows:])), rows


def _is_lr(tag: str) -> bool:
    return bool({tag.lower(), re.split(r"[/.]", tag.lower())[-1]} & {*USUAL_NAMES["lr"]})
