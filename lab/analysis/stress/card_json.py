"""Parts of a card as JSON, and its baseline: what ``lab stress`` and ``lab check`` write, and what they read again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.statistics import Interval, power_of
from lab.analysis.stress.battery import CARD_FILE, NOT_JUDGED, StressTest
from lab.analysis.stress.cures import Cure
from lab.analysis.stress.lines import Line
from lab.analysis.stress.measures import pooled_sd
from lab.analysis.stress.rates import FineCurve
from lab.core import files
from lab.core.errors import RequestError
from lab.core.schema import build

VERSION = 2  # of a baseline, since ten times the best learning rate is read off the curve
INTERVAL_LEVEL = 0.95
FAULTS = (ValueError, KeyError, TypeError, AttributeError)  # what damaged content raises
MADE = ("commands", "versions", "data", "interventions")
# The keys that hold a field as it is, with its name. An earlier card may lack some: their fields keep their defaults.
OF_TEST = {key: key for key in ("title", "unit", "passes", "fails", "failure", "source", "means")}
OF_LINE = {"seed_numbers": "seeds", "is_lower_bound": "is_bound", "caveat": "caveat", "verdict": "verdict"}
OF_LINE |= {"stuck_seeds": "stuck", "capped_seeds": "capped"}
OF_CURE = {key: key for key in ("change", "verdict", "p", "damage", "left", "reason", "is_confirmed", "is_advised")}
OF_CURE |= {"stuck_seeds": "stuck", "capped_seeds": "capped", "parameters_added": "parameters"}


class GuardedTest(NamedTuple):
    """A test in the JSON of a card, as far as ``lab check`` guards it.

    Attributes:
        title: its name for readers.
        unit: of its number.
        passes: from this value on recipes pass, on the side away from ``fails``.
        fails: from this value on recipes fail.
        seeds: its number for each of the ``seed_numbers``.
        is_lower_bound: whether the number is a lower bound.
        caveat: why a small number says nothing of what the recipe stands; empty where nothing speaks against it.
        verdict: on the recipe.
    """

    title: str
    unit: str
    passes: float
    fails: float
    seeds: tuple[float, ...]
    seed_numbers: tuple[int, ...]
    is_lower_bound: bool
    caveat: str = ""
    verdict: str = ""

    @property
    def by_seed(self) -> pd.Series[float]:
        """Its number by seed."""
        return pd.Series(self.seeds, index=list(self.seed_numbers), dtype=float)

    @property
    def margin(self) -> float:
        """By how much its number may change."""
        return abs(self.passes - self.fails) / 2


class CardBaseline(NamedTuple):
    """The numbers of a card to compare others with.

    Attributes:
        source: the file or folder from which they come.
        recipe: its name for readers.
        parameters: of the model.
        is_judged: whether the recipe beats a bigram model at any learning rate.
        best_lr: its best learning rate; NaN if no test needed it.
        losses: at the best learning rate, by seed, nats per token.
        curve: losses of the recipe itself, a row per learning rate and a column per seed; empty in earlier cards.
        tests: by name.
        made: how the runs were made: ``commands``, ``versions``, and fingerprints of the ``data``; and the
            ``interventions`` of the recipe.
    """

    source: str
    recipe: str
    parameters: int
    is_judged: bool
    best_lr: float
    losses: pd.Series[float]
    curve: pd.DataFrame
    tests: Mapping[str, GuardedTest]
    made: Mapping[str, list[str]]


def plain(held: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """The values of these keys, each the field that it names of what holds them."""
    return {key: getattr(held, name) for key, name in keys.items()}


def fields(entry: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields of ``plain``, as far as their keys are there; null is NaN."""
    return {name: math.nan if entry[key] is None else entry[key] for key, name in keys.items() if key in entry}


def of_line(line: Line) -> dict[str, Any]:
    """A line of a card."""
    return {
        "name": line.test.name,
        **plain(line.test, OF_TEST),
        **plain(line, OF_LINE),
        **of_interval(line.interval, "value", "low", "high"),
        "between": line.between,
        "power": power(line.test, line.interval),
        "seeds": line.interval.values,
        "reason": line.caveat if line.verdict == NOT_JUDGED else "",
    }


def of_cure(cure: Cure) -> dict[str, Any]:
    """What a card says of a change."""
    return {
        "test": cure.test.name,
        **plain(cure, OF_CURE),
        **of_interval(cure.cost, "cost_at_best_lr", "cost_low", "cost_high"),
        **of_interval(cure.improvement, "takes_off", "low", "high"),
        "unit": cure.test.unit,
        "seeds": cure.improvement.n,
        "step_time": cure.step_time,
    }


def of_interval(interval: Interval, *keys: str) -> dict[str, Any]:
    """The mean and the ends of an interval under these keys, with its number of seeds and its level."""
    numbers = dict(zip(keys, interval[:3], strict=True))
    return {**numbers, "n": interval.n, "interval_level": INTERVAL_LEVEL}


def by_seed(values: Mapping[int, float] | pd.Series[float]) -> dict[str, float]:
    """Values by seed, a mapping or a series."""
    return {str(seed): float(value) for seed, value in values.items()}


def by_lr(values: pd.DataFrame) -> dict[str, dict[str, float]]:
    """A table with a row per learning rate and a column per seed."""
    return {str(lr): by_seed(of_lr) for lr, of_lr in values.T.to_dict().items()}


def from_lrs(entry: Mapping[str, Mapping[str, float | None]]) -> pd.DataFrame:
    """The table of ``by_lr``."""
    return pd.DataFrame({float(lr): of_lr for lr, of_lr in entry.items() if of_lr}, dtype=float).T.rename(columns=int)


def power(test: StressTest, interval: Interval) -> float | None:
    """The probability that so many seeds tell the two zones of a test apart; None where nothing tells the spread.

    It is that of an interval, of a mean where recipes begin to pass, that excludes where they begin to fail.
    """
    sd, freedom = pooled_sd([np.array(interval.values)], test.spread)
    return power_of(interval.n, test.gap, sd, 1 - INTERVAL_LEVEL, freedom) if sd > 0 else None


def read(folder: Path) -> dict[str, Any]:
    """The content of the card that ``lab stress`` left in a folder.

    Raises:
        RequestError: there is none, or it is no JSON.
    """
    path = folder / CARD_FILE
    try:
        return files.read_json(path, dict)
    except OSError as refusal:
        raise RequestError(f"no card {path}: {refusal.strerror}") from None
    except ValueError:
        raise damaged(folder) from None


def damaged(folder: Path) -> RequestError:
    """The refusal of a card with damaged content."""
    return RequestError(f"{folder / CARD_FILE} is a damaged card, or one of another lab; lab stress makes it anew")


def line_of(entry: Mapping[str, Any], test: StressTest) -> Line:
    """The line of ``of_line``, of a test whose texts and zones may be those of the entry."""
    interval = interval_of(entry, "value", "low", "high")._replace(values=tuple(map(float, entry["seeds"])))
    seeds = tuple(entry["seed_numbers"])
    return Line(test, **{**fields(entry, OF_LINE), "seeds": seeds, "interval": interval})


def cure_of(entry: Mapping[str, Any], test: StressTest) -> Cure:
    """The change of ``of_cure``."""
    cost = interval_of(entry, "cost_at_best_lr", "cost_low", "cost_high")
    return Cure(test, improvement=interval_of(entry, "takes_off", "low", "high"), cost=cost, **fields(entry, OF_CURE))


def curve_of(entry: Mapping[str, Any]) -> FineCurve:
    """What is known of the curve of a recipe, from the ``learning_rates`` of its card."""
    logits = from_lrs(entry["attention_logits"]).fillna(math.inf)  # of a run that diverged
    return FineCurve(from_lrs(entry["between"]), fields(entry, {"loss_unigram": "unigram"})["unigram"], logits)


def interval_of(entry: Mapping[str, Any], *keys: str) -> Interval:
    """The interval whose mean and ends have these keys."""
    mean, low, high = (math.nan if entry[key] is None else float(entry[key]) for key in keys)
    return Interval(mean, low, high, entry["n"])


def baseline_of(path: Path, content: Mapping[str, Any]) -> CardBaseline:
    """The numbers of a card in the JSON of its folder, with how it was ``made``, or in a baseline.

    Raises:
        RequestError: a test lacks a number, or has a wrong one.
        ValueError, KeyError, TypeError, AttributeError: other content is damaged.
    """
    tests = {
        entry["name"]: build(
            GuardedTest, {key: entry[key] for key in GuardedTest._fields if key in entry}, f"{path}: test"
        )
        for entry in content["tests"]
    }
    if any(len(test.seeds) != len(test.seed_numbers) for test in tests.values()):
        raise ValueError("a test has other seeds than numbers")
    return CardBaseline(
        str(path),
        str(content["recipe"]),
        int(content["parameters"]),
        bool(content["is_judged"]),
        math.nan if content["best_lr"] is None else float(content["best_lr"]),
        pd.Series({int(seed): loss for seed, loss in content["losses_at_best_lr"].items()}, dtype=float),
        from_lrs(content.get("curve", {})),
        tests,
        {name: list(map(str, content["made"].get(name, ()))) for name in MADE},
    )


def baseline_text(card: CardBaseline) -> str:
    """The content of a baseline file: JSON with a line for each learning rate and each test, for diffs."""
    head = {
        "card_version": VERSION,
        "made": card.made,
        "recipe": card.recipe,
        "parameters": card.parameters,
        "is_judged": card.is_judged,
        "best_lr": None if math.isnan(card.best_lr) else card.best_lr,
        "losses_at_best_lr": by_seed(card.losses),
    }
    rates = ",\n".join(f"  {json.dumps(lr)}: {json.dumps(of_lr)}" for lr, of_lr in by_lr(card.curve).items())
    rows = ",\n".join(f"  {json.dumps({'name': name, **test._asdict()})}" for name, test in card.tests.items())
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
    return text + f',\n "curve": {{\n{rates}\n }},\n "tests": [\n{rows}\n ]\n}}\n'
