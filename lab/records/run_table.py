"""Runs of any trainer: a table with a row per run, made into records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.records import store
from lab.records.columns import (
    ARM,
    BEST,
    LOGGED_STEPS,
    LOSS_UNITS,
    NAME,
    PLANNED_STEPS,
    SHARED,
    UNIT_NAMES,
    USUAL_NAMES,
    Columns,
    column_of,
    end_of,
    is_arm,
    roles_of,
    spelled_out,
)
from lab.records.store import Records
from lab.records.table_files import NO_NUMBERS, plain, with_point

# What a column says about how a run ended: that its loss is no final one; all others but these ended early.
UNFINISHED = ("running", "pending", "waiting", "queued", "preempted", "pruned")
ENDED = ("", "nan", "finished", "complete", "completed", "done", "success", "succeeded", "terminated")
# Settings that every run of the lab has, and of which a table says nothing.
UNKNOWN = ("optimizer.name", "parametrization.name", "schedule.name", "precision")
LARGEST = 2**53  # of whole numbers, all of which up to here are floats
LARGEST_LOSS, LR_BOUNDS = 1e30, (1e-30, 1e30)
SAME_LR = 1.005  # learning rates within this ratio, which agree in three digits, are one
PER_BYTE = "losses are nats per byte"
KEEPS = ("error", "last", "best")
MEANINGS = {
    "lr": "peak learning rate",
    "loss": "final loss",
    "initial_loss": "loss at initialization",
    "axis": "along curves",
}
MOST_SHOWN = 8  # values of a setting that the mapping lists
UNKNOWN_SIZE = 1  # of models whose size a table does not say
ORIGIN = "imported from"
LR = "optimizer.lr"
AXIS = "axis"  # the setting that holds the key of the one along which curves run, where that is no learning rate


class Imported(NamedTuple):
    """Records made of a table, and what each of its columns was taken for: pairs of a meaning and of columns."""

    records: Records
    mapping: list[tuple[str, str]]


def records_of(
    table: pd.DataFrame, columns: Columns, source: str = "a table", measured: Collection[str] = ()
) -> Imported:
    """Make records of a table with a row per run.

    Columns that hold no quantity and are no setting are kept: numbers as metrics of the last step, words as notes.
    Those ``measured`` set no arms apart unless ``columns.arm`` names them. The page calls the table ``source``.

    Raises:
        RequestError: a column is absent, a row makes no sense, or two rows are one run.
    """
    table = _last_of_trials(plain(table if table.index.is_unique else table.reset_index(drop=True)))
    if {*store.RUN_COLUMNS} <= {*table} and columns == Columns():
        return _exported(table, source)
    best_over = [str(column_of(table, "best_over", name)) for name in columns.best_over or ()]
    found, numbers, unit = _quantities(table, columns, best_over)
    states = next((table[name] for name in table if end_of(str(name)) in ("state", "status")), None)
    ends = pd.Series("", table.index) if states is None else states.astype(str).str.lower()
    is_lost, is_left_out = ~numbers["loss"].map(math.isfinite), ends.isin(UNFINISHED)
    unknown = is_lost & ~is_left_out & ~numbers["initial_loss"].map(math.isfinite)
    _refuse(unknown, unknown, "a diverged run counts at its initial loss; --initial-loss COLUMN or NUMBER gives it")
    x = next((numbers[key] for key in ("axis", "lr") if found[key]), pd.Series(0.0, table.index))
    design = pd.DataFrame({"lr": x, "seed": numbers["seed"], "size": numbers["size"]})
    if found["axis"] and found["lr"]:
        design["rate"] = numbers["lr"]
    others = [str(name) for name in table if name not in (*found.values(), *best_over)]
    is_cut = is_lost | ~ends.isin(ENDED)
    roles = roles_of(table[others], design.join(table[best_over].add_prefix(BEST)), is_cut, columns.arm, measured)
    chosen = [name for name in others if roles[name] in (ARM, SHARED)]
    settings = _settings(table, chosen)
    alike = [numbers["size"], *settings.values()]
    steps = _whole_steps(numbers["steps"], found["steps"], is_cut, alike)
    if best_over and steps.groupby([values.astype(str) for values in alike]).nunique().max() > 1:
        found["steps"] = None  # they follow from the batch, say
    identity = pd.DataFrame({**design, **settings}).astype(str)
    if identity.duplicated().any() and end_of(str(found["steps"])) in PLANNED_STEPS and not best_over:
        identity["steps"] = steps.astype(str)
    numbers["steps"] = steps
    rows = _rows(identity, numbers["loss"], "best" if best_over else columns.keep)
    # A run of a table is not one of another, even of one name; six digits of a loss are alike in every format.
    identity = identity.assign(source=source, loss=numbers["loss"].map("{:.6g}".format))
    kept = [name for name in others if name not in chosen] + best_over
    words = table[[name for name in kept if not pd.api.types.is_numeric_dtype(table[name])]].astype(str)
    names = next((table[name].astype(str) + ": " for name in others if roles[name] == NAME), ends.mask(ends != "", ""))
    optional = {LR: ("lr", numbers["lr"]), "steps": ("steps", steps)}
    runs = pd.DataFrame(
        {
            "id": [files.digest([ORIGIN, *map(str, row)]) for row in identity.itertuples(index=False)],
            "status": np.where(is_left_out, "failed", np.where(is_lost, "diverged", "finished")),
            "reason": (names + "no finite loss").where(is_lost).mask(is_left_out, names + ends),
            "final_val_loss": numbers["loss"].mask(is_lost),
            "loss_at_init": numbers["initial_loss"],
            "parameters_without_embeddings": numbers["size"].astype("int64"),
            "seed": numbers["seed"].astype("int64"),
            "versions": f"{ORIGIN} {source}",
            "data_fingerprint": "imported",
            "data_notes": PER_BYTE if unit == "bits_per_byte" else None,
            "intervention": "none",
            store.TABLE: source,
            **dict.fromkeys(UNKNOWN, "unknown"),
            "notes": ["; ".join(f"{name}: {word}" for name, word in row.items()) for row in words.to_dict("records")],
            **{column: values for column, (key, values) in optional.items() if found[key] is not None},
            **settings,
        }
    ).iloc[rows]
    if found["axis"]:
        (key,) = _settings(table, [str(found["axis"])])
        runs[AXIS], runs[key] = key, numbers["axis"].iloc[rows]
    table, numbers = table.iloc[rows], {key: values.iloc[rows] for key, values in numbers.items()}
    mapping = _mapping(table, found, numbers, roles, runs)
    if unit != "nats":
        mapping.append(
            ("unit of losses", f"{unit}, converted to nats per {'byte' if unit == 'bits_per_byte' else 'token'}")
        )
    if best_over:
        mapping.append(("best over", f"{', '.join(best_over)}, {len(rows)} of {len(design)} rows"))
    elif len(rows) < len(design):
        mapping.append(("retried", f"{len(design) - len(rows)} rows are earlier tries of other rows"))
    return Imported(Records(store.declared(runs), _metrics(table, runs, kept)), mapping)


def _last_of_trials(table: pd.DataFrame) -> pd.DataFrame:
    """The last row of each trial of a log that has a row for each of its iterations, as those of Ray Tune have."""
    by_end = {end_of(str(name)): str(name) for name in table}
    if not {"trial_id", "training_iteration"} <= {*by_end}:
        return table
    last: pd.DataFrame = table.sort_values(by_end["training_iteration"], kind="stable").drop_duplicates(
        by_end["trial_id"], keep="last"
    )
    return last.sort_index()


def _quantities(
    table: pd.DataFrame, columns: Columns, best_over: Sequence[str]
) -> tuple[dict[str, str | float | None], dict[str, pd.Series[float]], str]:
    """The columns of the quantities, their numbers, and the unit of the losses, which are converted to nats."""
    found = {key: column_of(table, key, getattr(columns, key)) for key in (*USUAL_NAMES, "axis")}
    if found["axis"] is not None and found["axis"] == found["lr"]:
        found["axis"] = None
    found |= {key: None for key in USUAL_NAMES if key != "loss" and found[key] in (found["axis"], *best_over)}
    numbers = {key: _numbers(table, key, column) for key, column in found.items()}
    _check(numbers, found)
    unit = columns.unit or UNIT_NAMES.get(re.split("_(?=ppl|bpb|perp)", end_of(str(found["loss"])))[-1], "nats")
    if unit not in LOSS_UNITS:
        raise RequestError(f"--unit: no unit {unit!r}; {nearest(unit, LOSS_UNITS)}")
    if unit == "perplexity":
        _refuse(numbers["loss"] <= 0, numbers["loss"], "the perplexity {:g} is not above 0")
    for key in ("loss", "initial_loss"):
        values = numbers[key]
        numbers[key] = values.map(math.log) if unit == "perplexity" else values * LOSS_UNITS[unit]
    if found["lr"]:
        numbers["lr"] = _in_three_digits(numbers["lr"])
    return found, numbers, unit


def _rows(identity: pd.DataFrame, losses: pd.Series[float], keep: str | None) -> list[int]:
    """The positions of the rows that count, of several that are alike the last or the best.

    Raises:
        RequestError: rows are alike, and ``keep`` does not say which counts.
    """
    if keep not in (None, *KEEPS):
        raise RequestError(f"--keep: {keep!r} is none of {', '.join(KEEPS)}")
    twice = identity.duplicated()
    if not twice.any():
        return list(range(len(identity)))
    if keep in (None, "error"):
        first = identity.eq(identity[twice].iloc[0]).all(axis=1)
        raise RequestError(
            f"{_row(first)} and {_row(twice)} are one run, alike in {', '.join(map(str, identity))}; "
            "--keep last or --keep best counts one of them, --seed or --arm COLUMN tells them apart"
        )
    loss = losses.where(losses.map(math.isfinite), math.inf).reset_index(drop=True)
    runs = identity.groupby([*identity]).ngroup().to_numpy()
    counted = loss.groupby(runs).idxmin() if keep == "best" else pd.Series(range(len(runs))).groupby(runs).max()
    return sorted(counted)


def _exported(table: pd.DataFrame, source: str) -> Imported:
    """The records in a table that ``lab export --to csv`` wrote, with the settings that they were trained with."""
    runs = store.declared(table.assign(versions=f"{ORIGIN} {source}", **{store.TABLE: source}))
    mapping = [("records of the lab", f"every column keeps its meaning; {len(runs)} runs, without their probes")]
    return Imported(Records(runs, _metrics(table, runs.assign(steps=runs.get("steps", 0)), [])), mapping)


def _check(numbers: Mapping[str, pd.Series[float]], found: Mapping[str, str | float | None]) -> None:
    """Refuse numbers that make no sense."""
    low, high = LR_BOUNDS
    lr, size = numbers["lr"], numbers["size"]
    if found["lr"]:
        _refuse(~lr.between(low, high), lr, f"the learning rate {{:g}} is not from {low:g} to {high:g}")
    if found["axis"]:
        _refuse(~numbers["axis"].between(0, high), numbers["axis"], f"{found['axis']} {{:g}} is not from 0 to {high:g}")
    _refuse(size <= 0, size, "the size {:g} is not above 0")
    for key in ("size", "seed", "steps"):
        values = numbers[key].dropna()
        _refuse((values != values.round()) | (values.abs() > LARGEST), values, f"{key} {{:g}} is no whole number")
    _refuse(numbers["steps"] < 0, numbers["steps"], "the steps {:g} are below 0")


def _in_three_digits(lr: pd.Series[float]) -> pd.Series[float]:
    """Learning rates, of which those that agree in three digits are written as the shortest of them."""
    groups: list[list[float]] = []
    for value in sorted(set(lr)):
        if groups and value <= groups[-1][0] * SAME_LR:
            groups[-1].append(value)
        else:
            groups.append([value])
    return lr.map({value: min(group, key=lambda lr: (len(repr(lr)), lr)) for group in groups for value in group})


def _whole_steps(
    steps: pd.Series[float], column: str | float | None, is_cut: pd.Series[bool], alike: Sequence[pd.Series[Any]]
) -> pd.Series[float]:
    """The steps that runs were to make: of one that was cut short, those of the runs that are alike, or else of any.

    Steps that were logged are one number if they differ by as little as the interval between two logs.
    """
    ended = steps.where(~is_cut)
    whole = ended.groupby([values.astype(str) for values in alike]).transform("max").fillna(ended.max())
    steps = steps.where(~is_cut | ~(steps < whole), whole)
    is_logged = isinstance(column, str) and end_of(column) in LOGGED_STEPS
    return steps.clip(lower=steps.max()) if is_logged and steps.min() > 0.95 * steps.max() else steps


def _refuse(wrong: pd.Series[bool], values: pd.Series[Any], why: str) -> None:
    """Refuse the first row that is wrong; ``why`` may name its value."""
    if wrong.any():
        raise RequestError(f"{_row(wrong)}: {why.format(values[wrong].iloc[0])}")


def _numbers(table: pd.DataFrame, key: str, column: str | float | None) -> pd.Series[float]:
    """A column as numbers; empty cells are NaN, and without a column the seed is 0 and the size unknown."""
    if column is None or isinstance(column, float):
        absent = {"seed": 0.0, "size": float(UNKNOWN_SIZE)}.get(key, math.nan)
        return pd.Series(absent if column is None else column, table.index, dtype=float)
    cells = table[column]
    if pd.api.types.is_bool_dtype(cells):
        raise RequestError(f"{column} is no number: {cells.iloc[0]}")
    numbers = pd.to_numeric(cells.map(spelled_out, na_action="ignore") if key == "size" else cells, errors="coerce")
    is_word = numbers.isna() & cells.notna() & ~cells.astype(str).str.strip().str.lower().isin(NO_NUMBERS)
    if is_word.any():
        word = cells[is_word].iloc[0]
        raise RequestError(f"{_row(is_word)}: {column} is no number: {word!r}{with_point(str(word))}")
    numbers = numbers.astype(float)
    if key in ("loss", "initial_loss"):
        return numbers.mask(numbers.abs() > LARGEST_LOSS, math.inf)
    _refuse(numbers.isna(), numbers, f"{column} is empty")
    return numbers


def _row(chosen: pd.Series[bool]) -> str:
    """The first row chosen: ``row 3``, counted from 1 without the head, or ``run lr=0.1`` where rows have names."""
    number = int(np.flatnonzero(chosen)[0])
    label = chosen.index[number]
    return f"run {label}" if isinstance(label, str) else f"row {number + 1}"


def _settings(table: pd.DataFrame, chosen: Sequence[str]) -> dict[str, pd.Series[Any]]:
    """The columns of settings, under keys that are none of the lab's."""
    reserved = {*store.RUN_COLUMNS, LR, "seed", "steps", "out", "device", "folder", store.TABLE, AXIS}
    ends = Counter(map(_last, chosen))
    arms = [name for name in chosen if is_arm(name)]
    # without dots, no setting of another trainer is taken for one of the lab
    keys = {name: _last(name) if ends[_last(name)] == 1 else name.replace(".", "/") for name in chosen}
    keys |= dict.fromkeys(arms[:1], "arm")
    return {f"column.{key}" if key in reserved else key: table[name] for name, key in keys.items()}


def _last(name: str) -> str:
    """``config/qk_norm -> qk_norm``; of Optuna, ``params_clip -> clip``."""
    return re.split(r"[/.]", re.sub(r"^(params|user_attrs)_", "", name))[-1]


def _mapping(
    table: pd.DataFrame,
    found: Mapping[str, str | float | None],
    numbers: Mapping[str, pd.Series[float]],
    roles: Mapping[str, str],
    runs: pd.DataFrame,
) -> list[tuple[str, str]]:
    """What each column was taken for, the quantities first; columns that are not used are together by the reason."""
    lines = []
    for key, column in found.items():
        values = sorted(set(numbers[key][numbers[key].map(math.isfinite)]))
        if column is not None:
            ends = " to ".join(dict.fromkeys(f"{value:g}" for value in (values or [math.nan])[:: len(values) - 1 or 1]))
            lines.append((MEANINGS.get(key, key), f"{column}, {ends}" if isinstance(column, str) else ends))
    statuses = runs["status"].value_counts()
    for status, why in {"diverged": "without a finite loss", "failed": "left out, since they did not end"}.items():
        if status in statuses:
            lines.append((status, f"{statuses[status]} of {len(runs)} runs, {why}"))
    for role in dict.fromkeys([ARM, SHARED, *roles.values()]):
        if columns := [name for name, other in roles.items() if other == role]:
            shown = [f"{name} ({_values(table[name])})" for name in columns] if role == ARM else columns
            lines.append((role if role in (ARM, SHARED) else f"not used: {role}", ", ".join(shown)))
    return lines


def _values(column: pd.Series[Any]) -> str:
    """The values of a setting: all, or the first of many."""
    values = [f"{value:g}" if isinstance(value, int | float) else str(value) for value in column.unique().tolist()]
    return ", ".join(
        values if len(values) <= MOST_SHOWN else [*values[:MOST_SHOWN], f"and {len(values) - MOST_SHOWN} more"]
    )


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
    """Write imported records as a results folder, and the command that made them; returns whether they are new there.

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
