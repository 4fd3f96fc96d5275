"""Baseline files: the curves of a recipe as text, small enough to commit and to review in a diff."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

import lab.analysis.probe_values as probe_values
from lab.analysis.curves import Curve, configs, differing, load, name_arms, plain, points, same_sizes, significant
from lab.analysis.sensitivity import WINDOW, Window, window_of
from lab.analysis.statistics import FEWEST_SEEDS
from lab.core import files
from lab.core.errors import RequestError
from lab.core.schema import key_now
from lab.records import store
from lab.records.store import Records

VERSION = 2
# Numbers of probes stored per run, in decades, and the probe that each comes from.
PROBES = {
    "logit_growth": "attention_logit_max",
    "eps_ratio": "eps_ratio",
    "grad_norm_clipped": "grad_norm_clipped",
    "param_rms": "param_rms",
    "log_z_square": "log_z_square",
}
# Numbers stored per run, beside its learning rate and seed, and those of them that are left out where none is known.
NUMBERS = ("loss", "loss_at_init", "loss_bigram", "loss_unigram", "attention_logits", *PROBES)
IF_KNOWN = ("loss_unigram", "attention_logits", *PROBES)


class Baseline(NamedTuple):
    """Curves to compare others with.

    Attributes:
        source: the file or results folder from which they come.
        runs: one row per run, as ``curves.points`` makes them, with a column per key of ``PROBES``; NaN if it was not
            recorded. All of these are log10, to six digits: ``logit_growth`` of the run's largest attention logit over
            the one at its first step, ``grad_norm_clipped`` of the run's largest value, and the others of the last
            recorded value, a mean over weight tensors if there is one for each. ``attention_logits`` is the largest
            attention logit itself.
        curves: config of each curve by its number: plain values by dotted key.
        made: how the runs were made: ``commands``, ``versions``, ``data``.
        window: the learning rates over which sensitivity is a mean.
        recipe_lrs: the learning rate of the recipe itself, which the sweep replaces, by number of the curve; a curve
            whose learning rate is not on record is left out.
    """

    source: str
    runs: pd.DataFrame
    curves: dict[int, Curve]
    made: dict[str, list[str]]
    window: Window = WINDOW
    recipe_lrs: Mapping[int, float] = MappingProxyType({})


def from_folder(folder: Path, window: Window = WINDOW) -> Baseline:
    """The baseline of a results folder, with sensitivity over ``window``.

    Raises:
        RequestError: the folder cannot be read, or none of its runs ended.
    """
    made = from_records(load(folder), str(folder), store.commands(folder), store.recipe_lrs(folder))
    return made._replace(window=window)


def from_records(
    records: Records, source: str, commands: Sequence[str] = (), recipe_lrs: Mapping[str, float] = MappingProxyType({})
) -> Baseline:
    """The baseline of records, which messages call ``source``; learning rates of recipes by run, the newest last.

    Raises:
        RequestError: none of the runs ended.
    """
    runs = points(records.runs)
    if runs.empty:
        raise RequestError(f"no run in {source} ended")
    runs["curve"] = pd.factorize(runs["curve"])[0]  # in the order of the arms
    first = runs.drop_duplicates("curve")
    keys, config_of = configs(records.runs.set_index("id").loc[first["id"]].reset_index())
    measure = {"logit_growth": probe_values.growth, "grad_norm_clipped": probe_values.log_largest}
    for column, probe in PROBES.items():
        runs[column] = runs["id"].map(measure.get(column, probe_values.log_last)(records, probe))
    runs["attention_logits"] = 10 ** runs["id"].map(probe_values.log_largest(records, PROBES["logit_growth"]))
    facts = {name: sorted(records.runs[name].dropna().unique()) for name in ("versions", "data_notes")}
    made = {"commands": list(commands), "versions": facts["versions"], "data": facts["data_notes"]}
    curves = {int(number): config_of[key] for number, key in zip(first["curve"], keys, strict=True)}
    curve_of = dict(zip(runs["id"], runs["curve"], strict=True))
    of_curves = {int(curve_of[run]): lr for run, lr in recipe_lrs.items() if run in curve_of}
    runs = runs.assign(**{name: significant(runs[name].astype("float64")) for name in NUMBERS})
    return Baseline(source, runs, curves, made, recipe_lrs=of_curves)


def read(path: Path, window: Window | None = None) -> Baseline:
    """Read a baseline file, which contains its window, or make the baseline of a results folder over ``window``.

    Raises:
        RequestError: the file is missing, damaged, of another version, or no baseline.
    """
    if path.is_dir():
        return from_folder(path, window or WINDOW)
    try:
        content = files.read_json(path, dict)
        version = content["baseline_version"]
    except OSError as refusal:
        raise RequestError(f"no baseline {path}: {refusal.strerror}") from None
    except (ValueError, KeyError):
        raise RequestError(f"{path} is no baseline; lab check DIR --save FILE writes one") from None
    if version != VERSION:
        raise RequestError(
            f"{path} is a baseline of version {version}, this lab reads {VERSION}; remove it and save anew"
        )
    try:
        return _from_json(path, content)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise RequestError(
            f"{path} is a damaged baseline; take it from version control, or remove it and save anew"
        ) from None


def _from_json(path: Path, content: Mapping[str, Any]) -> Baseline:
    curves: dict[int, Curve] = {
        n: _config({**content["config"], **curve["arm"]}) for n, curve in enumerate(content["curves"])
    }
    counts = [int(curve["parameters"]) for curve in content["curves"]]
    sizes = [same_sizes(counts)[count] for count in counts]
    arms = name_arms(list(curves.values()), sizes)
    rows = [
        {"curve": n, "arm": arms[n].label, "size": sizes[n], "parameters": counts[n], **dict.fromkeys(IF_KNOWN), **run}
        for n, curve in enumerate(content["curves"])
        for run in curve["runs"]
    ]
    runs = pd.DataFrame(rows).astype(dict.fromkeys(["lr", *NUMBERS], "float64") | {"seed": str, "arm": "string"})
    _check(runs, curves)
    made = {name: list(map(str, lines)) for name, lines in content["made"].items()}
    given = {n: curve["recipe_lr"] for n, curve in enumerate(content["curves"]) if "recipe_lr" in curve}
    recipe_lrs = {n: float(lr) for n, lr in given.items()}
    if not all(0 < lr < math.inf for lr in recipe_lrs.values()):
        raise ValueError("a learning rate is none")
    return Baseline(str(path), runs, curves, made, window_of(content.get("window", WINDOW)), recipe_lrs)


def _check(runs: pd.DataFrame, curves: Mapping[int, Curve]) -> None:
    """Refuse runs that no sweep could have written, such as a line that a merge has doubled.

    Raises:
        ValueError, KeyError: a run or a curve is invalid.
    """
    # an imported table may lack both of these losses
    limits = [name for name in ("loss_at_init", "loss_bigram") if runs[name].notna().any()]
    complete = runs[["lr", "seed", "status", *limits]].notna().all(axis=None)
    if not complete or runs.duplicated(["curve", "lr", "seed"]).any() or len(set(runs["curve"])) < len(curves):
        raise ValueError("a run is missing, occurs twice, or lacks a number")
    if not runs[["lr", *limits]].map(math.isfinite).all(axis=None):
        raise ValueError("a number is infinite")
    if (runs["lr"] <= 0).any() or (runs["parameters"] <= 0).any() or not set(runs["status"]) <= set(store.STATUSES):
        raise ValueError("a number or a word is invalid")
    if any("data_fingerprint" not in curve or "intervention" not in curve for curve in curves.values()):
        raise ValueError("a curve has no config")


def _config(values: Mapping[str, Any]) -> Curve:
    name = str if store.TABLE in values else key_now
    return {name(key): math.inf if value == "inf" else plain(value) for key, value in values.items()}


def save(baseline: Baseline, path: Path) -> None:
    """Write a baseline file, a line per run.

    Raises:
        RequestError: a curve has fewer than three whole seeds, or the file cannot be written.
    """
    for (arm, size), runs in baseline.runs.groupby(["arm", "size"], sort=False):
        seeds = whole_seeds(runs)["seed"].nunique()
        if seeds < FEWEST_SEEDS:
            shortage = f"{arm} at {size:,} parameters has {seeds} whole seeds"
            raise RequestError(f"{baseline.source}: {shortage}; a baseline takes {FEWEST_SEEDS}")
    files.write_output(path, as_text(baseline))


def whole_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of whole seeds: those with a run at every learning rate of their curve."""
    lrs_of_curve = runs.groupby("curve")["lr"].transform("nunique")
    return runs[runs.groupby(["curve", "seed"])["lr"].transform("nunique") == lrs_of_curve]


def as_text(baseline: Baseline) -> str:
    """The content of a baseline file: JSON with a line per run, so that diffs are readable; losses to six digits."""
    varying = differing(list(baseline.curves.values()))
    first = next(iter(baseline.curves.values()))
    shared = {key: _to_json(value) for key, value in first.items() if key not in varying and value is not None}
    window = {} if baseline.window == WINDOW else {"window": baseline.window}
    head = {"baseline_version": VERSION, "made": baseline.made, **window, "config": shared}
    curves = []
    for number, runs in baseline.runs.groupby("curve", sort=False):
        config = baseline.curves[int(str(number))]
        arm = {key: _to_json(config[key]) for key in varying}
        curves.append(_curve_text(arm, runs, baseline.recipe_lrs.get(int(str(number)))))
    return json.dumps(head, indent=1)[:-2] + ',\n "curves": [\n' + ",\n".join(curves) + "\n ]\n}\n"


def _curve_text(arm: Mapping[str, Hashable], runs: pd.DataFrame, recipe_lr: float | None) -> str:
    known = [name for name in NUMBERS if name not in IF_KNOWN or runs[name].notna().any()]
    rows: Sequence[Mapping[str, Any]] = runs[["lr", "seed", "status", *known]].to_dict("records")  # type: ignore[assignment]
    lines = ",\n".join("   " + json.dumps({key: _to_json(value) for key, value in row.items()}) for row in rows)
    own = {} if recipe_lr is None else {"recipe_lr": recipe_lr}
    head = json.dumps({"arm": arm, "parameters": int(runs["parameters"].iloc[0]), **own})
    return f'  {head[:-1]}, "runs": [\n{lines}\n  ]}}'


def _to_json(value: Any) -> str | float | None:
    """A value as JSON can hold it: NaN and -inf as null, infinity as text."""
    if isinstance(value, str) or value is None:
        return value
    if not math.isfinite(value):
        return "inf" if value == math.inf else None
    return int(value) if float(value).is_integer() else float(value)
