"""Tables of runs as people keep them: CSV, Markdown, JSON and Parquet, wide ones made long and all cells made plain."""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.text import spelled_out
from lab.core import files
from lab.core.errors import RequestError
from labwatch.tables.columns import LOSS_WORDS, USUAL_NAMES, computed, end_of, usual_column, words_of

# Words for a number that there is not.
NO_NUMBERS = ("", "nan", "none", "null", "n/a", "na", "<na>", "-", "\u2013", "\u2014")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
# Numbers that Python prints as words, outside of quotes; a longer text is no mapping of Python's.
NOT_A_NUMBER, INFINITE = (re.compile(rf"(?<![\w'\"]){word}(?![\w'\"])") for word in ("nan", "inf"))
METRIC_NAME = "metricName"  # in headers of files that agents write of their experiments
# Numbers as NumPy and torch print them: ``np.float64(2.5)``, ``tensor(2.5, device='cuda:0')``.
PRINTED = re.compile(
    r"(?:(?:np|numpy|torch|jnp)\.)?(?:float|int|bfloat|tensor|array|Array)\d*\(([^(),]+)(?:,[^()]*)?\)"
)
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
LONGEST_MAPPING = 10_000
QUOTED_FORMULA = r"^'(?=[=+@-])"  # as ``files.csv_text`` writes a cell that a spreadsheet would run
PARQUET = ".parquet"
MARKS = re.compile(r"[*`]|~~|</?[a-z]+>|(?<!\w)__|__(?!\w)")
RULE = re.compile(r"(?=.*\|)(?=.*-)[\s|:-]+")  # |---|:--| below the head of a table of Markdown
# Names of columns that are numbers, alone or with a word that says what they are; and of a first one, ``lr / width``.
ACROSS = re.compile(r"(|[A-Za-z][\w ]*[ _=:@-]|[A-Za-z]+)(\d*\.?\d+(?:[eE][-+]?\d+)?[kKmMbBtT]?)(| [A-Za-z]+)")
CORNER = re.compile(r"\s*([\w ]*\w)\s*[\\/|]\s*(\w[\w ]*\w|\w)\s*")


def read_table(source: str) -> pd.DataFrame:
    """Read a table of runs: CSV, Markdown, JSON or Parquet by the suffix, or from standard input, ``-``.

    Cells of text are as they were written; ``plain`` makes them numbers.

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
            content = sys.stdin.read().encode() if source == "-" else files.read_bytes(path)
            if files.is_lfs_pointer(content):
                raise RequestError(f"{name} {files.LFS_POINTER}")
            text = content.decode("utf-8-sig")
            table = READ_TEXT[path.suffix or _suffix_of(text)](text)
    except FileNotFoundError:
        raise RequestError(f"no table {source}") from None
    except RequestError:
        raise
    except OSError as fault:
        raise RequestError(f"{source} cannot be read: {fault.strerror}") from None
    except Exception as fault:  # each reader has its own
        raise RequestError(f"{name} cannot be read as a table: {' '.join(str(fault).split())}") from None
    if table.empty:
        raise RequestError(f"the table {name} has no rows")
    return table


def _suffix_of(text: str) -> str:
    """What the name of a file with this text would end in."""
    if text.lstrip().startswith(("{", "[")):
        return ".jsonl"
    return ".md" if any(map(RULE.fullmatch, text.splitlines())) else ".csv"


def _csv(text: str) -> pd.DataFrame:
    """A table with commas, semicolons, tabs or bars, whichever its head has most of; all cells are text."""
    head = next(filter(str.strip, text.splitlines()), "")
    separator = max(",;\t|", key=head.count)
    rows = (row for row in csv.reader(io.StringIO(text), delimiter=separator) if any(map(str.strip, row)))
    return _of_rows([re.sub(QUOTED_FORMULA, "", cell) for cell in row] for row in rows)


def _markdown(text: str) -> pd.DataFrame:
    """The only table among the lines; marks of bold, struck and other text are left out."""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if number and RULE.fullmatch(line)]
    if len(rules) != 1:
        raise ValueError(f"{len(rules)} tables in it instead of one")
    (rule,) = rules
    rows = [lines[rule - 1], *itertools.takewhile(lambda line: "|" in line, lines[rule + 1 :])]
    return _of_rows([MARKS.sub("", cell).strip() for cell in row.strip().strip("|").split("|")] for row in rows)


def _of_rows(rows: Iterable[list[str]]) -> pd.DataFrame:
    """A table of its head and its rows of text, of which empty cells are absent."""
    head, *cells = list(rows) or [[]]
    if twice := [name for name, count in Counter(head).items() if count > 1]:
        raise ValueError(f"two columns are called {twice[0]!r}")
    for number, row in enumerate(cells):
        if any(row[len(head) :]):
            raise ValueError(f"row {number + 1} has {len(row)} cells, and the head {len(head)}")
    filled = ([cell or None for cell in row[: len(head)]] + [None] * (len(head) - len(row)) for row in cells)
    return pd.DataFrame(filled, columns=head, dtype=object)


def _json(text: str) -> pd.DataFrame:
    """A list of objects, or an object on each line; nested ones have dotted names."""
    if text.lstrip().startswith("["):
        rows = files.parse_json(text.encode(), list)
    else:
        rows = [files.parse_json(line.encode(), dict) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is no JSON object")
    return pd.DataFrame([_once(flat(row)) for row in _of_experiments(rows)])


def _of_experiments(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs in a file of an agent's experiments, whose header names the ``metric``; rows of other files as they are.

    A row that is no run, such as one of a hook, has no metric.

    Raises:
        ValueError: headers name different metrics.
    """
    headers = [row for row in rows if METRIC_NAME in row]
    if not headers:
        return rows
    metric, *others = sorted({_metric_of(row) for row in headers})
    if others:
        raise ValueError(f"headers in it name {' and '.join([metric, *others])}; give the runs of each a file")
    runs = [row for row in rows if "metric" in row and METRIC_NAME not in row]
    return [{metric if key == "metric" else key: value for key, value in row.items()} for row in runs]


def _metric_of(header: dict[str, Any]) -> str:
    """The name of the metric in a header, with its unit, and with its direction where that is no loss's."""
    name, unit = str(header[METRIC_NAME]), str(header.get("metricUnit") or "")
    name = name if not unit or unit.lower() in name.lower() else f"{name}_{unit}"
    return f"{name} (higher is better)" if header.get("bestDirection") == "higher" else name


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by name.

    Raises:
        ValueError: two have one name, as of ``{"a.b": 1, "a": {"b": 2}}``.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"two columns are called {name!r}")
        values[name] = value
    return values


READ_TEXT = {
    **dict.fromkeys((".csv", ".tsv"), _csv),
    **dict.fromkeys((".md", ".markdown"), _markdown),
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


# What may stand before a number in a cell of its own column, and behind it: ``lr=3e-4``, ``2.31 (best of 2)``.
LABELS = {"lr": r"(?:lr|learning[_ ]rate|eta)", "seed": r"(?:seed|s|run|#)"}
NOTED = (
    r"(?:{}[\s=:_#-]*)?[~\u2248]?([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"(?:[)\]]|\s*[*\u2020\u2021\u00b1(\[!;].*|,?\s(?!(?:to|or|and|then|x)\b)[A-Za-z@<].*)?"
)


def without_note(cell: str, key: str) -> str:
    """The number in a cell that says more than a number, such as ``seed 1`` or ``3e-4 (best of 2)``; else the cell."""
    match = re.fullmatch(NOTED.format(LABELS.get(key, "(?!)")), cell.strip(), re.IGNORECASE)
    return match[1] if match else cell


def with_point(word: str) -> str:
    """Says how to write a number whose decimals follow a comma; nothing about any other word."""
    return f"; decimals follow a point, as in {word.replace(',', '.')}" if DECIMAL_COMMA.fullmatch(word) else ""


def long(table: pd.DataFrame, loss: str | None = None) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """A table with a loss in each cell, such as learning rates down and sizes across, as one with a row per run.

    Names of its columns are numbers, alone or after one word that says what they are: ``64``, ``124M``, ``seed 1``.
    Without a word they are learning rates if the table has none otherwise and all are below 1, else sizes. An empty
    cell is no run; one that says ``nan`` is a run that diverged, as is each that is no number in a table of numbers.

    Returns:
        The table, and what its columns were taken for, as a pair of texts. Any other table is returned as it is.
    """
    matches = {name: match for name in table if (match := ACROSS.fullmatch(_with_number(str(name))))}
    words = {match[1].strip(" _=:@-") or match[3].strip() for match in matches.values()}
    if loss is not None or len(matches) < 2 or len(words) != 1 or usual_column(table, "loss"):
        return table, []
    word, down = words.pop(), [name for name in table if name not in matches]
    if down and (corner := CORNER.fullmatch(str(down[0]))):  # says what is down, and what across
        table, word, down = table.rename(columns={down[0]: corner[1]}), corner[2], [corner[1], *down[1:]]
    numbers = {name: float(spelled_out(match[2])) for name, match in matches.items()}
    if not word or end_of(word) in USUAL_NAMES["loss"]:
        word = "lr" if usual_column(table[down], "lr") is None and max(numbers.values()) < 1 else "size"
    rows = table.melt(down, [*matches], word, "loss")
    cells = rows[[*down, word]].to_numpy()
    labels = [" ".join(f"{name}={cell}" for name, cell in zip([*down, word], row, strict=True)) for row in cells]
    rows = rows.assign(**{word: rows[word].map(numbers)}).set_axis(
        labels if len({*labels}) == len(labels) else rows.index
    )
    if any(isinstance(cell, str) for cell in rows["loss"]):
        rows = rows[rows["loss"].notna()]
    rows = rows.rename(columns={"": "size" if word == "lr" else "lr"})
    return rows, [("a loss in each cell", f"{word} across, {', '.join(map(str, matches))}")]


def _with_number(name: str) -> str:
    """A name of a column with the power in it as a number: ``lr = 2^-8``."""
    head, sign, power = name.strip().rpartition("=")
    return f"{head}{sign}{computed(power)}"


def plain(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers, booleans or words; nested cells become columns, and numbers written as text are numbers.

    Decimals may follow a comma, where no group of thousands explains the commas of a column.

    Raises:
        RequestError: a nested cell cannot be read, or two columns have one name.
    """
    columns: list[tuple[str, pd.Series[Any]]] = []
    try:
        for position, name in enumerate(table):
            column = table.iloc[:, position]
            if not pd.api.types.is_numeric_dtype(column) and (nested := _nested(column)) is not None:
                columns += [(f"{name}.{key}", nested[key]) for key in nested]
            else:
                columns.append((str(name), column))
        words = [cell for _, column in columns if not pd.api.types.is_numeric_dtype(column) for cell in column]
        commas = [cell for cell in words if isinstance(cell, str) and DECIMAL_COMMA.fullmatch(cell)]
        is_decimal = any(not THOUSANDS.fullmatch(cell) for cell in commas)
        return pd.DataFrame(_once((name, _typed(column, is_decimal)) for name, column in columns), index=table.index)
    except ValueError as fault:
        raise RequestError(f"the table cannot be read: {fault}") from None


def _nested(column: pd.Series[Any]) -> pd.DataFrame | None:
    """The columns of cells that are mappings, or the JSON or Python text of some; None for other cells."""
    cells = column.dropna()
    are_nested = [isinstance(cell, dict) or (isinstance(cell, str) and cell.startswith("{")) for cell in cells]
    if not are_nested or not all(are_nested):
        return None
    rows = {
        row: _once(flat(cell if isinstance(cell, dict) else mapping_of(cell)))
        for row, cell in zip(cells.index, cells, strict=True)
    }
    return pd.DataFrame.from_dict(rows, orient="index").reindex(column.index)


def _typed(column: pd.Series[Any], is_decimal: bool) -> pd.Series[Any]:
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
    known = known.str.replace(PRINTED, r"\1", regex=True).map(computed)
    if is_decimal and known.str.contains(",").any() and known.map(DECIMAL_COMMA.fullmatch).map(bool).any():
        known = known.str.replace(",", ".") if not known.str.contains(r"\d\.|,.*,", regex=True).any() else known
    if not {*words_of(str(column.name))} & LOSS_WORDS:  # 2,310 of a loss may be 2.31
        known = known.map(without_commas)
    numbers = pd.to_numeric(known, errors="coerce")
    if numbers.notna().all():
        return numbers.reindex(column.index)
    return words.reindex(column.index)
