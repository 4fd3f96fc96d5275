"""Points of the measures of studies, and the tables of numbers that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.analysis.contrasts import Points, Reduce, best_losses, by_size, sensitivities, spread
from lab.analysis.sensitivity import PARTS, WINDOW, Study, Window
from lab.analysis.text import format_value
from lab.records.store import Records
from studies.claims.costs import spike_costs
from studies.claims.curve_summaries import summarize_curves

# Functions that tabulate numbers of runs, indexed by run id; studies add theirs.
RUN_TABLES: dict[str, Callable[[Records], pd.DataFrame]] = {"cost": spike_costs}


def valued(study: Study, values: pd.Series, **columns: pd.Series) -> pd.DataFrame:
    """The points of runs that have a value, by run id; ``columns`` by run id may rename ``arm`` or add ``column``."""
    points = study.points.assign(value=study.points["id"].map(values).astype(float))
    points = points.assign(**{name: points["id"].map(by_run) for name, by_run in columns.items()})
    return points[points["value"].notna()]


def in_columns(study: Study, values: Mapping[str, pd.Series]) -> pd.DataFrame:
    """``valued`` of several values, each in a ``column`` of its own."""
    return pd.concat([valued(study, of_column).assign(column=name) for name, of_column in values.items()])


def of_table(table: str, column: str, *, decades: bool = False) -> Points:
    """Points with a column of one of ``RUN_TABLES``, or in ``decades`` its log10; none if no run has it."""

    def points(study: Study) -> pd.DataFrame:
        values = RUN_TABLES[table](study.records).get(column, pd.Series(dtype=float))
        return valued(study, _log10(values) if decades else values)

    return points


def of_probe(
    probe: str, where: str = "", reduced_by: str = "late", *, rate: float = 0.0, decades: bool = False, **options: float
) -> Points:
    """Points with a number of a probe, or in ``decades`` its log10.

    Args:
        probe: its name.
        where: the end of the name of the part of the model, of several the last; ``*`` takes the largest of all parts.
        reduced_by: the function of ``probe_values`` that makes one number per run, to which ``options`` go.
        rate: restricts the points to the highest learning rate up to this one; 0 keeps all.
    """

    def points(study: Study) -> pd.DataFrame:
        places = [place for place in probe_values.places(study.records, probe) if where == "*" or place.endswith(where)]
        chosen = places if where == "*" else places[-1:]
        values = [getattr(probe_values, reduced_by)(study.records, probe, place, **options) for place in chosen]
        if not values:
            return study.points.head(0)
        largest: pd.Series = pd.concat(values, axis=1).max(axis=1)
        found = valued(study, _log10(largest) if decades else largest)
        return up_to(rate, found) if rate else found

    return points


def up_to(rate: float, points: pd.DataFrame) -> pd.DataFrame:
    """The points at the highest learning rate up to this one."""
    top = points.loc[points["lr"] <= rate, "lr"].max()
    chosen: pd.DataFrame = points[points["lr"] == top]
    return chosen


def _log10(values: pd.Series) -> pd.Series:
    return pd.Series(np.log10(values.where(values > 0)))


def by_rate(points: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    """Means of ``value`` at each learning rate."""
    return spread(points, "lr", lambda lr: f"at LR {format_value(lr)}")


def of_curves(quantity: str) -> Reduce:
    """A number of ``CurveSummary.values`` at each size; NaN where no learning rate beat the bigram model."""

    def reduce(points: pd.DataFrame, window: Window) -> pd.DataFrame:
        if quantity == "best":  # as that of ``CurveSummary``, but of many curves at once
            return best_losses(points, window)
        if quantity in PARTS:
            return sensitivities(points, window, quantity)
        values = {(summary.curve, summary.seed): summary.values[quantity] for summary in summarize_curves(points)}
        keys = zip(points["curve"], points["seed"], strict=True)
        return by_size(points.assign(value=[values[key] for key in keys]))

    return reduce


def change_over_size(quantity: str) -> Reduce:
    """A number of ``CurveSummary.values`` at the largest size minus that at the smallest."""

    def reduce(points: pd.DataFrame, window: Window) -> pd.DataFrame:
        values = of_curves(quantity)(points, window)
        if values.shape[1] < 2:
            return values.iloc[:, :0]
        return pd.DataFrame({"from the smallest to the largest size": values.iloc[:, -1] - values.iloc[:, 0]})

    return reduce


def slope_over_size(quantity: str) -> Reduce:
    """The slope of a number of ``CurveSummary.values`` over log10 size; arms may differ in their sizes."""

    def reduce(points: pd.DataFrame, window: Window) -> pd.DataFrame:
        slopes: list[pd.Series] = []
        for _, arm in points.groupby("arm", sort=False):
            log_sizes = np.log10(np.sort(arm["size"].unique()))
            if len(log_sizes) > 1:
                table = of_curves(quantity)(arm, window)
                slopes.append(table.apply(lambda row, x: np.polyfit(x, row, 1)[0], axis=1, x=log_sizes))
        return pd.DataFrame(
            {"per decade of size": pd.concat(slopes)} if slopes else of_curves(quantity)(points, window).iloc[:, :0]
        )

    return reduce
