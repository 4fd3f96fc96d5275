"""Guard a recipe's card: save its numbers as a baseline, and judge whether those of a new card are worse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.guard import render
from lab.analysis.guard.check import MARGIN, check_folder
from lab.analysis.guard.compare import REGRESSION, Change, Comparison, change_of, judged_together
from lab.analysis.guard.quantities import NATS
from lab.analysis.sensitivity import Window
from lab.analysis.text import format_value, listed, plain_text
from lab.core import files
from lab.core.errors import RequestError
from lab.records import store
from lab.studies.stress.battery import Spread, read_spreads
from lab.studies.stress.measures import pooled_difference

CARD, VERSION = "card.json", 1
BEST_LOSS = "loss at the best learning rate"
DAMAGED = "{path} is a damaged baseline of a card; take it from version control, or remove it and save anew"


class GuardedTest(NamedTuple):
    """A test of a card.

    Attributes:
        title: its name for readers.
        unit: of its number.
        passes: from this value on recipes pass, on the side away from ``fails``.
        fails: from this value on recipes fail.
        by_seed: its number by seed.
        is_bound: whether the number is a lower bound.
    """

    title: str
    unit: str
    passes: float
    fails: float
    by_seed: pd.Series[float]
    is_bound: bool


class CardBaseline(NamedTuple):
    """The numbers of a card to compare others with.

    Attributes:
        source: the file or folder from which they come.
        recipe: its name for readers.
        parameters: of the model.
        is_judged: whether the recipe beats a bigram model at any learning rate.
        best_lr: its best learning rate; NaN if no test needed it.
        losses: at the best learning rate, by seed, nats per token.
        tests: by name.
        made: how the runs were made: ``commands``, ``versions``, and fingerprints of the ``data``.
    """

    source: str
    recipe: str
    parameters: int
    is_judged: bool
    best_lr: float
    losses: pd.Series[float]
    tests: Mapping[str, GuardedTest]
    made: Mapping[str, list[str]]


def is_card(path: Path) -> bool:
    """Whether a path is the folder of a card, or the baseline of one."""
    if path.is_dir():
        return (path / CARD).is_file()
    try:
        return "card_version" in files.read_json(path, dict)
    except (OSError, ValueError):
        return False


def read_card(path: Path) -> CardBaseline:
    """Read the numbers of a card, from its folder or from a baseline.

    Raises:
        RequestError: the file is missing, damaged or of another version, or the card was made before it named seeds.
    """
    try:
        content = files.read_json(path / CARD if path.is_dir() else path, dict)
    except OSError as refusal:
        raise RequestError(f"no card or baseline {path}: {refusal.strerror}") from None
    except ValueError:
        raise RequestError(DAMAGED.format(path=path)) from None
    if path.is_dir():
        runs = store.read(path).runs
        facts = {name: sorted(runs[column].dropna().astype(str).unique()) for name, column in FACTS.items()}
        content["made"] = {"commands": list(store.commands(path)), **facts}
    elif content.get("card_version") != VERSION:
        raise RequestError(f"{path} is no baseline of a card of version {VERSION}; remove it and save anew")
    if not all("seed_numbers" in test for test in content.get("tests", ())) or "losses_at_best_lr" not in content:
        raise RequestError(f"{path} does not name the seeds of its numbers; {content.get('command')} makes it anew")
    try:
        return card_from_json(path, content)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(DAMAGED.format(path=path)) from None


FACTS = {"versions": "versions", "data": "data_fingerprint"}


def card_from_json(path: Path, content: Mapping[str, Any]) -> CardBaseline:
    """The numbers of a card in the JSON of its folder, with how it was ``made``, or in a baseline.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is damaged.
    """
    tests = {
        test["name"]: GuardedTest(
            str(test["title"]),
            str(test["unit"]),
            float(test["passes"]),
            float(test["fails"]),
            pd.Series(dict(zip(map(int, test["seed_numbers"]), test["seeds"], strict=True)), dtype=float),
            bool(test["is_lower_bound"]),
        )
        for test in content["tests"]
    }
    losses = {int(seed): loss for seed, loss in content["losses_at_best_lr"].items()}
    return CardBaseline(
        str(path),
        str(content["recipe"]),
        int(content["parameters"]),
        bool(content["is_judged"]),
        math.nan if content["best_lr"] is None else float(content["best_lr"]),
        pd.Series(losses, dtype=float),
        tests,
        {name: list(map(str, content["made"].get(name, ()))) for name in ("commands", *FACTS)},
    )


def save_card(folder: Path, path: Path) -> Iterator[str]:
    """Write the baseline of a card; yields lines about its content, or its differences from the old file.

    Raises:
        RequestError: the folder holds no readable card, or the file is no baseline of one.
    """
    new = read_card(folder)
    old = read_card(path) if path.is_file() else None
    tests = [
        {
            **test._replace(by_seed=pd.Series(dtype=float))._asdict(),
            "name": name,
            "is_lower_bound": test.is_bound,
            "seeds": list(test.by_seed),
            "seed_numbers": [int(str(seed)) for seed in test.by_seed.index],
        }
        for name, test in new.tests.items()
    ]
    kept = ("name", "title", "unit", "passes", "fails", "seeds", "seed_numbers", "is_lower_bound")
    head = {
        "card_version": VERSION,
        "made": new.made,
        "recipe": new.recipe,
        "parameters": new.parameters,
        "is_judged": new.is_judged,
        "best_lr": None if math.isnan(new.best_lr) else new.best_lr,
        "losses_at_best_lr": {str(seed): loss for seed, loss in new.losses.items()},
    }
    rows = ",\n".join("  " + json.dumps({key: test[key] for key in kept}) for test in tests)  # a line each, for diffs
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "tests": [\n{rows}\n ]\n}}\n'
    files.write_output(path, text)
    yield f"{path}: the card of {new.recipe}, from {folder}"
    yield from describe_card(new) if old is None else render.text(compare_cards(old, new, MARGIN))


def describe_card(card: CardBaseline) -> Iterator[str]:
    """Yield lines about how the card of a baseline was made, then a table with a row per test."""
    for name, lines in card.made.items():
        yield from (f"{name}: {line}" for line in lines)
    rows = [
        {
            "test": test.title,
            "mean": f"{'at least ' * test.is_bound}{test.by_seed.mean():.3f} {test.unit}",
            "seeds": ", ".join(str(seed) for seed in test.by_seed.index),
            "margin": f"{abs(test.passes - test.fails) / 2:.3g}",
        }
        for test in card.tests.values()
    ]
    yield from plain_text(pd.DataFrame(rows))


def check(
    folder: Path, baseline: Path, margin: float = MARGIN, strict: bool = False, window: Window | None = None
) -> Comparison:
    """Compare a folder with a baseline: cards if the baseline is of one, else curves, as ``check_folder`` does."""
    if is_card(baseline):
        return check_card(folder, baseline, margin, strict)
    return check_folder(folder, baseline, margin, strict, window)


def check_card(folder: Path, baseline: Path, margin: float, strict: bool = False) -> Comparison:
    """Compare a card with a baseline, both folders or files.

    Returns:
        The comparison (see ``compare_cards``). What cannot be read is not an error: the verdict is ``cannot judge``.
    """
    try:
        return compare_cards(read_card(baseline), read_card(folder), margin, strict)
    except RequestError as refusal:
        return _empty(str(baseline), str(folder), margin, strict, [str(refusal)], [])


def _empty(
    baseline: str, folder: str, margin: float, strict: bool, reasons: list[str], remarks: list[str]
) -> Comparison:
    return Comparison(baseline, folder, margin, strict, [], [], [], reasons, remarks, of_cards=True)


def compare_cards(old: CardBaseline, new: CardBaseline, margin: float, strict: bool = False) -> Comparison:
    """Compare a new card with a baseline, test by test, by the rule for curves.

    A change is a regression if its whole 90 % interval lies outside the margin, on the worse side. The margin of a test
    is half the gap between its zones; that of the loss at the best learning rate is a share of it, ``margin``. Changes
    are paired where both cards have the same seeds, and their spread is pooled with that of the reference records. A
    change is a drift if it is significant (Holm) and no regression. A tolerance that is now a lower bound is no
    regression, since it may be larger.
    """
    reasons, remarks = list(_reasons(old, new)), list(_remarks(old, new))
    comparison = _empty(old.source, new.source, margin, strict, reasons, remarks)
    if reasons:
        return comparison
    changes = list(_changes(old, new, margin))
    remarks += [
        f"{change.quantity} was not compared, for want of seeds" for change in changes if math.isnan(change.low)
    ]
    known = [change for change in changes if not math.isnan(change.low)]
    return comparison._replace(changes=judged_together(known), remarks=remarks)


def _reasons(old: CardBaseline, new: CardBaseline) -> Iterator[str]:
    """Yield reasons why two cards cannot be compared."""
    if not old.is_judged:
        yield f"{old.source}: the recipe is no better than a bigram model, so nothing can get worse"
    data, data_now = set(old.made["data"]), set(new.made["data"])
    if data - data_now and data_now - data:
        yield f"other data, fingerprint {listed(sorted(data))} in the baseline and {listed(sorted(data_now))} now"
    missing = [test.title for name, test in old.tests.items() if name not in new.tests]
    if missing:
        yield f"{new.source} lacks {listed(missing)}; give lab stress the same --tests or --minutes as the baseline"


def _remarks(old: CardBaseline, new: CardBaseline) -> Iterator[str]:
    """Yield other differences, and what was not compared."""
    if old.recipe != new.recipe:
        yield f"the recipe is {old.recipe} in the baseline, {new.recipe} now"
    if old.parameters != new.parameters:
        yield f"the model has {old.parameters:,} parameters in the baseline, {new.parameters:,} now"
    if old.best_lr < new.best_lr or old.best_lr > new.best_lr:
        yield f"the best learning rate is {format_value(old.best_lr)} in the baseline, {format_value(new.best_lr)} now"
    if not new.is_judged:
        yield "the recipe is no better than a bigram model at any learning rate now, so its tests were not compared"
    for name, test in new.tests.items():
        if name not in old.tests:
            yield f"{test.title} was not compared, since the baseline lacks it"


def _changes(old: CardBaseline, new: CardBaseline, margin: float) -> Iterator[Change]:
    """Yield the change of the loss at the best learning rate, and of each test; p is not adjusted yet."""
    arm = (new.recipe, new.parameters)
    if len(old.losses) and len(new.losses):
        limit = margin * float(old.losses.mean())
        found = pooled_difference(old.losses, new.losses, Spread())
        means = [float(old.losses.mean()), float(new.losses.mean())]
        yield change_of(BEST_LOSS, NATS, arm, found, means=means, limit=limit, worse=+1)
    for name, before in old.tests.items() if new.is_judged else ():
        now = new.tests[name]
        if not (len(before.by_seed) and len(now.by_seed)):
            continue
        found = pooled_difference(before.by_seed, now.by_seed, read_spreads().get(name, Spread()))
        means = [float(before.by_seed.mean()), float(now.by_seed.mean())]
        worse = 1 if before.passes < before.fails else -1
        limit = abs(before.passes - before.fails) / 2
        change = change_of(before.title, before.unit, arm, found, means=means, limit=limit, worse=worse)
        yield change._replace(verdict="unclear") if change.verdict == REGRESSION and now.is_bound else change
