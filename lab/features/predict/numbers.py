"""A run by its numbers: each risk against the limit of public runs, and the published run that contradicts it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import pandas as pd

from lab.analysis.laws.fits import Crossing
from lab.analysis.rendering import html
from lab.analysis.runaway import read_runaways
from lab.analysis.statistics import Interval
from lab.analysis.text import capitalized, count, first_to_last, format_value, listed, spelled_out
from lab.core import shipped
from lab.core.errors import RequestError, nearest
from lab.features.predict.limits import TOKENS_PER_PARAMETER, Limit, read_limits
from lab.report.answer import Answer, Section

BEYOND, OPEN, NOT_BEYOND, NOT_JUDGED = "beyond", "open", "not beyond", "not judged"
STABLE, UNSTABLE = "stable", "unstable"
LEAST_PARAMETERS = 1000  # of fewer the user has left out the unit
FAR = 30  # times the largest size, or the most tokens, that ran, beyond which no number is said to lie short of a limit
OF_LAWS = ("params", "active", "tokens", "optimizer")  # numbers that limits depend on
PARTS = {"active": "params", "batch": "tokens"}  # numbers that are at most another one
APART = ("optimizer", "qk_norm")  # runs that differ in one of these lie a decade apart
SHOWN = ("params", "lr", "tokens", "optimizer", "qk_norm")  # of a published run


class Number(float):
    """A number of the user's, with the text that it was given as."""

    text: str

    def __new__(cls, value: float, text: str) -> Self:
        """The number of this value."""
        number = super().__new__(cls, value)
        number.text = text
        return number


Numbers = Mapping[str, Number | str]


@dataclass(frozen=True)
class Risk:
    """A risk as ``risks.yaml`` describes it; see there."""

    name: str
    title: str
    number: str
    limit: str
    fails: str
    published: Sequence[str]
    test: str
    when: Mapping[str, Sequence[str]]
    trouble: str = "above"
    memories_of: str = ""
    threshold: str = ""

    @property
    def needs(self) -> list[str]:
        """The numbers that it takes."""
        return [key for key in (self.number, self.memories_of) if key]

    def excluded_by(self, numbers: Numbers) -> str:
        """The number under which it is not asked; one of a single number format is not asked without a format."""
        excluding = [key for key, values in self.when.items() if key in numbers and numbers[key] not in values]
        if excluding:
            return f"{excluding[0]}={text_of(numbers[excluding[0]])}"
        return "precision= not given" if "precision" in self.when and "precision" not in numbers else ""


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

    @property
    def described(self) -> str:
        """Its size, learning rate and so on, as words of the command line."""
        return " ".join(f"{key}={text_of(self.numbers[key])}" for key in SHOWN if key in self.numbers)


@dataclass(frozen=True, eq=False)
class Row:
    """What public runs say of a risk of a run with these numbers."""

    risk: Risk
    numbers: Mapping[str, Any]

    @property
    def source(self) -> Limit:
        """The runs that tell it."""
        return read_limits()[self.risk.limit]

    @property
    def missing(self) -> list[str]:
        """The numbers that it takes, or that say whether it applies, and that were not given."""
        asked = [*self.risk.needs, *(key for key in self.risk.when if key != "optimizer")]
        return [key for key in asked if key not in self.numbers]

    @property
    def unit(self) -> float:
        """What a limit is multiplied by to be one of the number: of memories of beta2, their steps."""
        return 1 / (1 - float(self.numbers.get(self.risk.memories_of, 0)))

    @property
    def value(self) -> float:
        """The user's number, in the unit of the limit; NaN where one that it takes was not given."""
        return math.nan if self.missing else self.numbers[self.risk.number] / self.unit

    @cached_property
    def limit(self) -> Crossing:
        """Where runs fail, for a model of the user's size, with the ends of its 95 % interval."""
        return self.source.at(self.numbers)

    @property
    def decades(self) -> Crossing:
        """From the number to the limit, with the interval; negative beyond it, NaN without a number."""
        sign = -1 if self.risk.trouble == "below" else 1
        return Crossing(*(sign * (math.log10(end / self.value) if self.value else math.inf) for end in self.limit))

    @property
    def factors_of_two(self) -> Crossing:
        """The same distance in doublings."""
        return Crossing(*(decades / math.log10(2) for decades in self.decades))

    @property
    def beyond(self) -> float:
        """Decades from the largest model that ran to the user's; 0 within the sizes that ran."""
        return max(0.0, math.log10(self.numbers["params"] / self.source.sizes[1]))

    @property
    def knows_optimizer(self) -> bool:
        """Whether public runs tell where the optimizer begins to fail."""
        return not self.source.offsets or self.numbers.get("optimizer", "adamw") in self.source.offsets

    @property
    def outside(self) -> str:
        """A number of which public runs had only others, so that nothing can be judged; empty without one."""
        key = self.risk.memories_of
        low, high = self.source.ranges.get(key, (-math.inf, math.inf))
        is_outside = not low <= self.numbers.get(key, low) <= high
        return f"no public run had {key}={self.numbers[key].text}" if is_outside else ""

    @property
    def too_far(self) -> str:
        """Why the limit cannot tell that a number lies short of it; empty where it can."""
        reasons: Mapping[str, str] = table()["too_far"]
        _, most_tokens = self.source.ranges.get("tokens", (0.0, math.inf))
        if not self.source.law.exponents and self.beyond > 0:
            return reasons["without_a_trend"]
        if self.beyond > math.log10(FAR):
            return reasons["size"]
        if self.numbers.get("tokens", 0.0) > FAR * most_tokens:
            return reasons["tokens"]
        return "" if self.knows_optimizer else reasons["optimizer"]

    @property
    def verdict(self) -> str:
        """Where the number lies against the limit; open if its interval holds the number.

        None of them is a permission: of published runs whose numbers were not beyond a limit, many were unstable.
        """
        if self.missing or self.outside:
            return NOT_JUDGED
        if max(self.decades) < 0 and (self.value or self.knows_optimizer):  # some optimizers need no warm-up
            return BEYOND
        if self.too_far:
            return NOT_JUDGED
        return NOT_BEYOND if min(self.decades) > 0 else OPEN

    @property
    def reason(self) -> str:
        """Why it is not judged; empty if it is."""
        if self.verdict != NOT_JUDGED:
            return ""
        return f"{_named(self.missing)} not given" if self.missing else self.outside or self.too_far

    @property
    def remarks(self) -> list[str]:
        """What was assumed, and what lies outside of what ran, a sentence each."""
        remarks, (low, high) = [], self.source.tried
        if self.source.law.exponents and self.numbers["params"] < self.source.sizes[0]:
            remarks.append(f"Your size lies below those that ran, from {count(self.source.sizes[0])} on.")
        if "tokens" in self.source.law.exponents and "tokens" not in self.numbers:
            remarks.append(f"No tokens are given, so {TOKENS_PER_PARAMETER} to each parameter are taken.")
        if not self.knows_optimizer:
            remarks.append(
                f"No public run here tells where {self.numbers['optimizer']} begins to fail, so the interval covers "
                f"{len(self.source.offsets)} others."
            )
        if not self.missing and not low <= self.value <= high:
            ran = f"{short(self.unit * low)} to {short(self.unit * high)}"
            remarks.append(f"Your {self.numbers[self.risk.number].text} lies outside of what ran, {ran}.")
        return remarks

    @property
    def yours(self) -> str:
        """The user's number with its name, as it was given."""
        if self.missing:
            return f"{_named(self.missing)} not given"
        return f"{self.risk.number}={self.numbers[self.risk.number].text}"

    @property
    def limit_text(self) -> str:
        """The limit with its interval, in the unit of the user's number."""
        return Interval(*self.limit).spelled(lambda end: short(self.unit * end))

    @property
    def factors_text(self) -> str:
        """Factors of two to the limit with their interval; empty without a number."""
        if not math.isfinite(self.factors_of_two.middle):
            return ""
        low, high = sorted(self.factors_of_two[1:])
        return Interval(self.factors_of_two.middle, low, high).spelled(lambda value: f"{value:+z.1f}")

    @property
    def finding(self) -> str:
        """What was found, half a sentence."""
        if self.verdict == NOT_JUDGED:
            return f"not judged, since {self.reason}"
        away = f", {self.factors_text} factors of two to it" if self.value else ""
        word = "open, since it may lie on either side of" if self.verdict == OPEN else self.verdict
        return f"{word} the limit of public runs ({self.yours}{away})"

    @property
    def threshold(self) -> dict[str, Any] | None:
        """The column of a log, and the level above which it has run away; None if there is no such level."""
        column = self.risk.threshold
        return {"column": column, "above": read_runaways()["output_logits"].level} if column else None


def _named(keys: Sequence[str]) -> str:
    return listed(f"{key}=" for key in keys)


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
    found = [Row(risk, numbers) for risk in risks() if not risk.excluded_by(numbers)]
    return sorted(found, key=lambda row: row.verdict != BEYOND)


def contradicting(row: Row | None, numbers: Numbers, known: Sequence[Published]) -> Published | None:
    """The nearest published run that contradicts what a row says, or that no risk is known.

    Of a number beyond its limit that is a run that was stable there. Of any other it is one that was unstable although
    none of its own numbers was beyond a limit; if there are such runs to which the risk applies, one of them.
    """
    if row and row.verdict == BEYOND:
        against = [run for run in known if run.outcome == STABLE and run.verdicts.get(row.risk.name) == BEYOND]
    else:
        unwarned = [run for run in known if run.outcome == UNSTABLE and BEYOND not in run.verdicts.values()]
        against = [run for run in unwarned if row and row.risk.name in run.verdicts] or unwarned
    return min(against, key=lambda run: distance(run.numbers, numbers), default=None)


def distance(a: Numbers, b: Numbers) -> float:
    """Decades of size, learning rate and tokens between two runs, and one for another optimizer or norm of queries.

    What is not given in both counts nothing.
    """
    apart = sum(key in a and key in b and a[key] != b[key] for key in APART)
    both = [key for key in ("params", "lr", "tokens") if key in a and key in b]
    return apart + sum(abs(math.log10(float(a[key]) / float(b[key]))) for key in both)


def base_rate(known: Sequence[Published]) -> str:
    """How many of the published runs that no limit warned of were unstable, a sentence."""
    unwarned = [run for run in known if BEYOND not in run.verdicts.values()]
    unstable = sum(run.outcome == UNSTABLE for run in unwarned)
    return f"Of the {len(unwarned)} published runs here with no number beyond a limit, {unstable} were unstable."


def not_covered(numbers: Numbers) -> list[str]:
    """What public runs do not tell of the values given, half a sentence each."""
    words, reasons = {key: f"{key}={text_of(value)}" for key, value in numbers.items()}, table()["not_covered"]
    return [f"{word}: {reason}" for key, word in words.items() if (reason := reasons.get(key) or reasons.get(word))]


def answer_of(given: Numbers, command: str, known: Sequence[Published] | None = None) -> Answer:
    """The risks of a run by its numbers, as ``read_numbers`` makes them, with ``params``.

    Args:
        given: the numbers.
        command: the command line that asks.
        known: the published runs among which one is looked for that contradicts the answer; all unless given.
    """
    found, about = rows(given), table()
    known = published_runs() if known is None else known
    pairs = [(row, contradicting(row, given, known)) for row in found]
    judged = sum(row.verdict != NOT_JUDGED for row in found)
    first, against = pairs[0] if pairs else (None, contradicting(None, given, known))
    lead = "No risk could be judged, since no public run has such numbers."
    if first:
        lead = f"Of {len(found)} risk{'s' * (len(found) > 1)} {judged or 'none'} could be judged. "
        lead += f"{capitalized(first.risk.title)}: {first.finding}."
    headline = f"{lead} {_contradiction(against)}"
    left_out = [f"{risk.title} ({word})" for risk in risks() if (word := risk.excluded_by(given))]
    uncovered = not_covered(given)
    asked = {*OF_LAWS, *(key for risk in risks() for key in (*risk.needs, *risk.when))}
    unused = [key for key in given if key not in asked]
    others = " ".join(f"{key}={text_of(value)}" for key, value in given.items() if key != "params")
    return Answer(
        headline,
        [
            about["not_measured"],
            base_rate(known),
            *(f"Not covered: {reason}." for reason in uncovered),
            "" if "optimizer" in given else "No optimizer is given, so these are the limits of AdamW.",
            f"Not asked: {listed(left_out)}." if left_out else "",
            f"No limit depends on {_named(unused)}." if unused else "",
            pd.DataFrame([_cells(row, run) for row, run in pairs]),
            about["about"],
            *(Section(row.risk.title, _evidence(row, run)) for row, run in pairs),
            Section("What no small model can tell", [about["untold"]]),
        ],
        title=f"A run of {text_of(given['params'])} parameters: {others or 'no number given'}",
        command=command,
        data={
            "command": command,
            "numbers": dict(given),
            "headline": headline,
            "judged": judged,
            "is_beyond": any(row.verdict == BEYOND for row in found),
            "risks": [_plain(row, run) for row, run in pairs],
            "thresholds": {of["column"]: {"above": of["above"]} for row in found if (of := row.threshold)},
            "left_out": left_out,
            "not_covered": uncovered,
            "not_tested": about["untold"],
        },
    )


def _contradiction(run: Published | None) -> str:
    if run is None:
        return "No published run here contradicts that."
    how = "with no number beyond a limit" if run.outcome == UNSTABLE else "beyond this limit"
    return (
        f"Nearest of the published runs that were {run.outcome} {how}: {run.name} ({run.described}), {run.published}."
    )


def _cells(row: Row, run: Published | None) -> dict[str, str]:
    return {
        "risk": row.risk.title,
        "finding": row.verdict,
        "yours": row.yours,
        "limit here": row.limit_text,
        "factors of two to it": row.factors_text,
        "your size": f"{count(10**row.beyond)} times larger" if row.beyond > 0 else "",
        "against it": f"{run.name}, {run.outcome}" if run else "",
    }


def _evidence(row: Row, run: Published | None) -> list[list[str]]:
    """Sentences on the limit of a row, the runs that tell it, what contradicts it and what was published."""
    sizes, steps = first_to_last(map(count, row.source.sizes)), first_to_last(map(short, row.source.steps))
    text = html.render("risk.txt", row=row, sizes=sizes, steps=steps, contradiction=_contradiction(run))
    return [text.splitlines()]


def _plain(row: Row, run: Published | None) -> dict[str, Any]:
    risk, source = row.risk, row.source
    of_risk = ("name", "title", "number", "trouble", "fails", "published", "test")
    contradicts = run and {"name": run.name, "outcome": run.outcome, "published": run.published, "source": run.source}
    return {
        **{name: getattr(risk, name) for name in of_risk},
        "verdict": row.verdict,
        "reason": row.reason or None,
        "value": row.value,
        "limit": row.limit.plain,
        "decades_to_limit": row.decades.plain,
        "factors_of_two_to_limit": row.factors_of_two.plain,
        "decades_of_size_between": row.beyond,
        "is_extrapolated": row.beyond > 0,
        "n": 1,
        "interval_level": 0.95,
        "records": {
            "runs": source.runs,
            "parameters": source.sizes,
            "steps": source.steps,
            "values": source.tried,
            "has_trend_over_size": bool(source.law.exponents),
        },
        "contradicted_by": contradicts,
        "remarks": row.remarks,
        "threshold": row.threshold,
    }


def text_of(value: Number | str) -> str:
    """A number as it was given."""
    return value.text if isinstance(value, Number) else value


def short(value: float) -> str:
    """A number to three digits, in thousands, millions and so on if it is large."""
    return count(value) if value >= 1e4 else format_value(float(f"{value:.3g}"))
