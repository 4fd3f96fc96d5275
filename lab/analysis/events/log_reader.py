"""Reads the log of any trainer line by line: pairs of a word and a number, JSON objects, or rows of a table.

No format is known in advance. Usual names, and what recurs, decide which word stands for the step, the loss and other
measurements, because a word that occurs once, as in source code before the first row, measures nothing.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.analysis.events.last_words import says_the_end
from lab.analysis.text import listed
from lab.core import files, shipped
from lab.core.errors import RequestError, nearest
from lab.records.table_files import flat, mapping_of, with_point, without_commas

STEP, LOSS = "step", "loss"
LARGEST_STEP = 2**53  # floats beyond it skip integers
LARGEST_LOSS = 1e30  # a loss beyond it is as good as infinite, and its square still is a number
# What names mean; the file says how.
_WORDS = shipped.load(Path(__file__).with_name("names.yaml"))
NAMES: dict[str, list[str]] = _WORDS["columns"]
UNITS: dict[str, str] = _WORDS["units"]
WHOLE_NAMES, LAST_NAMES, HELD_OUT, OF_WHOLE, OTHERS, AVERAGES = (
    frozenset(_WORDS[kind]) for kind in ("whole", "last", "held_out", "of_whole", "others", "averages")
)
FEWEST = 3  # a word that occurs in fewer lines does not recur
RARE = 5  # and one that occurs in so many times fewer than another is a summary
# How well names fit: those that end with a usual one; averages and parts of a loss; names that come last; and where
# lines hold ``400/3000`` without a name.
ENDING, SECOND, PART, LAST, PROGRESS_RANK = 100, 100, 200, 400, 500
# Two of these measurements, or the first alone, are those of reinforcement learning.
REWARD = "reward"
OF_REWARDS = (REWARD, "kl", "update_kl", "entropy")
# What is followed besides where these are logged.
OF_SAMPLES = ("zero_variance", "response_length", "truncated", "clip_fraction")
RUN_NAMES = ("run", "run_id", "run_name")  # columns whose values name the run of a row
# Columns of this name and a number are gradient norms of the micro-batches of a step.
MICRO_BATCH = "micro_batch_norm_"
# Suffixes that W&B adds to columns of an exported chart which hold extremes over a group of runs.
EXTREMES = ("__MIN", "__MAX")
# A file with a line of more bytes is no log of losses.
LONGEST_LINE = 2**20
# The first line with a measurement must lie within this many bytes.
LONGEST_PREAMBLE = 8 * files.MIB
WAITING = 500  # lines with numbers after which the columns are chosen
# What a reader keeps between two processes.
STATE = ("columns", "unit", "step", "in_one_line", "has_held_out", "rank")
MOST_NAMES = 10_000  # different names; a log with more holds no measurements

ENDS = re.compile(r"[\r\n]")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d.])|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
    r"|(?:nan|inf(?:inity)?)(?![\w]))[A-Za-z%]*",
    re.IGNORECASE,
)
UNIT = re.compile(r"(?<=[\d.])(?![kKMB]$)[A-Za-z]+$")
ROUNDED = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))([kKMB])")
THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
WORD_BEFORE = re.compile(
    r"([A-Za-z_][\w./@\-]*(?:\(\w+\))?(?:[ \t]+[A-Za-z_(][\w./@()\-]*){0,3})[\"'\s:=>]*(?:tensor\()?$"
)
SEPARATORS = re.compile(r"[|,;{}\[\]\t]")
RANK = re.compile(r"(?:(?<![a-z])(?:local_|global_)?rank\W{0,3}|\[default)(\d+)", re.IGNORECASE)
# Steps of all steps, such as ``400/3000``, but no date or path; and a name before it that means a pass over the data.
COUNT = r"\d{1,3}(?:,\d{3})+|\d+\.\d+[kKMB]|\d+[kKMB]?"
PROGRESS = re.compile(rf"(?<![\w.,/-])({COUNT})\s*/\s*({COUNT})(?![\w/:]|[.,-]\d)")
PASS = re.compile(r"epochs?\W*$|\bep\W*$", re.IGNORECASE)
# A line of two numbers.
PAIR = re.compile(r"\s*(\d+)(?:\s+|\s*[,;:|]\s*)([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf))\s*", re.I)
HELD_OUT_WORD = re.compile(rf"(?<![\w./-])(?:{'|'.join(HELD_OUT - {'best', 'held'})})(?![\w./-])", re.IGNORECASE)
# Lines of tables that hold no cells; and the vertical bars of other programs.
RULE = re.compile(r"[\s|:+=\-\u2500-\u257f]+")
VERTICAL = str.maketrans(dict.fromkeys("│┃║", "|"))
IS_HELD_OUT = ""  # the name of a field that lines of held-out losses have
LAST_WORDS = "last words"  # and of one that holds a line with which the program says that it stops
LONGEST_WORDS = 200  # letters of such a line

Fields = Mapping[str, Any]


class Row(NamedTuple):
    """Measurements of a step of a run, by column; those that were not logged are absent, and NaN is a logged value.

    Or none, but a line of ``last_words`` after that step; see ``says_the_end``.
    """

    run: str
    step: int
    values: dict[str, float]
    last_words: str = ""


def number(value: object) -> float | None:
    """The number in a text or a JSON value, infinite if it is too large for a float; None if there is none."""
    try:
        return None if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except TypeError:
        return None
    except ValueError:
        word = str(value).strip()
        if rounded := ROUNDED.fullmatch(word):  # 1.2M
            return round(float(rounded[1]) * THOUSANDS[rounded[2]], 3)
        return None if (plain := without_commas(word)) == word else float(plain)


@lru_cache(maxsize=MOST_NAMES)
def plain_name(name: str) -> str:
    """``train/CrossEntropyLoss -> train_cross_entropy_loss``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^0-9a-z_]+", "_", words.lower()).rstrip("_")


@lru_cache(maxsize=MOST_NAMES)
def rank_of(column: str, name: str) -> int | None:
    """How well a name fits a column: 0 is best; None if it does not fit."""
    plain, usual = plain_name(name), NAMES[column]
    if plain in usual:
        return usual.index(plain) + (LAST if plain in LAST_NAMES else 0)
    if column == STEP and is_progress(name):
        return PROGRESS_RANK
    endings = [ending for ending in usual if ending not in WHOLE_NAMES and plain.endswith(f"_{ending}")]
    if endings:
        ending = max(endings, key=len)
        rest = set(plain.removesuffix(ending).strip("_").split("_"))
        if rest & OTHERS or (rest & HELD_OUT and column not in ("val_loss", "clean_val_loss")):
            return None
        is_part = column == LOSS and not rest <= OF_WHOLE | AVERAGES
        return ENDING + usual.index(ending) + (SECOND if rest & AVERAGES else 0) + (PART if is_part else 0)
    prefix = next((ending for ending in usual if ending not in WHOLE_NAMES and plain.startswith(f"{ending}_")), None)
    if prefix and set(plain.removeprefix(prefix).strip("_").split("_")) <= AVERAGES:
        return ENDING + len(usual) + SECOND  # loss_avg
    return None


def _is(column: str, name: str) -> bool:
    return rank_of(column, name) is not None


def _is_of_rewards(name: str) -> bool:
    """Whether a name fits a column of reinforcement learning, even if it is called a loss, as an entropy may be."""
    return any(_is(column, name) for column in OF_REWARDS)


def is_progress(name: str) -> bool:
    """Whether a name stands for the first number of ``400/3000``."""
    return name.startswith("N/")


def is_part(name: str) -> bool:
    """Whether a loss may be one of several parts of the loss of training."""
    rank = rank_of(LOSS, name)
    return rank is not None and rank >= ENDING + PART


def usual_columns(names: Iterable[str], given: Mapping[str, str]) -> dict[str, str]:
    """The name of each column that is present: as ``given``, or else the one that fits best."""
    names = list(names)
    found = dict[str, str]()
    for column in NAMES:
        fits = [(rank, place, name) for place, name in enumerate(names) if (rank := rank_of(column, name)) is not None]
        if column in given:
            fits = [(0, 0, name) for name in names if given[column] in (name, plain_name(name))]
        if fits:
            found[column] = min(fits)[2]
    if LOSS not in found and REWARD in found:
        found[LOSS] = found[REWARD]  # rows of reinforcement learning need no loss
    has_experts = "router_balance" in found or plain_name(found.get(LOSS, "")) == "lm_loss"
    is_open = "router_z" not in found and "log_z_square" not in given
    if has_experts and is_open and found.get("log_z_square") == "z_loss":
        found["router_z"] = found.pop("log_z_square")  # so Megatron-LM calls the z-loss of its routers
    return found | {name: name for name in names if re.fullmatch(rf"{MICRO_BATCH}\d+", name)}


def of_rewards(columns: Container[str]) -> bool:
    """Whether columns are those of reinforcement learning, where the loss says little and is in no unit."""
    known = [name in columns for name in OF_REWARDS]
    return known[0] or sum(known) > 1


def described(columns: Mapping[str, str], unit: str = "nats") -> str:
    """Which names were taken for the loss and other measurements, and in which unit the loss is."""
    named = ("grad_norm", "lr", *OF_REWARDS, *(OF_SAMPLES if of_rewards(columns) else ()))
    others = [f"{column} '{columns[column]}'" for column in named if column in columns]
    units = f" in {unit}" if unit == "nats" else f" in {unit}, converted to nats"
    if columns[LOSS] == columns.get(REWARD):
        return ", ".join(["no loss, of reinforcement learning", *others])
    if of_rewards(columns):
        units = " of reinforcement learning, judged only where it is not finite"
    return ", ".join([f"loss '{columns[LOSS]}'{units}", *others])


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
    shown = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    return f"has no column of {plural} among {shown or 'none'}; --columns {column}=COLUMN names it"


def fields_of(line: str) -> Fields:
    """The words and numbers of a line: those of a JSON object at its end, or else each number with the words before it.

    >>> fields_of("iteration 400/ 3000 | lm loss 6.758929E+00 | elapsed time per iteration (ms): 12.5 |")
    {'iteration': '400', 'lm loss': '6.758929E+00', 'elapsed time per iteration (ms)': '12.5'}
    """
    text = line[line.find("{") :].rstrip()
    if text.startswith("{") and text.endswith("}"):
        with contextlib.suppress(ValueError):
            return _with_words(dict(flat(mapping_of(text), "/")), line[: line.find("{")])
    if pair := PAIR.fullmatch(line):
        return {"first number": pair[1], "second number": pair[2]}
    fields, end, loss_at = dict[str, Any](), 0, 0
    for match in NUMBER.finditer(line):
        gap = SEPARATORS.split(line[max(end, match.start() - 80) : match.start()])[-1]
        end = match.end()
        if (word := WORD_BEFORE.search(gap)) and not match[0].endswith("%"):
            fields.setdefault(word[1], UNIT.sub("", match[0]))
            loss_at = loss_at or (match.start() if rank_of(LOSS, word[1]) is not None else 0)
    if "/" in line:
        fields |= _progress(line)
    return fields | _held_out(line[:loss_at])


def _progress(text: str) -> dict[str, Any]:
    """The first number of each ``400/3000`` in a text, but not of passes over the data."""
    found = dict[str, Any]()
    for match in PROGRESS.finditer(text):
        done, whole = number(match[1]), number(match[2])
        if done is not None and whole and done <= whole and not PASS.search(text[: match.start()]):
            found[f"N/{whole:g}" if whole < 1e6 else f"N/{int(whole)}"] = done
    return found


def _held_out(text: str) -> dict[str, Any]:
    """A field that says that a line is of held-out losses, if the text before its loss does."""
    return {IS_HELD_OUT: True} if HELD_OUT_WORD.search(text) and "train" not in text.lower() else {}


def _with_words(fields: Fields, before: str = "") -> Fields:
    """Fields, some of whose values are text, with the numbers and words in it."""
    more = dict[str, Any](_held_out(before))
    for name, value in fields.items():
        if isinstance(value, str):
            if PROGRESS.fullmatch(value.strip()) and (progress := _progress(value)):
                more |= progress
                more[name] = next(iter(progress.values()))
            if value.strip().lower() in HELD_OUT:
                more[IS_HELD_OUT] = True
    return {**fields, **more} if more else fields


class Table(NamedTuple):
    """A line of names, and the rows below it. In a chart exported from W&B, a column ``RUN - METRIC`` is of one run."""

    separator: str
    names: list[str]

    @property
    def has_loss(self) -> bool:
        """Whether one of the columns may hold losses."""
        return any(rank_of(LOSS, name.rpartition(" - ")[2]) is not None for name in self.names)

    def cells(self, line: str) -> list[str]:
        cells = (
            line.split(self.separator) if '"' not in line else next(csv.reader([line], delimiter=self.separator), [])
        )
        return list(map(str.strip, cells)) if self.separator == "|" else cells

    def fields(self, line: str) -> Iterator[tuple[str, Fields]]:
        """The cells of a row by name, for each run in it."""
        cells = self.cells(line)
        if len(cells) > len(self.names) or cells == self.names:  # other text, or the names once more
            return
        shared, runs = dict[str, str](), dict[str, dict[str, str]]()
        for name, cell in zip(self.names, cells, strict=False):
            if " - " not in name:
                shared.setdefault(name, cell)
                continue
            run, _, metric = name.rpartition(" - ")
            if not metric.endswith(EXTREMES):
                runs.setdefault(run, {})[metric] = cell
        for run, fields in runs.items():
            yield run, _with_words(shared | fields)
        if not runs:
            yield "", _with_words(shared)


def table_of(line: str) -> Table | None:
    """The table that begins with this line, if it is one of names; the separator is the most frequent."""
    separator = max(",;\t|", key=line.count)
    try:
        names = [name.strip() for name in next(csv.reader([line.strip("\ufeff\r\n")], delimiter=separator), [])]
    except csv.Error:
        return None
    is_named = any(rank_of(column, name.rpartition(" - ")[2]) is not None for column in (STEP, LOSS) for name in names)
    are_words = all(name.isprintable() and number(name) is None for name in names)
    return Table(separator, names) if is_named and are_words else None


class LogReader:
    """Reads lines one by one. It keeps them until it knows the columns, and makes rows of them from then on.

    Args:
        given: the names of columns that are known, by column; see ``given_columns``.

    Attributes:
        columns: the name of each column, once they are chosen.
        unit: in which the loss is logged: ``nats``, ``bits`` or ``perplexity``.
        dropped: how many rows were left out, by the reason.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = dict(given)
        self.columns = dict[str, str]()
        self.unit = "nats"
        self.table: Table | None = None
        self.header = ""  # the line before, which may be one of names
        self.step = -1  # of the rows to come
        self.in_one_line = False  # whether the step stands in the lines of losses, and not in one before them
        self.has_held_out = False  # whether lines that say so hold losses of held-out text, since others do not say so
        self.rank: str | None = None  # of several processes that write into one log, the one that is read
        self.names = dict[str, None]()
        self.dropped = Counter[str]()
        self.first, self.lines = "", 0  # the first line that is not empty, and how many there are
        self.waiting = list[tuple[str, Fields]]()

    def read_lines(self, text: str) -> list[Row]:
        """The rows that are complete with these lines; a carriage return ends one, too, since bars are drawn so."""
        lines = list(filter(None, ENDS.split(text)))
        is_plain = '"' not in text and "\x1b" not in text and not HELD_OUT_WORD.search(text)
        rows = self._numeric_rows(lines) if is_plain else None
        return [row for line in lines for row in self.read(line)] if rows is None else rows

    def _numeric_rows(self, lines: Sequence[str]) -> list[Row] | None:
        """The rows of these lines, read at once, if all are of a table, and each cell that counts holds a number."""
        table, columns = self.table, self.columns
        if not table or STEP not in columns or not {*table.names} <= {*self.names} or " - " in "".join(table.names):
            return None
        try:
            cells = zip(*(line.split(table.separator) for line in lines), strict=True)
            cells_of = dict(reversed([*zip(table.names, cells, strict=True)]))  # of two columns of a name the first
            numbers = {column: list(map(float, cells_of[name])) for column, name in columns.items()}
        except (KeyError, ValueError):
            return None
        steps = numbers.pop(STEP)
        if not all(0 <= step <= LARGEST_STEP and step.is_integer() for step in steps):
            return None
        numbers[LOSS] = list(map(self._in_nats, numbers[LOSS]))
        self.step = int(steps[-1])
        runs = next((cells_of[name] for name in RUN_NAMES if name in cells_of), [""] * len(lines))
        values = (dict(zip(numbers, row, strict=True)) for row in zip(*numbers.values(), strict=True))
        return list(map(Row, runs, map(int, steps), values))

    def read(self, line: str) -> list[Row]:
        """The rows that are complete with this line; none if it holds no measurement."""
        line = ESCAPES.sub("", line).rstrip("\r\n").translate(VERTICAL)
        if RULE.fullmatch(line) or not line:
            return []
        self.first, self.lines = self.first or line, self.lines + 1
        if says_the_end(line):
            return self.add({LAST_WORDS: line.strip()[:LONGEST_WORDS]})
        if self.table is None or not (self.columns or self.table.has_loss):
            self.table = self._begun_table(line) or self.table
            self.header = line
        if self.table:
            return [row for run, fields in self.table.fields(line) for row in self.add(fields, run)]
        if (rank := RANK.search(line)) and self.rank not in (None, rank[1]):
            self.dropped[f"rows of other ranks than {self.rank}"] += 1
            return []
        fields = fields_of(line)
        if rank and self.rank is None and any(rank_of(LOSS, name) is not None for name in fields):
            self.rank = rank[1]
        return self.add(fields)

    def _begun_table(self, line: str) -> Table | None:
        """The table whose names are in the line before this one, if this one has numbers below them."""
        table = None if self.columns and self.step >= 0 else table_of(self.header)
        cells = table.cells(line) if table else []
        if table is None or len(cells) != len(table.names) or all(number(cell) is None for cell in cells):
            return None
        self.waiting, self.names = [], {}
        if self.columns and self.columns[LOSS] not in table.names:
            self.columns = {}
        return table

    def renewed(self) -> LogReader:
        """A reader of the file that replaces the log; it expects the same columns, and needs no names above a table."""
        reader = LogReader(self.given)
        reader.columns, reader.unit, reader.names = self.columns, self.unit, self.names
        reader.in_one_line = self.in_one_line
        if self.table:
            reader.header = self.table.separator.join(self.table.names)
        return reader

    def state(self) -> dict[str, Any]:
        """What the next line needs, as values for JSON."""
        table = self.table._asdict() if self.table else None
        return {name: getattr(self, name) for name in STATE} | {"table": table}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        vars(self).update({name: state[name] for name in STATE})
        self.table = Table(**state["table"]) if state["table"] else None
        self.names = dict.fromkeys(self.columns.values())

    def add(self, fields: Fields, run: str = "") -> list[Row]:
        """The rows that are complete with these fields."""
        if not fields:
            return []
        if new := [name for name in fields if name not in self.names]:
            if len(self.names) < MOST_NAMES:
                self.names |= dict.fromkeys(new)
            if self.columns:
                self.columns = usual_columns(new, self.given) | self.columns
        if self.columns:
            return list(self._rows(fields, run))
        self.waiting.append((run, fields))
        return self.settle() if len(self.waiting) % WAITING == 0 else []

    def settle(self) -> list[Row]:
        """Choose the columns, if the lines so far allow it, and make rows of these lines."""
        if self.columns or not self.waiting:
            return []
        steps = self._candidates(STEP, self._counts)
        beside = {name for _, fields in self.waiting for name in fields if any(step in fields for step in steps)}
        losses = self._losses(beside) or self._candidates(REWARD, bool)
        steps = self._candidates(STEP, self._counts)  # again, since lines of held-out losses may be known now
        if not losses or any(column not in usual_columns(self.names, self.given) for column in self.given):
            return []
        with_loss = [
            fields
            for _, fields in self.waiting
            if losses[0] in fields and not (self.has_held_out and IS_HELD_OUT in fields)
        ]
        if steps and is_progress(steps[0]):  # of bars of training and evaluation, the one beside the loss
            steps.sort(key=lambda step: -sum(step in fields for fields in with_loss))
        self.in_one_line = bool(steps) and 2 * sum(steps[0] in fields for fields in with_loss) > len(with_loss)
        of_rows = [fields for _, fields in self.waiting if not self.in_one_line or steps[0] in fields]
        names = [name for name in self.names if any(name in fields for fields in of_rows)]
        names = [name for name in names if _is_of_rewards(name) or not (_is(LOSS, name) or _is(STEP, name))]
        self.columns = usual_columns([*names, losses[0]], self.given) | {LOSS: losses[0]}
        self.columns |= {STEP: steps[0]} if steps else {}
        self.unit = self._unit_of_loss()
        waiting, self.waiting = self.waiting, []
        return [row for run, fields in waiting for row in self._rows(fields, run)]

    def _losses(self, beside: Container[str]) -> list[str]:
        """The names of losses, the best first; none if the best is one of several parts.

        ``beside`` are the names in lines with a step.
        """
        self.has_held_out = False
        every = self._candidates(LOSS, lambda name: name in beside or self._varies(name))
        told = [
            fields for _, fields in self.waiting if IS_HELD_OUT not in fields and any(map(fields.__contains__, every))
        ]
        self.has_held_out = len(told) >= FEWEST
        losses = self._candidates(LOSS, lambda name: name in beside or self._varies(name))
        losses = losses or [name for name in self._candidates(LOSS, bool) if len(self._values(name)) >= RARE * FEWEST]
        if losses and plain_name(losses[0]) == "second_number" and 2 * len(self._values(losses[0])) < self.lines:
            return []
        return [] if self._parts(losses) else losses

    def _parts(self, losses: Sequence[str]) -> list[str]:
        """The losses of which none is known to be the whole, of training that is no reinforcement learning."""
        if LOSS in self.given or len(losses) < 2 or not is_part(losses[0]) or of_rewards(usual_columns(self.names, {})):
            return []
        return list(losses)

    def _values(self, name: str) -> list[float]:
        of_training = self.has_held_out and (rank_of(LOSS, name) is not None or rank_of(STEP, name) is not None)
        some = (fields for _, fields in self.waiting if not (of_training and IS_HELD_OUT in fields))
        return [value for fields in some if (value := number(fields.get(name))) is not None]

    def _candidates(self, column: str, is_one: Callable[[str], bool]) -> list[str]:
        """The names of a column that recur, the best first."""
        if column in self.given:
            return [name for name in self.names if self.given[column] in (name, plain_name(name))][:1]
        ranks = [(rank, name) for name in self.names if (rank := rank_of(column, name)) is not None]
        found = {name: len(self._values(name)) for _, name in sorted(ranks) if is_one(name)}
        often = max(found.values(), default=0) / RARE
        return [
            name for name, count in found.items() if count >= FEWEST and (count >= often or self._may_be_rare(name))
        ]

    def _may_be_rare(self, name: str) -> bool:
        """Whether it is a bar, or said to be of training and in lines of several steps, unlike that of a summary."""
        if is_progress(name):
            return True
        if not {"train", "training"} & {*plain_name(name).split("_")}:
            return False
        steps = [step for step in self.names if rank_of(STEP, step) is not None]
        known = {
            (step, fields[step]) for _, fields in self.waiting if name in fields for step in steps if step in fields
        }
        return any(sum(each == step for each, _ in known) >= FEWEST for step in steps)

    def _varies(self, name: str) -> bool:
        values = self._values(name)
        return len(set(values)) > 1 or not all(map(math.isfinite, values))

    def _counts(self, name: str) -> bool:
        """Whether the values are whole numbers that change, those of a bar from line to line."""
        values = self._values(name)
        whole = sum(0 <= value <= LARGEST_STEP and value == int(value) for value in values if math.isfinite(value))
        changes = sum(a != b for a, b in itertools.pairwise(values))
        return changes > (len(values) / 2 if is_progress(name) else 0) and whole >= 0.9 * len(values)

    def _unit_of_loss(self) -> str:
        """The unit of the loss, by its name, or by a perplexity beside it."""
        words = plain_name(self.columns[LOSS]).split("_")
        if unit := next((UNITS[word] for word in words if word in UNITS), None):
            return unit
        other = next((name for name in self.names if UNITS.get(plain_name(name).split("_")[-1]) == "perplexity"), None)
        both = ((number(fields.get(self.columns[LOSS])), number(fields.get(other or ""))) for _, fields in self.waiting)
        bits = [math.log(ppl) / loss for loss, ppl in both if loss and ppl and ppl > 1 and math.isfinite(loss * ppl)]
        return "bits" if bits and abs(float(np.median(bits)) / math.log(2) - 1) < 0.02 else "nats"

    def _rows(self, fields: Fields, run: str) -> Iterator[Row]:
        if LAST_WORDS in fields and self.step >= 0:
            yield Row(run, self.step, {}, fields[LAST_WORDS])
        values = dict[str, float]()
        for column, name in self.columns.items():
            if column != STEP and (value := number(fields.get(name))) is not None:
                values[column] = self._in_nats(value) if column == LOSS else value
        is_held_out = self.has_held_out and IS_HELD_OUT in fields
        if is_held_out and LOSS in values:
            values = {"val_loss": values[LOSS]} | {name: value for name, value in values.items() if name == "val_loss"}
        if STEP in self.columns:
            text = fields.get(self.columns[STEP])
            step = number(text)
            if step is not None and 0 <= step <= LARGEST_STEP and step == int(step):
                self.step = int(step)
            elif step is not None and values:
                self.dropped[f"rows whose step is no whole number, such as {text}"] += 1
                return
            elif values and (self.in_one_line or text not in (None, "")) and not is_held_out:
                self.dropped["rows without a step"] += 1
                return
        elif LOSS in values:
            self.step += 1
        if values and self.step >= 0:
            run = run or next((str(fields[name]) for name in RUN_NAMES if isinstance(fields.get(name), (str, int))), "")
            yield Row(run, self.step, values)

    def _in_nats(self, loss: float) -> float:
        if self.unit == "perplexity":
            return math.log(loss) if loss > 0 else math.nan
        loss = loss * math.log(2) if self.unit == "bits" else loss
        return loss if abs(loss) < LARGEST_LOSS or math.isnan(loss) else math.copysign(math.inf, loss)

    def chosen(self) -> str:
        """Which names were taken for the step, the loss and the others, and in which unit the loss is."""
        step = f"step {self.columns[STEP]!r}" if STEP in self.columns else "no step, so that rows count"
        return f"{step}, {described(self.columns, self.unit)}"

    def _rank_of_loss(self, name: str) -> int:
        return rank_of(LOSS, name) or 0

    def fault(self) -> str:
        """The reason why the lines held no row."""
        if self.columns:
            return "has no row with a step and a loss"
        if not self.first and not self.names:
            return "is empty"
        if files.is_lfs_pointer(self.first.encode()):
            return files.LFS_POINTER
        if said := [fields[LAST_WORDS] for _, fields in self.waiting if LAST_WORDS in fields]:
            return f"has fewer than {FEWEST} rows with a loss, and the program says: {said[-1]!r}"
        wanted = [column for column in self.given if column not in usual_columns(self.names, self.given)]
        if wanted:
            return missing_column(wanted[0], self.names, self.given)
        named = [name for name in self.names if _is(LOSS, name) and plain_name(name) not in LAST_NAMES]
        losses = sorted(named, key=self._rank_of_loss)
        if parts := self._parts([name for name in losses if len(self._values(name)) >= FEWEST]):
            return f"has several losses and no total, {listed(parts)}; --columns loss=COLUMN names the one to judge"
        if losses and len(self._values(losses[0])) == 1:
            return (
                f"holds a single row with {losses[0]!r}, as the summary of a run does; a log has {FEWEST} rows or more"
            )
        if losses:
            words = [str(fields[losses[0]]) for _, fields in self.waiting if losses[0] in fields]
            odd = next((f": {word!r} is none{hint}" for word in words if (hint := with_point(word))), "")
            return f"has fewer than {FEWEST} rows with a number as {losses[0]!r}{odd}"
        if not self.names:
            return f"holds no measurement; its first line is {self.first.strip()[:80]!r}"
        often = Counter(tuple(fields) for _, fields in self.waiting).most_common(3)
        lines = "; ".join(", ".join(names)[:60] for names, _ in often)
        return f"{missing_column(LOSS, self.names, self.given)}; its likeliest lines hold {lines}"
