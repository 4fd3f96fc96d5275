"""Baselines: the curves that a recipe had, in a text file small enough to commit and to review in a diff."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.analysis.curves import Curve, configs, differing, load, name_arms, plain, points, same_sizes, significant
from lab.analysis.statistics import FEWEST_SEEDS
from lab.core import files
from lab.core.errors import RequestError
from lab.records import store
from lab.records.store import Records

VERSION = 1
# What a run is remembered by, beside its learning rate and seed.
NUMBERS = ("loss", "loss_at_init", "loss_bigram", "logit_growth")


class Baseline(NamedTuple):
    """Curves to be held against others.

    Attributes:
        source: the file or results folder they come from.
        runs: one row per run, as ``curves.points`` has them, with ``logit_growth``: log10 of the largest attention
            logit of the run over that at its first step, NaN where no probe heard any.  Numbers have six digits.
        curves: config of each curve by its number, plain values by dotted key.
        made: how the runs came to be: ``commands``, ``versions``, ``data``.
    """

    source: str
    runs: pd.DataFrame
    curves: dict[int, Curve]
    made: dict[str, list[str]]


def from_folder(folder: Path) -> Baseline:
    """The curves of a results folder.

    Raises:
        RequestError: it cannot be read, or none of its runs ended.
    """
    return from_records(load(folder), str(folder), store.commands(folder))


def from_records(records: Records, source: str, commands: Sequence[str] = ()) -> Baseline:
    """The curves of some records.

    Raises:
        RequestError: none of their runs ended.
    """
    runs = points(records.runs)
    if runs.empty:
        raise RequestError(f"no run in {source} ended")
    runs["curve"] = pd.factorize(runs["curve"])[0]  # in the order of the arms
    first = runs.drop_duplicates("curve")
    keys, known = configs(records.runs.set_index("id").loc[first["id"]].reset_index())
    runs["logit_growth"] = runs["id"].map(probe_values.growth(records, "attention_logit_max"))
    facts = {name: sorted(records.runs[name].dropna().unique()) for name in ("versions", "data_notes")}
    made = {"commands": list(commands), "versions": facts["versions"], "data": facts["data_notes"]}
    curves = {int(number): known[key] for number, key in zip(first["curve"], keys, strict=True)}
    return Baseline(
        source, runs.assign(**{name: significant(runs[name].astype("float64")) for name in NUMBERS}), curves, made
    )


def read(place: Path) -> Baseline:
    """A baseline file, or a results folder as one.

    Raises:
        RequestError: there is none, or it is of another version.
    """
    if place.is_dir():
        return from_folder(place)
    try:
        told = json.loads(place.read_text(encoding="utf-8-sig"))
        version = told["baseline_version"]
    except OSError as refusal:
        raise RequestError(f"no baseline {place}: {refusal.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{place} is no baseline; lab baseline save DIR FILE writes one") from None
    if version != VERSION:
        raise RequestError(
            f"{place} is a baseline of version {version}, this lab reads {VERSION}; remove it and save anew"
        )
    try:
        return _made_of(place, told)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise RequestError(
            f"{place} is a damaged baseline; take it from version control, or remove it and save anew"
        ) from None


def _made_of(place: Path, told: Mapping[str, Any]) -> Baseline:
    curves: dict[int, Curve] = {
        n: _config({**told["config"], **curve["arm"]}) for n, curve in enumerate(told["curves"])
    }
    counts = [int(curve["parameters"]) for curve in told["curves"]]
    sizes = [same_sizes(counts)[count] for count in counts]
    arms = name_arms(list(curves.values()), sizes)
    rows = [
        {"curve": n, "arm": arms[n].label, "size": sizes[n], "parameters": counts[n], **run}
        for n, curve in enumerate(told["curves"])
        for run in curve["runs"]
    ]
    runs = pd.DataFrame(rows).astype(dict.fromkeys(["lr", *NUMBERS], "float64") | {"seed": str, "arm": "string"})
    _check(runs, curves)
    return Baseline(str(place), runs, curves, {name: list(map(str, said)) for name, said in told["made"].items()})


def _check(runs: pd.DataFrame, curves: Mapping[int, Curve]) -> None:
    """Refuse what no sweep leaves behind, such as a line that stands twice after a merge.

    Raises:
        ValueError, KeyError: it is so.
    """
    whole_rows = runs[["lr", "seed", "status", "loss_at_init", "loss_bigram"]].notna().all(axis=None)
    if not whole_rows or runs.duplicated(["curve", "lr", "seed"]).any() or len(set(runs["curve"])) < len(curves):
        raise ValueError("a run is missing, stands twice, or lacks a number")
    if (runs["lr"] <= 0).any() or (runs["parameters"] <= 0).any() or not set(runs["status"]) <= set(store.STATUSES):
        raise ValueError("a number or a word makes no sense")
    if any("data_fingerprint" not in curve or "intervention" not in curve for curve in curves.values()):
        raise ValueError("a curve does not say what it is")


def _config(told: Mapping[str, Any]) -> Curve:
    return {key: math.inf if value == "inf" else plain(value) for key, value in told.items()}


def save(baseline: Baseline, place: Path) -> None:
    """Write a baseline file, a line per run.

    Raises:
        RequestError: a curve has too few whole seeds to be held against another, or the file cannot be written.
    """
    for (arm, size), some in baseline.runs.groupby(["arm", "size"], sort=False):
        seeds = whole(some)["seed"].nunique()
        if seeds < FEWEST_SEEDS:
            told = f"{arm} at {size:,} parameters has {seeds} whole seeds"
            raise RequestError(f"{baseline.source}: {told}; a baseline takes {FEWEST_SEEDS}")
    files.write_text(place, as_text(baseline))


def whole(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of seeds that ran at every learning rate at which any seed of their curve did."""
    asked = runs.groupby("curve")["lr"].transform("nunique")
    return runs[runs.groupby(["curve", "seed"])["lr"].transform("nunique") == asked]


def as_text(baseline: Baseline) -> str:
    """JSON in lines that a diff can tell apart; losses to six digits."""
    apart = differing(list(baseline.curves.values()))
    first = next(iter(baseline.curves.values()))
    shared = {key: _plain(value) for key, value in first.items() if key not in apart and value is not None}
    head = {"baseline_version": VERSION, "made": baseline.made, "config": shared}
    parts = []
    for number, runs in baseline.runs.groupby("curve", sort=False):
        curve = baseline.curves[int(str(number))]
        parts.append(_curve({key: _plain(curve[key]) for key in apart}, runs))
    return json.dumps(head, indent=1)[:-2] + ',\n "curves": [\n' + ",\n".join(parts) + "\n ]\n}\n"


def _curve(arm: Mapping[str, Hashable], runs: pd.DataFrame) -> str:
    rows: Sequence[Mapping[str, Any]] = runs[["lr", "seed", "status", *NUMBERS]].to_dict("records")  # type: ignore[assignment]
    lines = ",\n".join("   " + json.dumps({key: _plain(value) for key, value in row.items()}) for row in rows)
    head = json.dumps({"arm": arm, "parameters": int(runs["parameters"].iloc[0])})
    return f'  {head[:-1]}, "runs": [\n{lines}\n  ]}}'


def _plain(value: Any) -> str | float | None:
    """A value as JSON has it, null for what is no number."""
    if isinstance(value, str) or value is None:
        return value
    if not math.isfinite(value):
        return "inf" if value == math.inf else None
    return int(value) if float(value).is_integer() else float(value)
