"""Scores the quantities of a recorder on loss spikes: ``python results/score_recorder.py``.

Trains two sweeps with the probes that a recorder measures, into ``runs/recorder``, where what is there is not trained
again, and writes a row per quantity and sweep into ``recorder_scores.csv``. ``make results-readme`` makes the table of
the page from that file. Other tools that are installed, trainscope and runmedic, are scored on the same losses.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy

import lab
from lab.analysis.spikes.trend import loss_spikes
from lab.core.schema import batches_of_bursts
from lab.core.windows import MERGE, before
from lab.records import store
from lab.records.store import Records

HOME = Path(__file__).parents[1]
FOLDER = HOME / "runs" / "recorder"
TABLE = Path(__file__).with_name("recorder_scores.csv")
MARKS = ("<!-- recorder scores -->", "<!-- end of recorder scores -->")

NAMES = [
    *("train_loss", "grad_norm", "grad_rms", "param_rms", "update_rms", "block_rms", "block_kurtosis"),
    *("attention_logit_max", "attention_entropy", "output_logit_rms", "output_logit_mean", "log_z", "eps_ratio"),
    *("grad_below_eps", "moment_ratio", "moment_outliers", "stable_rank", "query_key_entropy", "grad_underflow_fp16"),
    *("grad_underflow_e4m3", "grad_underflow_mx", "block_underflow_e4m3", "block_underflow_mx", "block_overflow_mx"),
]
FALLING = ("attention_entropy", "stable_rank", "query_key_entropy")
SWEEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("own_spikes", {"intervention": [[]], "seed": [9, 10, 11, 12, 13, 14]}),
    "bad data": (
        "labelled_spikes",
        {
            "bad_batches": ["none", "conflicting_labels", "repeated_character", "shift", "rare_tokens", "huge_loss"],
            "optimizer.lr": 1e-2,
            "seed": [6, 7, 8],
            "validation": "short",
        },
    ),
}
# A measurement has risen if its logarithm lies above the median of the 100 before it by this many scaled median
# absolute deviations of these, and by this factor at least.
DEVIATIONS, LEAST_RISE = 8.0, 1.25
START = 500  # the step from which spikes of a model's own count
WARNING, LATE = 100, 5  # an alarm belongs to a spike if it comes so many steps before it at most, or so many after it
# A quantity would earn an alarm if it led so many of a model's own spikes, with so few false alarms in 10,000 steps: a
# rule that was fixed on seeds 3 to 8.
LEAST_LED, MOST_FALSE = 0.5, 20.0
PER_STEPS = 10_000
COLUMNS = ("spikes", "quantity", "found", "led", "of", "lead_low", "lead", "lead_high", "false", "calm_steps")


class Run(NamedTuple):
    """Losses and measurements ``[n]`` of a run at each step, and the rows at which its spikes begin and are over."""

    columns: dict[str, Any]
    spikes: list[tuple[int, int]]
    start: int


def main() -> None:
    """Train what is missing, and write the scores."""
    rows = [row for kind in SWEEPS for row in scores(kind, list(runs_of(kind)))]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.to_csv(TABLE, index=False, float_format="%.4g")


def runs_of(kind: str) -> Iterator[Run]:
    """The runs of a sweep, trained if they are missing."""
    name, values = SWEEPS[kind]
    folder = FOLDER / name
    lab.sweep(name, out=folder, engine="eager", **{"probes.names": [NAMES], **values})
    records = store.read(folder)
    columns = measured(records)
    for card in records.runs.to_dict("records"):
        of_run = columns.loc[card["id"]]
        step_n, loss_n = of_run.index.to_numpy(), of_run["train_loss"].to_numpy(float)
        spikes = [(span.first, span.last) for span in loss_spikes(step_n, loss_n)]
        start = START if kind == "own" else 0
        if kind != "own":  # what was planted, whether the loss shows it or not
            is_planted = card["bad_batches"] != "none"
            numbers = (float(card["bad_batches.start"]), float(card["bad_batches.length"]), int(card["steps"]), 1)
            spikes = [(steps.start, steps.stop - 1) for steps in batches_of_bursts(*numbers)] if is_planted else []
        yield Run(
            {str(name): of_run[name].to_numpy(float) for name in of_run},
            [spike for spike in spikes if spike[0] >= start],
            start,
        )


def measured(records: Records) -> pd.DataFrame:
    """By run and step the columns of a recorder for the whole model: the largest tensor or block, or the smallest."""
    metrics = records.metrics
    rates = records.runs.set_index("id")["optimizer.lr"]
    of_tensors = metrics[metrics["probe"].isin(["update_rms", "param_rms"])]
    both = of_tensors.pivot_table(index=["id", "step", "where"], columns="probe", values="value", observed=True)
    ratio = both["update_rms"] / both["param_rms"].where(both["param_rms"] > 0)
    ratio *= rates.reindex(both.index.get_level_values("id")).to_numpy()
    metrics = pd.concat([metrics, ratio.rename("value").reset_index().assign(probe="update_ratio")])
    falls = metrics["probe"].isin(FALLING)
    by = ["id", "step", "probe"]
    largest = metrics[~falls].groupby(by, observed=True)["value"].max()
    smallest = metrics[falls].groupby(by, observed=True)["value"].min()
    return pd.concat([largest, smallest]).unstack("probe")


def scores(kind: str, runs: list[Run]) -> Iterator[tuple[Any, ...]]:
    """A row for each quantity, and for each other tool that is installed."""
    names = sorted({name for run in runs for name in run.columns} - {"train_loss"})
    for name in names:
        falls = name in FALLING
        alarms = [first_rows(risen(run.columns[name], falls=falls)) for run in runs]
        yield kind, name, *score(runs, alarms)
    yield (
        kind,
        "lab watch, the loss",
        *score(
            runs,
            [
                [
                    span.first
                    for span in loss_spikes(np.arange(len(run.columns["train_loss"])), run.columns["train_loss"])
                ]
                for run in runs
            ],
        ),
    )
    for tool, alarms_of in OTHERS.items():
        if find_spec(tool.split()[0]):
            yield kind, tool, *score(runs, [alarms_of(run.columns["train_loss"]) for run in runs])


def risen(value_m: Any, *, falls: bool) -> Any:
    """Where measurements have risen, or fallen; NaN and what is not positive has not."""
    with np.errstate(invalid="ignore", divide="ignore"):
        log_m = np.where(value_m > 0, np.log(value_m), math.nan) * (-1 if falls else 1)
        median_m, deviation_m = before(log_m)
        return log_m > median_m + np.maximum(DEVIATIONS * deviation_m, math.log(LEAST_RISE))


def first_rows(risen_m: Any) -> list[int]:
    """The rows at which rises begin; rows closer than ``MERGE`` belong to one."""
    rows = np.flatnonzero(risen_m)
    return [int(row) for row in rows[np.diff(rows, prepend=-MERGE) >= MERGE]]


def score(runs: Iterable[Run], alarms: Iterable[Iterable[int]]) -> tuple[float, ...]:
    """Shares of spikes found and led, their number, quartiles of the lead, false alarms per 10,000 and calm steps."""
    spikes = found = false = calm = 0
    leads = list[int]()
    for run, of_run in zip(runs, alarms, strict=True):
        rows = np.array([row for row in of_run if row >= run.start], dtype=int)
        near_n = np.zeros(len(run.columns["train_loss"]), dtype=bool)
        end = run.start
        for first, last in run.spikes:
            near_n[max(0, first - WARNING) : last + WARNING] = True
            mine = rows[(rows >= max(end, first - WARNING)) & (rows <= first + LATE)]
            end = last + 1
            spikes += 1
            found += len(mine) > 0
            leads += [first - int(mine[0])] if len(mine) else []
        calm += int((~near_n[run.start :]).sum())
        false += int((~near_n[rows]).sum())
    low, middle, high = np.quantile(leads, (0.25, 0.5, 0.75)) if leads else (math.nan,) * 3
    led = sum(lead > 0 for lead in leads)
    return found / spikes, led / spikes, spikes, low, middle, high, false / calm * PER_STEPS, calm


def changepoints(loss_n: Any) -> list[int]:
    """Alarms of trainscope's default detector."""
    from trainscope.core.detectors.changepoint import ChangePointDetector

    detector = ChangePointDetector()
    return first_rows(np.array([detector.update(float(loss)) is not None for loss in loss_n]))


def spikes_of_runmedic(loss_n: Any) -> list[int]:
    """Steps that runmedic's check of spikes names, by its own functions."""
    from runmedic.stats import ema, robust_z

    values = list(map(float, loss_n))
    trend = ema(values, span=max(5, len(values) // 20))
    z = robust_z([value - usual for value, usual in zip(values, [trend[0], *trend[:-1]], strict=True)])
    rows = range(1, len(values))
    return [row for row in rows if z[row] > 8 and trend[row - 1] > 0 and values[row] > 1.5 * trend[row - 1]]


OTHERS: dict[str, Callable[[Any], list[int]]] = {
    "trainscope changepoint": changepoints,
    "runmedic loss_spikes": spikes_of_runmedic,
}


def quote(text: str) -> str:
    """The text of a page with the table of the committed scores between its marks."""
    before, _, rest = text.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{markdown(pd.read_csv(TABLE))}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def chance_of_leading(false: float) -> float:
    """The chance that an alarm falls into the steps before a spike in which it would lead, if alarms come as in calm.

    Args:
        false: alarms in 10,000 calm steps.
    """
    return 1 - math.exp(-false / PER_STEPS * WARNING)


def false_alarms(row: Any) -> tuple[float, float]:
    """The exact 95 % interval of false alarms in 10,000 steps, if they come by themselves (Poisson)."""
    alarms, per = round(row["false"] * row["calm_steps"] / PER_STEPS), PER_STEPS / row["calm_steps"]
    low = scipy.stats.chi2.ppf(0.025, 2 * alarms) / 2 if alarms else 0.0
    return float(low * per), float(scipy.stats.chi2.ppf(0.975, 2 * alarms + 2) / 2 * per)


def led(row: Any) -> tuple[float, float]:
    """The exact 95 % interval of the share of spikes that a quantity led (Clopper and Pearson)."""
    interval = scipy.stats.binomtest(round(row["led"] * row["of"]), round(row["of"])).proportion_ci()
    return float(interval.low), float(interval.high)


def earns(row: Any) -> bool:
    """Whether a quantity has earned an alarm."""
    return bool(row["led"] >= LEAST_LED and row["false"] <= MOST_FALSE)


def may_earn(row: Any) -> bool:
    """Whether the intervals leave it open that a quantity leads often enough and is seldom enough false."""
    return led(row)[1] >= LEAST_LED and false_alarms(row)[0] <= MOST_FALSE


def markdown(table: pd.DataFrame) -> str:
    """The table of the page: a row per quantity, those that led the most first."""
    own, planted = (table[table["spikes"] == kind].set_index("quantity") for kind in ("own", "bad data"))
    lines = [
        f"| quantity | led, of {own['of'].iloc[0]:.0f} own spikes | would lead by chance | found | lead, steps | "
        f"false alarms | found, of {planted['of'].iloc[0]:.0f} bursts of bad data | false alarms |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for name, row in own.sort_values(["led", "found"], ascending=False).iterrows():
        lead = f"{row['lead']:.0f} ({row['lead_low']:.0f} to {row['lead_high']:.0f})" if row["found"] else "none"
        bad = planted.loc[name]
        shown = name if str(name).startswith(("lab", *OTHERS)) else f"`{name}`"
        low, high = led(row)
        share = f"{row['led']:.0%} [{100 * low:.0f}, {100 * high:.0f}]"
        alarms = "{:.1f} [{:.1f}, {:.1f}]".format(row["false"], *false_alarms(row))
        lines.append(
            f"| {shown} | {share} | {chance_of_leading(row['false']):.0%} | {row['found']:.0%} | {lead} | {alarms} | "
            f"{bad['found']:.0%} | {bad['false']:.1f} |"
        )
    quantities = [(name, row) for name, row in own.iterrows() if not str(name).startswith(("lab", *OTHERS))]
    earned, open_for = (
        ", ".join(f"`{name}`" for name, row in quantities if holds(row)) or "none" for holds in (earns, may_earn)
    )
    told = f"Quantities that earn an alarm: {earned}. The intervals leave it open for: {open_for}."
    return "\n".join([*lines, "", told])


if __name__ == "__main__":
    sys.exit(main())
