"""Runs of any trainer: a table with a row per run, whose columns are recognized, and made into records."""

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
from lab.records.store import Records
from lab.records.table_files import NO_NUMBERS, plain

# Usual names of columns, in any case and also behind a prefix; the first that is there.
PLANNED_STEPS = ("steps", "n_steps", "num_steps", "train_steps", "max_steps", "total_steps")
LOGGED_STEPS = ("step", "_step", "global_step", "training_iteration")  # the last step that a run came to
USUAL_NAMES = {
    "lr": ("lr", "learning_rate", "peak_lr", "peak_learning_rate", "max_lr", "base_lr", "optimizer.lr"),
    "loss": (  # held-out losses before training losses
        *("final_val_loss", "val_loss", "val/loss", "validation_loss", "eval/loss", "eval_loss", "test_loss"),
        *("final_loss", "loss", "train_loss", "train/loss", "value"),
    ),
    "size": ("parameters_without_embeddings", "params", "n_params", "num_params", "parameters", "size", "model_size"),
    "seed": ("seed", "random_seed"),
    "steps": (*PLANNED_STEPS, *LOGGED_STEPS),
    "initial_loss": ("initial_loss", "init_loss", "loss_at_init"),
}
# What trackers and machines note about a run, which is no setting of it.
BOOKKEEPING = {
    *("state", "status", "host", "hostname", "node", "node_ip", "machine", "pid", "user", "entity", "project", "done"),
    *("runtime", "_runtime", "wall_seconds", "wall_time", "duration", "elapsed", "time_total_s", "time_this_iter_s"),
    *("_timestamp", "timestamp", "date", "created", "created_at", "updated_at", "heartbeat_at", "start_time"),
    *("datetime_start", "datetime_complete", "end_time", "gpu", "gpu_type", "device", "logdir", "output_dir", "out"),
    *("model_steps_per_second", "_wandb", "experiment_tag", "trial_id", "experiment_id", "number", *LOGGED_STEPS),
}
STATES = ("state", "status")  # columns that say how a run ended
UNFINISHED = ("running", "pending", "waiting", "queued", "preempted", "pruned")  # with a loss that is no final one
ARMS = ("arm", "variant", "method", "recipe", "treatment", "condition", "ablation", "group", "experiment")
NAMES = ("name", "run", "run_name", "run_id", "id", "folder", "trial_id", "number")
# Settings that every run of the lab has, and of which a table says nothing.
UNKNOWN = ("optimizer.name", "parametrization.name", "schedule.name", "precision")
LARGEST = 2**53  # of whole numbers, all of which up to here are floats
LARGEST_LOSS, LR_BOUNDS = 1e30, (1e-30, 1e30)
MANY_LRS = 3  # at which each value of a column occurs that sets arms apart
SAME_LR = 1.005  # learning rates within this ratio, which agree in three digits, are one
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}  # in which sizes are written, such as 124M
MEANINGS = {"lr": "peak learning rate", "loss": "final loss", "initial_loss": "loss at initialization"}
MOST_SHOWN = 8  # values of a setting that the mapping lists
UNKNOWN_SIZE = 1  # of models whose size a table does not say
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


class Imported(NamedTuple):
    """Records made of a table, and what each of its columns was taken for: pairs of a meaning and of columns."""

    records: Records
    mapping: list[tuple[str, str]]


def records_of(
    table: pd.DataFrame, columns: Columns, source: str = "a table", measured: Collection[str] = ()
) -> Imported:
    """Make records of a table with a row per run.

    A column that is none of ``columns`` sets arms apart if ``columns.arm`` names it. Where that is ``None``, it does so
    if each of its values occurs with three learning rates or more, or if it is needed to tell runs apart; unless it is
    bookkeeping, or seed, size or learning rate determines it, or it only says where a diverged run was cut short.
    Other columns are kept: numbers as metrics of the last step, words as notes.

    Args:
        table: as from ``read_table``.
        columns: names of its columns.
        source: what the table is called, for the page.
        measured: columns that set no arms apart unless ``columns.arm`` names them.

    Raises:
        RequestError: a column is absent, a row makes no sense, or two rows are one run.
    """
    table = plain(table)
    if {*store.RUN_COLUMNS} <= {*table} and columns == Columns():
        return _exported(table, source)
    found = {key: column_of(table, key, getattr(columns, key)) for key in USUAL_NAMES}
    numbers = {key: _numbers(table, key, column) for key, column in found.items()}
    _check(numbers)
    state = next((str(name) for name in table if _end(_plain(str(name))) in STATES), None)
    states = table[state].astype(str).str.lower() if state else pd.Series("", table.index)
    is_left_out = states.isin(UNFINISHED)
    diverged = ~numbers["loss"].map(math.isfinite)
    unknown = diverged & ~is_left_out & ~numbers["initial_loss"].map(math.isfinite)
    _refuse(unknown, unknown, "a diverged run counts at its initial loss; --initial-loss COLUMN or NUMBER gives it")
    numbers["lr"] = _in_three_digits(numbers["lr"])
    design = pd.DataFrame({key: numbers[key] for key in ("lr", "seed", "size")})
    is_cut = diverged | ~states.isin(["", "finished", "complete", "completed", "success", "terminated"])
    others = [str(name) for name in table if name not in found.values()]
    roles = _roles(table[others], design, is_cut, columns.arm, measured)
    settings = _settings(table, [name for name in others if roles[name] in (ARM, SHARED)])
    steps = _whole_steps(numbers["steps"], found["steps"], is_cut, [numbers["size"], *settings.values()])
    identity = pd.DataFrame({**design, **settings}).astype(str)
    if (twice := identity.duplicated()).any():
        first = identity.eq(identity[twice].iloc[0]).all(axis=1)
        raise RequestError(f"{_row(first)} and {_row(twice)} are one run: alike in {', '.join(map(str, identity))}")
    # A run of a table is not one of another, even of one name; six digits of a loss are alike in every format.
    identity = identity.assign(source=source, loss=numbers["loss"].map("{:.6g}".format))
    kept = [name for name in others if roles[name] not in (ARM, SHARED)]
    names = next((table[name].astype(str) + ": " for name in kept if roles[name] == NAME), pd.Series("", table.index))
    reason = (names + "no finite loss").where(diverged).mask(is_left_out, names + states)
    runs = pd.DataFrame(
        {
            "id": [files.digest([ORIGIN, *map(str, row)]) for row in identity.itertuples(index=False)],
            "status": np.where(is_left_out, "failed", np.where(diverged, "diverged", "finished")),
            "reason": reason,
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
            **({"steps": steps} if found["steps"] is not None else {}),
            **settings,
        }
    )
    mapping = _mapping(table, found, numbers, roles, runs)
    return Imported(Records(store.declared(runs), _metrics(table, runs, kept)), mapping)


def _exported(table: pd.DataFrame, source: str) -> Imported:
    """The records in a table that ``lab export --to csv`` wrote, with the settings that they were trained with."""
    runs = store.declared(table.assign(versions=f"{ORIGIN} {source}", **{TABLE: source}))
    mapping = [("records of the lab", f"every column keeps its meaning; {len(runs)} runs, without their probes")]
    return Imported(Records(runs, _metrics(table, runs.assign(steps=runs.get("steps", 0)), [])), mapping)


def _check(numbers: Mapping[str, pd.Series[float]]) -> None:
    """Refuse numbers that make no sense."""
    low, high = LR_BOUNDS
    lr, size = numbers["lr"], numbers["size"]
    _refuse(~lr.between(low, high), lr, f"the learning rate {{:g}} is not from {low:g} to {high:g}")
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
    is_logged = isinstance(column, str) and _end(_plain(column)) in LOGGED_STEPS
    return steps.clip(lower=steps.max()) if is_logged and steps.min() > 0.95 * steps.max() else steps


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
    option = f"--{key.replace('_', '-')}"
    if given is not None:
        if given in table:
            return given
        try:
            number = float(given) if key in ("size", "steps", "initial_loss") else math.nan
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        raise RequestError(f"{option}: no column {given!r}; {nearest(given, map(str, table))}")
    paths = {str(name): _plain(str(name)).replace(".", "/") for name in table}
    for usual in (name.replace(".", "/") for name in USUAL_NAMES[key]):
        same = [name for name, path in paths.items() if path == usual]
        ends = [name for name, path in paths.items() if path.endswith(f"/{usual}")]
        if same or len(ends) == 1:
            return (same or ends)[0]
    if key in ("lr", "loss"):
        usual_names = " or ".join(USUAL_NAMES[key][:3])
        raise RequestError(f"no column is called {usual_names}; {option} COLUMN says which it is")
    return None


def _plain(name: str) -> str:
    """``Learning Rate -> learning_rate``; of Optuna, ``params_lr -> params/lr``."""
    name = name.strip().lower().replace(" ", "_").replace("-", "_")
    return re.sub(r"^(params|user_attrs)_", r"\1/", name)


def _end(name: str) -> str:
    """``config/lr -> lr``."""
    return re.split(r"[/.]", name)[-1]


def _numbers(table: pd.DataFrame, key: str, column: str | float | None) -> pd.Series[float]:
    """A column as numbers; empty cells are NaN, and without a column the seed is 0 and the size unknown."""
    if column is None or isinstance(column, float):
        absent = {"seed": 0.0, "size": float(UNKNOWN_SIZE)}.get(key, math.nan)
        return pd.Series(absent if column is None else column, table.index, dtype=float)
    cells = table[column]
    if pd.api.types.is_bool_dtype(cells):
        raise RequestError(f"{column} is no number: {cells.iloc[0]}")
    numbers = pd.to_numeric(cells.map(_spelled, na_action="ignore") if key == "size" else cells, errors="coerce")
    is_word = numbers.isna() & cells.notna() & ~cells.astype(str).str.strip().str.lower().isin(NO_NUMBERS)
    if is_word.any():
        raise RequestError(f"{_row(is_word)}: {column} is no number: {cells[is_word].iloc[0]!r}")
    numbers = numbers.astype(float)
    if key in ("loss", "initial_loss"):
        return numbers.mask(numbers.abs() > LARGEST_LOSS, math.inf)
    _refuse(numbers.isna(), numbers, f"{column} is empty")
    return numbers


def _spelled(cell: Any) -> Any:
    """``124M -> 124000000``."""
    parts = re.fullmatch(r"([\d.]+)\s*([kmbt])", str(cell).strip().lower())
    return round(float(parts[1]) * UNITS[parts[2]]) if parts else cell


def _row(chosen: pd.Series[bool]) -> str:
    """The first row chosen: ``row 3``, counted from 1 without the head, or ``run lr=0.1`` where rows have names."""
    number = int(np.flatnonzero(chosen)[0])
    label = chosen.index[number]
    return f"run {label}" if isinstance(label, str) else f"row {number + 1}"


# What a column is that holds none of the quantities: a setting that sets arms apart, or that all runs share; or else
# why it is no setting.
ARM, SHARED, NAME = "arm", "same in all runs", "a name for each run"
EMPTY, NOTED, MEASURED, CUT = "empty", "bookkeeping", "measured", "cut short where a run diverged"
NOT_NAMED, NOT_NEEDED = "not named by --arm", "tells no runs apart"


def _roles(
    others: pd.DataFrame,
    design: pd.DataFrame,
    is_cut: pd.Series[bool],
    arm: Sequence[str] | None,
    measured: Collection[str],
) -> dict[str, str]:
    """What each of these columns is.

    Args:
        others: the columns that hold none of the quantities.
        design: learning rate, seed and size of each run.
        is_cut: the runs that ended early.
        arm: as in ``Columns``.
        measured: as for ``records_of``.
    """
    for name in arm or ():
        if name not in others:
            raise RequestError(f"--arm: no column {name!r}; {nearest(name, map(str, others))}")
    if arm is not None:
        return {str(name): ARM if name in arm else NOT_NAMED for name in others}
    roles = {str(name): _role(others[name], design, is_cut, name in measured) for name in others}
    runs = design.astype(str).assign(**{name: others[name].astype(str) for name, role in roles.items() if role == ARM})
    while (same := runs.duplicated(keep=False)).any() and (needed := _splitting(others, roles, runs[same])):
        roles[needed] = ARM
        runs[needed] = others[needed].astype(str)
    if ARM not in roles.values():  # arms whose seeds differ need no column to be told apart
        words = [name for name, role in roles.items() if role == NOT_NEEDED and _is_word(others[name])]
        words = [name for name in words if others[name].astype(str).value_counts().min() > 1]
        roles |= dict.fromkeys([name for name in words if _is_arm(name)][:1] or words[:1], ARM)
    return roles


def _role(column: pd.Series[Any], design: pd.DataFrame, is_cut: pd.Series[bool], is_measured: bool) -> str:
    name, values = _plain(str(column.name)), column.astype(str)
    if column.isna().all():
        return EMPTY
    if _end(name) in BOOKKEEPING:
        return NOTED
    if is_measured or re.match(r"(summary|metrics?)[/.]", name):
        return MEASURED
    if values.nunique() == 1:
        return SHARED
    seed, lr = values.groupby(design["seed"]), values.groupby(design["lr"])
    if seed.nunique().max() == 1 and (not _is_word(column) or _follows(values, design["seed"])):
        return "follows from the seed"
    # a switch may add gains, and so determine the exact size; a width or a depth follows from it
    if not _is_word(column) and values.groupby(design["size"]).nunique().max() == 1:
        return "follows from the size"
    if not _is_word(column) and lr.nunique().max() == 1 and values.nunique() == lr.ngroups > 1:
        return "follows from the learning rate"
    if not _is_word(column) and _is_cut_short(column, design["size"], is_cut):
        return CUT
    if (design["lr"].groupby(values).nunique() >= MANY_LRS).all():
        return ARM
    return NAME if _end(name) in NAMES and values.is_unique else NOT_NEEDED


def _is_word(column: pd.Series[Any]) -> bool:
    return pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column)


def _is_arm(name: str) -> bool:
    return _end(_plain(name)) in ARMS


def _follows(words: pd.Series[str], seed: pd.Series[float]) -> bool:
    """Whether each word has a seed of its own, such as the name of a machine; an arm has several."""
    return bool(seed.groupby(words).nunique().min() == 1)


def _is_cut_short(column: pd.Series[Any], size: pd.Series[float], is_cut: pd.Series[bool]) -> bool:
    """Whether a number is the same for all runs of a size, but lower for those that were cut short."""
    whole = column.where(~is_cut).groupby(size).transform("max")
    same = (column == whole) | (is_cut & ~(column > whole))
    return bool(is_cut.any() and same.all())


def _splitting(others: pd.DataFrame, roles: Mapping[str, str], runs: pd.DataFrame) -> str | None:
    """The column that tells most of these runs apart, which are alike in all settings so far; None without one.

    A number must repeat as a setting does; of columns that do as well, words come first, and those with few values.
    """
    best: tuple[Any, ...] = ()
    for position, name in enumerate(roles):
        values = others[name].astype(str)
        if roles[name] not in (NOT_NEEDED, CUT) or (2 * values.nunique() > len(values) and not _is_arm(name)):
            continue
        if not _is_word(others[name]) and values.value_counts().min() < 2:
            continue
        told = int((~runs.assign(**{name: values}).duplicated()).sum() - (~runs.duplicated()).sum())
        rank = (told, _is_arm(name), _is_word(others[name]), -values.nunique(), -position, name)
        best = max(best, rank) if told else best
    return str(best[-1]) if best else None


def _settings(table: pd.DataFrame, chosen: Sequence[str]) -> dict[str, pd.Series[Any]]:
    """The columns of settings, under keys that are none of the lab's."""
    reserved = {*store.RUN_COLUMNS, "optimizer.lr", "seed", "steps", "out", "device", "folder", TABLE}
    ends = Counter(map(_end, chosen))
    arms = [name for name in chosen if _is_arm(name)]
    # without dots, no setting of another trainer is taken for one of the lab
    keys = {name: _end(name) if ends[_end(name)] == 1 else name.replace(".", "/") for name in chosen}
    keys |= dict.fromkeys(arms[:1], "arm")
    return {f"column.{key}" if key in reserved else key: table[name] for name, key in keys.items()}


def _notes(table: pd.DataFrame, words: Sequence[str]) -> list[str]:
    rows = table[list(words)].astype(str).to_dict("records")
    return ["; ".join(f"{name}: {value}" for name, value in row.items()) for row in rows]


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
    values = list(map(str, column.unique()))
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
