"""The numbers of a run held against the limits of the committed records: a row for each risk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from lab.analysis.laws.fits import Crossing
from lab.analysis.logit_rounding import COSTLY, MANTISSA_BITS, level_at_cost
from lab.analysis.sensitivity import LOST
from lab.analysis.text import count, format_value, listed
from lab.core import shipped
from lab.core.errors import RequestError, nearest
from lab.features.numbers.limits import TOKENS_PER_PARAMETER, Limit, public, read_limits
from lab.records.columns import spelled_out

BEYOND, OPEN, UNTRIED, CLEAR = "beyond", "open", "not tried", "clear"
APART, UNASKED = "does not carry over", "no number"
VERDICTS = (BEYOND, OPEN, UNTRIED, CLEAR, APART, UNASKED)
FP16 = {"fp16": "fp16_emulated"}
FORMATS_AT_SIZE = ("fp32", "bf16")  # of public runs
LEAST_PARAMETERS = 1000  # of fewer the user has left out the unit
FAR = 30  # times the largest size, or the most tokens, that ran, beyond which nothing is called clear
PARTS = {"active": "params", "batch": "tokens"}  # numbers that are at most another one
HIGH_RATE = 10.0  # a learning rate above which a page says so first
DISAGREE = 3.0  # times, by which two records of one level may differ
GO, LOOK, STOP = "go", "look", "stop"


class Number(float):
    """A number of the user's, with the text that it was given as."""

    text: str

    def __new__(cls, value: float, text: str) -> Self:
        """The number of this value."""
        number = super().__new__(cls, value)
        number.text = text
        return number


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
    "decay": Derived(
        "weight decay times learning rate, summed over the steps at its peak",
        ("weight_decay", "lr", "tokens", "batch"),
        lambda weight_decay, lr, tokens, batch: weight_decay * lr * tokens / batch,
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
    threshold: Mapping[str, Any] | None = None
    does_not_carry: str = ""
    also: str = ""

    @property
    def means(self) -> str:
        """What its number is."""
        return DERIVED[self.number].means if self.number in DERIVED else str(table()["numbers"][self.number]["means"])

    @property
    def needs(self) -> tuple[str, ...]:
        """The numbers that it takes."""
        return DERIVED[self.number].needs if self.number in DERIVED else (self.number,)


class Decision(NamedTuple):
    """Whether to go, to look closer or to stop, and why."""

    word: str
    why: str


class Row(NamedTuple):
    """What the records say of a risk.

    Attributes:
        risk: the risk.
        value: the user's number; NaN where one that it takes was not given.
        limit: where runs fail, for a model of the user's size, with the ends of its 95 % interval.
        decades: from the number to the limit, with the interval; negative beyond it, NaN without a number.
        source: the records.
        beyond: decades from the largest model that ran to the user's; 0 within the sizes that ran.
        has_far_tokens: whether the limit is a power of tokens, and was extrapolated to more than ``FAR`` times those of
            any run.
        has_optimizer: whether runs of the user's optimizer tell the limit, where it depends on the optimizer.
        missing: the numbers that it takes, or that say whether it applies, and that were not given.
        given: the first of the numbers that it takes, as the user gave it; None without one.
        unit: what a limit is multiplied by to be one of that number, with the others as they were given.
        threshold: above which to act; None if there is no such level.
        remarks: what else is outside of what the records know, a sentence each.
    """

    risk: Risk
    value: float
    limit: Crossing
    decades: Crossing
    source: Limit
    beyond: float
    has_far_tokens: bool
    has_optimizer: bool
    missing: Sequence[str]
    given: Number | None
    unit: float
    threshold: Threshold | None
    remarks: Sequence[str]

    @property
    def does_not_carry(self) -> str:
        """Why the limit is another one for a model of the user's size; empty if no reason is known."""
        if disagreement := levels_that_disagree(self.risk):
            return disagreement
        reason = "" if self.source.has_trend else str(table()["without_a_trend"])
        if self.beyond > math.log10(FAR):
            reason = reason or str(table()["too_far"])
        if self.has_far_tokens:
            reason = reason or str(table()["too_many_tokens"])
        if not self.has_optimizer:
            reason = reason or str(table()["no_such_optimizer"])
        return self.risk.does_not_carry or (reason if min(self.decades) > 0 else "")

    @property
    def factors_of_two(self) -> Crossing:
        """From the number to the limit, with the interval; negative beyond it."""
        return Crossing(*(decades / math.log10(2) for decades in self.decades))

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``; open if the interval of the limit holds the number, not tried if it has no end there.

        A limit of small models at one size, or far below the user's, can tell what is beyond it, but never that a large
        model is clear of it.
        """
        if math.isnan(self.value):
            return UNASKED
        if self.does_not_carry:
            return APART
        if max(self.decades) < 0 and (math.isfinite(self.decades.middle) or self.value == 0):
            return BEYOND
        return CLEAR if min(self.decades) > 0 else UNTRIED if math.isinf(min(self.decades)) else OPEN


@cache
def table() -> Mapping[str, Any]:
    """The content of ``risks.yaml``; see there."""
    content: Mapping[str, Any] = shipped.load(Path(__file__).with_name("risks.yaml"))
    return content


@cache
def risks() -> Sequence[Risk]:
    """All risks, in their order."""
    return [Risk(name, **{"when": {}, **entry}) for name, entry in table()["risks"].items()]


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


def rows(numbers: Mapping[str, Number | str]) -> list[Row]:
    """What the records say of each risk of a run, the nearest limits first.

    A risk is left out if a number excludes it: attention logits, of a run with qk-norm.

    Args:
        numbers: as ``read_numbers`` makes them, with ``params``.
    """
    found = [_row(risk, numbers) for risk in risks() if not _excluded(risk, numbers)]
    return sorted(found, key=lambda row: (VERDICTS.index(row.verdict), row.decades.middle))


def levels_that_disagree(risk: Risk) -> str:
    """The levels that two records give to one quantity, a clause; empty if they agree within ``DISAGREE`` times."""
    records = [read_limits()[name] for name in (risk.limit, risk.also) if name]
    levels = [record.beyond for record in records]
    if len(records) < 2 or max(levels) <= DISAGREE * min(levels):
        return ""
    named = [f"{record.beyond:.3g} in {record.place} ({format_value(record.steps[0])} steps)" for record in records]
    return f"its records disagree, and the level is {listed(named)}"


def left_out(numbers: Mapping[str, Number | str]) -> dict[str, list[str]]:
    """The titles of the risks that do not apply, by the number that excludes them, such as ``qk_norm=yes``."""
    found: dict[str, list[str]] = {}
    for risk in risks():
        if excluded := _excluded(risk, numbers):
            found.setdefault(excluded, []).append(risk.title)
    return found


def not_covered(numbers: Mapping[str, Number | str]) -> list[str]:
    """What these records do not know of the values given, half a sentence each."""
    found = {}
    for key, value in numbers.items():
        reasons = table()["numbers"][key].get("not_covered", {})
        found[f"{key}={_text(value)}"] = reasons if isinstance(reasons, str) else reasons.get(value, "")
    return [f"{given}: {reason}" for given, reason in found.items() if reason]


def far_away(numbers: Mapping[str, Number | str]) -> list[str]:
    """What to know before all else, a sentence each: how far the numbers lie from all that ran."""
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
        f"{key}={_text(numbers[key])} ({short(low)} to {short(high)})"
        for key, (low, high) in ranges.items()
        if key in numbers and key not in ("params", "lr") and not low <= float(numbers[key]) <= high
    ]
    if outside:
        found.append(f"Outside of what public runs had: {listed(outside)}.")
    if "optimizer" not in numbers:
        found.append("No optimizer is given, so these are the limits of AdamW.")
    return found


def _far(numbers: Mapping[str, Number | str]) -> dict[str, float]:
    """The size and the tokens over the most of any public run, where they are more than ``FAR`` times that."""
    most = {key: float(public()["ranges"][key][1]) for key in ("params", "tokens")}
    return {key: times for key in most if key in numbers and (times := float(numbers[key]) / most[key]) > FAR}


def decide(found: Sequence[Row], numbers: Mapping[str, Number | str]) -> Decision:
    """What to do, by the rows of a run.

    Stop beyond a limit. Look where one is open, far from all that ran, where a number is not covered, in a number
    format that no public run had, or where none is clear.
    """
    titles = {word: [row.risk.title for row in found if row.verdict == word] for word in VERDICTS}
    if beyond := titles[BEYOND]:
        return Decision(STOP, f"{_are(beyond)} beyond the limit")
    if unsure := [*titles[OPEN], *titles[UNTRIED]]:
        return Decision(LOOK, f"{_are(unsure)} open")
    for key, times in _far(numbers).items():
        what = "size" if key == "params" else key
        return Decision(LOOK, f"nothing is clear at {count(times)} times the {what} of any public run here")
    if not titles[CLEAR]:
        return Decision(LOOK, "no limit that carries over judges these numbers")
    if apart := [reason.partition(":")[0] for reason in not_covered(numbers)]:
        return Decision(LOOK, f"{_are(apart)} not covered by these limits")
    if numbers.get("precision", "bf16") not in FORMATS_AT_SIZE:
        small = [row.risk.title for row in found if row.verdict == APART and "precision" in row.risk.when]
        return Decision(LOOK, f"{_are(small or ['the number format'])} known of small models alone")
    return Decision(GO, f"{_are(titles[CLEAR])} clear of the limit")


def _are(titles: Sequence[str]) -> str:
    return f"{listed(titles)} {'is' if len(titles) == 1 else 'are'}"


def cliff(found: Sequence[Row], numbers: Mapping[str, Number | str]) -> str:
    """How far the learning rate lies from that at which runs begin to fail, a sentence; empty if that is not known."""
    of_rates = [row for row in found if row.risk.number == "lr" and row.source.law and not math.isnan(row.value)]
    for row in sorted(of_rates, key=lambda row: row.decades.middle)[:1]:
        middle, *ends = row.factors_of_two
        side = "below" if middle > 0 else "above"
        low, high = sorted(ends) if middle > 0 else sorted(-end for end in ends)
        return (
            f"lr={_text(numbers['lr'])} is {abs(middle):.1f} [{low:.1f}, {high:.1f}] factors of two {side} the cliff, "
            f"the rate from which such runs end {LOST:g} nats higher or more."
        )
    return ""


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


def _text(value: Number | str) -> str:
    return value.text if isinstance(value, Number) else value


def _excluded(risk: Risk, numbers: Mapping[str, Number | str]) -> str:
    """The number that excludes a risk; a risk of one number format is excluded if no format is given."""
    for key, values in risk.when.items():
        if key in numbers and numbers[key] not in values:
            return f"{key}={numbers[key]}"
    return "precision= not given" if "precision" in risk.when and "precision" not in numbers else ""


def _row(risk: Risk, numbers: Mapping[str, Any]) -> Row:
    source, size = read_limits()[risk.limit], numbers["params"]
    conditions = [key for key in risk.when if key != "optimizer"]
    missing = [key for key in (*risk.needs, *conditions) if key not in numbers]
    value, unit = math.nan, 1.0
    if not missing:
        first, *others = (float(numbers[key]) for key in risk.needs)
        value = first
        if risk.number in DERIVED:  # in proportion to the first of its numbers
            derived = DERIVED[risk.number].value
            value, unit = derived(first, *others), 1 / derived(1.0, *others)
    limit = source.at(numbers)
    sign = -1 if risk.trouble == "below" else 1
    ends = [sign * _decades(value, end) for end in limit]
    if value == 0 and source.offsets and numbers.get("optimizer", "adamw") not in source.offsets:
        ends[-1] = math.inf  # some optimizers need no warm-up, and of this one nobody knows
    beyond = max(0.0, math.log10(size / source.sizes[1]))
    return Row(
        risk,
        value,
        limit,
        Crossing(*ends),
        source,
        beyond,
        has_far_tokens=bool(source.law and "tokens" in source.law.exponents and "tokens" in _far(numbers)),
        has_optimizer=not source.offsets or numbers.get("optimizer", "adamw") in source.offsets,
        missing=missing,
        given=numbers.get(risk.needs[0]),
        unit=unit,
        threshold=_threshold(risk, numbers),
        remarks=_remarks(risk, source, value, numbers),
    )


def _decades(value: float, limit: float) -> float:
    if math.isnan(value) or math.isnan(limit):
        return math.nan
    if value == 0 or math.isinf(limit):
        return math.inf
    return math.log10(limit / value) if limit else -math.inf


def _remarks(risk: Risk, source: Limit, value: float, numbers: Mapping[str, Any]) -> list[str]:
    remarks = []
    low, high = source.tried
    if source.has_trend and numbers["params"] < source.sizes[0]:
        remarks.append(f"Your size lies below those that ran, from {count(source.sizes[0])} on.")
    if source.law and "tokens" in source.law.exponents and "tokens" not in numbers:
        remarks.append(f"No tokens are given, so {TOKENS_PER_PARAMETER} to each parameter are taken.")
    optimizer = str(numbers.get("optimizer", "adamw"))
    if source.offsets and optimizer not in source.offsets:
        remarks.append(
            f"No public run here tells where {optimizer} begins to fail, so the interval covers "
            f"{count(len(source.offsets))} others."
        )
    if source.lines and math.isnan(source.beyond):
        at = f"The limit is that at a learning rate of {format_value(source.nearest(numbers.get('lr')))}"
        if "lr" not in numbers:
            remarks.append(f"{at}, the highest that ran, since no lr is given.")
        elif numbers["lr"] not in source.lines:
            remarks.append(f"{at}, the nearest that ran; yours is {numbers['lr'].text}.")
    elif not math.isnan(value) and not low <= value <= high:
        yours = short(value) if risk.number in DERIVED else numbers[risk.number].text
        remarks.append(f"Your {yours} lies outside of what ran, {short(low)} to {short(high)}.")
    asked = {key: values for key, values in risk.when.items() if key not in numbers and key != "optimizer"}
    remarks += [f"It applies if {key}={listed(values, 'or')}, which was not given." for key, values in asked.items()]
    return remarks


def short(value: float) -> str:
    """A number to three digits, in thousands, millions and so on if it is large."""
    return count(value) if value >= 1e4 else format_value(float(f"{value:.3g}"))


def _threshold(risk: Risk, numbers: Mapping[str, Any]) -> Threshold | None:
    if not risk.threshold:
        return None
    column, above = risk.threshold["column"], risk.threshold["above"]
    if above == "rounding":
        precision = str(numbers["precision"])
        above = float(f"{level_at_cost(COSTLY, MANTISSA_BITS[FP16.get(precision, precision)]):.3g}")
    return Threshold(column, float(above))
