"""The board as a matrix: what each arm does about each failure, what it costs, and what it tolerates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.statistics import UNKNOWN, Interval, SpreadPrior, holm, spread_prior
from lab.records import store
from lab.studies.leaderboard.failures import (
    AT_EASE,
    CURVE,
    REFERENCE,
    STRESSED,
    Board,
    Cell,
    Failure,
    Rule,
    board_arms,
    not_applicable,
    read_cells,
    read_failures,
)
from lab.studies.stress.battery import StepTime, read_step_times
from lab.studies.stress.measures import by_run, tolerances

CURES, IN_PART, NO, OPEN, HARMS = "cures", "in part", "no", "open", "harms"
NOT_TESTED, NEVER_ENGAGED, NOT_TRIED = "not tested", "never engaged", "not tried"
VERDICTS = (CURES, IN_PART, NO, OPEN, HARMS, NEVER_ENGAGED, NOT_TESTED, NOT_TRIED)
INCOMPLETE = "not all of its seeds were trained"
LEVEL, EQUIVALENCE = 0.95, 0.90  # of intervals, and of those that must lie within the margin

# For each cell of the board the runs by seed, with the columns of ``by_run``.
Tables = Mapping[Cell, pd.DataFrame]


class Judged(NamedTuple):
    """What an arm does about a failure.

    Attributes:
        verdict: one of ``VERDICTS``.
        takes_off: by how much it lowers what is measured under stress, paired by seed, with its 95 % interval, whose
            spread is moderated over arms.
        share: the same over what the control loses.
        p: of no effect, after Holm over the arms that were tried on the same seeds.
        is_confirmed: whether the seeds are fresh ones.
        reason: why it was not tried.
    """

    verdict: str
    takes_off: Interval = UNKNOWN
    share: float = math.nan
    p: float = math.nan
    is_confirmed: bool = False
    reason: str = ""

    @property
    def direction(self) -> str:
        """Which way a significant effect goes, whatever its size: ``better``, ``worse``, or empty."""
        return "" if not self.p < read_failures().rule.alpha else "better" if self.takes_off.mean > 0 else "worse"


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
        times: its learning rate for each of AdamW's.
    """

    name: str
    cells: Mapping[str, Judged]
    best: Interval
    trains: bool
    within_reference: float
    within_own: float
    is_bound: bool
    parameters: int
    times: float = 1.0

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
        lost: what the control of each failure loses, with its interval; no key where it has no runs.
        rows: the arms that have a curve, the reference first.
        spreads: by failure the prior of the spread of an effect over seeds.
    """

    folder: Path
    board: Board
    lost: Mapping[str, Interval]
    rows: Sequence[Row]
    spreads: Mapping[str, SpreadPrior] = field(default_factory=dict)

    @property
    def failures(self) -> list[Failure]:
        """The failures that were trained."""
        return [failure for name, failure in self.board.failures.items() if name in self.lost]

    @property
    def arms(self) -> list[Row]:
        """The rows without the reference."""
        return [row for row in self.rows if row.name != REFERENCE]

    def is_advised(self, row: Row) -> bool:
        """Whether an arm may be advised: it trains, and its best loss is not much worse than the reference's."""
        return row.trains and not row.best.mean > self.board.rule.loses


def read_matrix(folder: Path) -> Matrix:
    """The matrix of a results folder.

    Raises:
        RequestError: the folder holds no board, or its records cannot be read.
    """
    runs, reasons = read_cells(folder)
    return matrix_of(folder, tables_of(folder, runs), reasons)


def tables_of(folder: Path, runs: Mapping[Cell, Mapping[int, str]]) -> dict[Cell, pd.DataFrame]:
    """The recorded runs of each cell by seed, with the columns of ``by_run`` and ``versions``."""
    records = store.read(folder)
    by_id = records.runs.set_index("id")
    known = by_run(records).assign(versions=by_id["versions"].astype(str))
    tables = {}
    for cell, of_cell in runs.items():
        mine = {seed: run for seed, run in of_cell.items() if run in known.index}
        if mine:
            tables[cell] = known.loc[list(mine.values())].assign(seed=list(mine)).set_index("seed").sort_index()
    return tables


def matrix_of(folder: Path, tables: Tables, reasons: Mapping[tuple[str, str], str]) -> Matrix:
    """The matrix of these runs; ``reasons`` say by failure and arm why some were not tried."""
    board = read_failures()
    judged, lost, spreads = dict[str, dict[str, Judged]](), dict[str, Interval](), dict[str, SpreadPrior]()
    for failure in board.failures.values():
        if is_trained(failure, tables, board.rule):
            judged[failure.name], lost[failure.name], spreads[failure.name] = judge(failure, tables, board.rule)
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
    return Matrix(folder, board, lost, found, spreads)


def judge(failure: Failure, tables: Tables, rule: Rule) -> tuple[dict[str, Judged], Interval, SpreadPrior]:
    """What each arm does about a failure, what its control loses, and the spread of an effect over seeds."""
    stressed = _under_stress(failure, tables)
    control = stressed.pop(REFERENCE)
    lost = lost_by_control(failure, tables)
    differences = {arm: (control[failure.metric] - table[failure.metric]).dropna() for arm, table in stressed.items()}
    acting = {arm for arm in differences if not _is_control(stressed[arm], control)}
    screened = {arm: values[values.index.isin(rule.screened)] for arm, values in differences.items() if arm in acting}
    screened = {arm: values for arm, values in screened.items() if len(values) == len(rule.screened)}
    fresh = {arm: values[values.index.isin(rule.fresh)] for arm, values in differences.items() if arm in acting}
    fresh = {arm: values for arm, values in fresh.items() if len(values) == len(rule.fresh)}
    prior = spread_prior(values.to_numpy(dtype=float) for values in screened.values())
    # the screening had its say in which arms are confirmed, so these are judged by fresh seeds alone
    stages = ({arm: values for arm, values in screened.items() if arm not in fresh}, fresh)
    found = {arm: Judged(NEVER_ENGAGED) for arm in stressed if arm not in acting}
    found |= {arm: Judged(NOT_TRIED, reason=INCOMPLETE) for arm in acting if arm not in screened and arm not in fresh}
    is_tested = lost.low > 0 and lost.mean >= failure.least
    for stage, is_confirmed in zip(stages, (False, True), strict=True):
        tests = {arm: compared(values.to_numpy(dtype=float), prior) for arm, values in stage.items() if len(values)}
        ps = holm([test.p for test in tests.values()])
        for (arm, test), p in zip(tests.items(), ps, strict=True):
            verdict = _verdict(test, p, lost.mean, rule) if is_tested else NOT_TESTED
            if verdict in (CURES, IN_PART) and not is_confirmed:
                verdict = OPEN  # until its fresh seeds are trained
            found[arm] = Judged(verdict, test.interval, test.interval.mean / lost.mean, p, is_confirmed)
    return found, lost, prior


def _under_stress(failure: Failure, tables: Tables) -> dict[str, pd.DataFrame]:
    """The runs under the stress of a failure by arm, those of the control as the reference's."""
    mine = {cell.arm: table for cell, table in tables.items() if cell[0::2] == (failure.name, STRESSED)}
    return {arm: table for arm, table in mine.items() if arm not in failure.leaves_out}


def is_trained(failure: Failure, tables: Tables, rule: Rule) -> bool:
    """Whether the control of a failure was trained on all seeds of the screening, under stress and at ease."""
    cells = (Cell(failure.name, REFERENCE, name, place.lr) for name, place in failure.places.items())
    return all(cell in tables and {*rule.screened} <= {*tables[cell].index} for cell in cells)


def lost_by_control(failure: Failure, tables: Tables) -> Interval:
    """What a control loses under stress, over its seeds."""
    control = tables[Cell(failure.name, REFERENCE, STRESSED, failure.stressed.lr)][failure.metric]
    if failure.reference:
        control = control - tables[Cell(failure.name, REFERENCE, AT_EASE, failure.reference.lr)][failure.metric]
    values = control.dropna().to_numpy(dtype=float)
    return compared(values, SpreadPrior(math.nan, math.nan)).interval


def damages(failure: Failure, tables: Tables) -> dict[str, pd.Series[float]]:
    """What each arm, the reference among them, loses under stress: by seed, its runs under stress minus those at ease.

    Where the measure is zero without the failure, what is measured under stress. An arm without runs at ease has no key.
    """
    found = {}
    for arm, stressed in _under_stress(failure, tables).items():
        damage = stressed[failure.metric]
        if failure.reference:
            at_ease = tables.get(Cell(failure.name, arm, AT_EASE, failure.reference.lr))
            if at_ease is None:
                continue
            damage = damage - at_ease[failure.metric]
        found[arm] = damage.dropna()
    return found


def passes_screening(failure: Failure, tables: Tables, rule: Rule) -> list[str]:
    """The arms that take off enough of the control's damage to be tried on fresh seeds."""
    found = damages(failure, tables)
    control, lost = found.pop(REFERENCE), lost_by_control(failure, tables)
    if not lost.mean >= failure.least:
        return []
    taken = {arm: (control - damage).reindex(rule.screened).mean(skipna=False) for arm, damage in found.items()}
    return [arm for arm, improvement in taken.items() if improvement >= rule.passes_screening * lost.mean]


class Compared(NamedTuple):
    """The mean of paired differences, its degrees of freedom, and p of no difference."""

    interval: Interval
    freedom: float
    p: float

    def half(self, level: float) -> float:
        """Half the width of the interval of this level."""
        return float(scipy.special.stdtrit(min(self.freedom, 1e9), (1 + level) / 2)) * self.interval.error

    def is_within(self, margin: float) -> bool:
        """Whether the mean is equivalent to zero: its 90 % interval lies within the margin on either side."""
        mean, half = self.interval.mean, self.half(EQUIVALENCE)
        return -margin < mean - half and mean + half < margin


def compared(values: np.ndarray, prior: SpreadPrior) -> Compared:
    """The mean of paired differences, with a spread that is moderated by the prior if there is one."""
    n, mean = len(values), float(values.mean())
    if math.isnan(prior.sd):
        sd, freedom = float(values.std(ddof=1)) if n > 1 else math.nan, float(n - 1)
    else:
        sd, freedom = prior.with_own(values)
    error = sd / math.sqrt(n)
    test = Compared(Interval(mean, math.nan, math.nan, n, tuple(values.tolist()), error), freedom, math.nan)
    half = test.half(LEVEL)
    p = float(2 * scipy.special.stdtr(min(freedom, 1e9), -abs(mean) / error)) if error > 0 else math.nan
    return Compared(test.interval._replace(low=mean - half, high=mean + half), freedom, p)


def _verdict(test: Compared, p: float, lost: float, rule: Rule) -> str:
    margin, mean = rule.margin * lost, test.interval.mean
    if test.is_within(margin):
        return NO
    if not p < rule.alpha:
        return OPEN
    if mean < 0:
        return HARMS
    return CURES if lost - mean <= margin else IN_PART


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
                times=board_arms()[arm].times,
            )
        )
    return rows


def _of_curve(tables: Tables, arm: str, column: str, board: Board) -> Collection[float]:
    """The values of a column over the runs of an arm's curve."""
    values = [tables[Cell(CURVE, arm, CURVE, lr)][column] for lr in board.grid]
    return [float(value) for of_lr in values for value in of_lr]
