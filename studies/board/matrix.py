"""The board as a matrix: what each arm does about each failure, what it costs, and what it tolerates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.statistics import UNKNOWN, Interval, Spread, spread_prior
from lab.analysis.stress.arms import REFERENCE, arm_cards, board_arms
from lab.analysis.stress.battery import StepTime, read_step_times
from lab.analysis.stress.cures import CURES, HARMS, IN_PART, NO, OPEN, against_control, compared, verdict_of
from lab.analysis.stress.measures import by_run, is_capped, tolerances
from lab.records import store
from studies.board.failures import (
    AT_EASE,
    CURVE,
    STRESSED,
    Board,
    Cell,
    Failure,
    Family,
    Rule,
    not_applicable,
    read_cells,
    read_failures,
    read_families,
)

NOT_TESTED, NEVER_ENGAGED, NOT_TRIED = "not tested", "never engaged", "not tried"
LESS, MORE = "grows less", "grows more"  # of a growth, which no arm cures
VERDICTS = (CURES, IN_PART, LESS, NO, OPEN, HARMS, MORE, NEVER_ENGAGED, NOT_TESTED, NOT_TRIED)
OF_GROWTH = {CURES: LESS, IN_PART: LESS, HARMS: MORE}
INCOMPLETE = "not all of its seeds were trained"

# For each cell of the board the runs by seed, with the columns of ``by_run``, ``versions`` and ``seconds``.
Tables = Mapping[Cell, pd.DataFrame]


class Judged(NamedTuple):
    """What an arm does about a failure.

    Attributes:
        verdict: one of ``VERDICTS``.
        improvement: the damage of the control minus that of the arm, paired by seed, with its 95 % interval, whose
            spread is moderated over the family.
        share: the same over the mean damage of the control; where their curves tell, with both at ease at their own
            best learning rate.
        p: of no effect, times the number of arms in the family of the failure (Bonferroni), among which it counts.
        is_confirmed: whether the seeds are fresh ones.
        passed: whether it passed the screening.
        reason: why it was not tried.
        cost_at_ease: its loss at ease minus the control's there, in the mean over these seeds, nats; NaN without runs.
        above_control: its loss under stress minus the control's there, likewise.
    """

    verdict: str
    improvement: Interval = UNKNOWN
    share: float = math.nan
    p: float = math.nan
    is_confirmed: bool = False
    passed: bool = False
    reason: str = ""
    cost_at_ease: float = math.nan
    above_control: float = math.nan

    @property
    def direction(self) -> str:
        """Which way a significant effect goes, whatever its size: ``better``, ``worse``, or empty."""
        return "" if not self.p < read_failures().rule.alpha else "better" if self.improvement.mean > 0 else "worse"


@dataclass(frozen=True)
class Row:
    """An arm of the board.

    Attributes:
        name: of the arm.
        cells: what it does about each failure, by its name.
        best: its lowest loss over learning rates minus the reference's, paired by seed, nats per token.
        trains: whether it ends below a bigram model at any learning rate.
        within_reference: decades of learning rate within 0.1 nats of the reference's best loss.
        within_own: the same of its own best loss.
        is_bound: whether these are lower bounds, since the curve ends before the loss has risen.
        parameters: that it adds.
        lr_multiplier: its learning rate relative to AdamW's.
    """

    name: str
    cells: Mapping[str, Judged]
    best: Interval
    trains: bool
    within_reference: float
    within_own: float
    is_bound: bool
    parameters: int
    lr_multiplier: float = 1.0

    def instead_of(self, failure: Failure) -> str:
        """The part of the recipe of a failure that it takes the place of; empty if it is added."""
        card = arm_cards().get(self.name)
        if card is None:
            return ""
        return card.instead_of or ", ".join(name for name in card.not_beside if name in failure.control)

    @property
    def step_time(self) -> StepTime | None:
        """What it costs in time."""
        return read_step_times().get(self.name)

    def number(self, verdict: str) -> int:
        """On how many failures it has this verdict."""
        return sum(cell.verdict == verdict for cell in self.cells.values())


@dataclass(frozen=True)
class Matrix:
    """Every arm of the board by every failure.

    Attributes:
        folder: of its records.
        board: the failures and the rule.
        lost: the damage of the control of each failure, with its interval; no key where it has no runs.
        rows: the arms that have a curve, the reference first.
        families: by failure what is fixed for this edition.
        minutes: by failure what the fresh seeds of an arm cost, in core-minutes.
    """

    folder: Path
    board: Board
    lost: Mapping[str, Interval]
    rows: Sequence[Row]
    families: Mapping[str, Family] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[Failure]:
        """The failures that were trained."""
        return [failure for name, failure in self.board.failures.items() if name in self.lost]

    @property
    def arms(self) -> list[Row]:
        """The rows without the reference."""
        return [row for row in self.rows if row.name != REFERENCE]

    def holds_over_the_board(self, failure: Failure, cell: Judged) -> bool:
        """Whether an effect is significant among all cells of the board, and not only those of its failure."""
        cells = sum(len(family.arms) for family in self.families.values())
        return cell.p * cells / max(len(self.families[failure.name].arms), 1) < self.board.rule.alpha

    def is_advised(self, row: Row) -> bool:
        """Whether an arm may be advised: it trains, and its best loss is not much worse than the reference's."""
        return row.trains and not row.best.mean > self.board.rule.loses


def read_matrix(folder: Path) -> Matrix:
    """The matrix of a results folder.

    Raises:
        RequestError: the folder holds no board, or its records cannot be read.
    """
    runs, reasons = read_cells(folder)
    return matrix_of(folder, tables_of(folder, runs), reasons, read_families(folder))


def tables_of(folder: Path, runs: Mapping[Cell, Mapping[int, str]]) -> dict[Cell, pd.DataFrame]:
    """The recorded runs of each cell by seed, with the columns of ``by_run``, ``versions`` and ``seconds``."""
    records = store.read(folder)
    by_id = records.runs.set_index("id")
    known = by_run(records).assign(versions=by_id["versions"].astype(str), seconds=by_id["wall_seconds"])
    tables = {}
    for cell, of_cell in runs.items():
        mine = {seed: run for seed, run in of_cell.items() if run in known.index}
        if mine:
            tables[cell] = known.loc[list(mine.values())].assign(seed=list(mine)).set_index("seed").sort_index()
    return tables


def matrix_of(
    folder: Path,
    tables: Tables,
    reasons: Mapping[tuple[str, str], str],
    fixed: Mapping[str, Family] = MappingProxyType({}),
) -> Matrix:
    """The matrix of these runs.

    Args:
        folder: of the records.
        tables: the runs of each cell.
        reasons: by failure and arm why some were not tried.
        fixed: the families that are fixed for the edition.
    """
    board = read_failures()
    judged, lost, families = dict[str, dict[str, Judged]](), dict[str, Interval](), dict[str, Family]()
    for name, failure in board.failures.items():
        if is_trained(failure, tables, board.rule):
            families[name] = fixed.get(name) or family_of(failure, tables, board.rule)
            judged[name], lost[name] = judge_arms(failure, tables, board.rule, families[name])
    rows = _rows(curves_of(tables, board), tables, board)
    # some arms act under stress alone, and so have no curve
    others = dict.fromkeys(arm for of_failure in judged.values() for arm in of_failure)
    missing = [arm for arm in others if arm not in {row.name for row in rows}]
    rows += [Row(arm, {}, UNKNOWN, True, math.nan, math.nan, False, 0) for arm in missing]
    found = []
    for row in rows:
        cells = dict[str, Judged]()
        for name, of_failure in judged.items():
            if row.name in of_failure:
                cells[name] = of_failure[row.name]
            elif row.name != REFERENCE:
                why_not = reasons.get((name, row.name)) or not_applicable(board_arms()[row.name], board.failures[name])
                cells[name] = Judged(NOT_TRIED, reason=why_not or "it was not trained")
        found.append(replace(row, cells=cells))
    minutes = {name: _minutes_of_fresh(board.failures[name], tables, board.rule) for name in judged}
    return Matrix(folder, board, lost, found, families, minutes)


def judge_arms(
    failure: Failure, tables: Tables, rule: Rule, family: Family | None = None
) -> tuple[dict[str, Judged], Interval]:
    """What each arm does about a failure, and the damage of its control; without a family that of these runs."""
    stressed, lost = _under_stress(failure, tables), lost_by_control(failure, tables)
    family = family or family_of(failure, tables, rule)
    improvements, acting = _improvements(failure, tables), _acting(stressed)
    of_curves = _shares_at_own_best(failure, tables)
    found = {arm: Judged(NEVER_ENGAGED) for arm in stressed if arm not in {REFERENCE, *acting}}
    is_tested = lost.low > 0 and lost.mean >= failure.least
    passing = passes_screening(failure, tables, rule)
    for arm in acting:
        values = improvements.get(arm, pd.Series(dtype=float))
        screened, fresh = (values[values.index.isin(seeds)] for seeds in (rule.screened, rule.fresh))
        # screening seeds chose these arms, so they are judged by fresh seeds alone
        is_confirmed = len(fresh) == len(rule.fresh)
        if len(screened) < len(rule.screened) and not is_confirmed:
            found[arm] = Judged(NOT_TRIED, reason=INCOMPLETE)
            continue
        chosen = fresh if is_confirmed else screened
        test = compared(chosen.to_numpy(dtype=float), family.prior)
        # an arm that is added later counts itself, and no other that is added, so that none changes another's verdict
        p = min(1.0, len({*family.arms, arm}) * test.p)
        verdict = NOT_TESTED
        if is_tested:
            verdict = verdict_of(test.interval, p, lost.mean, margin=rule.margin, leaves=rule.leaves, alpha=rule.alpha)
        if verdict in (CURES, IN_PART) and not is_confirmed:
            verdict = OPEN  # until its fresh seeds are trained
        cost, trains = math.nan, True
        if failure.reference:
            at_ease, of_control = (_at_ease(failure, name, tables).loc[chosen.index] for name in (arm, REFERENCE))
            cost = float((at_ease["loss"] - of_control["loss"]).mean())
            trains = not (failure.metric == "loss" and is_capped(at_ease).any())
        above = float((stressed[arm]["loss"] - stressed[REFERENCE]["loss"]).loc[chosen.index].mean())
        at_most = math.inf if failure.is_growth else 0.0 if failure.metric == "loss" else rule.loses
        verdict = against_control(verdict, above=above, at_most=at_most, trains=trains)
        share = of_curves.get(arm, test.interval.mean / lost.mean)
        if failure.is_growth:
            verdict = OF_GROWTH.get(verdict, verdict)
        elif arm in of_curves:
            verdict = _with_share(verdict, share, rule)
        found[arm] = Judged(verdict, test.interval, share, p, is_confirmed, arm in passing, "", cost, above)
    return found, lost


def family_of(failure: Failure, tables: Tables, rule: Rule) -> Family:
    """The arms that these runs try on a failure, with the prior of the spread of an improvement."""
    acting, screened = _acting(_under_stress(failure, tables)), {*rule.screened}
    values = {arm: table[table.index.isin(screened)] for arm, table in _improvements(failure, tables).items()}
    tried = {arm: of_arm for arm, of_arm in values.items() if arm in acting and len(of_arm) == len(screened)}
    return Family(frozenset(tried), spread_prior(of_arm.to_numpy(dtype=float) for of_arm in tried.values()))


def families_table(families: Mapping[str, Family]) -> pd.DataFrame:
    """The table that ``read_families`` reads."""
    edition = read_failures().rule.edition
    return pd.DataFrame(
        [
            {"failure": name, "edition": edition, **family.prior._asdict(), "arms": " ".join(sorted(family.arms))}
            for name, family in families.items()
        ]
    )


def _acting(stressed: Mapping[str, pd.DataFrame]) -> list[str]:
    """The arms whose runs under stress are not those of the control."""
    return [arm for arm, table in stressed.items() if arm != REFERENCE and not _is_control(table, stressed[REFERENCE])]


def _improvements(failure: Failure, tables: Tables) -> dict[str, pd.Series[float]]:
    """By arm and seed the damage of the control minus that of the arm."""
    found = damages(failure, tables)
    control = found.pop(REFERENCE)
    return {arm: (control - damage).dropna() for arm, damage in found.items()}


def _under_stress(failure: Failure, tables: Tables) -> dict[str, pd.DataFrame]:
    """The runs under the stress of a failure by arm, those of the control as the reference's."""
    mine = {cell.arm: table for cell, table in tables.items() if cell[0::2] == (failure.name, STRESSED)}
    return {arm: table for arm, table in mine.items() if arm not in failure.leaves_out}


def is_trained(failure: Failure, tables: Tables, rule: Rule) -> bool:
    """Whether the control of a failure was trained on all seeds of the screening, under stress and at ease."""
    cells = (Cell(failure.name, REFERENCE, name, place.lr) for name, place in failure.places.items())
    return all(cell in tables and {*rule.screened} <= {*tables[cell].index} for cell in cells)


def _minutes_of_fresh(failure: Failure, tables: Tables, rule: Rule) -> float:
    """What the fresh seeds of an arm cost, in core-minutes, by the runs of the control."""
    places = [tables[Cell(failure.name, REFERENCE, name, place.lr)] for name, place in failure.places.items()]
    return sum(float(table["seconds"].mean()) for table in places) * len(rule.fresh) / 60


def lost_by_control(failure: Failure, tables: Tables) -> Interval:
    """The damage of a control, over its seeds."""
    values = damages(failure, tables)[REFERENCE].to_numpy(dtype=float)
    return compared(values, Spread()).interval


def damages(failure: Failure, tables: Tables) -> dict[str, pd.Series[float]]:
    """The damage of each arm, the reference among them: by seed its runs under stress minus those at ease.

    Without runs at ease an arm has no key; where the measure is zero without the failure, it needs none.
    """
    found = {}
    for arm, stressed in _under_stress(failure, tables).items():
        damage = stressed[failure.metric]
        if failure.reference:
            at_ease = _at_ease(failure, arm, tables)
            if at_ease.empty:
                continue
            damage = damage - at_ease[failure.metric]
        found[arm] = damage.dropna()
    return found


def _at_ease(failure: Failure, arm: str, tables: Tables) -> pd.DataFrame:
    """The runs of an arm at ease; empty without any."""
    assert failure.reference
    return tables.get(Cell(failure.name, arm, AT_EASE, failure.reference.lr), pd.DataFrame())


def _with_share(verdict: str, share: float, rule: Rule) -> str:
    """A verdict, or the lesser one or ``open`` where it does not hold for the share at an arm's own best rate."""
    bounds = ((1 - rule.leaves, CURES), (rule.margin, IN_PART), (-rule.margin, NO))
    zone = next((word for least, word in bounds if share >= least), HARMS)
    if {verdict, zone} == {CURES, IN_PART}:
        return IN_PART
    return verdict if verdict in (zone, NOT_TESTED) else OPEN


def _shares_at_own_best(failure: Failure, tables: Tables) -> dict[str, float]:
    """By arm the share of the control's damage that it removes, where both are at ease at their own best rate.

    Curves tell it, so it is known only where the stress is one of their learning rates.
    """
    curves = curves_of(tables, read_failures()) if failure.on_curve else {}
    damage = {arm: float(np.mean(losses.loc[failure.stressed.lr] - losses.min())) for arm, losses in curves.items()}
    return {arm: 1 - lost / damage[REFERENCE] for arm, lost in damage.items()} if REFERENCE in damage else {}


def passes_screening(failure: Failure, tables: Tables, rule: Rule) -> list[str]:
    """The arms that remove enough of the control's damage to be tried on fresh seeds."""
    lost = lost_by_control(failure, tables)
    if not lost.mean >= failure.least:
        return []
    taken = {
        arm: values.reindex(rule.screened).mean(skipna=False) for arm, values in _improvements(failure, tables).items()
    }
    return [arm for arm, improvement in taken.items() if improvement >= rule.passes_screening * lost.mean]


def _is_control(table: pd.DataFrame, control: pd.DataFrame) -> bool:
    """Whether an arm never acted: its loss is the control's, bit for bit, where one machine trained both.

    On another machine the same run has other bits.
    """
    beside = control.reindex(table.index)
    comparable = table["versions"] == beside["versions"]
    return bool(comparable.any() and (table["loss"] == beside["loss"])[comparable].all())


def curves_of(tables: Tables, board: Board) -> dict[str, pd.DataFrame]:
    """The losses of each arm whose grid is complete: a row per learning rate of AdamW, and a column per seed."""
    curves: dict[str, dict[float, pd.Series[float]]] = {}
    for cell, table in tables.items():
        if cell.failure == CURVE:
            curves.setdefault(cell.arm, {})[cell.lr] = table["loss"]
    found = {arm: pd.DataFrame(by_lr).T.sort_index().dropna(axis=1) for arm, by_lr in curves.items()}
    seeds = {*board.curve_seeds}
    return {arm: losses for arm, losses in found.items() if len(losses) == len(board.grid) and seeds <= {*losses}}


def _rows(curves: Mapping[str, pd.DataFrame], tables: Tables, board: Board) -> list[Row]:
    """The rows with all but their cells."""
    if REFERENCE not in curves:
        return []
    reference = curves[REFERENCE].min()
    best = {arm: (losses.min() - reference).dropna() for arm, losses in curves.items()}
    prior = spread_prior(values.to_numpy(dtype=float) for values in best.values())
    parameters = {arm: int(min(_of_curve(tables, arm, "parameters", board))) for arm in curves}
    bigram = max(_of_curve(tables, REFERENCE, "loss_bigram", board))
    limits = {int(str(seed)): float(loss) for seed, loss in reference.items()}
    rows = []
    for arm, losses in curves.items():
        shared = losses[[seed for seed in losses if seed in limits]]
        of_reference, own = tolerances(shared, limits).values(), tolerances(shared).values()
        rows.append(
            Row(
                name=arm,
                cells={},
                best=compared(best[arm].to_numpy(dtype=float), prior).interval,
                trains=bool(losses.mean(axis=1).min() < bigram),
                within_reference=float(np.mean([decades for decades, *_ in of_reference])),
                within_own=float(np.mean([decades for decades, *_ in own])),
                is_bound=any(not (below and above) for _, below, above in [*of_reference, *own]),
                parameters=parameters[arm] - parameters[REFERENCE],
                lr_multiplier=board_arms()[arm].lr_multiplier,
            )
        )
    return rows


def _of_curve(tables: Tables, arm: str, column: str, board: Board) -> Collection[float]:
    """The values of a column over the runs of an arm's curve."""
    values = [tables[Cell(CURVE, arm, CURVE, lr)][column] for lr in board.grid]
    return [float(value) for of_lr in values for value in of_lr]
