"""Formats of logs that other programs write: each format recognizes its own lines and reads them one by one."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lab.core import files
from lab.core.errors import RequestError, nearest

STEP, LOSS = "step", "loss"
LARGEST_STEP = 2**53  # floats beyond it skip integers
# Names that other programs give to each column, in lower-case words joined by "_"; the first one present counts.
NAMES = {
    STEP: (
        "step",
        "_step",
        "steps",
        "global_step",
        "train_global_step",
        "trainer_global_step",
        "iteration",
        "iter",
        "iterations",
        "update",
        "updates",
        "num_updates",
    ),
    LOSS: ("loss", "train_loss", "training_loss", "lm_loss", "train_lm_loss", "loss_train", "train_inner_loss"),
    "grad_norm": ("grad_norm", "gnorm", "gradient_norm", "global_grad_norm", "train_grad_norm", "train_gnorm"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate"),
    "loss_scale": ("loss_scale", "scale", "train_loss_scale", "grad_scale"),
    "attention_logit_max": ("attention_logit_max", "max_attention_logit"),
    "update_rms": ("update_rms",),
    "eps_ratio": ("eps_ratio",),
    "update_curvature": ("update_curvature",),
    "parts_error": ("parts_error",),
    "val_loss": ("val_loss", "eval_loss", "validation_loss", "loss_val", "loss_eval", "test_loss"),
    "clean_val_loss": ("clean_val_loss", "val_loss_clean", "val_clean_loss", "eval_clean_loss", "eval_loss_clean"),
    "log_z": ("log_z", "train_log_z"),
    "log_z_square": ("log_z_square", "log_z_squared", "train_log_z_square", "z_loss", "train_z_loss"),
    "output_logit_mean": ("output_logit_mean", "mean_logit", "train_output_logit_mean", "train_mean_logit"),
}
RUN_NAMES = ("run", "run_id", "run_name")  # columns whose values name the run of a row
# Columns of this name and a number are gradient norms of the micro-batches of a step.
MICRO_BATCH = "micro_batch_norm_"
# Suffixes that W&B adds to columns of an exported chart which hold extremes over a group of runs.
EXTREMES = ("__MIN", "__MAX")
# A file with a line of more bytes is no log of losses.
LONGEST_LINE = 2**20
# The first line in a known format must lie within this many bytes.
LONGEST_PREAMBLE = 8 * files.MIB

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Row(NamedTuple):
    """Measurements of a step of a run, by column; those that were not logged are absent, and NaN is a logged value."""

    run: str
    step: int
    values: dict[str, float]


def number(text: object) -> float | None:
    """The number that a text or a JSON value holds; None if it holds none."""
    if isinstance(text, (bool, type(None), list, dict)):
        return None
    try:
        return float(text)  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return None


def step_of(text: object) -> int | None:
    """The step that a text or a JSON value holds; None if it holds none."""
    value = number(text)
    return int(value) if value is not None and 0 <= value <= LARGEST_STEP else None


def usual_columns(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The name of each column that is present: as ``given``, or else by its usual names."""
    words = {re.sub(r"[^0-9a-z_]+", "_", name.strip().lower()).strip("_ "): name for name in reversed(names)}
    words |= {re.sub(r"[^0-9a-z_]+", "_", name.strip().lower()): name for name in reversed(names)}
    found = {
        column: next((words[alias] for alias in aliases if alias in words), None) for column, aliases in NAMES.items()
    }
    found |= {name: name for name in names if re.fullmatch(rf"{MICRO_BATCH}\d+", name)}
    found |= {column: name if name in names else None for column, name in given.items()}
    return {column: name for column, name in found.items() if name is not None}


def given_columns(text: str) -> dict[str, str]:
    """``step=COLUMN,loss=COLUMN`` as a dictionary.

    Raises:
        RequestError: a part is no pair, or its key is no column of a log.
    """
    given = dict[str, str]()
    for pair in text.split(","):
        key, separator, column = pair.partition("=")
        if not separator or not column:
            raise RequestError(f"--columns wants step=COLUMN,loss=COLUMN, not {pair!r}")
        if key not in NAMES:
            raise RequestError(f"--columns has no key {key!r}; {nearest(key, NAMES)}")
        given[key] = column
    return given


def missing_column(column: str, names: Iterable[object], given: Mapping[str, str]) -> str:
    """The message about a log that lacks a column of steps or losses."""
    known = [str(name) for name in names if str(name)]
    if column in given:
        return f"has no column {given[column]!r}; {nearest(given[column], known)}"
    plural = {STEP: "steps", LOSS: "losses"}[column]
    return f"has no column of {plural} among {', '.join(known) or 'none'}; --columns {column}=COLUMN names it"


@dataclass
class TextLines:
    """Lines that a program prints; those in a known format hold a step, a loss, and perhaps other measurements."""

    kind: ClassVar[str] = "text"
    name: str

    def read(self, line: str) -> Iterator[Row]:
        line = COLOURS.sub("", line)
        first = TEXTS[self.name].first.search(line)
        if first and (step := step_of(first["step"])) is not None:
            fields = {LOSS: first["loss"]}
            for column, pattern in TEXTS[self.name].others.items():
                if found := pattern.search(line):
                    fields[column] = found[1]
            yield Row("", step, {column: float(text) for column, text in fields.items()})

    def lacks(self) -> str:
        """The reason why no row was found; empty if nothing is wrong."""
        return ""


class TextFormat(NamedTuple):
    """The format of lines that a program prints: its name with an example, and the patterns of its numbers."""

    title: str
    first: re.Pattern[str]
    others: dict[str, re.Pattern[str]]


def _fields(**patterns: str) -> dict[str, re.Pattern[str]]:
    return {column: re.compile(f"{text}({NUMBER})", re.IGNORECASE) for column, text in patterns.items()}


TEXTS = {
    "nanogpt": TextFormat(
        "nanoGPT's output (iter 10: loss 3.2)",
        re.compile(rf"\biter (?P<step>\d+): loss (?P<loss>{NUMBER})", re.IGNORECASE),
        _fields(lr=r"\blr "),
    ),
    "llm.c": TextFormat(
        "llm.c's output (step 10/19560 | loss 7.6 | norm 2.1)",
        re.compile(rf"\bstep\s+(?P<step>\d+)/\d+ \| (?:train )?loss (?P<loss>{NUMBER})", re.IGNORECASE),
        _fields(grad_norm=r"\| norm ", lr=r"\| lr "),
    ),
    "megatron": TextFormat(
        "Megatron's output (iteration 100/ 5000 | lm loss: 6.5E+00)",
        re.compile(rf"\biteration\s+(?P<step>\d+)/\s*\d+ \|.*?\blm loss: (?P<loss>{NUMBER})", re.IGNORECASE),
        _fields(grad_norm=r"\| grad norm: ", lr=r"\| learning rate: ", loss_scale=r"\| loss scale: "),
    ),
}


@dataclass
class JsonLines:
    """Lines that end in a JSON object."""

    kind: ClassVar[str] = "json"
    given: dict[str, str]
    columns: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)

    def read(self, line: str) -> Iterator[Row]:
        fields = json_object(line)
        if fields is not None:
            yield from self.read_object(fields)

    def read_object(self, fields: dict[str, Any]) -> Iterator[Row]:
        self.learn(fields)
        step = step_of(fields.get(self.columns.get(STEP, "")))
        values = {
            column: value
            for column, name in self.columns.items()
            if column != STEP and (value := number(fields.get(name))) is not None
        }
        if step is not None and values:
            run = next((str(fields[name]) for name in RUN_NAMES if isinstance(fields.get(name), (str, int))), "")
            yield Row(run, step, values)

    def learn(self, fields: Mapping[str, Any]) -> None:
        """Find columns among new names; a column that was found before is kept."""
        if len(self.seen) < MOST_NAMES and (new := [name for name in fields if name not in self.seen]):
            self.seen += new
            self.columns = usual_columns(self.seen, self.given) | self.columns

    def lacks(self) -> str:
        lacking = next((column for column in (STEP, LOSS) if column not in self.columns), None)
        return missing_column(lacking, self.seen, self.given) if lacking else ""


MOST_NAMES = 10_000  # different keys; a log with more holds no measurements


def json_object(line: str) -> dict[str, Any] | None:
    """The JSON object at the end of a line, flattened: ``{"train": {"loss": 2}}`` has the key ``train/loss``."""
    start = line.find("{")
    if start < 0 or not line.rstrip().endswith("}"):
        return None
    try:
        return dict(_flat(files.parse_json(line[start:].encode(), dict)))
    except ValueError:
        return None


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, dict):
            yield from _flat(each, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", each


@dataclass
class TableLines:
    """CSV: a line of names, then rows. In a chart exported from W&B, a column ``RUN - METRIC`` belongs to a run."""

    kind: ClassVar[str] = "table"
    separator: str
    names: list[str]
    given: dict[str, str]
    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    step: int = -1
    run_column: int = -1

    def __post_init__(self) -> None:
        if not self.runs:
            self._find_columns()

    def _find_columns(self) -> None:
        plain = usual_columns(self.names, self.given)
        self.step = self.names.index(plain[STEP]) if STEP in plain else -1
        self.run_column = next((self.names.index(name) for name in RUN_NAMES if name in self.names), -1)
        if LOSS in plain:
            self.runs = {"": {column: self.names.index(name) for column, name in plain.items() if column != STEP}}
            return
        metrics = dict[str, dict[str, int]]()
        for index, name in enumerate(self.names):
            run, separator, metric = name.rpartition(" - ")
            if separator and not metric.endswith(EXTREMES):
                metrics.setdefault(run, {})[metric] = index
        for run, indices in metrics.items():
            found = usual_columns(list(indices), self.given)
            if LOSS in found:
                self.runs[run] = {column: indices[name] for column, name in found.items() if column != STEP}

    def read(self, line: str) -> Iterator[Row]:
        cells = self._cells(line)
        if len(cells) > len(self.names) or self.step >= len(cells):
            return
        step = step_of(cells[self.step])
        if step is None or self.lacks():
            return
        name = cells[self.run_column] if 0 <= self.run_column < len(cells) else ""
        for run, columns in self.runs.items():
            values = {
                column: value
                for column, index in columns.items()
                if index < len(cells) and (value := number(cells[index])) is not None
            }
            if values:
                yield Row(run or name, step, values)

    def _cells(self, line: str) -> list[str]:
        if '"' not in line:
            return line.rstrip("\r\n").split(self.separator)
        return next(csv.reader([line], delimiter=self.separator), [])

    def lacks(self) -> str:
        if self.step < 0:
            return missing_column(STEP, self.names, self.given)
        return "" if self.runs else missing_column(LOSS, self.names, self.given)


Lines = TextLines | JsonLines | TableLines


def table_of(line: str, given: Mapping[str, str]) -> TableLines | None:
    """The table that begins with this line of names; None if it holds no names. The separator is the most frequent."""
    separator = max(",;\t|", key=line.count)
    names = [name.strip() for name in next(csv.reader([line.strip("\ufeff\r\n")], delimiter=separator), [])]
    is_known = any(name in {*NAMES[STEP], *NAMES[LOSS]} for name in (each.lower() for each in names))
    table = TableLines(separator, names, dict(given))
    if not (is_known or table.step >= 0 or table.runs) or not all(map(str.isprintable, names)):
        return None
    return table


class LogReader:
    """Reads the lines of a log one by one, and recognizes their format by the first ones."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = dict(given)
        self.lines: Lines | None = None
        self.first = ""  # the first line that is not empty
        self.table: TableLines | None = None  # a table that the first line begins, but that lacks a column
        self.json = JsonLines(self.given)

    def read(self, line: str) -> Iterable[Row]:
        """The rows of a line; none if it is in another format, as is what a program prints before it trains."""
        if self.lines is None:
            self.lines = self._recognize(line)
        return self.lines.read(line) if self.lines else ()

    def _recognize(self, line: str) -> Lines | None:
        for name in TEXTS:
            text = TextLines(name)
            if any(text.read(line)):
                return text
        fields = json_object(line)
        if fields is not None:
            self.json.learn(fields)
            if not self.json.lacks():
                return self.json
        if not self.first and line.strip():
            self.first = line
            self.table = table_of(line, self.given)
            if self.table and not self.table.lacks():
                return self.table
        return None

    def fault(self) -> str:
        """The reason why the lines held no row."""
        if self.lines:
            return self.lines.lacks() or "has no row with a step and a loss"
        if self.table:
            return self.table.lacks()
        if self.json.seen:
            return self.json.lacks()
        return unknown_format(self.first) if self.first else "is empty"


STATE = "trainer_state.json of Transformers"


def known_formats() -> str:
    """The known formats, for a message about a file in another one."""
    texts = [each.title for each in TEXTS.values()]
    return ", ".join(["CSV with a step and a loss", "JSON lines with a step and a loss", *texts, STATE, "TensorBoard"])


def unknown_format(line: str) -> str:
    """The message about a log in an unknown format with this first line."""
    shown = line.strip()
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    known = f"{known_formats()}; --columns step=COLUMN,loss=COLUMN names other columns"
    return f"is in no known format; its first line is {shown!r}; known: {known}"


def trainer_state(path: Path, given: Mapping[str, str]) -> Iterator[Row] | None:
    """The rows of a ``trainer_state.json``; None if the file is not one.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        history = files.read_json(path, dict).get("log_history")
    except ValueError:
        return None
    if not isinstance(history, list):
        return None
    lines, entries = JsonLines(dict(given)), [dict(_flat(entry)) for entry in history if isinstance(entry, dict)]
    for entry in entries:
        lines.learn(entry)
    return (row for entry in entries for row in lines.read_object(entry))
