"""Quantities of an arm that claims can name: numbers of curves, losses, columns of tables of runs, values of probes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.records.store import Records
from studies.claims.costs import HELD_OUT
from studies.claims.evidence import ArmTables
from studies.claims.points import RUN_TABLES

# ``NAME`` of a number of ``CurveSummary.values``; or arguments, the first of which is a key of ``QUANTITIES`` or of
# ``RUN_TABLES``.
Quantity = str | Mapping[str, Any]
# A learning rate: ``top`` of the paper's window, ``highest`` or ``lowest`` of all, one near a number, or ``each``.
Rate = str | float


def log10(table: pd.DataFrame) -> pd.DataFrame:
    """Log10 of a table; NaN for values that are not positive."""
    values = table.to_numpy(dtype=float)
    return pd.DataFrame(np.log10(np.where(values > 0, values, np.nan)), table.index, table.columns)


def recovery(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Updates from a share of the run until a value is no higher than the last one before it; by run id.

    If none is, the number of all updates that are left.
    """
    values = probe_values.recorded(records, probe, where).sort_values(["id", "step"], kind="stable")
    start = part * values["updates"]
    is_late = values["step"] >= start
    before = values[~is_late].groupby("id")["value"].last()
    is_back = is_late & (values["value"] <= values["id"].map(before).astype(float))
    later = values[is_back].drop_duplicates("id").set_index("id")["step"]
    ends = values.drop_duplicates("id").set_index("id")["updates"]
    return later.reindex(ends.index).fillna(ends) - part * ends


REDUCED_BY = {"recovery": recovery, **{name: getattr(probe_values, name) for name in ("late", "near", "peak")}}


def quantity(arm: ArmTables, of: Quantity) -> pd.DataFrame | pd.Series:
    """A quantity as a table with a row per seed and a column per size or learning rate.

    Raises:
        MissingRunsError: the runs do not have it.
    """
    arguments = {"curve": of} if isinstance(of, str) else dict(of)
    kind = next(iter(arguments))
    if kind in RUN_TABLES:
        return run_column(arm, kind, arguments.pop(kind), **arguments)
    return QUANTITIES[kind](arm, **arguments)


def resolution(arm: ArmTables, of: Quantity) -> pd.DataFrame | pd.Series | float:
    """The resolution of ``quantity`` on the grid of learning rates, in decades; zero if no grid limits it."""
    name, size = (of, "") if isinstance(of, str) else (str(of.get("curve", "")), str(of.get("size", "")))
    return _at_size(arm.resolution(name), size) if name in ("log_best", "log_lost") else 0.0


def _curve(arm: ArmTables, *, curve: str, largest: int = 0, size: str = "") -> pd.DataFrame | pd.Series:
    """A number of ``CurveSummary.values``, at all sizes or at the ``largest`` ones only."""
    return _at_size(arm.table(curve, largest), size)


def _loss(arm: ArmTables, *, loss: Rate, size: str = "") -> pd.DataFrame | pd.Series:
    """Final held-out loss at a learning rate, nats/token."""
    return _at_rate(arm, loss, size, arm.loss)


def _margin_over_costly_loss(
    arm: ArmTables, *, margin_over_costly_loss: Rate, size: str = ""
) -> pd.DataFrame | pd.Series:
    """Final held-out loss at a learning rate minus the best one + 0.3, nats/token."""
    return _at_rate(arm, margin_over_costly_loss, size, arm.margin_over_costly_loss)


def loss_at_top(arm: ArmTables, factor: float = 1.0) -> pd.Series:
    """Final held-out loss of the largest model at the top learning rate times a factor, nats/token."""
    return arm.loss(arm.nearest(factor * arm.top)).iloc[:, -1]


def best_of_largest(arm: ArmTables) -> pd.Series:
    """Lowest final held-out loss of the largest model over the learning rates, nats/token."""
    return arm.table("best").iloc[:, -1]


def run_column(arm: ArmTables, table: str, column: str, at: Rate = "top", *, decades: bool = False) -> pd.Series:
    """A column of one of ``RUN_TABLES`` per seed, of the largest model at a learning rate; with ``each`` at every one.

    In ``decades`` it is the log10 of the column.
    """

    def recorded(lr: float) -> pd.DataFrame:
        values = arm.column(lr, RUN_TABLES[table], column)
        return log10(values) if decades else values

    numbers: Any = _at_rate(arm, at, "largest", recorded)
    values: pd.Series = numbers
    return values


def cost(arm: ArmTables, column: str) -> pd.Series:
    """A column of ``spike_costs`` per seed, of the largest model at the top learning rate."""
    return run_column(arm, "cost", column)


def _probe(
    arm: ArmTables,
    *,
    probe: str,
    where: str = "",
    reduced_by: str,
    at: Rate,
    size: str = "",
    decades: bool = False,
    **options: float,
) -> pd.DataFrame | pd.Series:
    """Value of a probe, or in ``decades`` its log10; ``options`` go to the function that reduces it to a number."""

    def recorded(lr: float) -> pd.DataFrame:
        table = arm.probe(lr, probe, where, REDUCED_BY[reduced_by], **options)
        return log10(table) if decades else table

    return _at_rate(arm, at, size, recorded)


QUANTITIES: dict[str, Callable[..., pd.DataFrame | pd.Series]] = {
    "curve": _curve,
    "loss": _loss,
    "margin_over_costly_loss": _margin_over_costly_loss,
    "probe": _probe,
}


def by_rate(lrs: Iterable[float], value: Callable[[float], pd.DataFrame | pd.Series]) -> pd.DataFrame:
    """Values at each learning rate, side by side as parts of a claim."""
    return pd.concat({f"{lr:g}": value(lr) for lr in lrs}, axis=1)


def _at_rate(arm: ArmTables, at: Rate, size: str, value: Callable[[float], pd.DataFrame]) -> pd.DataFrame | pd.Series:
    if at == "each":
        return by_rate(arm.lrs, lambda lr: _at_size(value(lr), size))
    rates = {"top": arm.top, "highest": max(arm.lrs), "lowest": min(arm.lrs)}
    return _at_size(value(rates[at] if isinstance(at, str) else arm.nearest(at)), size)


def _at_size(table: pd.DataFrame, size: str) -> pd.DataFrame | pd.Series:
    return table if not size else table.iloc[:, {"largest": -1, "smallest": 0}[size]]


def held_out(arm: ArmTables, lr: float, part: float) -> pd.Series:
    """Held-out loss of the largest model at a share of the run; if there is a restart at that step, after it."""
    return arm.probe(lr, HELD_OUT, "", probe_values.near, part=part).iloc[:, -1]
