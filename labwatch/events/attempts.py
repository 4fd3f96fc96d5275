"""The rows of a run as logs: one for each attempt where training went back, and for each phase where steps restart."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.core.windows import NORMAL, Numbers
from labwatch.events.detectors import Log, WentBack
from labwatch.events.held_out_losses import parting
from labwatch.events.log_lines import size_of_zero
from labwatch.events.log_names import LOSS, of_rewards
from labwatch.events.log_reader import FEWEST, Row
from labwatch.events.logit_rounding import rounding_cost

# Columns from which the level of output logits follows: log Z, the mean of its square, the mean logit.
OUTPUT_LOGITS = ["log_z", "log_z_square", "output_logit_mean"]
# The mean square of a router's log Z, whose root stands for its largest logit where that was not logged.
ROUTER_Z, ROUTER_LOGIT = "router_z", "router_logit_max"
# Held-out losses, of the corpus as it is and of clean text, from which follows whether they part.
HELD_OUT = ["val_loss", "clean_val_loss"]
# Measurements that a trainer logs at every step, so that a loss missing beside them was left out.
OF_EVERY_STEP = ["grad_norm", "lr", "loss_scale"]
# A file with a larger share of rows at smaller steps than the row before is not in the order of time.
UNSORTED = 0.05
# Training went back if the median loss of so many rows is as close to that of as many rows before this step.
LEVEL_ROWS, CLOSE_NATS, CLOSE_DEVIATIONS = 5, 0.3, 6.0
# A loss of exactly 0, or none beside other measurements, is no accident in so many rows at the end.
SPOILED_ROWS = 3
Steps = NDArray[np.int64]


class Column:
    """Values of one measurement in the order in which they were written, with their steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def rewind(self, step: int) -> None:
        """Drop the last values back to a step."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()

    def trim(self, rows: int) -> None:
        """Keep the last rows only."""
        del self.steps[:-rows], self.values[:-rows]

    def by_step(self) -> tuple[Steps, Numbers]:
        """The steps in rising order, and the value of each: the mean if every step has several, or else the last."""
        step_n, value_n = np.array(self.steps, dtype=np.int64), np.array(self.values)
        if (np.diff(step_n) > 0).all():
            return step_n, value_n
        unique_n, place_n = np.unique(step_n, return_inverse=True)
        if len(step_n) >= 2 * len(unique_n):  # of micro-batches
            filled_n = np.where(np.isnan(value_n), math.inf, value_n)
            return unique_n, np.bincount(place_n, filled_n) / np.bincount(place_n)
        _, latest_n = np.unique(step_n[::-1], return_index=True)
        return unique_n, value_n[::-1][latest_n]


class Table(NamedTuple):
    """The measurements of a run by step.

    Attributes:
        step_n: the steps, in rising order.
        columns: measurements ``[n]`` by name, NaN where one is missing.
        has_loss_n: where a loss was logged, since a loss that is NaN is logged, too.
        last_words: with which the program said after the last row that it stops; see ``says_the_end``.
    """

    step_n: Steps
    columns: Mapping[str, Numbers]
    has_loss_n: NDArray[np.bool_]
    last_words: str = ""

    def rows(self, chosen_n: NDArray[np.bool_]) -> Table:
        """Some of the rows."""
        columns = {name: value_n[chosen_n] for name, value_n in self.columns.items()}
        return Table(self.step_n[chosen_n], columns, self.has_loss_n[chosen_n])

    def known(self, name: str) -> pd.Series:
        """The values of a column that are not missing, by step."""
        return pd.Series(self.columns[name], self.step_n).dropna()


def table_of(columns: Mapping[str, Column]) -> Table:
    """The table of measurements that were logged one by one."""
    found = {name: column.by_step() for name, column in columns.items()}
    loss_step_n = step_n = found[LOSS][0]
    if not all(np.array_equal(step_n, known_n) for known_n, _ in found.values()):
        step_n = np.unique(np.concatenate([known_n for known_n, _ in found.values()]))
    has_loss_n = np.zeros(len(step_n), dtype=bool)
    has_loss_n[np.searchsorted(step_n, loss_step_n)] = True
    return Table(step_n, {name: _spread(step_n, *of_column) for name, of_column in found.items()}, has_loss_n)


def _spread(step_n: Steps, known_n: Steps, value_n: Numbers) -> Numbers:
    """Values that are known at some of the steps, at all of them; NaN at the others."""
    if len(known_n) == len(step_n):
        return value_n
    spread_n = np.full(len(step_n), math.nan)
    spread_n[np.searchsorted(step_n, known_n)] = value_n
    return spread_n


def _merged(before: Table, part: Table) -> Table:
    """The rows of both tables; of a step that both have, the values of the second one count where it has them."""
    step_n = np.union1d(before.step_n, part.step_n)
    columns = {name: np.full(len(step_n), math.nan) for name in [*before.columns, *part.columns]}
    for table in (before, part):
        for name, value_n in table.columns.items():
            spread_n = _spread(step_n, table.step_n, value_n)
            columns[name] = np.where(np.isnan(spread_n), columns[name], spread_n)
    has_loss_n = np.isin(step_n, np.union1d(before.step_n[before.has_loss_n], part.step_n[part.has_loss_n]))
    return Table(step_n, columns, has_loss_n, part.last_words)


class Parts:
    """The measurements of a run in the order of the file, a part for each stretch in which the steps of losses grow."""

    def __init__(self) -> None:
        self.parts = [defaultdict[str, Column](Column)]
        self.last_words = [""]  # of each part
        self.last, self.losses = -1, 0  # step of the last loss, and their number

    def add(self, row: Row) -> None:
        self.last_words[-1] = row.last_words or self.last_words[-1]
        if LOSS in row.values:
            if row.step < self.last:
                self.parts.append(defaultdict(Column))
                self.last_words.append("")
            elif trains_on(row, self.last):
                self.last_words[-1] = ""
            self.last, self.losses = row.step, self.losses + 1
        for column, value in row.values.items():
            self.parts[-1][column].add(row.step, value)

    def tables(self, name: str) -> tuple[list[Table], list[str]]:
        """The table of each part; or of all of a run whose rows are not in the order of time, and a remark."""
        starts = [part[LOSS].steps[:FEWEST] for part in self.parts]
        begin_anew = all(len(steps) == FEWEST and steps[0] <= starts[0][-1] for steps in starts[:-1])
        if begin_anew or len(self.parts) - 1 <= max(1, UNSORTED * self.losses):
            both = zip(self.parts, self.last_words, strict=True)
            return [table_of(part)._replace(last_words=words) for part, words in both if LOSS in part], []
        whole = defaultdict[str, Column](Column)
        for part in self.parts:
            for column, values in part.items():
                whole[column].steps.extend(values.steps)
                whole[column].values.extend(values.values)
        table = table_of(whole)
        kept = f"the last row of each kept: {int(table.has_loss_n.sum())} of {self.losses} rows"
        return [table._replace(last_words=self.last_words[-1])], [f"{name}: sorted by step, {kept}"]


def trains_on(row: Row, last: int) -> bool:
    """Whether a row shows that training went on after the last step, whatever the program said before."""
    return row.step > last and math.isfinite(row.values.get(LOSS, math.nan))


def logs_of_run(name: str, run: Parts, bits: float) -> tuple[list[Log], list[str]]:
    """The logs of one run, and remarks on how its rows were read.

    A step may be smaller than the one before. If the rows repeat the values of their steps, they are a copy and count
    once. If the loss is near that of this step, training went back there, and both attempts are kept. If steps begin
    anew and the loss goes on, as with each pass over the data, they are counted on. Any other loss begins a phase, or
    another run, with steps of its own.
    """
    parts, notes = run.tables(name)
    logs, back, phase, attempt = list[Log](), None, 1, 1
    current, passes, are_alike = parts[0], 1, _are_alike(parts)
    for part in parts[1:]:
        step, last = int(part.step_n[0]), int(current.step_n[-1])
        if _counts_on(current, part, are_alike):
            passes += 1
            current = _merged(current, part._replace(step_n=part.step_n + last + _spacing(part) - step))
            continue
        if _repeats(current, part):
            notes.append(f"{name}: steps {step} to {min(last, int(part.step_n[-1]))} are written twice and count once")
            current = _merged(current, part)
        elif _goes_on(current, part):
            logs.append(log_of(f"{_named(name, phase)} attempt {attempt}", current, bits, back))
            back = WentBack(last, step, _lr(current, step), _lr(part, step))
            current = _merged(current.rows(current.step_n < step), part)
            attempt += 1
        else:
            logs.append(log_of(_named(name, phase), current, bits, back))
            notes.append(f"{name}: after step {last}, phase {phase + 1} begins with step {step} at another loss")
            current, back, phase, attempt = part, None, phase + 1, 1
    logs.append(log_of(_named(name, phase), current, bits, back))
    if passes > 1:
        times = "once" if passes == 2 else f"{passes - 1} times"
        notes.append(f"{name}: steps begin anew {times} while the loss goes on, so they are counted on")
    return logs, [*notes, *(f"{log.name}: {log.note}" for log in logs if log.note)]


def _named(name: str, phase: int) -> str:
    return name if phase == 1 else f"{name} phase {phase}"


def _repeats(before: Table, part: Table) -> bool:
    """Whether at least half of the steps that both have hold the same loss."""
    logged = before.rows(before.has_loss_n)
    _, earlier, later = np.intersect1d(logged.step_n, part.step_n, assume_unique=True, return_indices=True)
    losses = (logged.columns[LOSS][earlier], part.columns[LOSS][later])
    return len(earlier) > 0 and bool(np.isclose(*losses, rtol=1e-6, atol=0, equal_nan=True).mean() >= 0.5)


def _goes_on(before: Table, part: Table) -> bool:
    """Whether the loss is near that of the rows before the first step, so that training went back to a checkpoint."""
    earlier, losses = before.rows(before.step_n < part.step_n[0]).known(LOSS), before.known(LOSS)
    if len(earlier) < LEVEL_ROWS and part.step_n[0] > 2 * _spacing(before):  # a log that begins at a checkpoint
        earlier = losses.head(LEVEL_ROWS)
    return is_near(earlier.to_numpy(), part.known(LOSS).to_numpy())


def is_near(earlier: Numbers, later: Numbers) -> bool:
    """Whether the first of some losses are near the last of others."""
    if len(earlier) < LEVEL_ROWS or not len(later):
        return False
    change_n = np.diff(earlier[-8 * LEVEL_ROWS :])
    deviation = NORMAL * float(np.median(np.abs(change_n - np.median(change_n))))
    gap = abs(float(np.median(later[:LEVEL_ROWS])) - float(np.median(earlier[-LEVEL_ROWS:])))
    return bool(gap <= max(CLOSE_NATS, CLOSE_DEVIATIONS * deviation))


def _spacing(part: Table) -> int:
    return int(np.median(np.diff(part.step_n))) if len(part.step_n) > 1 else 1


def _are_alike(parts: Sequence[Table]) -> bool:
    """Whether there are several parts with the same first and last step, as passes over the data have; the last may end
    early.
    """
    firsts, lasts = [int(part.step_n[0]) for part in parts], [int(part.step_n[-1]) for part in parts[:-1]]
    apart = _spacing(parts[0])
    return len(parts) > 2 and max(firsts) - min(firsts) <= apart and max(lasts) - min(lasts) <= apart


def _counts_on(before: Table, part: Table, are_alike: bool) -> bool:
    """Whether steps begin anew and the loss goes on: it is near that of the last rows.

    Of parts that ``are_alike``, it need only be nearer to that of the last rows than to that of the first ones.
    """
    earlier, later = before.known(LOSS).to_numpy(), part.known(LOSS).to_numpy()
    if part.step_n[0] > 2 * _spacing(part) or not len(later) or not len(earlier):
        return False
    now, last, first = (float(np.median(losses)) for losses in (later[:FEWEST], earlier[-FEWEST:], earlier[:FEWEST]))
    return is_near(earlier, later) or (are_alike and abs(now - last) < abs(now - first))


def _lr(table: Table, step: int) -> float:
    """The learning rate at a step, between those that were logged; NaN if none was."""
    rates = table.known("lr") if "lr" in table.columns else pd.Series(dtype=float)
    return float(np.interp(step, rates.index, rates)) if len(rates) else math.nan


def log_of(name: str, table: Table, bits: float, back: WentBack | None = None) -> Log:
    """The log of a table: a row for each step whose loss was logged, or was left out as NaN."""
    loss_n, is_row_n, why = _losses(table)
    others = {column: value_n for column, value_n in table.columns.items() if column != LOSS}
    rows = table._replace(columns={LOSS: loss_n, **others}).rows(is_row_n)
    held_out = {column: table.known(column) for column in HELD_OUT if column in table.columns}
    made = made_log(name, rows.step_n, rows.columns, bits, held_out)
    return made._replace(note=why, went_back=back, last_words=table.last_words)


def _losses(table: Table) -> tuple[Numbers, NDArray[np.bool_], str]:
    """The losses ``[n]``, NaN where trainers write a loss that is NaN otherwise; which rows count; and why some do.

    Transformers writes it as 0, and Megatron leaves it out. In reinforcement learning it may well be 0.
    """
    step_n, loss_n, has_loss_n = table.step_n, table.columns[LOSS], table.has_loss_n
    if of_rewards(table.columns):
        return loss_n, has_loss_n, ""
    others = {name: value_n for name, value_n in table.columns.items() if name != LOSS}
    if "grad_norm" in others:
        is_finite_n, is_zero_n = np.isfinite(others["grad_norm"]), np.abs(loss_n) <= size_of_zero("0.00")
        zero_n = has_loss_n & is_zero_n & ~is_finite_n
        is_of_every_row = 2 * is_finite_n[has_loss_n & ~is_zero_n].sum() > (has_loss_n & ~is_zero_n).sum()
        if zero_n.any() and is_of_every_row and not (loss_n < 0).any():  # a norm that is seldom logged may be missing
            why = f"from step {step_n[zero_n][0]} on the loss is 0 beside a gradient norm that is not finite"
            return np.where(zero_n, math.nan, loss_n), has_loss_n, why
    nonzero_n = step_n[has_loss_n & (loss_n != 0)]
    zero_n = has_loss_n & (step_n > nonzero_n[-1]) if len(nonzero_n) else np.zeros_like(has_loss_n)
    if zero_n.sum() >= SPOILED_ROWS:
        why = f"the last {zero_n.sum()} rows have a loss of exactly 0"
        return np.where(zero_n, math.nan, loss_n), has_loss_n, why
    is_known = {name: ~np.isnan(value_n) for name, value_n in others.items()}
    at_every_step = [known_n for name, known_n in is_known.items() if name in OF_EVERY_STEP]
    beside_n = np.logical_or.reduce(at_every_step) if at_every_step else np.zeros_like(has_loss_n)
    beside_n = beside_n | ~np.logical_or.reduce([np.zeros_like(has_loss_n), *is_known.values()])
    after_n = beside_n & (step_n > step_n[has_loss_n][-1])
    usually_n = has_loss_n[beside_n & ~after_n]
    if after_n.sum() >= SPOILED_ROWS and len(usually_n) and usually_n.mean() >= 1 - UNSORTED:
        why = f"from step {step_n[after_n][0]} on the loss is missing beside other measurements"
        return loss_n, has_loss_n | after_n, why
    return loss_n, has_loss_n, ""


def made_log(
    name: str,
    step_n: Steps,
    values: Mapping[str, Numbers],
    mantissa_bits: float,
    held_out: Mapping[str, pd.Series],
) -> Log:
    """The log of measurements, with the level of output logits and the cost of rounding them.

    Args:
        name: of the log.
        step_n: the steps with a loss.
        values: the measurements ``[n]`` at these steps, by column.
        mantissa_bits: as in ``Log``.
        held_out: held-out losses by column, indexed by steps of their own; each holds up to the next.
    """
    derived_from = (*OUTPUT_LOGITS, *HELD_OUT, ROUTER_Z)
    columns = {column: value_n for column, value_n in values.items() if column not in derived_from}
    if ROUTER_Z in values and ROUTER_LOGIT not in values:
        columns[ROUTER_LOGIT] = np.sqrt(np.clip(values[ROUTER_Z], 0, None))
    shares = [columns[name] for name in ("all_right", "all_wrong") if name in columns]
    if shares and "zero_variance" not in columns:
        columns["zero_variance"] = np.sum(shares, axis=0)
    if "entropy" in columns:  # some trainers log it with the sign of a loss
        columns["entropy"] = np.abs(columns["entropy"])
    if all(column in held_out for column in HELD_OUT):
        both = {column: held_out[column] for column in HELD_OUT}
        for column, losses in {**both, "parting": parting(*both.values())}.items():
            columns[column] = losses.reindex(step_n, method="ffill").to_numpy(dtype=float)
    level_n = _output_logits(values, len(step_n))
    if not np.isnan(level_n).all():
        columns |= {"output_logit": level_n, "logit_rounding": rounding_cost(level_n, mantissa_bits)}
    return Log(name, step_n, columns, "", mantissa_bits, held_out=held_out)


def _output_logits(values: Mapping[str, Numbers], rows: int) -> Numbers:
    """Level ``[n]`` of output logits: that of log Z, or else of the mean logit; NaN without either."""
    missing_n = np.full(rows, math.nan)
    log_z_n, square_n, mean_n = (values.get(column, missing_n) for column in OUTPUT_LOGITS)
    with np.errstate(invalid="ignore"):
        level_n = np.fmax(np.abs(log_z_n), np.sqrt(square_n))
    return np.asarray(np.abs(mean_n) if np.isnan(level_n).all() else level_n)
