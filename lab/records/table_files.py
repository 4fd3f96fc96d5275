"""Tables of runs as people keep them: CSV, JSON and Parquet, with nested, quoted and numeric cells made plain."""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lab.core import files
from lab.core.errors import RequestError

NO_NUMBERS = ("", "nan", "none", "null", "n/a", "<na>")  # words for a number that there is not
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
# Numbers that Python prints as words, outside of quotes; a longer text is no mapping of Python's.
NOT_A_NUMBER, INFINITE = (re.compile(rf"(?<![\w'\"]){word}(?![\w'\"])") for word in ("nan", "inf"))
LONGEST_MAPPING = 10_000
PARQUET = ".parquet"


def read_table(source: str) -> pd.DataFrame:
    """Read a table of runs: CSV, JSON or Parquet by the suffix of its name, or from standard input, ``-``.

    Raises:
        RequestError: there is no such file, it is none of these, or two columns have one name.
    """
    path, name = Path(source), "standard input" if source == "-" else source
    if source != "-" and path.suffix not in (*READ_TEXT, PARQUET):
        known = ", ".join((*READ_TEXT, PARQUET))
        raise RequestError(f"{source} is no table that can be imported; known: {known}, a folder, or - for a pipe")
    try:
        if path.suffix == PARQUET:
            table = files.read_table(path)
        else:
            text = sys.stdin.read() if source == "-" else files.read_bytes(path).decode("utf-8-sig")
            kind = path.suffix or (".jsonl" if text.lstrip().startswith(("{", "[")) else ".csv")
            table = READ_TEXT[kind](text)
        table = plain(table)
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
    """A table with commas, semicolons, tabs or bars, whichever its head has most of; all cells are text."""
    head = next(filter(str.strip, text.splitlines()), "")
    separator = max(",;\t|", key=head.count)
    names = Counter(next(csv.reader([head], delimiter=separator), []))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two columns are called {twice[0]!r}")
    return pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False, na_values=[""])


def _json(text: str) -> pd.DataFrame:
    """A list of objects, or an object on each line; nested ones have dotted names."""
    if text.lstrip().startswith("["):
        rows = files.parse_json(text.encode(), list)
    else:
        rows = [files.parse_json(line.encode(), dict) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is no JSON object")
    return pd.DataFrame([dict(flat(row)) for row in rows])


READ_TEXT = {
    **dict.fromkeys((".csv", ".tsv"), _csv),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _json),
}


def json_rows(text: str) -> list[dict[str, Any]]:
    """The objects of a list, of Transformers' ``log_history``, or of lines, the last of which may be cut short.

    Raises:
        ValueError: it is none of these.
    """
    if text.lstrip().startswith("["):
        return [row for row in files.parse_json(text.encode(), list) if isinstance(row, dict)]
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        content = files.parse_json(text.encode(), dict)
    except ValueError:
        with contextlib.suppress(ValueError):
            return [files.parse_json(line.encode(), dict) for line in lines]
        return [files.parse_json(line.encode(), dict) for line in lines[:-1]]
    history = content.get("log_history", [content] if len(lines) == 1 else [])
    return [row for row in history if isinstance(row, dict)] if isinstance(history, list) else []


def flat(tree: Mapping[Any, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of nested mappings by joined name; a list is text, and what is null is left out.

    Args:
        tree: the mapping.
        separator: joins names; settings are joined by dots, and measurements by ``/``, as trainers call them.
        prefix: of every name.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and {"value"} <= {*value} <= {"value", "desc"}:  # as W&B stores a config
            value = value["value"]
        if isinstance(value, Mapping):
            yield from flat(value, separator, f"{prefix}{key}{separator}")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str | int | float) else str(value)


def mapping_of(text: str) -> dict[Any, Any]:
    """A mapping written as JSON, or as Python prints it; ``nan`` is a word there.

    Raises:
        ValueError: it is neither.
    """
    try:
        return files.parse_json(text.encode(), dict)
    except ValueError:
        pass
    if len(text) < LONGEST_MAPPING:
        for python in (text, INFINITE.sub("1e999", NOT_A_NUMBER.sub("'nan'", text))):
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                if isinstance(value := ast.literal_eval(python), dict):
                    return value
    raise ValueError(f"{text[:40]!r} is no mapping")


def without_commas(word: str) -> str:
    """A number without its thousands separators; ``0,123`` has none, and may be a decimal number."""
    return word.replace(",", "") if THOUSANDS.fullmatch(word) else word


def with_point(word: str) -> str:
    """Says how to write a number whose decimals follow a comma; nothing about any other word."""
    is_decimal = re.fullmatch(r"[-+]?\d+,\d+(e[-+]?\d+)?", word, re.IGNORECASE)
    return f"; decimals follow a point, as in {word.replace(',', '.')}" if is_decimal else ""


def plain(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers, booleans or words; nested cells become columns, and numbers written as text are numbers."""
    columns: dict[str, pd.Series[Any]] = {}
    for name in table:
        column = table[name]
        if not pd.api.types.is_numeric_dtype(column) and (nested := _nested(column)) is not None:
            columns |= {f"{name}.{key}": _typed(nested[key]) for key in nested}
        else:
            columns[str(name)] = _typed(column)
    return pd.DataFrame(columns, index=table.index)


def _nested(column: pd.Series[Any]) -> pd.DataFrame | None:
    """The columns of cells that are mappings, or the JSON or Python text of some; None for other cells."""
    cells = column.dropna()
    are_nested = [isinstance(cell, dict) or (isinstance(cell, str) and cell.startswith("{")) for cell in cells]
    if not are_nested or not all(are_nested):
        return None
    rows = {
        row: dict(flat(cell if isinstance(cell, dict) else mapping_of(cell)))
        for row, cell in zip(cells.index, cells, strict=True)
    }
    return pd.DataFrame.from_dict(rows, orient="index").reindex(column.index)


def _typed(column: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers or booleans, if all cells that are not empty are such, and else words as they were given."""
    if pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column):
        return column
    cells = column.map(
        lambda cell: cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell), na_action="ignore"
    )
    words = cells.dropna().astype(str).str.strip()
    known = words[~words.str.lower().isin(NO_NUMBERS)]
    if len(known) == len(cells) and known.str.lower().isin(["true", "false"]).all():
        return words.str.lower() == "true"
    if known.empty and words.str.lower().isin(["none", "null"]).any():  # names
        return words.reindex(column.index)
    numbers = pd.to_numeric(known.map(without_commas), errors="coerce")
    if numbers.notna().all():
        return numbers.reindex(column.index)
    return words.reindex(column.index)
