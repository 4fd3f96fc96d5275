"""The rows of a run as logs: one for each attempt where training went back, and for each phase where steps restart."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from lab.analysis.events.detectors import Log, WentBack
from lab.analysis.events.held_out_losses import parting
from lab.analysis.events.log_reader import LOSS, Row
from lab.analysis.logit_rounding import rounding_cost
from lab.core.windows import NORMAL, Numbers

# Columns from which the level of output logits follows: log Z, the mean of its square, the mean logit.
OUTPUT_LOGITS = ["log_z", "log_z_square", "output_logit_mean"]
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
LOGGED = "logged"  # marks rows with a loss, since a loss that is NaN is logged, too


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

    def by_step(self) -> pd.Series:
        """The value of each step, in the order of the steps: the mean if every step has several, or else the last."""
        values = pd.Series(np.array(self.values), np.array(self.steps), dtype=float)
        if len(values) >= 2 * values.index.nunique():  # of micro-batches
            return values.fillna(math.inf).groupby(level=0).mean()
        return values[~values.index.duplicated(keep="last")].sort_index()


def table_of(columns: Mapping[str, Column]) -> pd.DataFrame:
    """A row for each step, and a column for each measurement; ``LOGGED`` is 1 where there is a loss."""
    table = pd.DataFrame({name: column.by_step() for name, column in columns.items()})
    return table.assign(**{LOGGED: pd.Series(1.0, np.unique(columns[LOSS].steps))})


def logs_of_rows(name: str, rows: Iterable[Row], bits: float) -> tuple[list[Log], list[str]]:
    """The logs of one run, and remarks on how its rows were read.

    A step may be smaller than the one before. If the rows repeat the values of their steps, they are a copy and count
    once. If the loss is near that of this step, training went back there, and both attempts are kept. Any other loss
    begins a phase, or another run, with steps of its own.
    """
    parts, notes = _parts(name, rows)
    logs, back, phase, attempt = list[Log](), None, 1, 1
    current = parts[0]
    for part in parts[1:]:
        step, last = int(part.index[0]), int(current.index[-1])
        if _repeats(current, part):
            notes.append(f"{name}: steps {step} to {min(last, int(part.index[-1]))} are written twice and count once")
            current = part.combine_first(current)
        elif _goes_on(current, part):
            logs.append(log_of(f"{_named(name, phase)} attempt {attempt}", current, bits, back))
            back = WentBack(last, step, _lr(current, last), _lr(part, step))
            current = pd.concat([current[current.index < step], part])
            attempt += 1
        else:
            logs.append(log_of(_named(name, phase), current, bits, back))
            notes.append(f"{name}: after step {last}, phase {phase + 1} begins with step {step} at another loss")
            current, back, phase, attempt = part, None, phase + 1, 1
    logs.append(log_of(_named(name, phase), current, bits, back))
    return logs, [*notes, *(f"{log.name}: {log.note}" for log in logs if log.note)]


def _named(name: str, phase: int) -> str:
    return name if phase == 1 else f"{name} phase {phase}"


def _parts(name: str, rows: Iterable[Row]) -> tuple[list[pd.DataFrame], list[str]]:
    """Tables in each of which the steps of losses grow, in the order of the file, and a remark if rows are sorted."""
    parts, last, losses = [defaultdict[str, Column](Column)], -1, 0
    for row in rows:
        if LOSS in row.values:
            if row.step < last:
                parts.append(defaultdict(Column))
            last, losses = row.step, losses + 1
        for column, value in row.values.items():
            parts[-1][column].add(row.step, value)
    if len(parts) - 1 <= max(1, UNSORTED * losses):
        return [table_of(part) for part in parts], []
    whole = defaultdict[str, Column](Column)
    for part in parts:
        for column, values in part.items():
            whole[column].steps.extend(values.steps)
            whole[column].values.extend(values.values)
    table = table_of(whole)
    kept = f"the last row of each kept: {int(table[LOGGED].sum())} of {losses} rows"
    return [table], [f"{name}: sorted by step, {kept}"]


def _repeats(before: pd.DataFrame, part: pd.DataFrame) -> bool:
    """Whether at least half of the steps that both have hold the same loss."""
    both = before.index[before[LOGGED].eq(1)].intersection(part.index)
    same = np.isclose(before.loc[both, LOSS], part.loc[both, LOSS], rtol=1e-6, atol=0, equal_nan=True)
    return len(both) > 0 and bool(same.mean() >= 0.5)


def _goes_on(before: pd.DataFrame, part: pd.DataFrame) -> bool:
    """Whether the loss is near that of the rows before the first step, so that training went back to a checkpoint."""
    earlier = before.loc[before.index < part.index[0], LOSS].dropna().tail(8 * LEVEL_ROWS)
    if len(earlier) < LEVEL_ROWS:
        return False
    deviation = NORMAL * float((earlier.diff().dropna() - earlier.diff().median()).abs().median())
    gap = abs(part[LOSS].dropna().head(LEVEL_ROWS).median() - earlier.tail(LEVEL_ROWS).median())
    return bool(gap <= max(CLOSE_NATS, CLOSE_DEVIATIONS * deviation))


def _lr(table: pd.DataFrame, step: int) -> float:
    return float(table["lr"].get(step, math.nan)) if "lr" in table else math.nan


def log_of(name: str, table: pd.DataFrame, bits: float, back: WentBack | None = None) -> Log:
    """The log of a table made by ``table_of``: a row for each step whose loss was logged, or was left out as NaN."""
    loss, why = _losses(table)
    values = table.drop(columns=[LOSS, LOGGED]).reindex(loss.index)
    values.insert(0, LOSS, loss)
    return made_log(name, values, bits, table)._replace(note=why, went_back=back)


def _losses(table: pd.DataFrame) -> tuple[pd.Series, str]:
    """The loss of each row, NaN where trainers write a loss that is NaN otherwise, and the words that say so.

    Transformers writes it as 0, and Megatron leaves it out.
    """
    loss = table.loc[table[LOGGED].eq(1), LOSS]
    if "grad_norm" in table:
        zero = loss.eq(0) & ~np.isfinite(table["grad_norm"].reindex(loss.index))
        if zero.any():
            first = int(loss.index[zero.argmax()])
            return loss.mask(zero), f"from step {first} on the loss is 0 beside a gradient norm that is not finite"
    zeros = len(loss) - 1 - int(np.flatnonzero(loss.ne(0))[-1]) if loss.ne(0).any() else 0
    if zeros >= SPOILED_ROWS:
        return loss.mask(np.arange(len(loss)) >= len(loss) - zeros), f"the last {zeros} rows have a loss of exactly 0"
    others = table.drop(columns=[LOSS, LOGGED])
    beside = table.index[others.isna().all(axis=1) | others.filter(OF_EVERY_STEP).notna().any(axis=1)]
    after = beside[beside > loss.index[-1]]
    usually = beside[beside <= loss.index[-1]].isin(loss.index)
    if len(after) >= SPOILED_ROWS and usually.mean() >= 1 - UNSORTED:
        why = f"from step {after[0]} on the loss is missing beside other measurements"
        return pd.concat([loss, pd.Series(math.nan, after)]), why
    return loss, ""


def made_log(name: str, values: pd.DataFrame, mantissa_bits: float, held_out: pd.DataFrame) -> Log:
    """The log of measurements indexed by step, with the level of output logits and the cost of rounding them.

    Args:
        name: of the log.
        values: a row for each step with a loss.
        mantissa_bits: as in ``Log``.
        held_out: held-out losses by column, indexed by steps of their own; each holds up to the next.
    """
    left_out = {*OUTPUT_LOGITS, *HELD_OUT}
    columns = {str(column): values[column].to_numpy(dtype=float) for column in values if column not in left_out}
    if all(column in held_out for column in HELD_OUT):
        both = {column: held_out[column].dropna() for column in HELD_OUT}
        both["parting"] = parting(*both.values())
        for column, losses in both.items():
            columns[column] = losses.reindex(values.index, method="ffill").to_numpy(dtype=float)
    level_n = _output_logits(values)
    if not np.isnan(level_n).all():
        columns |= {"output_logit": level_n, "logit_rounding": rounding_cost(level_n, mantissa_bits)}
    return Log(name, values.index.to_numpy(dtype=np.int64), columns, "", mantissa_bits)


def _output_logits(values: pd.DataFrame) -> Numbers:
    """Level ``[n]`` of output logits: that of log Z, or else of the mean logit; NaN without either."""
    log_z_n, square_n, mean_n = values.reindex(columns=OUTPUT_LOGITS).to_numpy(dtype=float).T
    with np.errstate(invalid="ignore"):
        level_n = np.fmax(np.abs(log_z_n), np.sqrt(square_n))
    return np.asarray(np.abs(mean_n) if np.isnan(level_n).all() else level_n)
