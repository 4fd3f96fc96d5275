"""The board for readers: one sentence to act on, its table and its notes; and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.rendering import html
from lab.analysis.statistics import Interval
from lab.analysis.stress.arms import REFERENCE
from lab.analysis.stress.cures import CURES, HARMS, IN_PART, NO, OPEN
from lab.analysis.text import format_p, listed
from lab.core import files
from studies.board.failures import Failure, read_failures
from studies.board.matrix import LESS, MORE, NEVER_ENGAGED, NOT_TESTED, NOT_TRIED, Judged, Matrix, Row
from studies.board.public_runs import broken_public_runs

SMALLEST_P = 1e-4  # from so few seeds a smaller p says no more
SHORT = {CURES: "cures", IN_PART: "part", NO: "no", OPEN: "open", HARMS: "harms", NEVER_ENGAGED: "idle", NOT_TRIED: ""}
SHORT |= {LESS: "less", MORE: "more"}


IN_PLACE = "\u2194"  # marks an arm that takes the place of a part of the recipe
BETTER = 3  # arms that the first line names for their best loss
ALIKE = 0.8  # the rank correlation above which two failures rank arms alike
FEWEST_ARMS = 8  # over which it is taken
SIMULATED = 20_000  # arms, for the power of a failure
PRICES = ("best loss", "decades of LR", "of its own best", "parameters", "time of a step", "broke in public runs")


def headline(matrix: Matrix) -> str:
    """Which arms take damage away under which stress, and, apart from it, which train better."""
    tested = [failure for failure in matrix.failures if is_tested(matrix, failure) and not failure.is_growth]
    if not tested:
        return "No failure is tested: its control does not fail, or not all of its seeds were trained."
    left, parts = tested, list[str]()
    while left:
        best = max(_advised(matrix), key=lambda row: (len(_cured(matrix, row, left)), -_best_loss(row)), default=None)
        if best is None or not (cured := _cured(matrix, best, left)):
            break
        parts.append(f"{best.name} under {listed(failure.title for failure in cured)} ({costs(best)})")
        left = [failure for failure in left if failure not in cured]
    text = f"Takes damage away: {'; '.join(parts)}" if parts else "No arm takes all damage away"
    in_part = [
        f"{failure.title} ({row.name}: {row.cells[failure.name].share:.0%})"
        for failure in left
        if (row := _best(matrix, failure))
    ]
    nothing = [failure.title for failure in left if not _best(matrix, failure)]
    text += f"; in part under {listed(in_part)}" if in_part else ""
    text += f"; no advised arm for certain under {listed(nothing)}" if nothing else ""
    better = sorted((row for row in _advised(matrix) if row.best.high < 0), key=_best_loss)
    named = [f"{row.name} ({row.best:±+.3f})" for row in better[:BETTER]]
    return f"{text}. Trains better at its best learning rate: {listed(named or ['none'])}."


def unconfirmed(matrix: Matrix) -> list[tuple[str, str]]:
    """The failures and arms of cells that passed the screening and were not trained on fresh seeds."""
    cells = [(failure.name, row) for failure in matrix.failures for row in matrix.arms]
    return [(name, row.name) for name, row in cells if row.cells[name].passed and not row.cells[name].is_confirmed]


def is_tested(matrix: Matrix, failure: Failure) -> bool:
    """Whether the control of a failure fails, so that its cures can be told."""
    return any(row.cells[failure.name].verdict not in (NOT_TESTED, NOT_TRIED, NEVER_ENGAGED) for row in matrix.arms)


def _advised(matrix: Matrix) -> list[Row]:
    return [row for row in matrix.arms if matrix.is_advised(row)]


def _cured(matrix: Matrix, row: Row, failures: Sequence[Failure]) -> list[Failure]:
    """The failures whose damage an arm takes away, so surely that it counts among all cells of the board."""
    return [failure for failure in failures if _holds(matrix, row, failure, CURES)]


def _best(matrix: Matrix, failure: Failure) -> Row | None:
    """The advised arm that removes most of the damage of a failure that none cures."""
    helping = [row for row in _advised(matrix) if _holds(matrix, row, failure, IN_PART)]
    return max(helping, key=lambda row: row.cells[failure.name].improvement.mean, default=None)


def _holds(matrix: Matrix, row: Row, failure: Failure, verdict: str) -> bool:
    cell = row.cells[failure.name]
    is_costly = cell.cost_at_ease > matrix.board.rule.loses
    return cell.verdict == verdict and not is_costly and matrix.holds_over_the_board(failure, cell)


def _best_loss(row: Row) -> float:
    """The lowest loss beside the reference's; 0 where an arm has no curve."""
    return row.best.mean if row.best.n else 0.0


def costs(row: Row) -> str:
    """``best loss -0.121, 1.34 times the time of a step``."""
    loss = f"best loss {row.best:±+.3f}" if row.best.n else "without a curve"
    return f"{loss}, {row.step_time.ratio:.2f} times the time of a step" if row.step_time else loss


def table(matrix: Matrix) -> pd.DataFrame:
    """A row per arm, those that cure most failures first: its verdicts, and what it costs and tolerates."""
    rows = []
    for row in ranked(matrix):
        cells = {failure.title: shown(row, failure) for failure in matrix.failures}
        rows.append({"arm": row.name, **cells, **prices(row)})
    return pd.DataFrame(rows)


def prices(row: Row) -> dict[str, str]:
    """What an arm costs and tolerates; empty texts for what is not known, as of arms that have no curve."""
    reaches = (f"{decades:.2f}{'+' * row.is_bound}" for decades in (row.within_reference, row.within_own))
    of_curve = (f"{row.best:±+.3f}", *reaches, f"{row.parameters:+,}") if row.best.n else [""] * 4
    broken = ", ".join(map(str, broken_public_runs().get(row.name, ())))
    return dict(zip(PRICES, (*of_curve, f"{row.step_time or ''}", broken), strict=True))


def ranked(matrix: Matrix) -> list[Row]:
    """The arms by the number of failures that they cure, then cure in part, then by what they remove."""

    def rank(row: Row) -> tuple[float, ...]:
        shares = [cell.share for cell in row.cells.values() if not math.isnan(cell.share)]
        return (-row.number(CURES), -row.number(IN_PART), row.number(HARMS), -sum(shares))

    return sorted(matrix.arms, key=rank)


def shown(row: Row, failure: Failure) -> str:
    """``cures 97 %``, and ``cures 101 % +1.02`` if it costs nats at ease.

    Of arms that do nothing, and of failures that are not tested, it is the word alone.
    """
    cell = row.cells[failure.name]
    word = SHORT.get(cell.verdict, cell.verdict)
    if math.isnan(cell.share) or cell.verdict == NOT_TESTED:
        return word
    mark = f" {IN_PLACE}" if row.instead_of(failure) else ""
    cost = f" {cell.cost_at_ease:+.2f}" if is_costly_at_ease(cell) else ""
    return f"{word} {round(100 * cell.share)} %{mark}{cost}"


def is_costly_at_ease(cell: Judged) -> bool:
    """Whether an arm helps against a failure, but ends so far above the control at ease that it is not advised."""
    return cell.verdict in (CURES, IN_PART) and cell.cost_at_ease > read_failures().rule.loses


def notes(matrix: Matrix) -> list[str]:
    """What the numbers mean, a sentence each."""
    tested = [failure for failure in matrix.failures if is_tested(matrix, failure)]
    text = html.render(
        "board_notes.txt",
        rule=matrix.board.rule,
        failures=matrix.failures,
        lost=matrix.lost,
        power={failure.name: _power(matrix, failure) for failure in tested},
        counted={failure.name: len(matrix.families[failure.name].arms) for failure in matrix.failures},
        cells=sum(len(family.arms) for family in matrix.families.values()),
        mark=IN_PLACE,
        unconfirmed=unconfirmed(matrix),
        minutes=sum(matrix.minutes[failure] for failure, _ in unconfirmed(matrix)),
        alike=alike(matrix),
        broken=listed(map(str, broken_public_runs()[REFERENCE])),
        untrained=[row.name for row in matrix.arms if not row.trains],
        costly=[row.name for row in matrix.arms if row.trains and not matrix.is_advised(row)],
        worse_at_ease=[
            f"{row.name} under {failure.title} ({cell.cost_at_ease:+.2f})"
            for failure in matrix.failures
            for row in _advised(matrix)
            if is_costly_at_ease(cell := row.cells[failure.name])
        ],
    )
    return text.splitlines()


def _power(matrix: Matrix, failure: Failure) -> float:
    """The probability that the fresh seeds show that an arm which removes half of the damage helps at least in part.

    A simulation: the spread of an arm is drawn from the prior, and its seeds with that spread.
    """
    rule, (arms, prior), lost = matrix.board.rule, matrix.families[failure.name], matrix.lost[failure.name].mean
    if not prior.sd > 0:
        return math.nan
    rng, seeds = np.random.default_rng(0), len(rule.fresh)
    own_sd_a = prior.sd * np.sqrt(prior.freedom / rng.chisquare(prior.freedom, SIMULATED))
    values_as = lost / 2 + own_sd_a[:, None] * rng.standard_normal((SIMULATED, seeds))
    freedom, mean_a = prior.freedom + seeds - 1, values_as.mean(1)
    squares_a = prior.freedom * prior.sd**2 + (seeds - 1) * values_as.var(1, ddof=1)
    error_a = np.sqrt(squares_a / freedom / seeds)
    t_of_p, t_of_interval = (scipy.special.stdtrit(freedom, 1 - tail / 2) for tail in (rule.alpha / len(arms), 0.05))
    return float(((mean_a > t_of_p * error_a) & (mean_a - t_of_interval * error_a >= rule.margin * lost)).mean())


class Alike(NamedTuple):
    """Two failures that rank the arms of both their families alike: their titles, and the rank correlation."""

    a: str
    b: str
    correlation: Interval

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval says so."""
        return self.correlation.low > ALIKE


def alike(matrix: Matrix) -> list[Alike]:
    """The pairs of failures that rank arms alike.

    References:
        Bonett and Wright 2000, https://doi.org/10.1007/BF02294183, for the interval of a rank correlation.
    """
    shares = {
        failure.title: pd.Series(
            {
                row.name: row.cells[failure.name].share
                for row in matrix.arms
                if row.name in matrix.families[failure.name].arms
            },
            dtype=float,
        )
        for failure in matrix.failures
    }
    found = []
    for a, b in combinations(shares, 2):
        both = pd.concat([shares[a], shares[b]], axis=1).dropna()
        rank = float(scipy.stats.spearmanr(both).statistic) if len(both) >= FEWEST_ARMS else math.nan
        if rank > ALIKE:
            half = 1.96 * math.sqrt((1 + rank**2 / 2) / (len(both) - 3))
            z = math.atanh(min(rank, 1 - 1e-9))
            found.append(Alike(a, b, Interval(rank, math.tanh(z - half), math.tanh(z + half), len(both))))
    return found


def as_csv(matrix: Matrix) -> str:
    """A line for each arm and failure."""
    return files.csv_text(pd.DataFrame(list(_plain_cells(matrix))))


def plain(matrix: Matrix) -> dict[str, Any]:
    """The board in plain values and named tuples, for programs."""
    arms = [
        {
            "arm": row.name,
            "best_loss": _ends(row.best),
            "trains": row.trains,
            "decades_within_reference": row.within_reference,
            "decades_within_own": row.within_own,
            "is_lower_bound": row.is_bound,
            "parameters_added": row.parameters,
            "step_time": row.step_time,
            "lr_times": row.lr_multiplier,
            "broke_in_public_runs": list(broken_public_runs().get(row.name, ())),
        }
        for row in matrix.rows
    ]
    lost = {failure.name: _ends(matrix.lost[failure.name]) for failure in matrix.failures}
    return {"headline": headline(matrix), "lost": lost, "arms": arms, "cells": list(_plain_cells(matrix))}


def _plain_cells(matrix: Matrix) -> Iterator[dict[str, object]]:
    for row in matrix.arms:
        for failure in matrix.failures:
            cell = row.cells[failure.name]
            yield {
                "arm": row.name,
                "failure": failure.name,
                "verdict": cell.verdict,
                "direction": cell.direction,
                "edition": matrix.board.rule.edition,
                "instead_of": row.instead_of(failure),
                "share": cell.share,
                "improvement": cell.improvement.mean,
                "low": cell.improvement.low,
                "high": cell.improvement.high,
                "unit": failure.unit,
                "p": cell.p,
                "seeds": cell.improvement.n,
                "passed_screening": cell.passed,
                "is_confirmed": cell.is_confirmed,
                "cost_at_ease": cell.cost_at_ease,
                "above_control": cell.above_control,
                "reason": cell.reason,
            }


def _ends(interval: Interval) -> dict[str, object]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def p_shown(p: float) -> str:
    """A p to read: not below what so few seeds can tell."""
    return f"< {SMALLEST_P:g}" if p < SMALLEST_P else format_p(p)
