"""Runs of any trainer: a table with a row per run, read and made into records."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.records import store
from lab.records.store import Records

# Usual names of columns, in any case, the first that is there; held-out losses before training losses.
USUAL_NAMES = {
    "lr": ("lr", "learning_rate", "peak_lr", "peak_learning_rate", "max_lr", "base_lr", "optimizer.lr"),
    "loss": (
        *("final_val_loss", "val_loss", "val/loss", "validation_loss", "eval/loss", "eval_loss", "test_loss"),
        *("final_loss", "loss", "train_loss", "train/loss"),
    ),
    "size": ("parameters_without_embeddings", "params", "n_params", "num_params", "parameters", "size", "model_size"),
    "seed": ("seed", "random_seed"),
    "steps": ("steps", "n_steps", "num_steps", "train_steps", "max_steps", "step", "_step"),
    "initial_loss": ("initial_loss", "init_loss", "loss_at_init"),
}
# Settings that every run of the lab has, and of which a table says nothing.
UNKNOWN = ("optimizer.name", "parametrization.name", "schedule.name", "precision")
NO_NUMBERS = ("", "nan", "none", "null")  # words for a loss that there is not
LARGEST = 2**53  # of whole numbers, all of which up to here are floats
FEWEST_LRS = 3  # of a curve, and of each value of a column that sets arms apart
ORIGIN = "imported from"
TABLE = "table"  # the setting that holds the name of the table, so that arms of several tables are told apart


class Columns(NamedTuple):
    """Which column holds what; ``None`` looks for a usual name, a number holds for all runs.

    Attributes:
        lr: peak learning rates.
        loss: final losses; what is empty or not finite is a diverged run.
        size: numbers of parameters, or any other whole number above 0 that grows with the model.
        seed: seeds; all runs are of one seed without it.
        arm: columns of settings that set arms apart; see ``records_of``.
        initial_loss: losses at initialization, at which diverged runs count.
        steps: numbers of training steps.
    """

    lr: str | None = None
    loss: str | None = None
    size: str | None = None
    seed: str | None = None
    arm: Sequence[str] | None = None
    initial_loss: str | None = None
    steps: str | None = None


def read_table(source: str) -> pd.DataFrame:
    """Read a table of runs: CSV, JSON lines or Parquet by the suffix of its name, or from standard input, ``-``.

    Raises:
        RequestError: there is no such file, or it is none of these.
    """
    path, name = Path(source), "standard input" if source == "-" else source
    if source != "-" and path.suffix not in (*READ_TEXT, PARQUET):
        known = ", ".join((*READ_TEXT, PARQUET))
        raise RequestError(f"{source} is no table that can be imported; known: {known}, or - for a pipe")
    try:
        if path.suffix == PARQUET:
            table = files.read_table(path)
        else:
            text = sys.stdin.read() if source == "-" else files.read_bytes(path).decode("utf-8-sig")
            kind = path.suffix or (".jsonl" if text.lstrip().startswith("{") else ".csv")
            table = READ_TEXT[kind](text)
    except FileNotFoundError:
        raise RequestError(f"no table {source}") from None
    except OSError as fault:
        raise RequestError(f"{source} cannot be read: {fault.strerror}") from None
    except Exception as fault:  # each reader has its own
        raise RequestError(f"{name} cannot be read as a table: {' '.join(str(fault).split())}") from None
    if table.empty:
        raise RequestError(f"the table {name} has no rows")
    return table


def _csv(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text), sep=None, engine="python")


def _json_lines(text: str) -> pd.DataFrame:
    return pd.json_normalize([json.loads(line) for line in text.splitlines() if line.strip()])


PARQUET = ".parquet"
READ_TEXT = {**dict.fromkeys((".csv", ".tsv"), _csv), **dict.fromkeys((".jsonl", ".ndjson", ".json"), _json_lines)}


def records_of(
    table: pd.DataFrame, columns: Columns, source: str = "a table", measured: Collection[str] = ()
) -> Records:
    """Make records of a table with a row per run.

    A column that is none of ``columns`` sets arms apart if ``columns.arm`` names it. Where that is ``None``, it does so
    if each of its values occurs with three learning rates or more, unless seed or size determines it. Other columns
    are kept: numbers as metrics of the last step, words as notes.

    Args:
        table: as from ``read_table``.
        columns: names of its columns.
        source: what the table is called, for the page.
        measured: columns that set no arms apart unless ``columns.arm`` names them.

    Raises:
        RequestError: a column is absent, a row makes no sense, two rows are one run, or too few learning rates.
    """
    found = {key: column_of(table, key, getattr(columns, key)) for key in USUAL_NAMES}
    numbers = {key: _numbers(table, key, column) for key, column in found.items()}
    for key, name in (("lr", "learning rate"), ("size", "size")):
        _refuse(numbers[key] <= 0, numbers[key], f"the {name} {{:g}} is not above 0")
    _refuse(numbers["lr"] == math.inf, numbers["lr"], "the learning rate is infinite")
    for key in ("size", "seed", "steps"):
        values = numbers[key].dropna()
        _refuse((values != values.round()) | (values.abs() > LARGEST), values, f"{key} {{:g}} is no whole number")
    _refuse(numbers["steps"] < 0, numbers["steps"], "the steps {:g} are below 0")
    diverged = ~numbers["loss"].map(math.isfinite)
    unknown = diverged & ~numbers["initial_loss"].map(math.isfinite)
    _refuse(unknown, unknown, "a diverged run counts at its initial loss; --initial-loss COLUMN or NUMBER gives it")
    if (count := numbers["lr"].nunique()) < FEWEST_LRS:
        raise RequestError(f"{count} learning rates, and a curve takes {FEWEST_LRS}")
    others = [str(name) for name in table if name not in found.values()]
    settings, kept = _settings(table, others, numbers, columns.arm, measured)
    identity = pd.DataFrame({**{key: numbers[key] for key in ("lr", "seed", "size")}, **settings}).astype(str)
    if (twice := identity.duplicated()).any():
        first = identity.eq(identity[twice].iloc[0]).all(axis=1)
        raise RequestError(f"{_row(first)} and {_row(twice)} are one run: alike in {', '.join(map(str, identity))}")
    # A run of a table is not one of another, even of one name; six digits of a loss are alike in every format.
    identity = identity.assign(source=source, loss=numbers["loss"].map("{:.6g}".format))
    runs = pd.DataFrame(
        {
            "id": [files.digest([ORIGIN, *map(str, row)]) for row in identity.itertuples(index=False)],
            "status": np.where(diverged, "diverged", "finished"),
            "final_val_loss": numbers["loss"].mask(diverged),
            "loss_at_init": numbers["initial_loss"],
            "parameters_without_embeddings": numbers["size"].astype("int64"),
            "optimizer.lr": numbers["lr"],
            "seed": numbers["seed"].astype("int64"),
            "versions": f"{ORIGIN} {source}",
            "data_fingerprint": "imported",
            "intervention": "none",
            TABLE: source,
            **dict.fromkeys(UNKNOWN, "unknown"),
            "notes": _notes(table, [name for name in kept if not pd.api.types.is_numeric_dtype(table[name])]),
            **({"steps": numbers["steps"]} if found["steps"] is not None else {}),
            **settings,
        }
    )
    return Records(store.declared(runs), _metrics(table, runs, kept))


def _refuse(wrong: pd.Series[bool], values: pd.Series[Any], why: str) -> None:
    """Refuse the first row that is wrong; ``why`` may name its value."""
    if wrong.any():
        raise RequestError(f"{_row(wrong)}: {why.format(values[wrong].iloc[0])}")


def column_of(table: pd.DataFrame, key: str, given: str | None) -> str | float | None:
    """The column of a quantity, or the number that holds for all runs; None if there is neither.

    Args:
        table: as for ``records_of``.
        key: a field of ``Columns``.
        given: its value there.

    Raises:
        RequestError: there is no such column, and the quantity is needed.
    """
    if given is not None:
        if given in table:
            return given
        try:
            return float(given)
        except ValueError:
            option = f"--{key.replace('_', '-')}"
            raise RequestError(f"{option}: no column {given!r}; {nearest(given, map(str, table))}") from None
    names = {_plain(str(name)): str(name) for name in table}
    ends = Counter(_end(name) for name in names)
    names = {_end(name): column for name, column in names.items() if ends[_end(name)] == 1} | names
    usual = next((names[name] for name in USUAL_NAMES[key] if name in names), None)
    if usual is None and key in ("lr", "loss", "size"):
        allowed = "COLUMN, or NUMBER if all runs are of one size," if key == "size" else "COLUMN"
        usual_names = " or ".join(USUAL_NAMES[key][:3])
        raise RequestError(f"no column is called {usual_names}; --{key} {allowed} says which it is")
    return usual


def _plain(name: str) -> str:
    """``Learning Rate -> learning_rate``."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _end(name: str) -> str:
    """``config/lr -> lr``."""
    return re.split(r"[/.]", name)[-1]


def _numbers(table: pd.DataFrame, key: str, column: str | float | None) -> pd.Series[float]:
    """A column as numbers; empty cells are NaN, except of seeds, which are 0 without a column."""
    if column is None or isinstance(column, float):
        value = (0.0 if key == "seed" else math.nan) if column is None else column
        return pd.Series(value, table.index, dtype=float)
    numbers = pd.to_numeric(table[column], errors="coerce")
    words = table[column].astype(str).str.strip().str.lower()
    is_word = numbers.isna() & table[column].notna() & ~words.isin(NO_NUMBERS)
    if is_word.any():
        raise RequestError(f"{_row(is_word)}: {column} is no number: {table[column][is_word].iloc[0]!r}")
    if key not in ("loss", "initial_loss"):
        _refuse(numbers.isna(), numbers, f"{column} is empty")
    return numbers.astype(float)


def _row(chosen: pd.Series[bool]) -> str:
    """The first row chosen: ``row 3``, counted from 1 without the head, or ``run lr=0.1`` where rows have names."""
    number = int(np.flatnonzero(chosen)[0])
    label = chosen.index[number]
    return f"run {label}" if isinstance(label, str) else f"row {number + 1}"


def _settings(
    table: pd.DataFrame,
    others: Sequence[str],
    numbers: Mapping[str, pd.Series[float]],
    arm: Sequence[str] | None,
    measured: Collection[str],
) -> tuple[dict[str, pd.Series[Any]], list[str]]:
    """The columns that set arms apart, and the names of the others."""
    for name in arm or ():
        if name not in others:
            raise RequestError(f"--arm: no column {name!r}; {nearest(name, others)}")

    def sets_arms_apart(name: str) -> bool:
        if arm is not None:
            return name in arm
        if name in measured:
            return False
        values = table[name].astype(str)
        # a switch may add gains, and so determine the exact size; a width or a depth follows from it
        is_number = pd.api.types.is_numeric_dtype(table[name]) and not pd.api.types.is_bool_dtype(table[name])
        keys = ("seed", "size") if is_number else ("seed",)
        follows = any(values.groupby(numbers[key]).nunique().max() == 1 for key in keys)
        is_swept = bool((numbers["lr"].groupby(values).nunique() >= FEWEST_LRS).all())
        return is_swept and (not follows or values.nunique() == 1)

    chosen = [name for name in others if sets_arms_apart(name)]
    reserved = {*store.RUN_COLUMNS, "optimizer.lr", "seed", "steps", "out", "device", "folder", TABLE}
    ends = Counter(map(_end, chosen))
    # without dots, no setting of another trainer is taken for one of the lab
    keys = {name: _end(name) if ends[_end(name)] == 1 else name.replace(".", "/") for name in chosen}
    settings = {f"column.{key}" if key in reserved else key: table[name] for name, key in keys.items()}
    return settings, [name for name in others if name not in chosen]


def _notes(table: pd.DataFrame, words: Sequence[str]) -> list[str]:
    rows = table[list(words)].astype(str).to_dict("records")
    return ["; ".join(f"{name}: {value}" for name, value in row.items()) for row in rows]


def _metrics(table: pd.DataFrame, runs: pd.DataFrame, kept: Sequence[str]) -> pd.DataFrame:
    """The final loss and all other numbers as metrics of the last step."""
    measured: Mapping[str, pd.Series[Any]] = {
        "val_loss": runs["final_val_loss"],
        **{name: table[name] for name in kept if pd.api.types.is_numeric_dtype(table[name])},
    }
    steps = runs["steps"].astype("int64") if "steps" in runs else 0
    frames = [
        pd.DataFrame({"id": runs["id"], "step": steps, "probe": name, "where": "", "value": values.astype(float)})
        for name, values in measured.items()
    ]
    metrics = pd.concat(frames, ignore_index=True).astype(store.METRIC_COLUMNS)
    return metrics.sort_values(["id", "step", "probe", "where"], ignore_index=True)


def is_imported(records: Records) -> bool:
    """Whether all runs come from tables, and so have no probes."""
    return bool(records.runs["versions"].fillna("").str.startswith(ORIGIN).all())


def size_name(records: Records) -> str:
    """The quantity that sizes are.

    Nobody knows which parameters a table of other runs counts, nor which of a custom model's are embeddings.
    """
    if is_imported(records):
        return "model size"
    custom = records.runs["guest"].notna() if "guest" in records.runs else pd.Series(False, records.runs.index)
    if custom.all():
        return "parameters with embeddings"
    return f"parameters without embeddings{' (with them in custom models)' * bool(custom.any())}"


def write(folder: Path, records: Records, command: str, *, replace: bool = False) -> bool:
    """Write imported records as a results folder; returns whether it was written, or held them already.

    Args:
        folder: the results folder.
        records: as from ``records_of``.
        command: the command that imports them.
        replace: the imported records that are there.

    Raises:
        RequestError: the folder holds other records, or cannot be written.
    """
    present = store.find(folder) if (folder / "store.json").exists() else None
    if present is not None:
        if all(one.equals(other) for one, other in zip(present[:2], store.joined(records)[:2], strict=True)):
            return False
        if not is_imported(present):
            raise RequestError(f"{folder} holds runs that were trained; give another out=")
        if not replace:
            raise RequestError(f"{folder} holds another table; --replace replaces it, or give another out=")
    store.write_imported(folder, records)
    store.note_command(folder, command)
    return True
