"""Tables of a study: as the reader sees them, and as files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.analysis.curves import LR, configs, differing, plain
from lab.analysis.sensitivity import Study, optima
from lab.analysis.text import count, spell

# Names for the reader of what the code calls total, below and above.
PARTS = {"total": "sensitivity", "below": "under-training part", "above": "instability part"}
COLUMNS = {"total": "sensitivity", "below": "under_training", "above": "instability"}
FATE_SIGNS = {"": "", "unstable": " *", "diverged": " †"}


def sensitivities(study: Study) -> pd.DataFrame:
    """A row per arm and size: S with its parts, best learning rate, the smallest one lost, seeds."""
    curves = study.curves
    return pd.DataFrame(
        {
            "arm": curves["arm"],
            "parameters": curves["parameters"].map("{:,}".format),
            **{name: curves[part].map(lambda interval: interval.bare) for part, name in PARTS.items()},
            "best LR": curves["best_lr"].map(_span),
            "eta_div": curves["eta_div"].map(_span),
            "n": curves["total"].map(lambda interval: interval.n),
        }
    )


def differences(study: Study) -> pd.DataFrame:
    """A row per pair of arms and size: the first arm's numbers minus the second's, paired by seed."""
    pairs = study.pairs
    return pd.DataFrame(
        {
            "first arm": pairs["first"],
            "minus second arm": pairs["second"],
            "parameters": pairs["size"].map(count),
            **{name: pairs[part].map(lambda interval: interval.bare) for part, name in PARTS.items()},
            "n": pairs["total"].map(lambda interval: interval.n),
        }
    )


def losses(study: Study) -> pd.DataFrame:
    """A row per arm and size, a column per learning rate: mean over seeds of the final loss and its fate."""
    rows, lrs = [], [spell(lr) for lr in sorted(study.points["lr"].unique())]
    for _, runs in study.points.groupby(["arm", "size"], sort=False):
        cells: dict[str, str] = dict.fromkeys(lrs, "") | {
            spell(lr): f"{some['capped'].mean():.3f}{FATE_SIGNS[max(some['fate'], key=list(FATE_SIGNS).index)]}"
            for lr, some in runs.groupby("lr")
        }
        rows.append({"arm": runs["arm"].iloc[0], "parameters": count(runs["size"].iloc[0]), **cells})
    return pd.DataFrame(rows)


def lost(study: Study) -> pd.DataFrame:
    """A row per run that diverged or failed."""
    some = study.points[study.points["fate"] == "diverged"]
    cards = study.records.runs.set_index("id")
    ended = {
        "run": some["id"],
        "arm": some["arm"],
        "parameters": some["parameters"],
        "LR": some["lr"],
        "seed": some["seed"],
        "fate": some["fate"],
        "final loss": some["loss"].map("{:.3f}".format),
        "from step": some["diverged_at"],
        "reason": cards.loc[some["id"], "reason"],
    }
    failed = {
        "run": study.failed["id"],
        "arm": study.failed["intervention"],
        "parameters": study.failed["parameters_without_embeddings"],
        "LR": study.failed[LR],
        "seed": study.failed["seed"],
        "fate": study.failed["status"],
        "final loss": study.failed["final_val_loss"],
        "from step": study.failed["diverged_at"],
        "reason": study.failed["reason"],
    }
    return pd.DataFrame({name: [_known(cell) for cell in [*ended[name], *failed[name]]] for name in ended})


def arms(study: Study) -> pd.DataFrame:
    """A row per arm: every config key in which curves differ, values of several sizes one after the other."""
    runs = study.records.runs.set_index("id").loc[study.points["id"]].reset_index()
    keys, curves = configs(runs)
    arm_of = dict(zip(keys, study.points["arm"], strict=True))
    rows = []
    for arm in study.points["arm"].unique():
        own = [curve for key, curve in curves.items() if arm_of[key] == arm]
        values = {key: [_known(curve[key]) for curve in own] for key in differing(list(curves.values()))}
        rows.append({"arm": arm} | {key: ", ".join(dict.fromkeys(some)) for key, some in values.items()})
    return pd.DataFrame(rows)


def shared_settings(study: Study) -> dict[str, str]:
    """What no curve differs in, by dotted key; absent keys are left out."""
    curves = list(configs(study.records.runs[study.records.runs["status"] != "failed"])[1].values())
    same = set(curves[0]) - set(differing(curves))
    return {key: spell(curves[0][key]) for key in sorted(same) if curves[0][key] is not None}


def files(study: Study) -> dict[str, pd.DataFrame]:
    """Plain numbers by file name."""
    seeds = study.seeds.drop(columns="curve").rename(columns=COLUMNS)
    points = study.points.drop(columns=["curve", "best_lr"]).rename(columns={"capped": "loss_capped"})
    return {
        "sensitivity": _flat(study.curves),
        "sensitivity_by_seed": seeds,
        "differences": _flat(study.pairs).assign(**_effect_sizes(study.pairs)),
        "optima_by_seed": optima(study.points),
        "losses": points,
    }


def _effect_sizes(pairs: pd.DataFrame) -> dict[str, list[float]]:
    """Cohen's d of paired differences, by name of the column."""
    return {f"{COLUMNS[part]}_dz": [interval.dz for interval in pairs[part]] for part in PARTS}


def _flat(table: pd.DataFrame) -> pd.DataFrame:
    """Intervals as columns: mean, low, high and the number of seeds."""
    columns: dict[str, Any] = {}
    for name in table:
        if name not in PARTS:
            columns[str(name)] = table[name].map(lambda value: _span(value) if isinstance(value, list) else value)
            continue
        for field in ("mean", "low", "high"):
            label = COLUMNS[str(name)]
            columns[label if field == "mean" else f"{label}_{field}"] = [getattr(cell, field) for cell in table[name]]
    return pd.DataFrame(columns).assign(n=[interval.n for interval in table["total"]])


def _span(values: Sequence[float]) -> str:
    """Learning rates of the seeds: one, or the smallest to the largest, and how many seeds have any."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return "none"
    ends = " to ".join(spell(value) for value in dict.fromkeys([known[0], known[-1]]))
    return ends if len(known) == len(values) else f"{ends} ({len(known)} of {len(values)} seeds)"


def _known(value: Any) -> str:
    return "" if plain(value) is None else spell(plain(value))
