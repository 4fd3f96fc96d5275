"""Reads the log of any trainer line by line, by what ``log_lines`` finds in each.

No format is known in advance. Usual names, and what recurs, decide which word stands for the step, the loss and other
measurements, because a word that occurs once, as in source code before the first row, measures nothing.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lab.analysis.text import listed
from lab.core import files
from labwatch.events.log_lines import (
    FIRST,
    HELD_OUT_WORD,
    IS_HELD_OUT,
    RULE,
    SECOND,
    WITH_COMMA,
    Fields,
    Table,
    fields_of,
    listed_numbers,
    number,
    plain_line,
    says_the_end,
    size_of_zero,
    table_of,
)
from labwatch.events.log_names import (
    ADVERSARIAL_RANK,
    ENDING,
    HELD_OUT_LOSS,
    LAST_NAMES,
    LOSS,
    MOST_NAMES,
    OR,
    PART,
    REWARD,
    STEP,
    UNITS,
    Given,
    described,
    fits,
    is_of_rewards,
    is_part,
    is_pass,
    is_progress,
    is_some_loss,
    missing_column,
    of_rewards,
    plain_name,
    rank_of,
    usual_columns,
)

LARGEST_STEP = 2**53  # floats beyond it skip integers
LARGEST_LOSS = 1e30  # a loss beyond it is as good as infinite, and its square still is a number
FEWEST = 3  # a word that occurs in fewer lines does not recur
RARE = 5  # and one that occurs in so many times fewer than another is a summary
# With such a word in its name, a loss or a reward is what is meant, whatever others there are.
CERTAIN = {"total", "raw", "episode", "episodic", "ep", "eprewmean"}
LAST_WORDS = "last words"  # the name of a field that holds a line with which the program says that it stops
LONGEST_WORDS = 200  # letters of such a line
RUN_NAMES = ("run", "run_id", "run_name")  # columns whose values name the run of a row
# A file with a line of more bytes is no log of losses.
LONGEST_LINE = 2**20
# The first line with a measurement must lie within this many bytes.
LONGEST_PREAMBLE = 8 * files.MIB
WAITING = 500  # lines with numbers after which the columns are chosen
# What a reader knows of a file once it has chosen columns, and what else the next line needs.
KNOWN = ("steps", "apart", "ahead", "pass_name", "is_held_out", "losses", "with_comma", "others")
CHOSEN = ("columns", "unit", "step", "in_one_line", "has_held_out", "rank", *KNOWN)
STATE = (*CHOSEN, "held", "now", "raw", "before", "offsets", "parts", "is_lost", "waits_for_loss", "unsure")

ENDS = re.compile(r"[\r\n]")
RANK = re.compile(r"(?:(?<![a-z])(?:local_|global_)?rank\W{0,3}|\[default)(\d+)", re.IGNORECASE)


class Row(NamedTuple):
    """Measurements of a step of a run, by column; those that were not logged are absent, and NaN is a logged value.

    The name of a run that begins with a blank is that of one of several losses of the run that the rest names.
    A row may hold no measurement but a line of ``last_words`` after that step; see ``says_the_end``.
    """

    run: str
    step: int
    values: dict[str, float]
    last_words: str = ""


class LogReader:
    """Reads lines one by one. It keeps them until it knows the columns, and makes rows of them from then on.

    Args:
        given: the names of columns that are known, by column; or a pattern of lines that are rows, whose groups are
            columns, which replaces all else.

    Attributes:
        columns: the name of each column, once they are chosen.
        unit: in which the loss is logged: ``nats``, ``bits`` or ``perplexity``.
        dropped: how many rows were left out, by the reason.
    """

    def __init__(self, given: Given) -> None:
        self.pattern = given if isinstance(given, re.Pattern) else None
        self.given = {name: name for name in given.groupindex} if isinstance(given, re.Pattern) else dict(given)
        self.columns = dict[str, str]()
        self.unit = "nats"
        self.table: Table | None = None
        self.header = ""  # the line before, which may be one of names
        self.step = -1  # of the rows to come
        self.steps = list[str]()  # the name of the step, if there is one
        self.in_one_line = False  # whether the step stands in the lines of losses, and not in one before them
        self.apart = list[str]()  # columns that stand in lines of their own
        self.ahead = list[str]()  # those among them that come before the line of their step
        self.held = dict[str, float]()  # their values, up to that line
        self.pass_name, self.now = "", -1  # passes over the data, in each of which steps may begin anew
        self.raw, self.before = -1, -1  # the last step as it was written, and the one before it as it counts
        self.offsets = dict[str, int]()  # what is added to the steps of each
        self.has_held_out = False  # whether lines that say so hold losses of held-out text, since others do not say so
        self.is_held_out = False  # whether the only loss is of held-out text
        self.losses = list[str]()  # without a total, each is judged by itself
        self.parts = dict[str, list[float]]()  # other losses: the step and value of the last one; empty once it was NaN
        self.others = list[str]()  # names that might have been taken for a column
        self.with_comma = list[str]()  # names of numbers whose decimals follow a comma
        self.is_lost = False  # whether the last loss was not finite
        self.waits_for_loss = True  # whether this pass has no finite loss yet
        self.unsure = list[Row]()  # rows of progress bars that say nan before the first loss of a pass
        self.runs: Table | None = None  # the table of another kind that the log may be
        self.rank: str | None = None  # of several processes that write into one log, the one that is read
        self.names = dict[str, None]()
        self.dropped = Counter[str]()
        self.first, self.lines = "", 0  # the first line that is not empty, and how many there are
        self.waiting = list[tuple[str, Fields]]()
        self.lists = dict[str, list[str]]()  # of a table that lies on its side

    def read_lines(self, text: str) -> list[Row]:
        """The rows that are complete with these lines; a carriage return ends one, too, since bars are drawn so."""
        lines = list(filter(None, ENDS.split(text)))
        is_plain = text.isascii() and '"' not in text and "\x1b" not in text and not HELD_OUT_WORD.search(text)
        rows = self._numeric_rows(lines) if is_plain else None
        return [row for line in lines for row in self.read(line)] if rows is None else rows

    def _numeric_rows(self, lines: Sequence[str]) -> list[Row] | None:
        """The rows of these lines, read at once, if all are of a table, and each cell that counts holds a number."""
        table, columns = self.table, self.columns
        if not table or not table.separator or STEP not in columns or not {*table.names} <= {*self.names}:
            return None
        if self.losses or self.pass_name or " - " in "".join(table.names):
            return None
        try:
            cells = zip(*(line.split(table.separator) for line in lines), strict=True)
            cells_of = dict(reversed([*zip(table.names, cells, strict=True)]))  # of two columns of a name the first
            numbers = {column: list(map(float, cells_of[name])) for column, name in columns.items()}
            parts = [list(map(float, cells_of[name])) for name in self.parts]
        except (KeyError, ValueError):
            return None
        steps = numbers.pop(STEP)
        if not all(0 <= step <= LARGEST_STEP and step.is_integer() for step in steps):
            return None
        if any(0.0 in values for values in numbers.values()) or not all(map(math.isfinite, itertools.chain(*parts))):
            return None
        for column in filter(_is_loss, numbers):
            numbers[column] = list(map(self._in_nats, numbers[column]))
        known = [self.before, self.step, *map(int, steps)]
        self.raw = self.step = known[-1]
        self.before = next((step for step in reversed(known) if step != self.step), -1)
        self.parts |= {name: [self.step, values[-1]] for name, values in zip(self.parts, parts, strict=True)}
        runs = next((cells_of[name] for name in RUN_NAMES if name in cells_of), [""] * len(lines))
        values = (dict(zip(numbers, row, strict=True)) for row in zip(*numbers.values(), strict=True))
        return list(map(Row, runs, map(int, steps), values))

    def read(self, line: str) -> list[Row]:
        """The rows that are complete with this line; none if it holds no measurement."""
        line = plain_line(line)
        if RULE.fullmatch(line) or not line:
            return []
        self.first, self.lines = self.first or line, self.lines + 1
        if says_the_end(line):
            return self.add({LAST_WORDS: line.strip()[:LONGEST_WORDS]})
        if self.lines == 2:
            self.runs = table_of(self.first, line)
        if self.pattern:
            found = self.pattern.search(line)
            return self.add({name: each for name, each in found.groupdict().items() if each} if found else {})
        if self.table is None or not (self.columns or self.table.has(LOSS)):
            self.table = self._begun_table(line) or self.table
            self.header = line
        if self.table:
            return [row for run, fields in self.table.fields(line) for row in self.add(fields, run)]
        if (rank := RANK.search(line)) and self.rank not in (None, rank[1]):
            self.dropped[f"rows of other ranks than {self.rank}"] += 1
            return []
        if not self.columns and (listed := listed_numbers(line)):
            name, cells = listed
            self.lists[name] = [] if name in self.lists else cells
        fields = fields_of(line)
        if rank and self.rank is None and any(rank_of(LOSS, name) is not None for name in fields):
            self.rank = rank[1]
        return self.add(fields)

    def _begun_table(self, line: str) -> Table | None:
        """The table whose names are in the line before this one, if this one has numbers below them."""
        table = None if self.columns and self.step >= 0 else table_of(self.header, line)
        if table is None:
            return None
        is_named = table.has(STEP, LOSS, REWARD) or {*self.given.values()} & {*table.names}
        if not is_named or sum(map(bool, table.names)) < 2:
            return None
        self.waiting, self.names = [], {}
        if self.columns and self.columns[LOSS] not in table.names:
            self.columns = {}
        return table

    def renewed(self) -> LogReader:
        """A reader of the file that replaces the log; it expects the same columns, and needs no names above a table."""
        reader = LogReader(self.pattern or self.given)
        for name in ("columns", "unit", "names", "in_one_line", *KNOWN):
            setattr(reader, name, getattr(self, name))
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
        self.unsure = [Row(*row) for row in self.unsure]
        self.table = Table(**state["table"]) if state["table"] else None
        self.names = dict.fromkeys(self.columns.values())

    def add(self, fields: Fields, run: str = "") -> list[Row]:
        """The rows that are complete with these fields."""
        listed = {name: text for name, value in fields.items() if (text := _listed(value))} if not self.columns else {}
        self.lists |= {name: [] if name in self.lists else cells for name, cells in listed.items()}
        if not fields:
            return []
        if new := [name for name in fields if name not in self.names and name != LAST_WORDS]:
            if len(self.names) < MOST_NAMES:
                self.names |= dict.fromkeys(new)
            if self.columns:
                self.columns = usual_columns(new, self.given) | self.columns
        if self.columns:
            return list(self._rows(fields, run))
        self.waiting.append((run, fields))
        return self.settle() if len(self.waiting) % WAITING == 0 else []

    def rest(self) -> list[Row]:
        """The rows that are left when nothing follows."""
        if not (rows := self.settle()) and not self.columns and (lists := self._lists()):
            self.names = dict.fromkeys(lists)
            self.waiting = [("", dict(zip(lists, row, strict=True))) for row in zip(*lists.values(), strict=True)]
            rows = self.settle()
        unsure, self.unsure = self.unsure, []
        return [*rows, *unsure]

    def _lists(self) -> dict[str, list[str]]:
        """The rows of a table that lies on its side: those as long as that of the loss."""
        losses = [*fits(LOSS, self.lists), *fits(REWARD, self.lists), *fits(HELD_OUT_LOSS, self.lists)]
        rows = len(self.lists[losses[0]]) if losses else 0
        return {name: cells for name, cells in self.lists.items() if len(cells) == rows > 0}

    def settle(self) -> list[Row]:
        """Choose the columns, if the lines so far allow it, and make rows of these lines."""
        if self.columns or not self.waiting:
            return []
        steps = self._candidates(STEP, self._counts)
        beside = {name for _, fields in self.waiting for name in fields if any(step in fields for step in steps)}
        losses = self._losses(beside) or self._candidates(REWARD, bool)
        if not losses and steps:
            losses = self._candidates(HELD_OUT_LOSS, bool)[:1]
        steps = self._candidates(STEP, self._counts)  # again, since lines of held-out losses may be known now
        if not losses or any(column not in usual_columns(self.names, self.given) for column in self.given):
            return []
        with_loss = [
            fields
            for _, fields in self.waiting
            if losses[0] in fields and not (self.has_held_out and IS_HELD_OUT in fields)
        ]
        steps = self._steps(steps, losses[0], with_loss)
        self.steps = steps[:1]
        self.in_one_line = bool(steps) and 2 * sum(steps[0] in fields for fields in with_loss) > len(with_loss)
        self.is_held_out = sum(IS_HELD_OUT in fields for fields in with_loss) > len(with_loss) / 2
        self._choose(losses)
        self.unit = self._unit_of_loss()
        waiting, self.waiting = self.waiting, []
        return [row for run, fields in waiting for row in self._rows(fields, run)]

    def _choose(self, losses: Sequence[str]) -> None:
        """Choose the columns besides the step: those with names in its lines, and those that stand apart."""
        clock = self.steps or losses[:1]
        lines = [fields for _, fields in self.waiting if any(step in fields for step in self.steps)]
        of_rows = lines if self.in_one_line else [fields for _, fields in self.waiting]
        apart = {name for name in self.names if not any(name in fields for fields in lines)} if self.steps else set()
        names = [name for name in self.names if any(name in fields for fields in of_rows) or self._recurs(name)]
        given = {*self.given.values()}
        known = [
            name
            for name in names
            if is_of_rewards(name) or {name, plain_name(name)} & given or not (is_some_loss(name) or _is(STEP, name))
        ]
        dim = [name for name in known if self._is_dim(name) and not _is(REWARD, name)]
        chosen = usual_columns([*(name for name in known if name not in dim), losses[0]], self.given, self.names)
        self.columns = chosen | {LOSS: losses[0]} | (dict.fromkeys([STEP], self.steps[0]) if self.steps else {})
        if self.columns.get(HELD_OUT_LOSS) == losses[0]:
            del self.columns[HELD_OUT_LOSS]
        self.losses = self._parts(losses)
        self.others = [
            name for name in names if name not in self.losses and (self._counts(name) or not _is(STEP, name))
        ]
        if self.losses:
            self.columns[LOSS] = self.losses[0]
        self.columns |= self._alternatives(losses)
        others = {*self.columns.values(), *self.losses}
        self.parts = {
            name: [-1, math.nan]
            for name in names
            if name not in others and is_some_loss(name) and not self._is_average(name) and self._recurs(name)
        }
        self.apart = [column for column, name in self.columns.items() if name in apart]
        self.ahead = [column for column in self.apart if self._comes_before(self.columns[column], clock)]
        self.with_comma = [name for name in self.names if self._has_decimal_comma(name)]
        passes = [name for name in fits(STEP, self.names) if is_pass(name) and name not in clock and self._counts(name)]
        self.pass_name = passes[0] if passes and self.steps else ""

    def _steps(self, steps: Sequence[str], loss: str, with_loss: Sequence[Fields]) -> list[str]:
        """The names of the step, the best first: one in the lines of losses is better than one in lines before them.

        Passes over the data are steps if most rows have one of their own.
        """
        if STEP in self.given:
            return list(steps)
        often = {step: sum(step in fields for fields in with_loss) for step in steps}
        passes = {step: set[object]() for step in steps if is_pass(step)}
        latest = dict[str, object]()
        for _, fields in self.waiting:
            latest |= {step: fields[step] for step in passes if step in fields}
            for step in latest if loss in fields else ():
                passes[step].add(latest[step])
        steps = [step for step in steps if step not in passes or 2 * len(passes[step]) > len(with_loss)]
        if steps and is_progress(steps[0]):  # of bars of training and evaluation, the one beside the loss
            steps.sort(key=lambda step: -often[step])
        return sorted(steps, key=lambda step: 2 * often[step] <= len(with_loss))

    def _comes_before(self, name: str, clock: Container[str]) -> bool:
        """Whether there are as many lines with a name as steps, and they come before those of their step."""
        steps = sum(any(step in clock for step in fields) for _, fields in self.waiting)
        if 2 * len(self._values(name)) < steps:
            return False
        first = next(fields for _, fields in self.waiting if name in fields or any(step in clock for step in fields))
        return name in first

    def _recurs(self, name: str) -> bool:
        return len(self._values(name)) >= FEWEST

    def _is_average(self, name: str) -> bool:
        """Whether a loss is the mean of those of several steps, which stays NaN once one of them was."""
        rank = rank_of(LOSS, name)
        return rank is not None and 2 * ENDING <= rank < ENDING + PART

    def _texts(self, name: str) -> list[str]:
        return [str(fields[name]) for _, fields in self.waiting if fields.get(name) not in (None, "")]

    def _is_dim(self, name: str) -> bool:
        """Whether all numbers were printed as zero, with too few digits to say whether they are."""
        texts = [fields[name] for _, fields in self.waiting if name in fields]
        return bool(texts) and all(map(size_of_zero, texts))

    def _has_decimal_comma(self, name: str) -> bool:
        """Whether decimals follow a comma: each number has one, so none is too small for thousands."""
        numbers = [text for text in self._texts(name) if text.strip(" +-")[:1].isdigit()]
        return not _is(STEP, name) and len(numbers) >= FEWEST and all(map(WITH_COMMA.fullmatch, numbers))

    def _losses(self, beside: Container[str]) -> list[str]:
        """The names of losses, the best first.

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
        is_pair = bool(losses) and losses[0] == SECOND
        if is_pair and (self.runs or 2 * len(self._values(SECOND)) < self.lines):  # names above say what they are
            return []
        if len(losses) == 1 and LOSS not in self.given and rank_of(LOSS, losses[0]) == ADVERSARIAL_RANK:
            return []
        return [name for name in losses if not is_of_rewards(name)]

    def _parts(self, losses: Sequence[str]) -> list[str]:
        """The losses of which none is known to be the whole, of training that is no reinforcement learning."""
        if LOSS in self.given or len(losses) < 2 or not is_part(LOSS, losses[0]) or of_rewards(self.columns):
            return []
        is_adversarial = rank_of(LOSS, losses[0]) == ADVERSARIAL_RANK
        alike = [name for name in losses if is_adversarial or rank_of(LOSS, name) != ADVERSARIAL_RANK]
        return [name for name in alike if self._varies(name)] or alike[:1]

    def _alternatives(self, losses: Sequence[str]) -> dict[str, str]:
        """Columns of other names that may be meant as well: neither parts nor averages, and in the same unit."""
        found = dict[str, str]()
        names = {LOSS: losses, REWARD: self._candidates(REWARD, bool)}
        for column in (REWARD,) if of_rewards(self.columns) else (LOSS,):
            chosen = self.columns.get(column, "")
            if column in self.given or not chosen or self.losses or CERTAIN & {*plain_name(chosen).split("_")}:
                continue
            others = [name for name in names[column] if name != chosen and (rank_of(column, name) or 0) < 2 * ENDING]
            others = [name for name in others if 2 * len(self._values(name)) > len(self._values(chosen))]
            alike = [name for name in others if _unit_of(name) == _unit_of(chosen)]
            found |= {f"{column}={chosen}{OR}{column}={name}": name for name in alike}
        return found

    def _values(self, name: str) -> list[float]:
        of_training = self.has_held_out and (rank_of(LOSS, name) is not None or rank_of(STEP, name) is not None)
        some = (fields for _, fields in self.waiting if not (of_training and IS_HELD_OUT in fields))
        return [value for fields in some if (value := number(fields.get(name))) is not None]

    def _candidates(self, column: str, is_one: Callable[[str], bool]) -> list[str]:
        """The names of a column that recur, the best first."""
        if column in self.given:
            return [name for name in self.names if self.given[column] in (name, plain_name(name))][:1]
        names = [name for name in fits(column, self.names) if column in (STEP, REWARD) or not self._is_dim(name)]
        found = {name: len(self._values(name)) for name in names if is_one(name)}
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
        """Whether the values are whole numbers that change, those of a bar in each line; or grow, without a name."""
        values = self._values(name)
        whole = sum(0 <= value <= LARGEST_STEP and value == int(value) for value in values if math.isfinite(value))
        changes = sum(a != b for a, b in itertools.pairwise(values))
        if name == FIRST and sum(a > b for a, b in itertools.pairwise(values)) > len(values) / 10:
            return False
        return changes > (len(values) / 2 if is_progress(name) or name == FIRST else 0) and whole >= 0.9 * len(values)

    def _unit_of_loss(self) -> str:
        """The unit of the loss, by its name, or by a perplexity beside it."""
        if unit := _unit_of(self.columns[LOSS]):
            return unit
        other = next((name for name in self.names if UNITS.get(plain_name(name).split("_")[-1]) == "perplexity"), None)
        both = ((number(fields.get(self.columns[LOSS])), number(fields.get(other or ""))) for _, fields in self.waiting)
        bits = [math.log(ppl) / loss for loss, ppl in both if loss and ppl and ppl > 1 and math.isfinite(loss * ppl)]
        return "bits" if bits and abs(float(np.median(bits)) / math.log(2) - 1) < 0.02 else "nats"

    def _number(self, fields: Fields, name: str) -> float | None:
        value = number(fields.get(name), has_decimal_comma=name in self.with_comma)
        is_small = value == 0 and name != self.columns.get(REWARD)  # a reward may well be 0
        return size_of_zero(fields[name]) if is_small else value

    def _rows(self, fields: Fields, run: str) -> Iterator[Row]:
        if LAST_WORDS in fields and self.step >= 0:
            yield Row(f"{run} {self.losses[0]}" if self.losses else run, self.step, {}, fields[LAST_WORDS])
        values = dict[str, float]()
        for column, name in self.columns.items():
            if column != STEP and (value := self._number(fields, name)) is not None:
                values[column] = self._in_nats(value) if _is_loss(column) else value
        is_held_out = self.has_held_out and IS_HELD_OUT in fields
        if is_held_out and LOSS in values:
            values = {HELD_OUT_LOSS: values[LOSS]} | {
                name: value for name, value in values.items() if name == HELD_OUT_LOSS
            }
        text = next((fields[step] for step in self.steps if fields.get(step) not in (None, "")), None)
        step, is_clock = number(text), LOSS in values
        if self.pass_name and (now := number(fields.get(self.pass_name))) is not None and now == int(now):
            self.now = int(now)
        if self.steps:
            is_clock = step is not None and 0 <= step <= LARGEST_STEP and step == int(step)
            if step is not None and is_clock and is_held_out and self.pass_name:
                is_clock = False  # their iterations are not those of training
            elif step is not None and is_clock:
                yield from self._go_to(int(step))
            elif step is not None and values:
                self.dropped[f"rows whose step is no whole number, such as {text}"] += 1
                return
            elif text is not None or (LOSS in values and self.in_one_line and not is_held_out):
                self.dropped["rows without a step"] += bool(values)
                return
            elif self.in_one_line:
                values = {column: value for column, value in values.items() if column in self.apart or is_held_out}
        elif LOSS in values:
            self.step += 1
        if is_clock:
            values, self.held = self.held | values, {}
        else:
            self.held |= {column: value for column, value in values.items() if column in self.ahead}
            values = {column: value for column, value in values.items() if column not in self.ahead}
        if self.step < 0:
            return
        run = run or next((str(fields[name]) for name in RUN_NAMES if isinstance(fields.get(name), (str, int))), "")
        yield from self._parts_of_row(fields, run, values)
        if values:
            yield from self._sure(Row(run, self.step, values), any(map(is_progress, fields)))

    def _go_to(self, raw: int) -> Iterator[Row]:
        """Go to a step. Where each pass over the data counts its own, those of the passes before are added.

        Yields the rows of a bar that ended without a loss.
        """
        begins_anew = 0 <= raw < self.raw
        if begins_anew:
            self.waits_for_loss = True
            yield from self.unsure
            self.unsure = []
        step, now = raw, str(self.now)
        if self.pass_name:
            if now not in self.offsets:
                last = max(self.offsets.values(), default=0)
                spacing = self.step - self.before if self.before >= 0 else 1
                self.offsets[now] = self.step + spacing - raw if begins_anew else last
            step += self.offsets[now]
        if step != self.step:
            self.before = self.step
        self.raw, self.step = raw, step

    def _parts_of_row(self, fields: Fields, run: str, values: Mapping[str, float]) -> Iterator[Row]:
        """Of several losses without a total those but the first; and parts of a sound one, once they were NaN."""
        if LOSS in values:
            self.is_lost = not math.isfinite(values[LOSS])
        for name in self.losses[1:]:
            if (loss := self._number(fields, name)) is not None:
                yield Row(f"{run} {name}", self.step, {LOSS: self._in_nats(loss)})
        for name, last in self.parts.items():
            loss = self._number(fields, name)
            if loss is None or self.is_lost:
                continue
            if last and not math.isfinite(loss):
                if last[0] >= 0:
                    yield Row(f"{run} {name}", int(last[0]), {LOSS: last[1]})
                self.parts[name] = []
            elif last:
                self.parts[name] = [self.step, loss]
            if not self.parts[name]:
                yield Row(f"{run} {name}", self.step, {LOSS: loss})

    def _sure(self, row: Row, is_bar: bool) -> Iterator[Row]:
        """Rows that are known to be some: a bar may say nan before it knows a loss, and it did if it then knows one."""
        loss = row.values.get(LOSS, math.inf)
        if math.isnan(loss) and is_bar and self.waits_for_loss:
            self.unsure.append(row)
            return
        if math.isfinite(loss):
            self.waits_for_loss, self.unsure = False, []
        yield row if not self.losses else row._replace(run=f"{row.run} {self.losses[0]}")

    def _in_nats(self, loss: float) -> float:
        if self.unit == "perplexity":
            return math.log(loss) if loss > 0 else math.nan
        loss = loss * math.log(2) if self.unit == "bits" else loss
        return loss if abs(loss) < LARGEST_LOSS or math.isnan(loss) else math.copysign(math.inf, loss)

    def chosen(self) -> str:
        """Which names were taken for the step, the loss and the others, what else there was, and the loss's unit."""
        step = "" if STEP in self.columns else "no step, so that rows count, "
        known = described(self.columns, self.unit, self.others, losses=self.losses, is_held_out=self.is_held_out)
        over = f"; steps are counted on over each {self.pass_name!r}" if len({*self.offsets.values()}) > 1 else ""
        return f"{step}{known}{over}"

    def fault(self) -> str:
        """The reason why the lines held no row."""
        if self.losses:
            return f"has several losses and no total, {listed(self.losses)}, which lab watch judges one by one"
        if self.columns:
            return "has no row with a step and a loss"
        if not self.first and not self.names:
            return "is empty"
        if files.is_lfs_pointer(self.first.encode()):
            return files.LFS_POINTER
        if said := [fields[LAST_WORDS] for _, fields in self.waiting if LAST_WORDS in fields]:
            return f"has fewer than {FEWEST} rows with a loss, and the program says: {said[-1]!r}"
        names = self.runs.names if self.runs else [*self.names]
        wanted = [column for column in self.given if column not in usual_columns(self.names, self.given)]
        if wanted:
            return missing_column(wanted[0], names, self.given)
        named = [name for name in fits(LOSS, self.names) if plain_name(name) not in LAST_NAMES]
        losses = [name for name in named if rank_of(LOSS, name) != ADVERSARIAL_RANK]
        if losses and len(self._values(losses[0])) == 1:
            return (
                f"holds a single row with {losses[0]!r}, as the summary of a run does; a log has {FEWEST} rows or more"
            )
        if losses and self._is_dim(losses[0]):
            shown = self._texts(losses[0])[0]
            return f"prints {losses[0]!r} as {shown} in every row, with too few digits to tell whether it is zero"
        if losses:
            return f"has fewer than {FEWEST} rows with a number as {losses[0]!r}"
        if not names:
            return f"holds no measurement; its first line is {self.first.strip()[:80]!r}"
        often = Counter(tuple(fields) for _, fields in self.waiting).most_common(3)
        lines = "; ".join(", ".join(filter(None, names))[:60] for names, _ in often)
        missing = missing_column(LOSS, names, self.given)
        return missing if self.runs else f"{missing}; its likeliest lines hold {lines}"


def _listed(value: object) -> list[str]:
    """The numbers of a text that is a list of several."""
    found = listed_numbers(f"list {value}") if isinstance(value, str) and value.startswith("[") else None
    return found[1] if found else []


def _is(column: str, name: str) -> bool:
    return rank_of(column, name) is not None


def _is_loss(column: str) -> bool:
    """Whether a column holds losses of training, be it by another name."""
    return column == LOSS or (OR in column and column.startswith(f"{LOSS}="))


def _unit_of(name: str) -> str:
    """The unit that a name says; empty without one."""
    return next((UNITS[word] for word in plain_name(name).split("_") if word in UNITS), "")
