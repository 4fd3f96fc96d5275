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

from lab.analysis.text import first_to_last, spelled_out
from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.core.schema import FORMER_KEYS, key_now
from lab.records import store
from lab.records.imported import (
    AXIS,
    COLUMN,
    DERIVED,
    FOLLOWED,
    ORIGIN,
    PER_BYTE,
    SINGLE_CHANGE,
    TRIAL,
    UNKNOWN_SIZE,
    is_imported,
)
from lab.records.store import Records
from labwatch.tables import single_changes
from labwatch.tables.columns import (
    ARM,
    ARM_NAMES,
    BEST,
    DECISIONS,
    DESCRIPTIONS,
    DIVERGED,
    EMPTY,
    FAILED,
    FOLLOWS,
    KEPT,
    LOGGED_STEPS,
    LOSS_UNITS,
    LOST_AT,
    MEASURED,
    NAME,
    NOT_NAMED,
    NOTES,
    RUN_NAMES,
    SAME_LR,
    SHARED,
    UNFINISHED,
    UNIT_NAMES,
    USUAL_NAMES,
    Columns,
    as_rates,
    as_text,
    called_so,
    column_of,
    end_of,
    ending_of,
    followed_by,
    follows_text,
    is_arm,
    is_peak,
    is_word,
    roles_of,
    short_name,
    usual_column,
)
from labwatch.tables.run_names import averages_of, settings_in
from labwatch.tables.table_files import NO_NUMBERS, long, plain, with_point, without_note

# Settings that every run of the lab has, and of which a table says nothing.
UNKNOWN = ("optimizer.name", "parametrization.name", "schedule.name", "precision")
LARGEST = 2**53  # of whole numbers, all of which up to here are floats
LARGEST_LOSS, LR_BOUNDS = 1e30, (1e-30, 1e30)
AT_THE_END = 0.95  # share of the steps at which a run has ended, since logs are written at intervals
KEEPS = ("error", "last", "best")
MEANINGS = {
    "lr": "peak learning rate",
    "loss": "final loss",
    "initial_loss": "loss at initialization",
    "axis": "along curves",
    "tokens": "training tokens",
}
FEWEST_RATES, DECADE = 3, 10  # learning rates, and the ratio of their ends, at which losses that agree are remarkable
ONE_LOSS = 1e-3  # nats that losses differ by at most that are all but one
MOST_NAMED = 3  # columns that a refusal names
MOST_SHOWN = 8  # values of a setting that the mapping lists
LOST = "diverged"  # how a run ended whose loss did; that of one that did not end, or has none, says why
LR = "optimizer.lr"
FOLDER = "folder"  # the column of what tells the paths of runs apart
# Keys without a dot that mean something else where the lab trained the runs; a setting of a table gets another.
RESERVED = {"lr", "rate", "size", "seed", "loss", "source", "precision", FOLDER, "recipe", "custom_model"}.union(
    ("probes", *FORMER_KEYS),
    store.RUN_COLUMNS,
    store.BOUNDS,
    store.DEFAULTS,
    store.EXCLUDED_FROM_ID,
    (ARM, store.TABLE, AXIS, FOLLOWED, DERIVED, SINGLE_CHANGE, TRIAL),
)
TOKENS, VARIANT = "tokens", "variant"
PEAK = "peak_lr"  # the column of a learning rate in names, where one of a column is not the peak
SWEPT = "sweep"  # the variant of runs whose names hold settings only, where others have one
FLAGS = ("diverged", "is_diverged", "has_diverged", "nan", "is_nan", "has_nan", "exploded")


class Imported(NamedTuple):
    """Records made of a table, and what each of its columns was taken for: pairs of a meaning and of columns."""

    records: Records
    mapping: list[tuple[str, str]]


def records_of(
    table: pd.DataFrame, columns: Columns, source: str = "a table", measured: Collection[str] = ()
) -> Imported:
    """Make records of a table with a row per run, or with learning rates down and sizes across.

    Columns that hold no quantity and are no setting are kept: numbers as metrics of the last step, words as notes.
    Those ``measured`` set no arms apart unless ``columns.arm`` names them. The page calls the table ``source``.

    Raises:
        RequestError: there are no rows, a column is absent, a row makes no sense, or two rows are one run.
    """
    if table.empty:
        raise RequestError(f"{source} has no rows")
    table, read_from = long(table if table.index.is_unique else table.reset_index(drop=True), columns.loss)
    table, left_out = _without_averages(_last_of_trials(plain(table)), columns)
    exported = table.rename(columns=lambda column: key_now(str(column)))
    if {*store.RUN_COLUMNS} <= {*exported} and columns == Columns():
        return _exported(exported, source)
    table, in_names = _with_settings_of_names(table, columns)
    loss = str(column_of(table, "loss", columns.loss))
    table, of_sweeps = single_changes.of_sweeps(table, loss, columns.axis)
    read = _read(table, columns)
    imported = (
        _with_single_changes(read, columns, source, measured)
        or _with_trials(read, columns, source, measured)
        or _runs_of(read, columns, source, measured)[0]
    )
    return imported._replace(mapping=[*read_from, *in_names, *of_sweeps, *imported.mapping, *left_out])


def _with_single_changes(whole: _Reading, columns: Columns, source: str, measured: Collection[str]) -> Imported | None:
    """The records of a base and single changes of it, each of which has the card of its base; None of other tables."""
    if columns.axis is not None or columns.best_over is not None:
        return None
    numbers = whole.numbers
    given = {key: column for key, column in whole.found.items() if isinstance(column, str)}
    changes = single_changes.find(whole.table, given, is_asked=columns.arm is not None)
    if changes is None or "axis" in given or {*changes.columns} & {*(columns.arm or ())}:
        return None
    rest = changes.table.drop(index=changes.rows.index, columns=changes.columns)
    alike = rest.drop(columns=given["loss"]).apply(as_text).assign(**{given["loss"]: ""})
    again = alike.groupby([*alike]).cumcount()
    if "seed" not in given and again.any():
        rest["seed"] = again
    read, ids = _runs_of(_read(rest, columns), columns, source, measured)
    rows = changes.rows[changes.rows["base"].isin(ids.index)]
    where = rows.index
    cards = read.records.runs.set_index("id", drop=False).loc[list(ids[rows["base"]])].set_axis(where)
    told = {name: rows[name].map(_told, na_action="ignore").fillna("") for name in ("key", "value", "before")}
    shorts = Counter(map(short_name, told["key"].unique()))
    told["key"] = told["key"].map(lambda key: short_name(key) if shorts[short_name(key)] == 1 else key)
    for key in {*map(short_name, told["key"])} & {*map(str, cards)}:  # a setting that all bases have, as a card says it
        is_own = (told["key"].map(short_name) == key) & (
            is_word(cards[key]) == rows["value"].map(lambda value: isinstance(value, str))
        )
        cards[key] = cards[key].mask(is_own, rows["value"])
    ends, loss = whole.ends[where], numbers["loss"][where]
    is_left_out = ~ends.isin(["", LOST])
    losses = loss.map("{:.6g}".format).mask(ends != "", ends)
    identity = zip(cards["id"], told["key"], told["value"], numbers["seed"][where], losses, strict=True)
    cards = cards.assign(
        id=[files.digest([ORIGIN, *map(str, row)]) for row in identity],
        status=np.select([is_left_out, ends == LOST], ["failed", "diverged"], "finished"),
        reason=ends.mask(ends == LOST, "no finite loss").where(ends != ""),
        final_val_loss=loss.where(loss.map(math.isfinite)),
        loss_at_init=numbers["initial_loss"][where],
        seed=numbers["seed"][where].astype("int64"),
        notes="",
        **{f"{SINGLE_CHANGE}.{name}": values for name, values in told.items()},
        **{f"{SINGLE_CHANGE}.base": cards["id"]},
    ).drop_duplicates("id")
    runs = store.declared(pd.concat([read.records.runs, cards], ignore_index=True))
    own = _metrics(cards, cards, numbers["steps"][cards.index], [])
    metrics = pd.concat([read.records.metrics, own], ignore_index=True)
    metrics = metrics.sort_values(["id", "step", "probe", "where"], ignore_index=True)
    named_by = f"; named by {', '.join(changes.columns)}" if changes.columns else ""
    bases = rows["base"].nunique()
    text = f"{len(cards)}, in {_values(told['key'])}, of {bases} base{'s' * (bases != 1)}{named_by}"
    mapping = [*read.mapping, ("single changes", text)]
    return Imported(Records(runs, metrics), mapping)


def _with_trials(whole: _Reading, columns: Columns, source: str, measured: Collection[str]) -> Imported | None:
    """The records of changes that were tried one after another, of which a column says which were kept; else None."""
    table = whole.table
    found = _quantities(table, columns, ())[0] if whole.best_over else whole.found
    if any(found[key] for key in ("lr", "axis", "seed")) or columns.arm is not None:
        return None
    free = [str(name) for name in table if name not in found.values()]
    kept = {name: as_text(table[name]).str.strip().str.lower().isin(KEPT) for name in free if end_of(name) in DECISIONS}
    kept = {name: is_kept for name, is_kept in kept.items() if is_kept.any() and not is_kept.all()}
    if not kept:
        return None
    decision = next(iter(kept))
    ended = table[whole.ends == ""]
    names = [name for name in free if end_of(name) in RUN_NAMES and table[name].notna().all() and ended[name].is_unique]
    words = [name for name in free if is_word(table[name]) and name not in (decision, *names)]
    told = [name for end in DESCRIPTIONS for name in words if end_of(name) == end] or words
    texts = table[told[0]] if told else pd.Series(None, table.index, dtype=object)
    if not names:
        names = [VARIANT] if TRIAL in table else [TRIAL]
        table = table.assign(**{names[0]: [f"{number + 1}" for number in range(len(table))]})
    columns = columns._replace(arm=names[:1])
    read, ids = _runs_of(_read(table, columns), columns, source, measured)
    said = pd.DataFrame(
        {"order": range(len(table)), "kept": kept[decision], "text": as_text(texts).where(texts.notna())}
    )
    said = said.loc[ids.index].set_axis(ids).add_prefix(f"{TRIAL}.")
    runs = store.declared(read.records.runs.join(said, on="id"))
    is_kept = said[f"{TRIAL}.kept"] & (runs.set_index("id")["status"].reindex(ids) == "finished")
    mapping = [pair for pair in read.mapping if not pair[0].endswith(NOT_NAMED)]
    mapping += [("trials", f"{is_kept.sum()} kept, as {decision} says{f'; described by {told[0]}' if told else ''}")]
    return Imported(Records(runs, read.records.metrics), mapping)


class _Reading(NamedTuple):
    """A table whose cells are plain, and what was read in it.

    Attributes:
        table: a row per run.
        found: the column of each quantity, or the number that holds for all runs.
        numbers: each quantity.
        unit: of the losses, which were converted to nats.
        ends: how each run ended, and ``states`` what its state says of that; see ``_ends``.
        best_over: the columns over which the best run is taken.
    """

    table: pd.DataFrame
    found: dict[str, str | float | None]
    numbers: dict[str, pd.Series[float]]
    unit: str
    ends: pd.Series[str]
    states: pd.Series[str]
    best_over: list[str]

    @property
    def is_lost(self) -> pd.Series[bool]:
        return self.ends == LOST

    @property
    def is_left_out(self) -> pd.Series[bool]:
        return ~self.ends.isin(["", LOST])

    @property
    def is_cut(self) -> pd.Series[bool]:
        return self.is_lost | self.is_left_out | self.states.isin(FAILED)

    @property
    def others(self) -> list[str]:
        """The columns that hold no quantity."""
        return [str(name) for name in self.table if name not in (*self.found.values(), *self.best_over)]

    @property
    def design(self) -> pd.DataFrame:
        """The numbers that runs of one arm differ in."""
        along = next((self.numbers[key] for key in ("axis", "lr") if self.found[key]), pd.Series(0.0, self.table.index))
        design = pd.DataFrame({"lr": along, "seed": self.numbers["seed"], "size": self.numbers["size"]})
        return design.assign(rate=self.numbers["lr"]) if self.found["axis"] and self.found["lr"] else design

    @property
    def design_with_best(self) -> pd.DataFrame:
        return self.design.join(self.table[self.best_over].add_prefix(BEST))


def _read(table: pd.DataFrame, columns: Columns) -> _Reading:
    """Read the quantities in a table, and how its runs ended.

    Raises:
        RequestError: a number makes no sense, or a diverged run would count at nobody knows which loss.
    """
    best_over = [str(column_of(table, "best_over", name)) for name in columns.best_over or ()]
    found, numbers, unit = _quantities(table, columns, best_over)
    ends, states = _ends(table, found, numbers)
    unknown = (ends == LOST) & ~numbers["loss"].map(math.isfinite) & ~numbers["initial_loss"].map(math.isfinite)
    _refuse(unknown, unknown, "a diverged run counts at its initial loss; --initial-loss COLUMN or NUMBER gives it")
    return _Reading(table, found, numbers, unit, ends, states, best_over)


class _Settings(NamedTuple):
    """What the other columns of a table are.

    Attributes:
        roles: of each column that holds no quantity.
        chosen: the columns of settings.
        kept: the columns of numbers and words that are kept beside them.
        keys: the key of each setting, by its column.
        steps_role: the role of the steps.
    """

    roles: dict[str, str]
    chosen: list[str]
    kept: list[str]
    keys: dict[str, str]
    steps_role: str


def _settings_of(read: _Reading, arm: Sequence[str] | None, measured: Collection[str]) -> _Settings:
    """Tell settings from other columns. The steps of runs that were cut short become those that they were to make."""
    table, found, numbers = read.table, read.found, read.numbers
    are_trials = not any(found[key] for key in ("lr", "axis", "seed"))
    design = read.design_with_best
    roles = roles_of(table[read.others], design, read.is_cut, arm, measured, are_trials=are_trials)
    chosen = [name for name, role in roles.items() if role in (ARM, SHARED)]
    kept = [*(name for name in roles if name not in chosen), *read.best_over]
    keys = _keys([*chosen, *[str(found["axis"])] * bool(found["axis"])])
    given = [table[name] for name in chosen]
    alike = [numbers["size"], *given, *(table[name] for name in read.best_over)]
    numbers["steps"] = _whole_steps(numbers["steps"], found["steps"], read.is_cut, alike)
    steps_role = _role_of_steps(numbers["steps"], found["steps"], arm, given, design)
    return _Settings(roles, chosen, kept, keys, steps_role)


def _runs_of(
    read: _Reading, columns: Columns, source: str, measured: Collection[str]
) -> tuple[Imported, pd.Series[str]]:
    """The records of a table that was read, and the id of each row that counts."""
    settings = _settings_of(read, columns.arm, measured)
    table, found, numbers, chosen = read.table, read.found, read.numbers, settings.chosen
    identity = read.design.join(table[chosen].rename(columns=settings.keys)).apply(as_text)
    if settings.steps_role == ARM and identity[~read.is_left_out].duplicated().any():
        identity["steps"] = as_text(numbers["steps"])
    unnamed = [name for name in table if name in read.others or (name == found["steps"] and "steps" not in identity)]
    called = identity.rename(columns={settings.keys[name]: name for name in chosen})
    keep = "best" if read.best_over else columns.keep
    rows = _rows(called, numbers["loss"], read.is_left_out, keep, table[unnamed])
    # A run of a table is not one of another, even of one name; six digits of a loss are alike in every format.
    losses = numbers["loss"].map("{:.6g}".format).mask(read.is_left_out, read.ends)
    identity = identity.assign(source=source, loss=losses)
    ids = [files.digest([ORIGIN, *map(str, row)]) for row in identity.itertuples(index=False)]
    runs = _frame(read, settings, source).assign(id=ids).iloc[rows]
    metrics = _metrics(table.iloc[rows], runs, numbers["steps"].iloc[rows], settings.kept)
    mapping = [*_mapping(read, settings, runs, rows), *_remarks(read, settings, rows)]
    return Imported(Records(store.declared(runs), metrics), mapping), runs["id"]


def _frame(read: _Reading, settings: _Settings, source: str) -> pd.DataFrame:
    """The columns of records, without ids."""
    table, found, numbers, chosen = read.table, read.found, read.numbers, settings.chosen
    words = table[[name for name in settings.kept if not pd.api.types.is_numeric_dtype(table[name])]].astype(str)
    roles = settings.roles
    naming = [name for name in roles if roles[name] == NAME or (roles[name] == ARM and _names_a_run(name))]
    names = as_text(table[naming[0]]) + ": " if naming else pd.Series("", table.index)
    follow = [table[name] for name, role in roles.items() if role.startswith(FOLLOWS)]
    follow += [numbers["steps"].rename(found["steps"])] if settings.steps_role.startswith(FOLLOWS) else []
    derived, followed = _followers(follow, [table[name] for name in chosen], read.design_with_best)
    optional = {
        LR: numbers["lr"] if found["lr"] else None,
        "steps": numbers["steps"] if settings.steps_role in (ARM, SHARED) else None,
        FOLLOWED: "; ".join(followed) or None,
        **derived,
    }
    runs = pd.DataFrame(
        {
            "id": "",
            "status": np.where(read.is_left_out, "failed", np.where(read.is_lost, "diverged", "finished")),
            "reason": (names + read.ends.mask(read.is_lost, "no finite loss")).where(read.ends != ""),
            "final_val_loss": numbers["loss"].where(numbers["loss"].map(math.isfinite)),
            "loss_at_init": numbers["initial_loss"],
            "parameters_without_embeddings": numbers["size"].astype("int64"),
            "seed": numbers["seed"].astype("int64"),
            "versions": f"{ORIGIN} {source}",
            "data_fingerprint": "imported",
            "data_notes": PER_BYTE if read.unit == "bits_per_byte" else None,
            "intervention": "none",
            store.TABLE: source,
            **dict.fromkeys(UNKNOWN, "unknown"),
            "notes": [
                "; ".join(f"{name}: {word}" for name, word in zip(words, row, strict=True)) for row in words.to_numpy()
            ],
            **{column: values for column, values in optional.items() if values is not None},
            **{settings.keys[name]: table[name] for name in chosen},
        }
    )
    if found["axis"]:
        key = settings.keys[str(found["axis"])]
        runs[AXIS], runs[key] = key, numbers["axis"]
    return runs


def _remarks(read: _Reading, settings: _Settings, rows: list[int]) -> list[tuple[str, str]]:
    """What somebody should know who compares these runs: units, rows that do not count, lengths, useless rates."""
    table, found, remarks = read.table, read.found, list[tuple[str, str]]()
    if read.unit != "nats":
        per = "byte" if read.unit == "bits_per_byte" else "token"
        remarks.append(("unit of losses", f"{read.unit}, converted to nats per {per}"))
    alike = [read.numbers["size"], *(table[name] for name in settings.chosen)]
    length = usual_column(table, TOKENS) or str(found["steps"])  # at equal tokens steps follow from the batch
    if read.best_over:
        remarks.append(("best over", f"{', '.join(read.best_over)}, {len(rows)} of {len(table)} rows"))
        if length in table and table.groupby(alike, dropna=False)[length].nunique().max() > 1:
            unlike = f"{length}, over which the best was taken too; longer runs end lower, so name it in --arm"
            remarks.append(("length of runs differs", unlike))
    elif len(rows) < len(table):
        remarks.append(("retried", f"{len(table) - len(rows)} rows are earlier tries of other rows"))
    steps = read.numbers["steps"].iloc[rows][~read.is_cut.iloc[rows]]
    if settings.steps_role == MEASURED and steps.min() < AT_THE_END * steps.max():
        unlike = f"by {steps.max() / max(steps.min(), 1):.2g}, {found['steps']} {_extent(steps)}; longer runs end lower"
        remarks.append(("lengths differ", unlike))
    ended = pd.DataFrame({"lr": read.numbers["lr"], "loss": read.numbers["loss"]})[read.ends == ""]
    groups = ended.groupby([as_text(values) for values in (*alike, read.numbers["seed"])])
    rates, spread = groups["lr"], groups["loss"].max() - groups["loss"].min()
    is_one = (spread == 0) | (spread < ONE_LOSS) & (rates.max() >= DECADE * rates.min())  # or nearly so over a decade
    if found["lr"] and (same := int((is_one & (rates.nunique() >= FEWEST_RATES)).sum())):
        where = "" if same == len(groups) else f" in {same} of {len(groups)} curves"
        text = f"the final loss is the same at all learning rates{where}: does the rate reach the optimizer?"
        remarks.append(("learning rate has no effect", text))
    return remarks


def _told(cell: Any) -> str:
    """A number or a word of a table as text."""
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell)


def _last_of_trials(table: pd.DataFrame) -> pd.DataFrame:
    """The last row of each trial of a log that has a row for each of its iterations, as those of Ray Tune have."""
    by_end = {end_of(str(name)): str(name) for name in table}
    if not {"trial_id", "training_iteration"} <= {*by_end}:
        return table
    last: pd.DataFrame = table.sort_values(by_end["training_iteration"], kind="stable").drop_duplicates(
        by_end["trial_id"], keep="last"
    )
    return last.sort_index()


def _without_averages(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """The table without the rows that sum up others, by their name or their seed, and which they are."""
    seed = columns.seed or usual_column(table, "seed")
    has_seed = table[seed].notna() if seed in table else pd.Series(False, table.index)
    for name in table:
        if is_word(table[name]) and (name == seed or is_arm(str(name)) or _names_a_run(str(name))):
            is_average = averages_of(as_text(table[name]), has_seed, is_of_seeds=name == seed)
            if is_average.any():
                told = ", ".join(as_text(table[name][is_average]).unique())
                return plain(table[~is_average]), [("left out, as no run", told)]
    return table, []


def _with_settings_of_names(table: pd.DataFrame, columns: Columns) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """The table with the learning rates and seeds that only the names of runs tell, and what was read from them.

    A learning rate in all names that is not the one of a column is kept beside it, since that may be a last one.
    """
    missing = [key for key in ("lr", "seed") if getattr(columns, key) is None and usual_column(table, key) is None]
    for name in table if columns.axis is None else ():
        if _names_a_run(str(name)) and is_word(table[name]) and table[name].notna().all():
            found = settings_in(list(map(str, table[name])))
            pairs = pd.DataFrame([pairs for pairs, _ in found], table.index)
            keys = [str(key) for key in pairs if key not in table and (pairs[key].notna().all() or key == "seed")]
            if columns.lr is None and "lr" in table and "lr" in pairs and not is_peak(table["lr"], pairs["lr"]):
                pairs, keys = pairs.rename(columns={"lr": PEAK}), [*keys, PEAK]
            if {*keys} & {*missing, PEAK}:
                settings = pairs[keys]
                if "seed" in settings:  # a run whose name has none is of another seed than all others
                    settings = settings.assign(seed=settings["seed"].fillna(settings["seed"].max() + 1).astype(int))
                rest = f"{name} without settings" if VARIANT in table else VARIANT
                table = table.join(settings).assign(**{rest: [word or SWEPT for _, word in found]})
                return table, [(f"read from {name}", ", ".join([*keys, rest]))]
    return table, []


def _quantities(
    table: pd.DataFrame, columns: Columns, best_over: Sequence[str]
) -> tuple[dict[str, str | float | None], dict[str, pd.Series[float]], str]:
    """The columns of the quantities, their numbers, and the unit of the losses, which are converted to nats.

    A loss of exactly zero, which stands for none, is NaN.
    """
    settings = (*(columns.arm or ()), *best_over, columns.axis)
    free = table[[name for name in table if name not in settings]]
    given = {key: getattr(columns, key) for key in USUAL_NAMES if key != TOKENS}
    found = {key: column_of(free if name is None else table, key, name) for key, name in given.items()}
    found |= {key: None for key in found if key not in ("loss", "axis") and found[key] in settings}
    numbers = {key: _numbers(table, key, column) for key, column in found.items()}
    if found["axis"] == found["lr"] or (columns.axis is None and numbers["lr"].nunique() > 1):
        found["axis"] = None  # a multiplier is the axis where the learning rate itself does not vary
    _check(numbers, found)
    unit = columns.unit or UNIT_NAMES.get(re.split("_(?=ppl|bpb|perp)", end_of(str(found["loss"])))[-1], "nats")
    if unit not in LOSS_UNITS:
        raise RequestError(f"--unit: no unit {unit!r}; {nearest(unit, LOSS_UNITS)}")
    numbers["loss"] = numbers["loss"].mask(numbers["loss"] == 0)
    for key in ("loss", "initial_loss"):
        values = numbers[key]
        if unit == "perplexity":
            _refuse(values <= 0, values, "the perplexity {:g} is not above 0")
        numbers[key] = values.map(math.log) if unit == "perplexity" else values * LOSS_UNITS[unit]
    if found["lr"]:
        numbers["lr"] = _in_three_digits(numbers["lr"])
    return found, numbers, unit


def _ends(
    table: pd.DataFrame, found: Mapping[str, str | float | None], numbers: Mapping[str, pd.Series[float]]
) -> tuple[pd.Series[str], pd.Series[str]]:
    """How each run ended, and what its state says; the end is empty, ``LOST``, or the reason why it has no final loss.

    A run that failed has none, unless its log is as long as those of the others. If all that is known is that it has no
    loss, it counts as diverged where it can, at its initial loss.
    """
    none = pd.Series("", table.index)
    saying = _saying(table, found)
    said = table[saying].astype(object).fillna("").astype(str)
    states = said.agg("; ".join, axis=1).map(ending_of) if saying else none
    flags = next((table[name] for name in table if end_of(str(name)) in FLAGS), none)
    says_diverged = states.isin(DIVERGED) | as_text(flags).str.lower().isin(["true", "1", "1.0", "yes"])
    for name in (name for name in table if end_of(str(name)) in LOST_AT and not is_word(table[name])):
        says_diverged |= table[name] >= 0
    has_loss = numbers["loss"].map(math.isfinite)
    is_zero = pd.to_numeric(table[str(found["loss"])], errors="coerce") == 0
    is_at_end = has_loss & _is_logged(found["steps"]) & (numbers["steps"] >= AT_THE_END * numbers["steps"].max())
    counts_as_diverged = ~has_loss & ~is_zero & numbers["initial_loss"].map(math.isfinite)
    has_failed = states.isin(FAILED) & ~is_at_end & ~counts_as_diverged
    ends = np.select(
        [states.isin(UNFINISHED) | has_failed, says_diverged, is_zero, ~has_loss], [states, LOST, "loss 0", LOST], ""
    )
    return pd.Series(ends, table.index), states


def _saying(table: pd.DataFrame, found: Mapping[str, str | float | None]) -> list[str]:
    """The columns that may say how a run ended: states, decisions, words among losses, and in sweeps notes."""
    ends = [*DECISIONS, *(NOTES if found["lr"] else ())]
    return [
        str(name) for name in table if (end_of(str(name)) in ends or name == found["loss"]) and is_word(table[name])
    ]


def _is_logged(steps: str | float | None) -> bool:
    """Whether steps are the last ones that runs came to, by the name of their column."""
    return isinstance(steps, str) and end_of(steps) in LOGGED_STEPS


def _role_of_steps(
    steps: pd.Series[float],
    column: str | float | None,
    arm: Sequence[str] | None,
    settings: Sequence[pd.Series[Any]],
    design: pd.DataFrame,
) -> str:
    """What the training steps are, as of any column in ``roles_of``; those that were logged set no arms apart."""
    if column is None:
        return EMPTY
    if steps.nunique() == 1:
        return SHARED
    if arm is not None:
        return NOT_NAMED
    if sources := followed_by(steps.rename(column), settings, design):
        return follows_text(sources)
    return MEASURED if _is_logged(column) or steps.groupby(design["lr"]).nunique().max() == 1 else ARM


def _followers(
    columns: Sequence[pd.Series[Any]], settings: Sequence[pd.Series[Any]], design: pd.DataFrame
) -> tuple[dict[str, pd.Series[Any]], list[str]]:
    """Tell numbers that only seem to follow from others, by key, from texts on those that do.

    Where each curve has other values of what a number follows from, anything would follow from them: whether it varies
    by itself is for the law of the best learning rate to find out.
    """
    derived: dict[str, pd.Series[Any]] = {}
    followed = list[str]()
    curves = pd.concat([*settings, design["size"]], axis=1).drop_duplicates().index
    for column in columns:
        sources = followed_by(column, settings, design) if pd.api.types.is_numeric_dtype(column) else []
        if not sources:
            continue
        if 2 * len(pd.concat(sources, axis=1).loc[curves].drop_duplicates()) > len(curves):
            derived[f"{DERIVED}.{short_name(str(column.name)).replace('.', '/')}"] = column
        elif [source.name for source in sources] != ["size"]:
            followed.append(f"{column.name} ({follows_text(sources).removeprefix('follows ')})")
    return derived, followed


def _rows(
    identity: pd.DataFrame,
    losses: pd.Series[float],
    is_left_out: pd.Series[bool],
    keep: str | None,
    others: pd.DataFrame,
) -> list[int]:
    """The positions of the rows that count, of several that are alike the last or the best; a failed one is no other's.

    Raises:
        RequestError: rows are alike, and ``keep`` does not say which counts; it names ``others`` in which they differ.
    """
    if keep not in (None, *KEEPS):
        raise RequestError(f"--keep: {keep!r} is none of {', '.join(KEEPS)}")
    failed = np.flatnonzero(is_left_out & ~identity.where(is_left_out).duplicated(keep="last"))
    ended = np.flatnonzero(~is_left_out)
    runs = identity.iloc[ended]
    twice = runs.duplicated()
    if not twice.any():
        return sorted([*failed, *ended])
    if keep in (None, "error"):
        second = identity.index[ended[np.flatnonzero(twice)[0]]]
        first = runs.index[runs.eq(identity.loc[second]).all(axis=1)][0]
        differ = [str(name) for name in others if str(others.at[first, name]) != str(others.at[second, name])]
        such_as = f", such as {', '.join(differ[:MOST_NAMED])}" if differ else ""
        rows = (_row(pd.Series(identity.index == label, identity.index)) for label in (first, second))
        raise RequestError(
            f"{' and '.join(rows)} are one run, alike in {', '.join(map(str, identity))}; --keep last or --keep best "
            f"counts one of them, --seed, --arm or --axis COLUMN tells them apart{such_as}"
        )
    loss = losses.where(losses.map(math.isfinite), math.inf).iloc[ended].reset_index(drop=True)
    alike = pd.MultiIndex.from_frame(runs).factorize()[0]  # two columns may have one name
    counted = loss.groupby(alike).idxmin() if keep == "best" else pd.Series(range(len(alike))).groupby(alike).max()
    return sorted([*failed, *ended[counted]])


def _exported(table: pd.DataFrame, source: str) -> Imported:
    """The records in a table that ``lab export --to csv`` wrote, with the settings that they were trained with."""
    runs = store.declared(table.assign(versions=f"{ORIGIN} {source}", **{store.TABLE: source}))
    mapping = [("records of the lab", f"every column keeps its meaning; {len(runs)} runs, without their probes")]
    steps = runs["steps"].astype(float) if "steps" in runs else pd.Series(0.0, runs.index)
    return Imported(Records(runs, _metrics(table, runs, steps, [])), mapping)


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
        values, place = numbers[key].dropna(), f" in {found[key]}" if isinstance(found[key], str) else ""
        is_whole = (values == values.round()) & (values.abs() <= LARGEST)
        _refuse(~is_whole, values, f"{key} {{:g}}{place} is no whole number")
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
    whole = ended.groupby(list(map(as_text, alike))).transform("max").fillna(ended.max())
    steps = steps.where(~is_cut | ~(steps < whole), whole)
    is_whole = _is_logged(column) and steps.min() > AT_THE_END * steps.max()
    return steps.clip(lower=steps.max()) if is_whole else steps


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
    if is_word(cells):
        cells = cells.map(lambda cell: without_note(str(cell), key), na_action="ignore")
    numbers = pd.to_numeric(cells.map(spelled_out, na_action="ignore") if key == "size" else cells, errors="coerce")
    is_lost = table[column].map(lambda cell: key == "loss" and isinstance(cell, str) and ending_of(cell) != "")
    is_other = numbers.isna() & cells.notna() & ~cells.astype(str).str.strip().str.lower().isin(NO_NUMBERS) & ~is_lost
    if is_other.any():
        word = table[column][is_other].iloc[0]
        raise RequestError(f"{_row(is_other)}: {column} is no number: {word!r}{with_point(str(word))}")
    numbers = numbers.astype(float)
    if key in ("loss", "initial_loss"):
        return numbers.mask(numbers.abs() > LARGEST_LOSS, math.inf)
    _refuse(numbers.isna(), numbers, f"{column} is empty")
    return as_rates(numbers.rename(column)) if key == "lr" else numbers


def _row(chosen: pd.Series[bool]) -> str:
    """The first row chosen: ``row 3``, counted from 1 without the head, or ``run lr=0.1`` where rows have names."""
    number = int(np.flatnonzero(chosen)[0])
    label = chosen.index[number]
    return f"run {label}" if isinstance(label, str) else f"row {number + 1}"


def _keys(names: Sequence[str]) -> dict[str, str]:
    """The key of each setting, by the name of its column: short, unlike all others, and none that the lab has."""
    shorts = Counter(map(short_name, names))
    arms = sorted(filter(is_arm, names), key=lambda name: ARM_NAMES.index(end_of(name)))
    keys = dict.fromkeys([*arms, *filter(_names_a_run, names)][:1], ARM)
    for name in names:
        # without dots, no setting of another trainer is taken for one of the lab
        key = (short_name(name) if shorts[short_name(name)] == 1 else name).replace(".", "/")
        key = f"{COLUMN}{key}" if key in RESERVED else key
        while name not in keys and key in keys.values():
            key += "'"
        keys.setdefault(name, key)
    return keys


def _names_a_run(name: str) -> bool:
    return end_of(name) in RUN_NAMES and end_of(name) != FOLDER


def _mapping(read: _Reading, settings: _Settings, runs: pd.DataFrame, rows: list[int]) -> list[tuple[str, str]]:
    """What each column was taken for, the quantities first; columns that are not used are together by the reason."""
    lines, table, roles, steps_role = [], read.table.iloc[rows], settings.roles, settings.steps_role
    for key, column in read.found.items():
        if column is not None:
            text = _extent(read.numbers[key].iloc[rows])
            if isinstance(column, str):
                follows = f"; {steps_role}" if key == "steps" and steps_role.startswith(FOLLOWS) else ""
                rivals = [name for name in called_so(table, key) if name not in read.found.values()]
                told = f" (not {', '.join(rivals)})" if rivals else ""
                text = f"{column}, {text}{follows}{told}"
            lines.append((MEANINGS.get(key, key), text))
    tokens = column_of(table, TOKENS, None)
    if isinstance(tokens, str) and pd.api.types.is_numeric_dtype(table[tokens]):
        lines.append((MEANINGS[TOKENS], f"{tokens}, {_extent(table[tokens])}"))
    statuses = runs["status"].value_counts()
    reasons = dict.fromkeys(str(why).rpartition(": ")[2] for why in runs.loc[runs["status"] == "failed", "reason"])
    told = ", ".join(_saying(table, read.found))
    has_loss = (runs["status"] == "diverged") & runs["final_val_loss"].notna()
    said = f"{has_loss.sum()} as {told} says" if has_loss.any() else "without a finite loss"
    for status, why in {"diverged": said, "failed": f"left out: {', '.join(reasons)}"}.items():
        if status in statuses:
            lines.append((status, f"{statuses[status]} of {len(runs)} runs, {why}"))
    for role in dict.fromkeys([ARM, SHARED, *roles.values()]):
        if columns := [name for name, other in roles.items() if other == role]:
            shown = [f"{name} ({_values(table[name])})" for name in columns] if role == ARM else columns
            lines.append((role if role in (ARM, SHARED) else f"not used: {role}", ", ".join(shown)))
    return lines


def _extent(values: pd.Series[float]) -> str:
    """The least and the largest of numbers, ``1 to 3``."""
    known = values[values.map(math.isfinite)]
    return first_to_last(f"{end:g}" for end in (known.min(), known.max()))


def _values(column: pd.Series[Any]) -> str:
    """The values of a setting: all, or the first of many."""
    values = [f"{value:g}" if isinstance(value, int | float) else str(value) for value in column.unique().tolist()]
    return ", ".join(
        values if len(values) <= MOST_SHOWN else [*values[:MOST_SHOWN], f"and {len(values) - MOST_SHOWN} more"]
    )


def _metrics(table: pd.DataFrame, runs: pd.DataFrame, steps: pd.Series[float], kept: Sequence[str]) -> pd.DataFrame:
    """The final loss and all other numbers as metrics of the last step."""
    numbers = [name for name in kept if pd.api.types.is_numeric_dtype(table[name])]
    measured: dict[str, pd.Series[Any]] = {"val_loss": runs["final_val_loss"]}
    measured |= {f"{COLUMN}{name}" if name in measured else name: table[name] for name in numbers}
    last = steps.fillna(0).astype("int64")
    frames = [
        pd.DataFrame({"id": runs["id"], "step": last, "probe": name, "where": "", "value": values.astype(float)})
        for name, values in measured.items()
    ]
    metrics = pd.concat(frames, ignore_index=True).astype(store.METRIC_COLUMNS)
    return metrics.sort_values(["id", "step", "probe", "where"], ignore_index=True)


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
