"""Tables of a base and single changes of it: which row is whose base, and in what it differs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.core.errors import RequestError
from labwatch.tables.columns import (
    ARM_NAMES,
    BASES,
    BOOKKEEPING,
    CHANGED,
    RUN_NAMES,
    SET_FROM,
    SET_TO,
    USUAL_NAMES,
    as_text,
    end_of,
    is_named_base,
    is_word,
    usual_column,
)

PAIR = re.compile(r"\s*([A-Za-z][\w./ -]*?)\s*(?:=|:|->)\s*(\S.*?)\s*")  # beta1 = 0.95
FEWEST_KEYS = 2  # of a table in which nothing says what is a change
MOST_VALUES = 2 / 3  # of the rows, in a column of which most hold the value of a base
MOST_APART = 2  # settings other than the size in which bases differ


LARGER = 1.5  # times the size of a base, above which a model is another one and not changed


class SingleChanges(NamedTuple):
    """The changes in a table.

    Attributes:
        rows: a row for each that is a change of something other than the learning rate: ``key``, ``value``, ``before``
            (the value of the base, None if nothing says it) and ``base``, the label of the row of its base.
        columns: those that only say what was changed.
        table: the table, with the learning rate of rows that say in these columns what it was changed to.
    """

    rows: pd.DataFrame
    columns: list[str]
    table: pd.DataFrame


def find(table: pd.DataFrame, found: dict[str, str], *, is_asked: bool) -> SingleChanges | None:
    """Find a base and single changes of it in a table; None in any other.

    Either a column says what each row changes, and is empty or says ``baseline`` in others; the base of a change is
    that of these which agrees with it in most other columns. Or no column says so, but all rows of a size (and of up to
    two words, such as the optimizer, or of a number of tokens) differ from one of them in a single column each.

    Args:
        table: one row per run, its cells made plain.
        found: the columns of the quantities.
        is_asked: whether somebody said what sets arms apart, so that only a column that names changes counts.

    Raises:
        RequestError: a row changes two bases that agree with it in as many columns.
    """
    named = _named(table, found)
    if named is not None or is_asked:
        return named
    return _unnamed(table, found)


def _named(table: pd.DataFrame, found: dict[str, str]) -> SingleChanges | None:
    """Changes that a column names, with their values in another one or after a sign, as in ``beta1=0.95``."""
    free = [str(name) for name in table if name not in found.values()]
    key = _key_column(table, free)
    if key is None or pd.api.types.is_bool_dtype(table[key]):
        return None
    names = as_text(table[key]).str.strip()
    is_base = table[key].isna() | names.str.lower().isin(BASES)
    value = next((name for name in free if name != key and end_of(name) in SET_TO), None)
    values: pd.Series[Any] = table[value] if value else pd.Series(None, table.index, dtype=object)
    if value is None:
        parts = names.map(PAIR.fullmatch)
        if parts[~is_base].isna().any():
            return None
        values = pd.Series([part[2] if part else None for part in parts], table.index, dtype=object)
        names = pd.Series([part[1] if part else "" for part in parts], table.index)
    if is_base.all() or not is_base.any():
        return None
    told = [name for name in (key, value) if name]
    flags = [name for name in free if pd.api.types.is_bool_dtype(table[name]) and (table[name] == is_base).all()]
    others = [name for name in table if name not in (found["loss"], found.get("initial_loss"), *told, *flags)]
    codes = [pd.factorize(table[name], use_na_sentinel=False)[0] for name in others]
    changes, bases = np.flatnonzero(~is_base), np.flatnonzero(is_base)
    column_of = {
        each: found.get("lr") if end_of(each) in USUAL_NAMES["lr"] else _column_of(each, values[names == each], table)
        for each in names.iloc[changes].unique()
    }
    changed = names.iloc[changes].map(column_of).to_numpy()
    differ = np.zeros((len(changes), len(bases)), np.int16)
    for name, column in zip(others, codes, strict=True):  # a change may have any value of what it changes
        differ += (column[changes][:, None] != column[bases]) & (changed != name)[:, None]
    nearest = differ == differ.min(axis=1)[:, None]
    chosen = bases[nearest.argmax(axis=1)]
    # seeds, names and numbers that were measured do not make another base
    settings = [
        column
        for name, column in zip(others, codes, strict=True)
        if name != found.get("seed") and len(set(column)) <= MOST_VALUES * len(column)
    ]
    for row, is_near, base in zip(changes, nearest, chosen, strict=True):
        near = bases[is_near]
        apart = near[np.any([column[near] != column[base] for column in settings], axis=0)] if settings else near[:0]
        if len(apart):
            raise RequestError(
                f"row {row + 1} changes {names.iloc[row]}, and its base may be row {base + 1} or row {apart[0] + 1}; a "
                "column in which it agrees with one of them only would tell"
            )
    before = next((name for name in free if name not in told and end_of(name) in SET_FROM), None)
    said = {key: before or column for key, column in column_of.items()}
    rows = pd.DataFrame(
        {
            "key": names.iloc[changes],
            "value": [_plain(cell) for cell in values.iloc[changes]],
            "before": [
                _plain(table[said[name]].iloc[change if before else base]) if said[name] else None
                for name, change, base in zip(names.iloc[changes], changes, chosen, strict=True)
            ],
            "base": table.index[chosen],
        },
        index=table.index[changes],
        dtype=object,
    )
    is_lr = rows["key"].map(end_of).isin(USUAL_NAMES["lr"]) & (found.get("lr") is not None)
    if is_lr.any():
        numbers = pd.to_numeric(rows["value"][is_lr], errors="coerce").dropna().astype(float)
        table = table.assign(**{found["lr"]: numbers.reindex(table.index).fillna(table[found["lr"]].astype(float))})
    return SingleChanges(rows[~is_lr], [*told, *flags, *([before] if before else [])], table)


def _key_column(table: pd.DataFrame, free: Sequence[str]) -> str | None:
    """The column that names what each row changes."""
    return next((name for usual in CHANGED for name in free if end_of(name) == usual and is_word(table[name])), None)


def of_sweeps(table: pd.DataFrame, loss: str, axis: str | None) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """A table that names the setting and the value of each row, ``sweep, value``, as one that ``find`` can read.

    Rows of learning rates are a curve. The others change the run of this curve whose loss one of them repeats in every
    setting, since a run that is part of two sweeps is listed in both; where none does, nobody knows what they change,
    and they are left out. With ``axis``, the rows of this setting are the table.

    Returns:
        The table, and a pair of texts on what was left out. Any other table is returned as it is.

    Raises:
        RequestError: several settings were swept, and none is the learning rate.
    """
    free = [str(name) for name in table if name != loss]
    key = _key_column(table, free)
    value = next((name for name in free if name != key and end_of(name) in SET_TO), None)
    if key is None or value is None or table[key].isna().any():
        return table, []
    names = as_text(table[key]).str.strip()
    known = [*dict.fromkeys(names)]
    is_swept = table[value].groupby(names).nunique().min() > 1 and not names.str.lower().isin(BASES).any()
    lr = usual_column(table.drop(columns=[key, value]), "lr")
    if not is_swept or {*known} <= {*table}:
        return (table.drop(columns=[key, value]) if is_swept else table), []
    is_lr = names.map(end_of).isin(USUAL_NAMES["lr"])
    chosen = axis if axis in known else known[0] if len(known) == 1 else None
    if chosen is not None:
        rows = table[names == chosen].drop(columns=key).rename(columns={value: chosen})
        return rows, [("read from", f"{key} and {value}, the rows of {chosen}")]
    if not is_lr.any():
        raise RequestError(f"{key} names {', '.join(known)}, none of them a learning rate; --axis SETTING takes one")
    if lr is not None:
        bases = table.loc[~is_lr, lr].unique()
    else:
        seed = usual_column(table, "seed")
        others = [name for name in free if name == seed or (name not in (key, value) and is_word(table[name]))]
        groups = table[others].apply(as_text).agg(" ".join, axis=1) if others else pd.Series("", table.index)
        ends = groups + " " + as_text(table[loss])
        whole = (is_lr & ends.isin(ends[~is_lr])).groupby(table[value]).sum() == groups.nunique()
        bases = whole[whole].index.to_numpy()
    rates = pd.to_numeric(table[value].where(is_lr), errors="coerce")
    is_base = is_lr & (table[value] if lr is None else table[lr]).isin(bases)
    if len(bases) != 1 or not is_base.any():
        told = f"{(~is_lr).sum()} rows of {', '.join(name for name in known if not is_lr[names == name].any())}"
        why = f"{told}: nothing says which run they change; --axis SETTING draws curves along one of them"
        return table[is_lr].drop(columns=[key, value]).assign(**{lr or "lr": rates[is_lr]}), [("left out", why)]
    table = table.assign(**{key: names.mask(is_base), lr or "lr": rates.fillna(float(bases[0]))})
    why = "whose losses other rows repeat" if lr is None else "the one of all other rows"
    return table, [("base", f"the runs at learning rate {float(bases[0]):g}, {why}")]


def _column_of(key: str, values: pd.Series[Any], table: pd.DataFrame) -> str | None:
    """The column of a setting that was changed: of its name, or one that holds all values that it was changed to."""
    if key in table:
        return key
    told = list(values.map(_plain))
    own = table.loc[values.index].drop(columns=str(values.name), errors="ignore")
    return next((str(name) for name in own if list(own[name].map(_plain)) == told), None)


def _plain(cell: Any) -> Any:
    """A cell as a number if it is one, as text else; None if it is empty."""
    if cell is None or (isinstance(cell, float) and np.isnan(cell)):
        return None
    try:
        return float(cell)
    except ValueError:
        return str(cell)


def _unnamed(table: pd.DataFrame, found: dict[str, str]) -> SingleChanges | None:
    """Changes that nothing names, in a table whose rows each differ from a base in one column."""
    fixed = {found["loss"], found.get("initial_loss"), found.get("size"), found.get("seed")}
    settings = [str(name) for name in table if name not in fixed and _may_be_set(table[name])]
    # of columns that change in the same rows, as the steps do with the batch at equal tokens, the first counts
    codes = {name: pd.factorize(table[name], use_na_sentinel=False)[0].tobytes() for name in settings}
    settings = list(map(str, pd.Series(codes, dtype=object).drop_duplicates().index))
    size = [found["size"]] if found.get("size") in table else []
    is_base = _is_named_base(table)
    own = [name for name in settings if name != found.get("lr")]
    if size and is_base.any() and len(table.loc[is_base, [*own, *size]].drop_duplicates()) == 1:
        ratio = table[size[0]].astype(float) / float(table.loc[is_base, size[0]].iloc[0])
        if 1 / LARGER <= ratio.min() <= ratio.max() <= LARGER:  # it follows from what was changed
            size = []
    apart = [name for name in settings if _tells_bases(table[name])]
    best: pd.DataFrame | None = None
    for count in range(MOST_APART + 1):
        for by in combinations(apart, count):
            keys = [name for name in settings if name not in by]
            rows = _of_groups(table, [*size, *by], keys, is_base) if len(keys) >= FEWEST_KEYS else None
            if rows is not None and (best is None or len(rows) > len(best)):
                best = rows
    if best is None or best["key"].nunique() < FEWEST_KEYS:
        return None
    return SingleChanges(best[best["key"] != found.get("lr")], [], table)


def _is_named_base(table: pd.DataFrame) -> pd.Series[bool]:
    """Which rows are called a baseline, unless all are."""
    naming = [table[name] for name in table if end_of(str(name)) in (*RUN_NAMES, *ARM_NAMES)]
    told = [is_base for is_base in map(is_named_base, naming) if is_base.any() and not is_base.all()]
    return told[0] if told else pd.Series(False, table.index)


def _tells_bases(column: pd.Series[Any]) -> bool:
    """Whether a setting may be one in which bases differ: a word, or a number of tokens."""
    is_name = is_word(column) and not pd.api.types.is_bool_dtype(column)
    return is_name or end_of(str(column.name)) in USUAL_NAMES["tokens"]


def _may_be_set(column: pd.Series[Any]) -> bool:
    """Whether a column may be one of settings, most of whose rows have the value of a base."""
    end, values = end_of(str(column.name)), as_text(column)
    is_noted = column.isna().all() or end in (*BOOKKEEPING, *RUN_NAMES)
    is_measured = re.match(r"(summary|metrics?)[/.]", str(column.name).lower()) is not None
    return not (is_noted or is_measured) and 1 < values.nunique() <= MOST_VALUES * len(values)


def _of_groups(
    table: pd.DataFrame, by: Sequence[str], keys: Sequence[str], is_base: pd.Series[bool]
) -> pd.DataFrame | None:
    """The changes in each group of rows; None if there is a row that differs from the base of its group in two.

    The base is the row that is called so, or else the one most like the others.
    """
    grouped = table.groupby(list(by), dropna=False, sort=False).indices.values() if by else [np.arange(len(table))]
    codes = np.array([pd.factorize(table[name], use_na_sentinel=False)[0] for name in keys]).T
    usual = np.array([np.bincount(column).argmax() for column in codes.T])
    rows = []
    for places in grouped:
        own = codes[places]
        own_usual = np.array([np.bincount(column).argmax() for column in own.T])
        # of a single setting that was changed, any value could be the base's: the one that others have counts
        likeness = (own == own_usual).sum(axis=1) * len(keys) + (own == usual).sum(axis=1)
        base = int((likeness + is_base.to_numpy()[places] * likeness.max()).argmax())
        if (own != own[base]).sum(axis=1).max() > 1:
            return None
        for place, changed in zip(places, own != own[base], strict=True):
            if changed.any():
                key = keys[int(changed.argmax())]
                cells = table[key].iloc[place], table[key].iloc[places[base]]
                value, before = map(_plain, cells)
                rows.append((table.index[place], key, value, before, table.index[places[base]]))
    frame = pd.DataFrame(rows, columns=["row", "key", "value", "before", "base"], dtype=object)
    return frame.set_index("row").rename_axis(None)
