"""Tables of a study: as numbers, as text for readers, and as CSV files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.crossings import rate_text
from lab.analysis.curves import axis_of, configs, differing, idle_parameters, parameters, plain
from lab.analysis.runaway import crossings, rates
from lab.analysis.sensitivity import WINDOW, Study, optima, untrained
from lab.analysis.text import LEARNING_RATE, NO_AXIS, UNDEFINED, count, format_value, span
from lab.records.imported import COLUMN

# The parts of sensitivity in CSV files.
PART_COLUMNS = {"total": "sensitivity", "below": "under_training", "above": "instability"}
OUTCOME_MARKS = {"": "", "unstable": " *", "diverged": " †"}


def sensitivities(study: Study) -> pd.DataFrame:
    """A row per arm and size, in numbers; NaN where nothing is defined.

    Returns:
        Columns ``arm``, ``size``, ``parameters``; sensitivity and its two parts with the ends of their intervals;
        ``best_lr`` and ``eta_div``, the smallest unstable learning rate, each as the least and the greatest of the
        seeds that have one, with the number of these seeds; ``n``, the seeds of the intervals. Where no run ended
        better than the bigram model, there is no ``eta_div``.

    Raises:
        TypeError: records are no study.
    """
    if not isinstance(study, Study):
        raise TypeError(
            f"sensitivities takes a Study, which study(FOLDER) makes of a results folder and from_frame(TABLE) of a "
            f"table, and no {type(study).__name__}"
        )
    seeds = study.seeds.assign(eta_div=study.seeds["eta_div"].mask(_untrained(study, study.seeds)))
    of_curve = seeds.groupby("curve", sort=False)
    numbers = _flat(study.curves.drop(columns=["best_lr", "eta_div"]))
    n = numbers.pop("n")
    for name in ("best_lr", "eta_div"):
        for end, reduced in {"least": "min", "greatest": "max", "seeds": "count"}.items():
            numbers[f"{name}_{end}"] = of_curve[name].agg(reduced).to_numpy()
    return numbers.assign(n=n)


def _untrained(study: Study, rows: pd.DataFrame) -> np.ndarray:
    """Whether no run of the arm and size of each row ended better than the bigram model."""
    return pd.MultiIndex.from_frame(rows[["arm", "size"]]).isin(untrained(study.points))


def _part_names(study: Study) -> dict[str, str]:
    """The names of the parts of sensitivity for readers."""
    return {"total": "sensitivity", "below": study.along.below, "above": study.along.above}


def sensitivities_as_text(study: Study) -> pd.DataFrame:
    """``sensitivities`` for readers: intervals as mean and half width, learning rates as ranges over seeds."""
    curves = study.curves
    return pd.DataFrame(
        {
            "arm": curves["arm"],
            "parameters": _sizes(study, curves),
            **{name: curves[part].map("{:±}".format) for part, name in _part_names(study).items()},
            f"best {study.along.short}": curves["best_lr"].map(span),
            "eta_div": curves["eta_div"].map(span).mask(_untrained(study, curves), UNDEFINED),
            "n": curves["total"].map(lambda interval: interval.n),
        }
    )


def failing_rates(study: Study) -> pd.DataFrame:
    """A row for each arm and quantity of ``runaway.rates``, and a column for each size, for readers.

    A cell holds the learning rate at which the quantity passes its level, and how steeply it rises there.
    """
    found = rates(study.records, study.points) if study.along == LEARNING_RATE else []
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for rate in found:
        row = rows.setdefault((rate.arm, rate.quantity), {"arm": rate.arm, "what passes its level": rate.level})
        several = ", the first of several" * any(seed.times > 1 for seed in rate.seeds)
        slope = f" (slope {rate.slope.mean:.2g})" if rate.slope.n and not math.isnan(rate.rate.mean) else ""
        row[count(rate.size)] = f"{rate_text(rate.rate)}{slope}{several}"
    sizes = [count(size) for size in sorted({rate.size for rate in found})]
    return pd.DataFrame([*rows.values()], columns=["arm", "what passes its level", *sizes]).fillna("")


def crossings_by_seed(study: Study) -> pd.DataFrame:
    """A row for each curve, seed and quantity of ``runaway.crossings``, in numbers; empty without learning rates."""
    found = crossings(study.records, study.points if study.along == LEARNING_RATE else study.points[:0])
    names = ["at", "low", "high", "slope", "times"]
    passed = pd.DataFrame([{name: getattr(each, name) for name in names} for each in found["crossing"]], columns=names)
    return found.drop(columns=["curve", "crossing"]).join(passed)


def differences(study: Study) -> pd.DataFrame:
    """A row per pair of arms and size: the first arm's numbers minus the second's, paired by seed.

    Returns:
        Columns ``first``, ``second``, ``size``; sensitivity and its two parts with the ends of their intervals; ``n``;
        and Cohen's d_z of each.
    """
    dz = {f"{column}_dz": [interval.dz for interval in study.pairs[part]] for part, column in PART_COLUMNS.items()}
    return _flat(study.pairs).assign(**dz)


def differences_as_text(study: Study) -> pd.DataFrame:
    """``differences`` for readers: intervals as mean and half width."""
    pairs = study.pairs
    return pd.DataFrame(
        {
            "first arm": pairs["first"],
            "minus second arm": pairs["second"],
            "parameters": pairs["size"].map(count),
            **{name: pairs[part].map("{:±}".format) for part, name in _part_names(study).items()},
            "n": pairs["total"].map(lambda interval: interval.n),
        }
    )


def losses(study: Study) -> pd.DataFrame:
    """A row per ``arm`` and ``size``, a column per learning rate: mean final loss over seeds, NaN without a run."""
    means = study.points.pivot_table("capped", ["arm", "size"], "lr", sort=False)
    return means.sort_index(axis="columns").rename_axis(columns=None).reset_index()


def losses_as_text(study: Study) -> pd.DataFrame:
    """``losses`` for readers, marked by the worst outcome of the seeds."""
    has_axis, rows = study.along != NO_AXIS, []
    lrs = {lr: format_value(lr) if has_axis else "loss" for lr in sorted(study.points["lr"].unique())}
    for (arm, size), runs in study.points.groupby(["arm", "size"], sort=False):
        cells = {lrs[lr]: _loss_cell(seeds) for lr, seeds in runs.groupby("lr")}
        rows.append({"arm": arm, "size": size} | dict.fromkeys(lrs.values(), "") | cells)
    table = pd.DataFrame(rows)
    return table.assign(size=_sizes(study, table)).rename(columns={"size": "parameters"})


def _sizes(study: Study, rows: pd.DataFrame) -> pd.Series:
    """The size of each row in words, and with experts how many of its parameters act on a token."""
    idle = study.points["id"].map(idle_parameters(study.records.runs))
    of_arm = idle[idle > 0].groupby([study.points["arm"], study.points["size"]]).first()
    words = []
    for arm, size in zip(rows["arm"], rows["size"], strict=True):
        without = int(of_arm.get((arm, size), 0))
        words.append(f"{count(size)}, of which {count(size - without)} act" if without else count(size))
    return pd.Series(words, rows.index, dtype=object)


def _loss_cell(seeds: pd.DataFrame) -> str:
    worst = max(seeds["outcome"], key=list(OUTCOME_MARKS).index)
    return f"{seeds['capped'].mean():.3f}{OUTCOME_MARKS[worst]}"


def lost(study: Study) -> pd.DataFrame:
    """A row per run that diverged or failed."""
    diverged, failed, axis = study.points[study.points["outcome"] == "diverged"], study.failed, axis_of(study.runs)
    diverged = diverged.assign(
        loss=diverged["loss"].map("{:.3f}".format), reason=diverged["id"].map(study.runs.set_index("id")["reason"])
    )
    failed = failed.assign(
        arm=failed["intervention"],
        parameters=parameters(failed),
        lr=failed[axis] if axis else UNDEFINED,
        outcome=failed["status"],
        loss=failed["final_val_loss"],
    )
    columns = ["id", "arm", "parameters", "lr", "seed", "outcome", "loss", "diverged_at", "reason"]
    titles = {"id": "run", "lr": study.along.short, "loss": "final loss", "diverged_at": "from step"}
    table = pd.DataFrame({name: list(map(_config_text, [*diverged[name], *failed[name]])) for name in columns})
    return table.drop(columns=[] if axis else "lr").rename(columns=titles)


def arms(study: Study) -> pd.DataFrame:
    """A row per arm, a column per config key in which curves differ; cells list the values of all sizes."""
    runs = study.records.runs.set_index("id").loc[study.points["id"]].reset_index()
    keys, curves = configs(runs)
    arm_of = dict(zip(keys, study.points["arm"], strict=True))
    rows = []
    for arm in study.points["arm"].unique():
        own = [curve for key, curve in curves.items() if arm_of[key] == arm]
        values = {key: [_config_text(curve[key]) for curve in own] for key in differing(list(curves.values()))}
        rows.append({"arm": arm} | {key: ", ".join(dict.fromkeys(texts)) for key, texts in values.items()})
    return pd.DataFrame(rows).rename(columns=lambda key: key.removeprefix(COLUMN))


def shared_settings(study: Study) -> dict[str, str]:
    """Config values that all curves share, as text by dotted key; absent keys are left out."""
    curves = list(configs(study.records.runs[study.records.runs["status"] != "failed"])[1].values())
    same = set(curves[0]) - set(differing(curves))
    present = {key: curves[0][key] for key in sorted(same) if curves[0][key] is not None}
    return {key.removeprefix(COLUMN): format_value(value) for key, value in present.items()}


def files(study: Study) -> dict[str, pd.DataFrame]:
    """Tables of plain numbers by name of the CSV file; with another window than the paper's, rows contain its ends."""
    low, high = study.window
    ends = {} if study.window == WINDOW else {"window_low": low, "window_high": high}
    seeds = study.seeds.drop(columns="curve").rename(columns=PART_COLUMNS)
    points = study.points.drop(columns=["curve", "best_lr"])
    return {
        "sensitivity": _flat(study.curves).assign(**ends),
        "sensitivity_by_seed": seeds.assign(**ends),
        "differences": differences(study).assign(**ends),
        "optima_by_seed": optima(study.points, study.window),
        "crossings_by_seed": crossings_by_seed(study),
        "losses": points.rename(columns={"capped": "loss_capped"}),
    }


def _flat(table: pd.DataFrame) -> pd.DataFrame:
    """A table with each interval as three columns (mean, low, high), and the number of seeds."""
    columns: dict[str, Any] = {}
    for name in table:
        if name not in PART_COLUMNS:
            columns[str(name)] = table[name].map(lambda value: span(value) if isinstance(value, list) else value)
            continue
        for field in ("mean", "low", "high"):
            column = PART_COLUMNS[str(name)]
            columns[column if field == "mean" else f"{column}_{field}"] = [getattr(cell, field) for cell in table[name]]
    return pd.DataFrame(columns).assign(n=[interval.n for interval in table["total"]])


def _config_text(value: Any) -> str:
    return "" if plain(value) is None else format_value(plain(value))
