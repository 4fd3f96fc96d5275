"""Numbers, lists and tables as plain text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pandas as pd

from lab.core.errors import RequestError


class Axis(NamedTuple):
    """The setting along which curves run, and the words in which texts speak of it.

    Attributes:
        name: its name for readers, such as ``learning rate``.
        short: its name where there is little room, such as ``LR``.
        values: its name in the plural.
        peak: its name on the axes of figures; empty where curves have one point.
        sensitivity: the name of the sensitivity to it.
        below: the name of the part of this sensitivity that lies below the best value; ``above``, likewise.
    """

    name: str
    short: str
    values: str
    peak: str
    sensitivity: str
    below: str
    above: str

    @property
    def over(self) -> str:
        """``over learning rates`` after a space; empty where curves have one point."""
        return f" over {self.values}" if self.peak else ""


LEARNING_RATE = Axis(
    name="learning rate",
    short="LR",
    values="learning rates",
    peak="peak learning rate",
    sensitivity="LR sensitivity",
    below="under-training part",
    above="instability part",
)
# Of a table without learning rates, whose curves have one point each.
NO_AXIS = Axis("run", "run", "runs", "", "sensitivity", "part below the best", "part above the best")


def axis_called(name: str) -> Axis:
    """The axis of a setting with this name, other than the learning rate."""
    sensitivity = f"sensitivity to {name}"
    return Axis(name, name, f"values of {name}", name, sensitivity, NO_AXIS.below, NO_AXIS.above)


# Of more words, or longer ones, a sentence lists the first ones and the number of the others.
MOST_LISTED, LONGEST_LIST = 8, 400
UNDEFINED = "\N{EM DASH}"  # the cell of a number that is not defined


def format_value(value: Hashable) -> str:
    """A config value in full precision, as labels show it: ``1.0 -> 1``, ``1e-08 -> 1e-8``."""
    if not isinstance(value, float):
        return str(value)
    return repr(float(value)).removesuffix(".0").replace("e-0", "e-").replace("e+0", "e+")


def format_p(p: float) -> str:
    """A p value; empty without a test."""
    return "" if math.isnan(p) else f"{p:.2g}" if p >= 1e-4 else "<0.0001"


def number(value: float) -> str:
    """A number as figures show it, on axes as in keys: ``0``, ``0.001``, ``3e-5``, ``2000``, ``2e6``."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.6g}")


def shortened(label: str, most: int = 120) -> str:
    """A label of at most so many letters: of a longer one the beginning and the end, where labels differ."""
    end = most // 3
    return label if len(label) <= most else f"{label[: most - end - 3]}...{label[-end:]}"


def count(parameters: float) -> str:
    """A parameter count to three digits: ``98688 -> 98.7k``; a table that has none counts one."""
    if parameters == 1:
        return "unknown size"
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= 0.9995 * scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters:.0f}"


def first_to_last(words: Iterable[str]) -> str:
    """The ends of words in their order, ``a to c``; one if they are alike, and an empty text without any."""
    spelled = list(words)
    return " to ".join(dict.fromkeys([spelled[0], spelled[-1]])) if spelled else ""


def span(values: Sequence[float]) -> str:
    """Range of the seeds' learning rates, with the number of seeds that have one (not NaN) if not all do."""
    present = sorted(value for value in values if not math.isnan(value))
    if not present:
        return "none"
    ends = first_to_last(map(format_value, present))
    return ends if len(present) == len(values) else f"{ends} ({len(present)} of {len(values)} seeds)"


def listed(words: Iterable[str], conjunction: str = "and") -> str:
    """Words as a list in a sentence: ``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def few(words: Iterable[str], others: str = "more") -> list[str]:
    """Words for a list in a sentence; of many the first ones and how many ``others`` there are, ``[a, b, 20 more]``."""
    every = list(words)
    lengths = accumulate(len(word) + 2 for word in every)
    shown = min(MOST_LISTED, max(1, sum(length <= LONGEST_LIST for length in lengths)))
    is_short = len(every) <= MOST_LISTED + 1 and sum(len(word) + 2 for word in every) <= LONGEST_LIST
    return every if is_short or len(every) == 1 else [*every[:shown], f"{len(every) - shown} {others}"]


def plain_text(table: pd.DataFrame) -> list[str]:
    """Lines of a table for a terminal: the column names, then the rows, columns aligned at the left."""
    cells = [list(map(str, table.columns)), *table.astype(str).to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def markdown_table(table: pd.DataFrame) -> str:
    """A table in Markdown; its cells stand in it as they are."""
    cells = [list(map(str, table)), ["---"] * table.shape[1], *table.astype(str).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def to_json(content: Any) -> str:
    """Plain values, lists, mappings and named tuples as JSON; a number that is not finite is null."""
    return json.dumps(_finite(content), indent=1, allow_nan=False, ensure_ascii=False)


def _finite(content: Any) -> Any:
    if hasattr(content, "_asdict"):
        content = content._asdict()
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    return [_finite(value) for value in content] if isinstance(content, list | tuple) else finite(content)


def finite(value: Any) -> Any:
    """The value itself, or None, which JSON writes as null, for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def capitalized(text: str) -> str:
    """A text that begins with a capital; its other letters stay as they are."""
    return text[:1].upper() + text[1:]


def arm_phrase(label: str) -> str:
    """An arm in the form that sentences use: ``with qk-layernorm``, ``for cosine``."""
    return label if label.startswith(("with ", "without ")) else f"for {label}"


SIZE_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def spelled_out(cell: Any) -> Any:
    """A number with a unit, or in groups of digits, as a whole number, ``124M -> 124000000``; others as they are."""
    text = str(cell).strip().lower()
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text):
        return int(text.replace(",", ""))
    parts = re.fullmatch(r"([\d.]+)\s*([kmbt])", text)
    return round(float(parts[1]) * SIZE_UNITS[parts[2]]) if parts else cell


def positive(option: str, given: str | None) -> float | None:
    """The number above 0 that an option gives, if it was given; ``7B`` is one.

    Raises:
        RequestError: it is none.
    """
    try:
        number = float(spelled_out(given)) if given else None
    except ValueError:
        number = math.nan
    if number is not None and not 0 < number < math.inf:
        raise RequestError(f"{option} is a number above 0, not {given}")
    return number
