"""Effects: functions that make one number per seed from the tables of arms, with what qualifies it.

``claims.yaml`` can name those that take arms by position and all else by keyword.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

from lab.analysis.probe_values import late
from lab.analysis.sensitivity import HIGH, LOST
from lab.analysis.statistics import Interval, student_t
from lab.analysis.text import count
from studies.claims.evidence import ArmTables, MissingRunsError
from studies.claims.quantities import Quantity, log10, quantity, resolution
from studies.claims.statistics import share_of_clusters

FEWEST_SIZES = 3
# Decimals to which effects are rounded, so that differences of the arithmetic do not count.
DIGITS = 9

Table = TypeVar("Table", pd.DataFrame, pd.Series)


class Qualified(NamedTuple):
    """Effects with their qualifications: the resolution of a grid, a control, a presumption.

    Attributes:
        table: an effect per seed (row) for each part (column) of a claim.
        resolution: of each effect, in its own unit; zero if no grid limits it.
        control: effects that must lie above zero; otherwise the claim would hold without the cause that it names.
        caution: a remark for the reader of the verdict, such as about what was left out.
        presumed: effects that must lie above zero; otherwise the setting does not show the trouble that the claim is
            about. Judging adds them.
        trials: of each effect that is a share of so many trials minus ``minus``; NaN for others, which have Student's
            intervals.
        minus: what the table has subtracted from shares.
    """

    table: pd.DataFrame | pd.Series
    resolution: pd.DataFrame | pd.Series | float = 0.0
    control: Qualified | None = None
    caution: str = ""
    presumed: Qualified | None = None
    trials: pd.DataFrame | pd.Series | float = math.nan
    minus: float = 0.0

    def __neg__(self) -> Qualified:
        return self._replace(table=-self.table, trials=math.nan)

    @property
    def parts(self) -> list[str]:
        """Names of the parts: given names or sizes of models; numbers if these are not all different."""
        labels = [self.table.name] if isinstance(self.table, pd.Series) else self.table.columns
        names = [_part_name(label) for label in labels]
        return names if len(set(names)) == len(names) else [f"part {number}" for number in range(1, len(names) + 1)]

    def intervals(self) -> list[Interval]:
        """The interval of each part, over the seeds at which every part, also of control and presumption, is finite."""
        return _intervals(self, self._known())

    def control_intervals(self) -> list[Interval]:
        """The intervals of the control, over the same seeds."""
        return _intervals(self.control, self._known())

    def weak_controls(self) -> list[Interval]:
        """The intervals of the control that do not lie above zero."""
        return _not_above_zero(self.control_intervals())

    def weak_presumptions(self) -> list[Interval]:
        """The intervals of the presumption, over the same seeds, that do not lie above zero."""
        return _not_above_zero(_intervals(self.presumed, self._known()))

    def with_earlier_seeds(self, earlier: pd.DataFrame, name: str) -> Qualified:
        """The same with the effects of earlier seeds; of a seed that both have, the effect here counts.

        Args:
            earlier: effects by table and part (rows) and seed (columns).
            name: the name of this table there, with which the names of resolution, control and presumption begin.
        """

        def both(name: str, now: pd.DataFrame | pd.Series) -> pd.DataFrame | pd.Series:
            shown, before = pd.DataFrame(now), earlier.xs(name, level="table").T
            if list(before) != ([""] if isinstance(now, pd.Series) else list(map(str, shown))):
                raise ValueError(f"earlier seeds have other parts than {name}")
            pooled = pd.concat([before.drop(shown.index, errors="ignore").set_axis(shown.columns, axis=1), shown])
            return pd.Series(pooled.iloc[:, 0], name=now.name) if isinstance(now, pd.Series) else pooled

        step = self.resolution
        return self._replace(
            table=both(name, self.table),
            resolution=both(f"{name} resolution", step) if isinstance(step, (pd.DataFrame, pd.Series)) else step,
            control=self.control and self.control.with_earlier_seeds(earlier, f"{name} control"),
            presumed=self.presumed and self.presumed.with_earlier_seeds(earlier, f"{name} presumed"),
        )

    def _known(self) -> pd.Index[str]:
        tables = [pd.DataFrame(effects.table) for effects in (self, self.control, self.presumed) if effects]
        return pd.concat(tables, axis=1).replace([-math.inf, math.inf], math.nan).dropna().index


def _part_name(label: Hashable) -> str:
    if label is None:
        return "all of it"
    if isinstance(label, (int, np.integer)):
        return f"{count(int(label))} parameters"
    return " ".join(map(_part_name, label)) if isinstance(label, tuple) else str(label).replace("_", " ")


def _not_above_zero(intervals: Sequence[Interval]) -> list[Interval]:
    return [interval for interval in intervals if not interval.low > 0]  # NaN is not above it


def _intervals(effects: Qualified | None, seeds: pd.Index[str]) -> list[Interval]:
    if effects is None:
        return []
    values_ps = np.atleast_2d(effects.table.to_numpy(dtype=float).T)
    resolutions_ps, trials_ps = (
        np.broadcast_to(np.atleast_2d(np.asarray(table, dtype=float).T), values_ps.shape)
        for table in (effects.resolution, effects.trials)
    )
    known = effects.table.index.isin(seeds)
    intervals = []
    for values_s, resolutions_s, trials_s in zip(
        values_ps[:, known], resolutions_ps[:, known], trials_ps[:, known], strict=True
    ):
        if np.isfinite(trials_s).any():
            intervals.append(share_of_clusters((values_s + effects.minus) * trials_s, trials_s, effects.minus))
        else:
            resolution = max(10**-DIGITS, math.sqrt(np.mean(resolutions_s**2)) if known.any() else 0)
            intervals.append(student_t(values_s.round(DIGITS), resolution=resolution))
    return intervals


Effects = pd.DataFrame | pd.Series | Qualified
EffectsOfArms = Callable[..., Effects]


def qualified(effects: Effects) -> Qualified:
    """Wrap plain tables of effects as ``Qualified``; return any other unchanged."""
    return effects if isinstance(effects, Qualified) else Qualified(effects)


def mean(tables: Sequence[Table]) -> Table:
    """Mean of the tables, cell by cell; NaN where any is."""
    return reduce(add, tables) / len(tables)


def parts(**tables: pd.DataFrame | pd.Series) -> pd.DataFrame:
    """Effects of several parts of a claim, side by side under their names."""
    return pd.concat(tables, axis=1)


def slope(table: pd.DataFrame, fewest: int = FEWEST_SIZES) -> pd.Series:
    """Slope of the least-squares line over log10 of the columns, by row.

    Raises:
        MissingRunsError: there are fewer than ``fewest`` columns.
    """
    if table.shape[1] < fewest:
        raise MissingRunsError(f"{table.shape[1]} of {fewest} points that a trend takes")
    return pd.Series(table.to_numpy(dtype=float) @ _slope_weights(table), table.index)


def slope_resolution(resolution: pd.DataFrame) -> pd.Series:
    """Resolution of ``slope``, for values of this ``resolution`` with independent errors."""
    return pd.Series(np.sqrt(resolution.to_numpy(dtype=float) ** 2 @ _slope_weights(resolution) ** 2), resolution.index)


def _slope_weights(table: pd.DataFrame) -> np.ndarray:
    x = np.log10(np.array(table.columns, dtype=float))
    x -= x.mean()
    return np.asarray(x / (x @ x))


def at_each_size(tables: Mapping[float, pd.DataFrame]) -> dict[Hashable, pd.DataFrame]:
    """From a table per value of a setting to a table per size, with a column per value."""
    sizes = next(iter(tables.values())).columns
    return {size: pd.DataFrame({value: table.get(size) for value, table in tables.items()}) for size in sizes}


def extrapolated(table: pd.DataFrame, size: float) -> pd.Series:
    """Value at another size of the least-squares line over log10 of the columns, by row."""
    middle = float(np.log10(np.array(table.columns, dtype=float)).mean())
    return slope(table, fewest=2) * (math.log10(size) - middle) + table.mean(axis=1, skipna=False)


def exceeds(
    table: pd.DataFrame | pd.Series, bound: float, trials: pd.DataFrame | pd.Series | float = math.nan
) -> Qualified:
    """A table minus a bound, as a control that must lie above the bound; with ``trials`` a table of shares."""
    return Qualified(table - bound, trials=trials, minus=bound)


def value(*arms: ArmTables, of: Quantity, arm: int = 0, sign: int = 1, plus: float = 0.0) -> Qualified:
    """A quantity of the arm with this number, times ``sign``, plus a constant."""
    return Qualified(sign * quantity(arms[arm], of) + plus, resolution(arms[arm], of))


def difference(
    *arms: ArmTables,
    of: Quantity | list[Quantity],
    between: Sequence[int] = (0, 1),
    absolute: bool = False,
    plus: float = 0.0,
) -> Qualified:
    """A quantity of the first arm minus that of the second, plus a constant; or the first of two minus the second."""
    first, second = of if isinstance(of, list) else (of, of)
    left, right = (arms[number] for number in between)
    table = quantity(left, first) - quantity(right, second)
    step = (resolution(left, first) ** 2 + resolution(right, second) ** 2) ** 0.5
    return Qualified((table.abs() if absolute else table) + plus, step)


def weighted_sum(*arms: ArmTables, of: Quantity, weights: Sequence[float], plus: float = 0.0) -> Qualified:
    """Sum of a quantity over the arms, each times its weight, plus a constant."""
    return Qualified(reduce(add, [quantity(arm, of) * w for arm, w in zip(arms, weights, strict=True)]) + plus)


def ratio(*arms: ArmTables, of: Quantity, between: Sequence[int] = (0, 1)) -> Qualified:
    """Ratio of a quantity between two arms."""
    left, right = (quantity(arms[number], of) for number in between)
    return Qualified(left / right)


def slope_over_size(*arms: ArmTables, of: Quantity, arm: int = 0, sign: int = 1) -> Qualified:
    """Slope of a quantity of one arm over log10 size, times ``sign``."""
    table, step = quantity(arms[arm], of), resolution(arms[arm], of)
    return Qualified(
        sign * slope(pd.DataFrame(table)), slope_resolution(step) if isinstance(step, pd.DataFrame) else step
    )


def difference_of_slopes(first: ArmTables, second: ArmTables, *, of: Quantity) -> Qualified:
    """Slope of a quantity over log10 size in the first arm, minus that in the second."""
    return Qualified(slope(pd.DataFrame(quantity(first, of))) - slope(pd.DataFrame(quantity(second, of))))


def slope_of_difference(first: ArmTables, second: ArmTables, *, of: list[Quantity]) -> Qualified:
    """Slope over log10 size of a quantity of the first arm minus another of the second."""
    return Qualified(slope(pd.DataFrame(quantity(first, of[0]) - quantity(second, of[1]))))


def _drift(arm: ArmTables) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Decades by which eta* of each larger size lies above eta* of the smallest, and their resolution."""
    if len(arm.sizes) < 2:
        raise MissingRunsError("models of one size only")
    best, squared_resolution = arm.table("log_best"), arm.resolution("log_best") ** 2
    step = squared_resolution.iloc[:, 1:].add(squared_resolution.iloc[:, 0], axis=0) ** 0.5
    return best.iloc[:, 1:].sub(best.iloc[:, 0], axis=0), step


def drift(*arms: ArmTables, arm: int = 0) -> Qualified:
    """Decades by which eta* (vertex of a parabola over log LR) of each larger size lies above eta* of the smallest."""
    return Qualified(*_drift(arms[arm]))


def drift_beyond_half_a_decade(*arms: ArmTables, arm: int = 0) -> Qualified:
    """Distance of eta* at the largest size from that at the smallest, in decades, minus half a decade.

    The control of a claim that eta* stays in place: in the arm without the remedy it must not.
    """
    moved, step = _drift(arms[arm])
    return Qualified(moved.iloc[:, -1].abs() - 0.5, step.iloc[:, -1])


def largest_margin_over_costly_loss(*arms: ArmTables, arm: int = 0, sign: int = 1) -> Qualified:
    """Largest loss at learning rates above the best one, in the paper's window, minus the best loss + 0.3, nats/token.

    Of one arm, at each size, times ``sign``. Above zero some learning rate is costly.
    """
    chosen = arms[arm]
    best, lrs = chosen.table("log_best"), [lr for lr in chosen.lrs if lr <= HIGH] or [chosen.top]
    losses = np.stack([chosen.margin_over_costly_loss(lr).where(best < math.log10(lr), -LOST) for lr in lrs])
    return Qualified(sign * pd.DataFrame(losses.max(axis=0), best.index, best.columns).where(best.notna()))


def mean_loss_difference_at_calm_rates(first: ArmTables, second: ArmTables) -> Qualified:
    """Mean loss of the second arm minus the first's, over learning rates up to a tenth of the first's eta_div.

    There is one at each size, nats/token. The eta_div, where the loss crosses the best one + 0.3, is the smallest over
    seeds. The control: at the top learning rate the first arm's loss is higher by more than 0.02, at every size.
    """
    means = {}
    for size, lost in first.table("log_lost").min().items():
        if math.isnan(lost):
            means[size] = first.table("log_lost")[size]
            continue
        calm = [lr for lr in first.lrs if math.log10(lr) <= lost - 1 + 1e-6]
        if not calm:
            raise MissingRunsError("no learning rate as low as eta_div / 10")
        means[size] = mean([second.loss(lr) - first.loss(lr) for lr in calm])[size]
    return Qualified(pd.DataFrame(means), control=exceeds(first.loss(first.top) - second.loss(second.top), 0.02))


def late_log(arm: ArmTables, probe: str, where: str) -> dict[float, pd.DataFrame]:
    """Log10 of a probe's values at the end of training, by learning rate."""
    return {lr: log10(arm.probe(lr, probe, where, late)) for lr in arm.lrs}


def over_rate(tables: Mapping[float, pd.DataFrame]) -> pd.DataFrame:
    """Slope over log10 of the learning rate, at each size."""
    return pd.DataFrame({size: slope(table) for size, table in at_each_size(tables).items()})


def over_size(tables: Mapping[float, pd.DataFrame]) -> pd.Series:
    """Slope over log10 size, a mean over the learning rates."""
    return mean([slope(table) for table in tables.values()])


def late_slope_over_rate(arm: ArmTables, *, probe: str, where: str, sign: int = 1) -> pd.DataFrame:
    """Slope of log10 of a probe's value late in training over log10 of the learning rate, at each size."""
    return sign * over_rate(late_log(arm, probe, where))


def late_slope_over_size(arm: ArmTables, *, probe: str, where: str, sign: int = 1) -> pd.Series:
    """Slope of log10 of a probe's value late in training over log10 size, a mean over the learning rates."""
    return sign * over_size(late_log(arm, probe, where))
