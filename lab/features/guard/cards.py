"""Guard a recipe's card: save its numbers as a baseline, and judge whether those of a new card are worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.guard.compare import (
    BETTER,
    MARGIN,
    NEGLIGIBLE,
    REGRESSION,
    UNCLEAR,
    Change,
    Comparison,
    change_of,
    judged_together,
)
from lab.analysis.guard.quantities import NATS
from lab.analysis.statistics import DIFFERENCE_LEVEL, Difference, Spread, power_of
from lab.analysis.stress import card_json
from lab.analysis.stress.battery import CARD_FILE, FAILS, OPEN, WEAK, Place, read_spreads
from lab.analysis.stress.card_json import VERSION, CardBaseline, GuardedTest
from lab.analysis.stress.measures import of_difference, pooled_difference, pooled_sd
from lab.analysis.text import format_value, listed
from lab.core import files
from lab.core.errors import RequestError
from lab.records import store

FAILING = (FAILS, WEAK, OPEN)  # verdicts on which a check without a baseline may fail, the worst first
BEST_LOSS = "loss at the best learning rate"
TEN_TIMES = "loss at ten times the baseline's best learning rate"
POWER = 0.8  # with which a check finds the smallest change that a baseline names
ABOUT = (
    f"A check with these seeds finds a change that is as much worse as the last column says in about {POWER:.0%} of "
    "cases. Smaller ones stay unclear, which fails with --fail-on unclear; more seeds find more."
)
FACTS = {"versions": "versions", "data": "data_fingerprint"}
DAMAGED = "{path} is a damaged baseline of a card; take it from version control, or remove it and save anew"


def is_card(path: Path) -> bool:
    """Whether a path is the folder of a card, or the baseline of one."""
    if path.is_dir():
        return (path / CARD_FILE).is_file()
    try:
        return "card_version" in files.read_json(path, dict)
    except (OSError, ValueError):
        return False


def read_card(path: Path) -> CardBaseline:
    """Read the numbers of a card, from its folder or from a baseline.

    Raises:
        RequestError: the file is missing, damaged or of another version, or the card of an earlier lab.
    """
    if path.is_dir():
        content = card_json.read(path)
        if "fitted_best_lrs" not in content:
            raise RequestError(f"{path / CARD_FILE} is of an earlier lab; {content.get('command')} makes it anew")
        runs = store.read(path).runs
        facts = {name: sorted(runs[column].dropna().astype(str).unique()) for name, column in FACTS.items()}
        sets = [{*names.split("+")} for names in runs["intervention"].fillna("").astype(str)]
        own = sorted(set[str].intersection(*sets) - {""})  # since cures only add to those of the recipe
        content["made"] = {"commands": list(store.commands(path)), **facts, "interventions": own}
    else:
        try:
            content = files.read_json(path, dict)
        except OSError as refusal:
            raise RequestError(f"no card or baseline {path}: {refusal.strerror}") from None
        except ValueError:
            raise RequestError(DAMAGED.format(path=path)) from None
        if content.get("card_version") != VERSION:
            raise RequestError(f"{path} is no baseline of a card of version {VERSION}; remove it and save anew")
    try:
        return card_json.baseline_of(path, content)
    except card_json.FAULTS:
        raise RequestError(DAMAGED.format(path=path)) from None


def rows(card: CardBaseline) -> Iterator[dict[str, str]]:
    """Yield a row for each number that is guarded, as ``ABOUT`` explains."""
    for name, test in _guarded(card, card, MARGIN).items():
        if len(test.by_seed) or name in card.tests:
            smallest = smallest_change(test.by_seed, test.margin, read_spreads().get(name, Spread()))
            yield {
                "number": f"{test.title}{' (at least)' * test.is_lower_bound}",
                "mean": f"{test.by_seed.mean():.3f} {test.unit}",
                "seeds": ", ".join(map(str, test.by_seed.index)),
                "margin": f"{test.margin:.3g}",
                "finds": "no change" if math.isnan(smallest) else f"{smallest:.2g} worse",
            }


def smallest_change(numbers: pd.Series[float], margin: float, spread: Spread) -> float:
    """The smallest change for the worse that is called a regression with a probability of ``POWER``.

    Args:
        numbers: of the baseline, by seed; the new ones are those of the same seeds.
        margin: the change that is allowed, in their unit.
        spread: of one of them over seeds, of reference records.

    Returns:
        The change in the unit of the numbers; NaN where nothing tells how they spread.
    """
    sd, freedom = of_difference(pooled_sd([numbers.to_numpy(dtype=float)], spread))
    if not (len(numbers) and sd > 0):
        return math.nan
    alpha, unit = 1 - DIFFERENCE_LEVEL, sd / math.sqrt(len(numbers))
    beyond = scipy.optimize.brentq(
        lambda errors: power_of(len(numbers), errors * unit, sd, alpha, freedom) - POWER, 0, 100
    )
    return margin + float(beyond) * unit


def _guarded(card: CardBaseline, old: CardBaseline, margin: float) -> dict[str, GuardedTest]:
    """The numbers of a card that are held against those of an old one: two losses, and its tests."""
    most = 2 * margin * float(old.losses.mean()) if len(old.losses) else math.nan
    losses = {BEST_LOSS: card.losses, TEN_TIMES: losses_at(card, ten_times(old))}
    of_losses = {
        name: GuardedTest(name, NATS, 0.0, most, tuple(of), tuple(of.index), False) for name, of in losses.items()
    }
    return {**of_losses, **card.tests}


def ten_times(card: CardBaseline) -> float:
    """Ten times the best learning rate of a card, as its runs have it."""
    return Place(times_best=10).setting(card.best_lr).lr


def losses_at(card: CardBaseline, lr: float) -> pd.Series[float]:
    """The losses of a card at a learning rate, by seed; empty where its curve lacks it."""
    at_lr: pd.Series[float] = card.curve.T.get(lr, pd.Series(dtype=float))
    return at_lr


def check_verdicts(folder: Path, fail_on: str) -> tuple[list[str], int]:
    """Judge a card by its own verdicts, without a baseline.

    Args:
        folder: of the card.
        fail_on: the verdict that fails; so do worse ones, which come before it in ``FAILING``.

    Returns:
        Lines about it, and the exit code: 1 if a test fails the check, 2 if the recipe is not judged at all, else 0.

    Raises:
        RequestError: the folder holds no card, or a damaged one.
    """
    content = card_json.read(folder)
    try:
        card = card_json.baseline_of(folder, {"made": {}, **content})
        failing = [test for test in card.tests.values() if test.verdict in FAILING[: FAILING.index(fail_on) + 1]]
        headline = str(content["headline"])
    except card_json.FAULTS:
        raise card_json.damaged(folder) from None
    code = 1 if failing else 0 if card.is_judged else 2
    head = f"{folder}: --fail-on {fail_on} {('passes', 'fails', 'cannot judge')[code]}"
    return [head, *(f"- {test.title}: {test.verdict}" for test in failing), headline], code


def compare_cards(old: CardBaseline, new: CardBaseline, margin: float, strict: bool = False) -> Comparison:
    """Compare a new card with a baseline, test by test, by the rule for curves.

    A change is a regression if its whole 90 % interval lies outside the margin, on the worse side. The margin of a test
    is half the gap between its zones; that of a loss is a share of the loss at the best learning rate, ``margin``. The
    tests look at multiples of each card's own best learning rate, so what lowers that rate may hide from them. The loss
    at ten times the baseline's best one does not. Changes are paired where both cards have the same seeds, and those of
    tests have a spread that is pooled with that of the reference records. Where every seed has the same number, to
    rounding, nothing has changed. A change is a drift if it is significant (Holm) and no regression. A tolerance that
    is now a lower bound is no regression, since it may be larger; and no number is better than it was that says
    nothing of what the recipe stands (see ``measures.caveat_of``). A missing intervention is a regression, whatever the
    numbers are.
    """
    reasons, remarks = list(_reasons(old, new)), list(_remarks(old, new))
    comparison = Comparison(old.source, new.source, margin, strict, [], [], [], reasons, remarks, of_cards=True)
    if reasons:
        return comparison
    changes = list(_changes(old, new, margin))
    remarks += [
        f"{change.quantity} was not compared, for want of seeds" for change in changes if math.isnan(change.low)
    ]
    known = [change for change in changes if not math.isnan(change.low)]
    missing = [name for name in old.made["interventions"] if name not in new.made["interventions"]]
    removed = [f"{new.recipe}: {name} is missing" for name in missing]
    return comparison._replace(changes=judged_together(known), removed=removed, remarks=remarks)


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
    if len(old.losses) and not len(old.curve):
        yield f"{TEN_TIMES} was not compared, since the baseline was saved without it; save it anew"
    elif len(losses_at(old, ten_times(old))) and not len(losses_at(new, ten_times(old))):
        yield f"{TEN_TIMES} was not compared, since there is no run at {format_value(ten_times(old))} now"
    for name, test in new.tests.items():
        if name not in old.tests:
            yield f"{test.title} was not compared, since the baseline lacks it"


def _changes(old: CardBaseline, new: CardBaseline, margin: float) -> Iterator[Change]:
    """Yield the change of each number that has seeds on both sides; p is not adjusted yet."""
    now = _guarded(new, old, margin)
    for name, test in _guarded(old, old, margin).items():
        if (name in old.tests and not new.is_judged) or not (len(test.by_seed) and len(now[name].by_seed)):
            continue
        change = change_of(
            test.title,
            test.unit,
            (new.recipe, new.parameters),
            _difference(test.by_seed, now[name].by_seed, read_spreads().get(name, Spread()), test.margin),
            means=[float(side.by_seed.mean()) for side in (test, now[name])],
            limit=test.margin,
            worse=1 if test.passes < test.fails else -1,
        )
        is_bound, is_idle = now[name].is_lower_bound, now[name].caveat
        is_open = (change.verdict == REGRESSION and is_bound) or (change.verdict == BETTER and is_idle)
        yield change._replace(verdict=UNCLEAR) if is_open else change


def _difference(before: pd.Series[float], now: pd.Series[float], spread: Spread, limit: float) -> Difference:
    """The change of a number; it has no error where every seed has the number that it had, to rounding."""
    found = pooled_difference(before, now, spread)
    is_same = set(before.index) == set(now.index) and bool(((now - before).abs() <= NEGLIGIBLE * limit).all())
    return found._replace(error=0.0) if is_same else found
