"""The numbers of a run held against the limits of public runs: a row for each risk, and what contradicts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from lab.analysis.laws.fits import Crossing
from lab.analysis.logit_rounding import COSTLY, MANTISSA_BITS, level_at_cost
from lab.analysis.text import count, format_value, listed
from lab.core import shipped
from lab.core.errors import RequestError, nearest
from lab.features.predict.limits import TOKENS_PER_PARAMETER, Limit, public, read_limits
from lab.records.columns import spelled_out

BEYOND, OPEN, NOT_BEYOND, NOT_JUDGED = "beyond", "open", "not beyond", "not judged"
STABLE, UNSTABLE = "stable", "unstable"
LEAST_PARAMETERS = 1000  # of fewer the user has left out the unit
FAR = 30  # times the largest size, or the most tokens, that ran, beyond which no number is told to lie short of a limit
PARTS = {"active": "params", "batch": "tokens"}  # numbers that are at most another one
HIGH_RATE = 10.0  # a learning rate above which a page says so first
APART = ("optimizer", "qk_norm")  # runs that differ in one of these lie a decade apart


class Number(float):
    """A number of the user's, with the text that it was given as."""

    text: str

    def __new__(cls, value: float, text: str) -> Self:
        """The number of this value."""
        number = super().__new__(cls, value)
        number.text = text
        return number


Numbers = Mapping[str, Number | str]


class Derived(NamedTuple):
    """A number in proportion to the first of others: what it is, from which it follows, and how."""

    means: str
    needs: tuple[str, ...]
    value: Callable[..., float]


DERIVED = {
    "warm_up": Derived(
        "warm-up in memories of beta2, 1 / (1 - beta2) steps each",
        ("warmup", "beta2"),
        lambda warmup, beta2: warmup * (1 - beta2),
    ),
}


class Threshold(NamedTuple):
    """A level of a logged column above which to act."""

    column: str
    above: float


@dataclass(frozen=True)
class Risk:
    """A risk as ``risks.yaml`` describes it; see there."""

    name: str
    title: str
    number: str
    limit: str
    fails: str
    published: Sequence[str]
    log: str
    test: str
    when: Mapping[str, Sequence[str]]
    columns: Sequence[str] = ()
    trouble: str = "above"
    act: str = ""
    threshold: str = ""  # the column that has a level to act on, at which rounding is costly

    @property
    def means(self) -> str:
        """What its number is."""
        return DERIVED[self.number].means if self.number in DERIVED else str(table()["numbers"][self.number]["means"])

    @property
    def needs(self) -> tuple[str, ...]:
        """The numbers that it takes."""
        return DERIVED[self.number].needs if self.number in DERIVED else (self.number,)


@dataclass(frozen=True, eq=False)
class Published:
    """A published run of a large model, as ``published_runs.yaml`` describes it."""

    name: str
    numbers: Numbers
    outcome: str
    published: str
    about: str
    source: str

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """Its verdict on each risk that applies to it, by the name of the risk."""
        return {row.risk.name: row.verdict for row in rows(self.numbers)}


class Row(NamedTuple):
    """What public runs say of a risk.

    Attributes:
        risk: the risk.
        value: the user's number; NaN where one that it takes was not given.
        limit: where runs fail, for a model of the user's size, with the ends of its 95 % interval.
        decades: from the number to the limit, with the interval; negative beyond it, NaN without a number.
        source: the runs that tell it.
        beyond: decades from the largest model that ran to the user's; 0 within the sizes that ran.
        too_far: why the limit cannot tell that a number lies short of it; empty where it can.
        missing: the numbers that it takes, or that say whether it applies, and that were not given.
        outside: a number of which public runs had only others, so that nothing can be told; empty without one.
        given: the first of the numbers that it takes, as the user gave it; None without one.
        unit: what a limit is multiplied by to be one of that number, with the others as they were given.
        threshold: above which to act; None if there is no such level.
        remarks: what else is outside of what ran, a sentence each.
    """

    risk: Risk
    value: float
    limit: Crossing
    decades: Crossing
    source: Limit
    beyond: float
    too_far: str
    missing: Sequence[str]
    outside: str
    given: Number | None
    unit: float
    threshold: Threshold | None
    remarks: Sequence[str]

    @property
    def factors_of_two(self) -> Crossing:
        """The same distance as ``decades``, in doublings."""
        return Crossing(*(decades / math.log10(2) for decades in self.decades))

    @property
    def verdict(self) -> str:
        """Where the number lies beside the limit; open if its interval holds the number.

        None of them is a permission: of published runs whose numbers were not beyond a limit, many were unstable.
        """
        if self.missing or self.outside:
            return NOT_JUDGED
        if max(self.decades) < 0:
            return BEYOND
        if self.too_far:
            return NOT_JUDGED
        return NOT_BEYOND if min(self.decades) > 0 else OPEN

    @property
    def reason(self) -> str:
        """Why it is not judged; empty if it is."""
        if self.verdict != NOT_JUDGED:
            return ""
        return (
            f"{listed(f'{key}=' for key in self.missing)} not given" if self.missing else self.outside or self.too_far
        )


@cache
def table() -> Mapping[str, Any]:
    """The content of ``risks.yaml``; see there."""
    content: Mapping[str, Any] = shipped.load(Path(__file__).with_name("risks.yaml"))
    return content


@cache
def risks() -> Sequence[Risk]:
    """All risks, in their order: that of the learning rate, of which public runs tell most, comes first."""
    return [Risk(name, **entry) for name, entry in table()["risks"].items()]


@cache
def published_runs() -> Sequence[Published]:
    """The published runs that come with the lab."""
    entries = shipped.load(Path(__file__).with_name("published_runs.yaml"))
    return [Published(name, **{**entry, "numbers": read_numbers(entry["numbers"])}) for name, entry in entries.items()]


def read_numbers(words: Sequence[str]) -> dict[str, Number | str]:
    """The numbers of a run from words such as ``lr=3e-4``, ``batch=4M``, ``precision=bf16`` and ``qk_norm=no``.

    Raises:
        RequestError: a word is no number of a run, is given twice, or its value is none; or a part is more than the
            whole.
    """
    known, numbers = table()["numbers"], dict[str, Number | str]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            raise RequestError(f"unknown number {key!r}; {nearest(key, known)}")
        if key in numbers:
            raise RequestError(f"{key} is given twice")
        numbers[key] = _value(key, text, known[key])
    for key, whole in PARTS.items():
        part, most = numbers.get(key), numbers.get(whole)
        if isinstance(part, Number) and isinstance(most, Number) and part > most:
            raise RequestError(f"{key}={part.text} is more than {whole}={most.text}")
    return numbers


def _value(key: str, text: str, entry: Mapping[str, Any]) -> Number | str:
    kind, from_zero = entry["kind"], entry.get("from_zero", False)
    if isinstance(kind, list):
        word = text.lower().replace("-", "_")
        if word not in kind:
            raise RequestError(f"{key} is not {text!r}; {nearest(word, kind)}")
        return word
    try:
        value = float(spelled_out(text))
    except ValueError:
        value = math.nan
    most = 1.0 if kind == "share" else math.inf
    if not (0 <= value < most if from_zero or kind == "share" else 0 < value < most):
        bounds = "from 0 to below 1" if kind == "share" else "0 or more" if from_zero else "above 0"
        raise RequestError(f"{key} is a number {bounds}, not {text}")
    if kind == "count" and not value.is_integer():
        raise RequestError(f"{key} is a whole number, not {text}")
    if key == "params" and value < LEAST_PARAMETERS:
        raise RequestError(f"params={text} is a model of {text} parameters; is {text}B or {text}M meant?")
    return Number(value, text)


def rows(numbers: Numbers) -> list[Row]:
    """What public runs say of each risk of a run, those beyond their limits first, and else in the order of ``risks``.

    A risk is left out if a number excludes it: the learning rate without qk-norm, of a run with it.

    Args:
        numbers: as ``read_numbers`` makes them, with ``params``.
    """
    found = [_row(risk, numbers) for risk in risks() if not _excluded(risk, numbers)]
    return sorted(found, key=lambda row: row.verdict != BEYOND)


def contradicting(row: Row, numbers: Numbers, known: Sequence[Published]) -> Published | None:
    """The nearest published run that contradicts what a row says.

    Of a number beyond its limit that is a run that was stable there. Of any other it is one that was unstable although
    none of its own numbers was beyond a limit; if there are such runs to which the risk applies, one of them.
    """
    is_beyond = row.verdict == BEYOND
    alike, others = list[Published](), list[Published]()
    for run in known:
        if is_beyond and run.outcome == STABLE and run.verdicts.get(row.risk.name) == BEYOND:
            alike.append(run)
        elif not is_beyond and run.outcome == UNSTABLE and BEYOND not in run.verdicts.values():
            (alike if row.risk.name in run.verdicts else others).append(run)
    return min(alike or others, key=lambda run: distance(run.numbers, numbers), default=None)


def distance(a: Numbers, b: Numbers) -> float:
    """Decades of size, learning rate and tokens between two runs, and one for another optimizer or norm of queries.

    What is not given in both counts nothing.
    """
    apart = sum(key in a and key in b and a[key] != b[key] for key in APART)
    both = [key for key in ("params", "lr", "tokens") if key in a and key in b]
    return apart + sum(abs(math.log10(float(a[key]) / float(b[key]))) for key in both)


def left_out(numbers: Numbers) -> dict[str, list[str]]:
    """The titles of the risks that do not apply, by the number that excludes them, such as ``qk_norm=yes``."""
    found: dict[str, list[str]] = {}
    for risk in risks():
        if excluded := _excluded(risk, numbers):
            found.setdefault(excluded, []).append(risk.title)
    return found


def not_covered(numbers: Numbers) -> list[str]:
    """What public runs do not tell of the values given, half a sentence each."""
    found = {}
    for key, value in numbers.items():
        reasons = table()["numbers"][key].get("not_covered", {})
        found[f"{key}={text_of(value)}"] = reasons if isinstance(reasons, str) else reasons.get(value, "")
    return [f"{given}: {reason}" for given, reason in found.items() if reason]


def far_away(numbers: Numbers) -> list[str]:
    """How far the numbers lie from all that ran, a sentence each."""
    ranges, found = public()["ranges"], []
    if times := _far(numbers).get("params"):
        found.append(
            f"Your size is {count(times)} times that of the largest public run here ({count(ranges['params'][1])})."
        )
    lr = numbers.get("lr")
    if isinstance(lr, Number) and lr > HIGH_RATE:
        found.append(
            f"lr={lr.text} is above {HIGH_RATE:g}, and the highest that ran here is {ranges['lr'][1]:g}: is it meant?"
        )
    outside = [
        f"{key}={text_of(numbers[key])} ({short(low)} to {short(high)})"
        for key, (low, high) in ranges.items()
        if key in numbers and key not in ("params", "lr") and not _is_inside(key, numbers[key])
    ]
    if outside:
        found.append(f"Outside of what public runs had: {listed(outside)}.")
    if "optimizer" not in numbers:
        found.append("No optimizer is given, so these are the limits of AdamW.")
    return found


def _is_inside(key: str, value: Number | str) -> bool:
    """Whether public runs had numbers below and above a value."""
    low, high = public()["ranges"][key]
    return bool(low <= float(value) <= high)


def _far(numbers: Numbers) -> dict[str, float]:
    """The size and the tokens over the most of any public run, where they are more than ``FAR`` times that."""
    most = {key: float(public()["ranges"][key][1]) for key in ("params", "tokens")}
    return {key: times for key in most if key in numbers and (times := float(numbers[key]) / most[key]) > FAR}


def changes_of(optimizer: Number | str | None) -> list[str]:
    """What single changes of a tuned recipe did to public runs of an optimizer, or of all if it is none of theirs."""
    if optimizer is None:
        return []
    known: Mapping[str, Mapping[str, Sequence[int]]] = public()["changes"]
    own = known.get(str(optimizer)) or _together(known.values())
    of = optimizer if optimizer in known else f"{len(known)} other optimizers, since none of {optimizer} is here"
    broke = [f"{name} ({broken} of {tried})" for name, (broken, tried) in own.items() if broken]
    held: dict[str, int] = {}
    for name, (_, tried) in own.items():
        key = name.split()[0]
        held[key] = held.get(key, 0) + tried
    never = [key for key in held if not any(name.split()[0] == key and broken for name, (broken, _) in own.items())]
    return [
        f"Single changes that broke tuned runs of {of}: {listed(broke or ['none'])}.",
        f"Changes that broke none: {listed(f'{key} (of {held[key]})' for key in never)}.",
    ]


def _together(tables: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, Sequence[int]]:
    """Runs that broke and that were tried, by change, summed over optimizers."""
    found: dict[str, Sequence[int]] = {}
    for own in tables:
        for name, counts in own.items():
            found[name] = [a + b for a, b in zip(found.get(name, (0, 0)), counts, strict=True)]
    return found


def text_of(value: Number | str) -> str:
    """A number as it was given."""
    return value.text if isinstance(value, Number) else value


def _excluded(risk: Risk, numbers: Numbers) -> str:
    """The number that excludes a risk; a risk of one number format is excluded if no format is given."""
    for key, values in risk.when.items():
        if key in numbers and numbers[key] not in values:
            return f"{key}={text_of(numbers[key])}"
    return "precision= not given" if "precision" in risk.when and "precision" not in numbers else ""


def _row(risk: Risk, numbers: Mapping[str, Any]) -> Row:
    source = read_limits()[risk.limit]
    conditions = [key for key in risk.when if key != "optimizer"]
    missing = [key for key in (*risk.needs, *conditions) if key not in numbers]
    value, unit = math.nan, 1.0
    if not missing:
        first, *others = (float(numbers[key]) for key in risk.needs)
        value = first
        if risk.number in DERIVED:  # in proportion to the first of its numbers
            derived = DERIVED[risk.number].value
            value, unit = derived(first, *others), 1 / derived(1.0, *others)
    outside = [key for key in risk.needs[1:] if key in numbers and not _is_inside(key, numbers[key])]
    limit = source.at(numbers)
    sign = -1 if risk.trouble == "below" else 1
    ends = [sign * (math.log10(end / value) if value else math.inf) for end in limit]
    has_optimizer = not source.offsets or numbers.get("optimizer", "adamw") in source.offsets
    if value == 0 and not has_optimizer:
        ends[-1] = math.inf  # some optimizers need no warm-up, and of this one nobody knows
    beyond = max(0.0, math.log10(numbers["params"] / source.sizes[1]))
    return Row(
        risk,
        value,
        limit,
        Crossing(*ends),
        source,
        beyond,
        too_far=_too_far(source, beyond, has_optimizer, numbers),
        missing=missing,
        outside=f"no public run had {' or '.join(f'{key}={numbers[key].text}' for key in outside)}" if outside else "",
        given=numbers.get(risk.needs[0]),
        unit=unit,
        threshold=_threshold(risk, numbers),
        remarks=_remarks(risk, source, value, has_optimizer, numbers),
    )


def _too_far(source: Limit, beyond: float, has_optimizer: bool, numbers: Numbers) -> str:
    """Why a limit cannot tell that a number lies short of it; empty where it can."""
    reasons: Mapping[str, str] = table()["too_far"]
    if not source.law.exponents and beyond > 0:
        return reasons["without_a_trend"]
    if beyond > math.log10(FAR):
        return reasons["size"]
    if "tokens" in source.law.exponents and "tokens" in _far(numbers):
        return reasons["tokens"]
    return "" if has_optimizer else reasons["optimizer"]


def _remarks(risk: Risk, source: Limit, value: float, has_optimizer: bool, numbers: Mapping[str, Any]) -> list[str]:
    remarks = []
    low, high = source.tried
    if source.law.exponents and numbers["params"] < source.sizes[0]:
        remarks.append(f"Your size lies below those that ran, from {count(source.sizes[0])} on.")
    if "tokens" in source.law.exponents and "tokens" not in numbers:
        remarks.append(f"No tokens are given, so {TOKENS_PER_PARAMETER} to each parameter are taken.")
    if not has_optimizer:
        remarks.append(
            f"No public run here tells where {numbers['optimizer']} begins to fail, so the interval covers "
            f"{count(len(source.offsets))} others."
        )
    if not math.isnan(value) and not low <= value <= high:
        yours = short(value) if risk.number in DERIVED else numbers[risk.number].text
        remarks.append(f"Your {yours} lies outside of what ran, {short(low)} to {short(high)}.")
    asked = {key: values for key, values in risk.when.items() if key not in numbers and key != "optimizer"}
    return [
        *remarks,
        *(f"It applies if {key}={listed(values, 'or')}, which was not given." for key, values in asked.items()),
    ]


def short(value: float) -> str:
    """A number to three digits, in thousands, millions and so on if it is large."""
    return count(value) if value >= 1e4 else format_value(float(f"{value:.3g}"))


def _threshold(risk: Risk, numbers: Numbers) -> Threshold | None:
    """The level of a risk: that at which rounding in the user's number format is costly."""
    if not risk.threshold:
        return None
    level = level_at_cost(COSTLY, MANTISSA_BITS[str(numbers["precision"])])
    return Threshold(risk.threshold, float(f"{level:.3g}"))
