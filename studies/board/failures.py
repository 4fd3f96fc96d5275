"""The failures of the board, as ``failures.yaml`` describes them, and the settings that train them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.statistics import Spread
from lab.analysis.stress.arms import REFERENCE, Arm, arm_cards, board_arms, no_such_arm
from lab.analysis.stress.battery import Place, read_battery
from lab.core import shipped
from lab.core.errors import RequestError
from lab.core.schema import build
from lab.records.plans import Setting

FILE = Path(__file__).with_name("failures.yaml")
STRESSED, AT_EASE = "stressed", "at ease"
CURVE = "curve"
CELLS = "cells.csv"  # in a results folder, which runs belong to which setting
FAMILIES = "families.csv"  # in a results folder, by failure what is fixed for an edition


class Failure(NamedTuple):
    """A failure of training that shows at this size.

    Attributes:
        name: as commands take it.
        title: its name for readers.
        failure: what fails at scale.
        source: where that was published.
        stressed: the runs in which it shows.
        metric: the column of ``measures.outcomes`` that is measured.
        unit: of the measure.
        least: what the control must lose for the failure to be tested.
        means: what is measured.
        control: the interventions of the recipe that has the failure.
        words: the other overrides of its runs.
        reference: runs in which it does not show; None where the measure is zero without the failure.
        leaves_out: optimizers that act on the matrices of blocks alone, where the recipe has no blocks.
        of_stress: keys that act on the stress alone; at ease an arm leaves them out, and so is the control there.
        on_curve: whether its stress is a learning rate of the curves, so each arm can be at ease at its own best one.
        is_growth: whether it is the growth of a tensor and no damage of the loss, so that no arm cures it.
    """

    name: str
    title: str
    failure: str
    source: str
    stressed: Place
    metric: str
    unit: str
    least: float
    means: str
    control: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    reference: Place | None = None
    leaves_out: tuple[str, ...] = ()
    of_stress: tuple[str, ...] = ()
    on_curve: bool = False
    is_growth: bool = False

    @property
    def places(self) -> dict[str, Place]:
        """Where its runs are, by name."""
        return {STRESSED: self.stressed} | ({AT_EASE: self.reference} if self.reference else {})


class Rule(NamedTuple):
    """How an arm is judged; frozen before its seeds were trained.

    Attributes:
        edition: its number; a change of the rule, or of the families, makes another one.
        margin: the share of the control's damage that counts as no effect.
        leaves: the share of the control's damage that a cure may leave.
        alpha: the level of tests, after Bonferroni over the family of a failure.
        screened: seeds of all arms.
        fresh: further seeds of the arms that pass the screening, by which alone these are judged.
        passes_screening: the share of the control's damage that an arm must remove in the screening.
        loses: nats of best loss that an arm may lose to be advised.
        within: nats above a best loss up to which a learning rate is tolerated.
    """

    edition: int
    margin: float
    leaves: float
    alpha: float
    screened: tuple[int, ...]
    fresh: tuple[int, ...]
    passes_screening: float
    loses: float
    within: float


class Family(NamedTuple):
    """What is fixed for an edition of the board, so that an arm that is added later changes no verdict.

    Attributes:
        arms: that were tried on a failure when the edition was made.
        prior: the spread of an improvement over seeds, from the screening of these arms.
    """

    arms: frozenset[str]
    prior: Spread


class Board(NamedTuple):
    """Everything that the file says.

    Attributes:
        runs: overrides of all runs.
        control: the interventions of the recipe of the curves.
        grid: learning rates of a curve.
        curve_seeds: its seeds.
    """

    rule: Rule
    runs: tuple[str, ...]
    control: tuple[str, ...]
    grid: tuple[float, ...]
    curve_seeds: tuple[int, ...]
    failures: Mapping[str, Failure]


class Cell(NamedTuple):
    """What distinguishes the runs of the board that differ in their seeds only."""

    failure: str
    arm: str
    place: str
    lr: float


@cache
def read_failures() -> Board:
    """The failures that come with the lab."""
    tree = shipped.load(FILE)
    rule = build(Rule, tree["rule"], "rule")
    failures = {name: _failure(name, entry) for name, entry in tree["failures"].items()}
    return Board(
        rule,
        tuple(tree["runs"]),
        tuple(tree["curve"]["control"]),
        tuple(tree["curve"]["grid"]),
        tuple(tree["curve"]["seeds"]),
        failures,
    )


def _failure(name: str, entry: Mapping[str, Any]) -> Failure:
    test = read_battery().tests[entry["test"]] if "test" in entry else None
    told = {"failure": test.failure, "source": test.source} if test else {}
    kept = {key: value for key, value in entry.items() if key != "test"}
    return build(Failure, {**told, **kept, "name": name}, name)


def chosen_arms(names: Iterable[str]) -> list[Arm]:
    """The arms of these names, with the reference first; all without names.

    Raises:
        RequestError: there is no such arm.
    """
    arms = board_arms()
    for name in names:
        if name not in arms:
            raise RequestError(no_such_arm(name))
    return [arm for arm in arms.values() if not names or arm.name in {REFERENCE, *names}]


def interventions(control: Sequence[str], arm: Arm, excludes: Mapping[str, Iterable[str]]) -> str:
    """The override of the interventions of an arm: those of a control, without what the arm takes the place of.

    Args:
        control: the interventions of the recipe.
        arm: the arm.
        excludes: the interventions that cannot stand beside each intervention, by its name.
    """
    cards = arm_cards()
    replaced = {other for name in arm.adds for other in (*excludes.get(name, ()), *cards[name].not_beside)}
    return f"intervention=[{','.join(sorted({*control, *arm.adds} - (replaced - set(arm.adds))))}]"


def settings(
    arm: Arm, seeds: Sequence[int], excludes: Mapping[str, Iterable[str]], failures: Iterable[Failure]
) -> dict[Cell, Setting]:
    """The runs of an arm: its curve, and its runs under each failure and at ease."""
    board, last = read_failures(), (_seeds(seeds),)
    own = (interventions(board.control, arm, excludes), *arm.optimizer, *arm.words, _seeds(board.curve_seeds))
    found = {Cell(CURVE, arm.name, CURVE, lr): Setting(own, _times(lr, arm)) for lr in board.grid}
    for failure in failures:
        for place_name, place in failure.places.items():
            chosen = (interventions(failure.control, arm, excludes),)
            known = (word for word in failure.words if _is_known(word, arm))
            idle = failure.of_stress if place_name == AT_EASE else ()
            own_words = (word for word in arm.words if word.partition("=")[0] not in idle)
            words = (*chosen, *arm.optimizer, *known, *place.words, *own_words, *last)
            cell = Cell(failure.name, arm.name, place_name, place.lr)
            found[cell] = Setting(words, _times(place.lr, arm))
    return found


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed={','.join(map(str, seeds))}"


def _is_known(word: str, arm: Arm) -> bool:
    """Whether the optimizer of an arm has the key of an override of its numbers; StableSPAM has no clip."""
    key = word.partition("=")[0].removeprefix("optimizer.")
    return not (word.startswith("optimizer.") and arm.optimizer) or key in arm_cards()[arm.name].defaults


def _times(lr: float, arm: Arm) -> float:
    return float(f"{lr * arm.lr_multiplier:.6g}")


def not_applicable(arm: Arm, failure: Failure | None) -> str:
    """Why an arm has no runs under a failure, or without one no curve; empty where it has."""
    control = failure.control if failure else read_failures().control
    for name in arm.adds:
        if lacks := arm_cards()[name].lacks(control):
            return lacks
    if failure is None:
        return ""
    if arm.name in failure.leaves_out:
        return "it acts on the matrices of blocks, which this recipe has none of"
    stress = {word.partition("=")[0] for word in failure.stressed.words}
    if any(word.partition("=")[0] in stress for word in arm.words):
        return "it takes the stress away"
    return "the control has it" if arm.adds and {*arm.adds} <= {*failure.control} else ""


def read_cells(folder: Path) -> tuple[dict[Cell, dict[int, str]], dict[tuple[str, str], str]]:
    """Which runs belong to each setting of the board, by seed, and why some arms were not tried on some failures.

    Raises:
        RequestError: the folder holds no board.
    """
    path = folder / CELLS
    if not path.is_file():
        raise RequestError(f"{folder} holds no board, which `lab leaderboard {folder} --train` trains")
    table = pd.read_csv(path, keep_default_na=False, dtype={"lr": float})
    runs, reasons = dict[Cell, dict[int, str]](), dict[tuple[str, str], str]()
    for row in table.itertuples():
        if row.reason:
            reasons[str(row.failure), str(row.arm)] = str(row.reason)
            continue
        cell = Cell(str(row.failure), str(row.arm), str(row.place), float(str(row.lr)))
        seeds, ids = str(row.seeds).split(), str(row.runs).split()
        runs.setdefault(cell, {}).update(zip(map(int, seeds), ids, strict=True))
    return runs, reasons


def read_families(folder: Path) -> dict[str, Family]:
    """The families of the present edition by failure; none of a folder in which they are not fixed yet."""
    if not (folder / FAMILIES).is_file():
        return {}
    table = pd.read_csv(folder / FAMILIES).fillna({"freedom": 0})  # without a prior
    mine = table[table["edition"] == read_failures().rule.edition]
    return {
        row["failure"]: Family(frozenset(row["arms"].split()), Spread(row["sd"], row["freedom"]))
        for row in mine.to_dict("records")
    }


def cells_table(runs: Mapping[Cell, Mapping[int, str]], reasons: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """The table that ``read_cells`` reads."""
    rows = [
        {**cell._asdict(), "seeds": " ".join(map(str, of_cell)), "runs": " ".join(of_cell.values()), "reason": ""}
        for cell, of_cell in runs.items()
    ]
    rows += [
        {"failure": failure, "arm": arm, "place": STRESSED, "lr": 0.0, "seeds": "", "runs": "", "reason": reason}
        for (failure, arm), reason in reasons.items()
    ]
    return pd.DataFrame(rows).sort_values(["failure", "arm", "place", "lr"])
