"""Curves: runs that differ in nothing but learning rate and seed, and the arms they form."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.text import spell
from lab.records import store
from lab.records.store import Records

# What makes a model larger; it names an arm only where it does more than grow with the size.
SHAPE = ("model.head_width", "model.depth", "model.width")

Curve = Mapping[str, Hashable]


class Arm(NamedTuple):
    """An arm's place among the arms, from 0, and its label."""

    place: int
    label: str


def name_arms(curves: Sequence[Curve], sizes: Sequence[int]) -> list[Arm]:
    """The arm of each curve; curves of one arm differ in size alone.

    Args:
        curves: config of each curve, plain values by dotted key, ``None`` where absent; the same keys in each.
        sizes: parameters of each curve.
    """
    columns = telling(curves, sizes)
    keys = [tuple(curve[column] for column in columns) for curve in curves]
    spoken = [column for column in columns if not _implied(column, columns, curves)]
    ordered = sorted(
        zip(keys, curves, strict=True), key=lambda one: [_rank(key, one[1]) for key in [*spoken, *columns]]
    )
    labels = {key: _label(curve, spoken) for key, curve in ordered}
    places = {key: place for place, key in enumerate(labels)}
    return [Arm(places[key], labels[key]) for key in keys]


def differing(curves: Sequence[Curve]) -> list[str]:
    """Keys in which curves differ; absent is a value of its own."""
    keys = curves[0] if curves else ()
    return [key for key in keys if len({curve[key] for curve in curves}) > 1]


def telling(curves: Sequence[Curve], sizes: Sequence[int]) -> list[str]:
    """All differing keys but the shape; of the shape the fewest keys without which an arm would be no line."""
    fixed = [key for key in differing(curves) if key not in SHAPE]
    shape = [key for key in SHAPE if key in differing(curves)]
    choices = [list(some) for count in range(len(shape) + 1) for some in combinations(shape, count)]
    for some in choices:
        silent = [key for key in shape if key not in some]
        if _grows(curves, sizes, fixed + some, silent):
            return fixed + some
    return fixed + shape


def _grows(curves: Sequence[Curve], sizes: Sequence[int], named: list[str], silent: list[str]) -> bool:
    """Whether, inside every arm, each size occurs once and the silent shape never shrinks with it."""
    arms: dict[tuple[Hashable, ...], list[tuple[int, tuple[float, ...]]]] = {}
    for curve, size in zip(curves, sizes, strict=True):
        shape = tuple(float(str(curve[key])) for key in silent)
        arms.setdefault(tuple(curve[key] for key in named), []).append((size, shape))
    steps = [(a, b) for arm in arms.values() for a, b in zip(sorted(arm), sorted(arm)[1:], strict=False)]
    return all(a[0] < b[0] and all(x <= y for x, y in zip(a[1], b[1], strict=True)) for a, b in steps)


def _implied(key: str, named: list[str], curves: Sequence[Curve]) -> bool:
    """Whether a key says nothing that the name of its group (``optimizer.name``, ``intervention``) does not say."""
    group = key.split(".")[0]
    data = [k for k in named if k.startswith("data.")]
    names = {"intervention": ["intervention"], "guest": ["guest"], "data_fingerprint": data}
    saying = [name for name in names.get(group, [f"{group}.name"]) if name in named and name != key]
    seen = {tuple(curve[name] for name in saying) for curve in curves}
    return bool(saying) and len({(*(curve[name] for name in saying), curve[key]) for curve in curves}) == len(seen)


def _rank(key: str, curve: Curve) -> tuple[int, float, str]:
    """Absent before numbers before words; fewer interventions before more."""
    value = curve[key]
    if key == "intervention":
        names = str(value).split("+")
        return (0, 0 if names == ["none"] else len(names), str(value))
    if value is None:
        return (0, 0, "")
    return (1, value, "") if isinstance(value, float) else (2, 0, str(value))


def _label(curve: Curve, spoken: list[str]) -> str:
    shorts = [_short(key) for key in spoken]
    parts = [
        str(curve[key])
        if key == "intervention"
        else f"{short if shorts.count(short) == 1 else key}={spell(curve[key])}"
        for key, short in zip(spoken, shorts, strict=True)
        if curve[key] is not None
    ]
    if not spoken:
        return str(curve["intervention"])
    return " ".join(parts) or f"no {', '.join(shorts)}"


def _short(key: str) -> str:
    group, _, last = key.rpartition(".")
    return group if last == "name" else last


LR = "optimizer.lr"
# What a curve runs over, and what changes no number of a run or only names others.  Probes change nothing either.
FREE = {LR, "seed", "data.seed", "model.name", "scale.name", "out", "device"}
# An intervention may add a few gains; these make no size of their own.
SAME_SIZE = 1.05


def load(*folders: str | Path) -> Records:
    """Overlay the records of one or more results folders; equal ids are one run, rather whole than failed.

    Raises:
        RequestError: a folder is absent, empty, or of another record version.
    """
    tables = [store.read(Path(folder)) for folder in folders]
    runs = pd.concat([table.runs.assign(folder=place) for place, table in enumerate(tables)], ignore_index=True)
    runs = runs.loc[(runs["status"] == "failed").sort_values(kind="stable").index].drop_duplicates("id")
    kept = [set(runs.loc[runs["folder"] == place, "id"]) for place in range(len(tables))]
    metrics = [table.metrics[table.metrics["id"].isin(ids)] for table, ids in zip(tables, kept, strict=True)]
    runs = runs.drop(columns="folder").sort_values("id", ignore_index=True)
    return Records(runs, pd.concat(metrics, ignore_index=True))


def points(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per run that did not fail: where it lies.

    Of runs that repeat a point (on another device, say) the first id stays.

    Returns:
        Columns ``id``, ``curve`` (a number), ``arm`` (a label), ``size`` (``parameters`` up to what gains add),
        ``parameters`` (without embeddings), ``lr`` (peak), ``seed`` (text; a data seed unlike it after a slash),
        ``loss`` (final, held-out), ``loss_at_init``, ``loss_bigram`` (nats per token), ``status``, ``diverged_at``
        (step).  Sorted by arm, size, learning rate, seed.
    """
    ended = runs[runs["status"] != "failed"].sort_values("id")
    keys, curves = configs(ended)
    counts = [int(count) for count in ended["parameters_without_embeddings"]]
    by_curve = dict(zip(keys, counts, strict=True))
    sizes = same_sizes(counts)
    arms = dict(zip(curves, name_arms(list(curves.values()), [sizes[by_curve[key]] for key in curves]), strict=True))
    numbers = {key: number for number, key in enumerate(curves)}
    frame = pd.DataFrame(
        {
            "id": ended["id"],
            "curve": [numbers[key] for key in keys],
            "place": [arms[key].place for key in keys],
            "arm": pd.Series([arms[key].label for key in keys], ended.index, dtype="string"),
            "size": [sizes[count] for count in counts],
            "parameters": counts,
            "lr": significant(ended[LR]),
            "seed": _replicates(ended),
            "loss": ended["final_val_loss"],
            **{name: ended[name] for name in ("loss_at_init", "loss_bigram", "status", "diverged_at")},
        }
    )
    frame = frame.drop_duplicates(["curve", "lr", "seed"]).sort_values(["place", "size", "lr", "seed"])
    return frame.drop(columns="place").reset_index(drop=True)


def configs(runs: pd.DataFrame) -> tuple[list[Hashable], dict[Hashable, Curve]]:
    """Key of the curve of each run, and the config of each curve in plain values by dotted key."""
    config = sorted(key for key in set(map(str, runs)) - set(store.RUN_COLUMNS) - FREE if key.split(".")[0] != "probes")
    columns = ["intervention", *config, "data_fingerprint"]
    keys: list[Hashable] = [tuple(map(plain, row)) for row in runs[columns].itertuples(index=False, name=None)]
    return keys, {key: dict(zip(columns, key, strict=True)) for key in keys}  # type: ignore[call-overload]


def plain(value: Any) -> Hashable:
    """A config value that can be compared: absent is ``None``, a number a float, a list or switch its text."""
    if isinstance(value, list | tuple | np.ndarray):
        return f"[{', '.join(map(str, value))}]"
    if value is None or value is pd.NA or value != value:
        return None
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | np.bool_) else str(value)


def significant(values: Iterable[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Learning rates to six digits, so that 0.1 * 3 and 0.3, or single and double precision, are one."""
    return np.array([float(f"{value:.6g}") for value in values], dtype=float)


def same_sizes(counts: Sequence[int]) -> dict[int, int]:
    """To each parameter count the smallest one that is the same size."""
    sizes: dict[int, int] = {}
    size = -1
    for count in sorted(set(counts)):
        size = count if count > SAME_SIZE * size else size
        sizes[count] = size
    return sizes


def _replicates(runs: pd.DataFrame) -> list[str]:
    data = runs["data.seed"] if "data.seed" in runs else [None] * len(runs)
    pairs = [(plain(seed), plain(other)) for seed, other in zip(runs["seed"], data, strict=True)]
    return [spell(seed) if other in (None, seed) else f"{spell(seed)}/{spell(other)}" for seed, other in pairs]
