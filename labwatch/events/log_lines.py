"""What stands in a line of a log: names beside numbers or above them, or last words with which a program stops."""

from __future__ import annotations

import contextlib
import csv
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import shipped
from labwatch.events.log_names import (
    AVERAGES,
    HELD_OUT,
    HELD_OUT_LOSS,
    LOSS,
    NAMES,
    OF_WHOLE,
    REWARD,
    STEP,
    rank_of,
)
from labwatch.tables.table_files import flat, mapping_of, without_commas

# Suffixes that W&B adds to columns of an exported chart which hold extremes over a group of runs.
EXTREMES = ("__MIN", "__MAX")
IS_HELD_OUT = ""  # the name of a field that lines of held-out losses have
FIRST, SECOND = "first number", "second number"  # names of numbers that begin lines without a name
LONGEST_MESSAGE = 300  # characters of a text among the values of an object that may hold measurements
FEWEST_LISTED = 3  # numbers after a name that are those of as many rows

# What is put right before a line is read: colours, characters of typesetting and of boxes, and how Python and C write
# numbers of other types.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
SINGLE_QUOTES, DOUBLE_QUOTES = (
    "\u2018\u2019\u201a\u201b\u2032\uff07",
    ("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u300c\u300d\u300e\u300f\uff02"),
)
DASHES, INVISIBLE = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u00ad\u200b\u200c\u200d\u2060\ufeff"
TYPESET = str.maketrans(
    dict.fromkeys("│┃║", "|")
    | dict.fromkeys(SINGLE_QUOTES, "'")
    | dict.fromkeys(DOUBLE_QUOTES, '"')
    | dict.fromkeys(DASHES, "-")
    | dict.fromkeys(INVISIBLE, "")
)
POWER_OF_TEN = re.compile(r"(?<=\d)\s*[\u00d7\u00b7]\s*10\^?(?=[-+]?\d)")
WRAPPED = re.compile(
    r"(?:<tf\.Tensor[^>]*numpy=|(?<![\w.])(?:[A-Za-z_][\w.]*?)?(?:float\d*|int\d+|tensor|array|scalar|decimal)\()"
    r"[\s'\"\[(]*([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))[\s'\"\])]*(?:,(?:[^()]|\([^()]*\))*)?[)>]",
    re.IGNORECASE,
)
NAN_OF_C = re.compile(r"(?<![\w.])([-+]?)1\.#(IND|QNAN|SNAN|INF)\w*|(?<=nan)\((?:ind|snan)\)", re.IGNORECASE)
BOLD = re.compile(r"(\*\*|__|`)(?=\S)(.+?)(?<=\S)\1")

SLANTED = re.compile(r"^([*_])(\S.*)\1$")  # a cell of Markdown

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d.])|\d+,\d+(?:[eE][-+]?\d+)?(?![\w.]|,\d)"
    r"|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?:nan|inf(?:inity)?)(?![\w]))[A-Za-z%]*",
    re.IGNORECASE,
)
UNIT = re.compile(r"(?<=[\d.])(?![kKMB]$)[A-Za-z]+$")
ROUNDED = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))([kKMB])")
THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
WITH_COMMA = re.compile(r"[-+]?\d+,\d+(?:e[-+]?\d+)?", re.IGNORECASE)
ZERO = re.compile(r"[-+]?0*\.(0{2,})")  # printed with two digits or more, to which it was rounded
# Up to four words, but no value of another word, and what separates them from the number; a word that says so; one that
# says where it was; and words behind a number.
WORD_BEFORE = re.compile(
    r"(?:(?<=[:=])[^\s:=]+[ \t]+)?([A-Za-z_][\w./@\-]*(?:\(\w+\))?(?:[ \t]+[A-Za-z_(][\w./@()\-]*){0,3})"
    r"(?:[\"'\s:=>~(]|\s-(?=\s|$)|-(?=>))*$"
)
VERB = re.compile(
    r"(?:\s+(?:is|was|are|has|have|equals|of|now|at|to|reached|fell|rose|dropped|became|around|about))+$", re.IGNORECASE
)
WHERE = re.compile(r"(.*\S)\s+(?:at|after|in|for|on)\s+(\S.*)", re.IGNORECASE)
HANGING = re.compile(r"(?:^|\s)(?:at|after|in|for|on)$", re.IGNORECASE)
WORDS_AFTER = re.compile(r"\s+([A-Za-z_][\w/.]*(?: [A-Za-z_][\w/.]*){0,2})\s*(?=[,|;)\]}]|\s-\s|$)")
WORD_AFTER = re.compile(r"\s+([A-Za-z]+)")
SEPARATORS = re.compile(r"[|,;{}\[\]\t]")
BLANKS = " '\"(:="
UNNAMED = re.compile(r"[\s:=\]})>-]*")
# Steps of all steps, such as ``400/3000``, but no date or path; and a name before it that means a pass over the data.
COUNT = r"\d{1,3}(?:,\d{3})+|\d+\.\d+[kKMB]|\d+[kKMB]?"
PROGRESS = re.compile(rf"(?<![\w.,/-])({COUNT})\s*/\s*({COUNT})(?![\w/]|[:.,-]\d)")
PASS = re.compile(r"epochs?\W*$|\bep\W*$", re.IGNORECASE)
# A line of two numbers, and one that begins with a number, which is no date and no time.
PAIR = re.compile(r"\s*(\d+)(?:\s+|\s*[,;:|]\s*)([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf))\s*", re.I)
LEADING = re.compile(r"\s*[\[(#]?\s*(\d{1,9})[\])]?(?:\s*[:|,;.]?\s+|\s*[:|,;-]\s*(?=[A-Za-z]))(?![/:])")
HELD_OUT_WORD = re.compile(rf"(?<![\w./-])(?:{'|'.join(HELD_OUT - {'best', 'held'})})(?![\w./-])", re.IGNORECASE)
# Lines of tables that hold no cells; and words that belong to the next one in a name.
WITH_NUMBER = re.compile(r"[:=]\s*[-+]?\.?\d")
RULE = re.compile(r"[\s|:+=\-\u2500-\u257f]+")
_ADJECTIVES = (HELD_OUT | OF_WHOLE | AVERAGES | {"grad", "gradient", "learning", "total"}) - {*NAMES[STEP]}
BOUND = re.compile(rf"\b({'|'.join(sorted(_ADJECTIVES))}) (?=\S)", re.IGNORECASE)
# Parts of lines with which trainers say that they stop because training diverged; the file says how.
LAST_WORDS_PARTS = {
    name: re.compile("|".join(patterns), 0 if name == "errors" else re.IGNORECASE)
    for name, patterns in shipped.load(Path(__file__).with_name("last_words.yaml")).items()
}

Fields = Mapping[str, Any]


def plain_line(line: str) -> str:
    """A line without colours and typesetting, with ASCII's quotes and bars, and numbers as numbers."""
    line = line.rstrip("\r\n")
    if "\x1b" in line:
        line = ESCAPES.sub("", line)
    if not line.isascii():
        line = unicodedata.normalize("NFKC", line.translate(TYPESET)).translate(TYPESET)
        line = POWER_OF_TEN.sub("e", line)
    if "(" in line or "numpy=" in line:
        line = WRAPPED.sub(r"\1", line)
    if "#" in line or "nan(" in line:
        line = NAN_OF_C.sub(lambda match: (match[1] or "") + {"INF": "inf", None: ""}.get(match[2], "nan"), line)
    return BOLD.sub(r"\2", line) if "**" in line or "`" in line else line


def says_the_end(line: str) -> bool:
    """Whether a line says that the program stops since its loss, a gradient or a weight is no number, or has diverged.

    Trainers that stop by themselves seldom log the row that made them: fairseq, Megatron-LM, DeepSpeed, detectron2,
    mmengine, Keras, Lightning and scripts in the manner of MAE print a sentence or raise an error instead. What only
    configures such a check, asks for it, or says that an update was skipped, has none of these forms.

    >>> says_the_end("Loss is nan, stopping training"), says_the_end("terminate_on_nan=True")
    (True, False)
    """

    def has(part: str) -> bool:
        return LAST_WORDS_PARTS[part].search(line) is not None

    if not has("hints"):
        return False
    if LAST_WORDS_PARTS["asserted"].match(line):
        return True
    if LAST_WORDS_PARTS["code"].match(line) or has("goes_on") or (has("settings") and not has("errors")):
        return False
    if has("skipped") and not has("stops"):
        return False
    if has("phrases"):
        return True
    return (has("errors") or has("stops")) and has("not_finite") and (has("of_loss") or not has("early"))


def number(value: object, *, has_decimal_comma: bool = False) -> float | None:
    """The number in a text or a JSON value, infinite if it is too large for a float; None if there is none.

    ``1,450`` is a thousand and more, unless numbers beside it show that decimals follow the comma.
    """
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
        if WITH_COMMA.fullmatch(word) and (has_decimal_comma or without_commas(word) == word):
            return number(word.replace(",", "."))
        return None if (plain := without_commas(word)) == word else float(plain)


def size_of_zero(value: object) -> float:
    """How large a number is on average that was printed as a zero of two decimals or more; 0 for any other."""
    zero = ZERO.fullmatch(value.strip()) if isinstance(value, str) else None
    return 0.25 * 10.0 ** -len(zero[1]) if zero else 0.0


def fields_of(line: str) -> Fields:
    """The names and numbers of a line: those of a JSON object at its end, or else each number with its name.

    >>> fields_of("iteration 400/ 3000 | lm loss 6.758929E+00 | elapsed time per iteration (ms): 12.5 |")
    {'iteration': '400', 'lm loss': '6.758929E+00', 'elapsed time per iteration (ms)': '12.5'}
    """
    brace = line.find("{")
    text = line[brace:].rstrip()
    if text.startswith("{") and text.endswith("}"):
        with contextlib.suppress(ValueError):
            steps = {name: each for name, each in _pairs(line[:brace]).items() if rank_of(STEP, name) is not None}
            return {**steps, **with_words(dict(flat(mapping_of(text), "/")), line[:brace])}
    if pair := PAIR.fullmatch(line):
        return {FIRST: pair[1], SECOND: pair[2]}
    fields = _pairs(line)
    if "/" in line:
        fields |= _progress(line)
    if fields and (leading := LEADING.match(line)) and leading[1] not in fields.values():
        fields[FIRST] = leading[1]
    return fields


def _pairs(line: str) -> dict[str, Any]:
    """Each number of a line by its name, which stands before it, or behind it as in ``3.5 avg loss,``.

    And a field that says that its losses are held out, if the words before the first one do.
    """
    fields, end, loss_at, before, after = dict[str, Any](), 0, 0, "", None
    for match in NUMBER.finditer(line):
        gap = line[max(end, match.start() - 80, after.end() if after and before else 0) : match.start()]
        name = _name_before(gap, is_first=not end)
        if not name and before and UNNAMED.fullmatch(gap):  # loss after step 5: 3.5
            name = before
        hangs = HANGING.search(name)
        after = (WORD_AFTER if hangs else WORDS_AFTER).match(line, match.end())
        if after and _is_known(after[1]) and (hangs or not name):
            name = f"{name} {after[1]}".strip()  # 3.5 avg loss; or loss after 5 steps: 3.5
        before = ""
        if name and (where := WHERE.fullmatch(name)) and rank_of(STEP, where[2]) is not None:
            before, name = where[1], where[2]
        end = match.end()
        if name and not match[0].endswith("%"):
            fields.setdefault(name, UNIT.sub("", match[0]))
            loss_at = loss_at or (match.start() if rank_of(LOSS, name) is not None else 0)
    return fields | _held_out(line[:loss_at])


def _name_before(gap: str, *, is_first: bool) -> str:
    """The name at the end of a text between two numbers, or in a cell of its own before it: ``| loss | 3.5``."""
    cells = SEPARATORS.split(gap.rstrip("[( "))
    if len(cells) > 1 and not cells[-1].strip(BLANKS):  # what follows a number, as in ``3.5 avg loss,``, names that
        cells = [cell for cell in cells[0 if is_first else 1 :] if cell.strip(BLANKS)]
    word = WORD_BEFORE.search(cells[-1]) if cells else None
    return VERB.sub("", word[1]) if word else ""


def _is_known(name: str) -> bool:
    return any(rank_of(column, name) is not None for column in NAMES)


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


def with_words(fields: Fields, before: str = "") -> Fields:
    """Fields, some of whose values are text, with the numbers and words in it."""
    more = dict[str, Any](_held_out(before))
    for name, value in fields.items():
        if isinstance(value, str):
            if PROGRESS.fullmatch(value.strip()) and (progress := _progress(value)):
                more |= progress
                more[name] = next(iter(progress.values()))
            elif number(bare := plain_line(value).strip("[] ")) is not None and bare != value:
                more[name] = bare
            elif len(value) < LONGEST_MESSAGE and NUMBER.search(value):  # {"message": "step 5 loss 3.5"}
                pairs = _pairs(value)
                more |= {each: pairs[each] for each in pairs if each not in fields and _is_known(each)}
            if value.strip().lower() in HELD_OUT:
                more[IS_HELD_OUT] = True
    return {**fields, **more} if more else fields


def listed_numbers(line: str) -> tuple[str, list[str]] | None:
    """The name of a line and the numbers of several rows that follow it, in a table that lies on its side."""
    name, *cells = [*filter(None, re.split(r"[\s|,;:=\[\]()'\"]+", _bound(line))), ""]
    cells = cells[:-1]
    are_numbers = len(cells) >= FEWEST_LISTED and all(number(cell) is not None for cell in cells)
    return (name, cells) if are_numbers and number(name) is None else None


def _bound(line: str) -> str:
    """A line of names, in which those of two words are one: ``Training_Loss``."""
    return BOUND.sub(r"\1_", line)


class Table(NamedTuple):
    """A line of names, and the rows below it. In a chart exported from W&B, a column ``RUN - METRIC`` is of one run.

    The separator is empty if blanks separate the cells.
    """

    separator: str
    names: list[str]

    def has(self, *columns: str) -> bool:
        """Whether one of the names may be of one of the columns."""
        names = (name.rpartition(" - ")[2] for name in self.names)
        return any(rank_of(column, name) is not None for name in names for column in columns)

    def cells(self, line: str) -> list[str]:
        if not self.separator:
            return line.split()[: len(self.names)]
        cells = (
            line.split(self.separator) if '"' not in line else next(csv.reader([line], delimiter=self.separator), [])
        )
        return [SLANTED.sub(r"\2", cell.strip()) for cell in cells] if self.separator == "|" else cells

    def is_first_row(self, line: str) -> bool:
        """Whether a line below that of the names holds numbers."""
        cells = self.cells(line)
        if len(cells) != len(self.names):
            return False
        are_numbers = [number(cell.rstrip(":%")) is not None or PROGRESS.fullmatch(cell) is not None for cell in cells]
        return any(are_numbers) if self.separator else sum(are_numbers) > len(cells) / 2 and _are_data(cells)

    def fields(self, line: str) -> Iterator[tuple[str, Fields]]:
        """The cells of a row by name, for each run in it."""
        cells = self.cells(line)
        if len(cells) > len(self.names) or cells == self.names:  # other text, or the names once more
            return
        if not self.separator and (len(cells) < len(self.names) or not _are_data(cells)):
            return
        shared, runs = dict[str, str](), dict[str, dict[str, str]]()
        for name, cell in zip(self.names, cells, strict=False):
            if " - " not in name:
                shared |= {} if not name or name in shared else {name: cell}
                continue
            run, _, metric = name.rpartition(" - ")
            if not metric.endswith(EXTREMES):
                runs.setdefault(run, {})[metric] = cell
        for run, fields in runs.items():
            yield run, with_words(shared | fields)
        if not runs:
            yield "", with_words(shared)


def _are_data(cells: Iterable[str]) -> bool:
    """Whether each cell of a row holds digits, or says that there is no number."""
    return all(re.search(r"\d|^[-+]?(?:nan|inf|none|n/?a|-+)\W*$", cell, re.IGNORECASE) for cell in cells)


def table_of(header: str, line: str) -> Table | None:
    """The table with names in one line and numbers in the next; the most frequent separator separates both."""
    separator = max(",;\t|", key=header.count)
    if separator in header:
        try:
            names = [name.strip() for name in next(csv.reader([header.strip("\r\n")], delimiter=separator), [])]
        except csv.Error:
            return None
        tables = [Table(separator, names)]
    else:
        tables = [Table("", names) for names in (re.split(r"\s{2,}", header.strip()), _bound(header).split())]
        tables = [table for table in tables if len(table.names) > 1 and table.has(STEP, LOSS, HELD_OUT_LOSS, REWARD)]
    for table in tables:
        are_words = all(name.isprintable() and number(name) is None for name in table.names)
        are_words = are_words and not any(PROGRESS.fullmatch(name) or WITH_NUMBER.search(name) for name in table.names)
        if are_words and table.is_first_row(line):
            return table
    return None
