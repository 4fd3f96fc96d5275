"""Load records, group runs into curves (which differ in learning rate and seed only), and curves into arms."""

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

# Keys of a model's shape. They name an arm only where shape does not simply grow with size.
SHAPE = ("model.head_width", "model.depth", "model.width")

Curve = Mapping[str, Hashable]


class Arm(NamedTuple):
    """An arm: its position in the order of arms, from 0, and its label."""

    position: int
    label: str


def name_arms(curves: Sequence[Curve], sizes: Sequence[int]) -> list[Arm]:
    """Assign each curve to an arm; curves of one arm differ in size only.

    Args:
        curves: config of each curve, plain values by dotted key, ``None`` where absent; all have the same keys.
        sizes: parameters of each curve.
    """
    keys = arm_keys(curves, sizes)
    settings = [tuple(curve[key] for key in keys) for curve in curves]
    label_keys = [key for key in keys if not _implied(key, keys, curves)]
    ordered = sorted(
        zip(settings, curves, strict=True), key=lambda pair: [_sort_key(key, pair[1]) for key in [*label_keys, *keys]]
    )
    labels = {setting: _label(curve, label_keys) for setting, curve in ordered}
    positions = {setting: position for position, setting in enumerate(labels)}
    return [Arm(positions[setting], labels[setting]) for setting in settings]


def differing(curves: Sequence[Curve]) -> list[str]:
    """Keys in which curves differ; an absent key counts as a value of its own."""
    keys = curves[0] if curves else ()
    return [key for key in keys if len({curve[key] for curve in curves}) > 1]


def arm_keys(curves: Sequence[Curve], sizes: Sequence[int]) -> list[str]:
    """Keys that set arms apart: all differing ones, but of the shape as few as leave each arm growing with size."""
    fixed = [key for key in differing(curves) if key not in SHAPE]
    shape = [key for key in SHAPE if key in differing(curves)]
    choices = [list(keys) for count in range(len(shape) + 1) for keys in combinations(shape, count)]
    for chosen in choices:
        left_out = [key for key in shape if key not in chosen]
        if _grows(curves, sizes, fixed + chosen, left_out):
            return fixed + chosen
    return fixed + shape


def _grows(curves: Sequence[Curve], sizes: Sequence[int], keys: list[str], shape_keys: list[str]) -> bool:
    """Whether in every arm (equal in ``keys``) each size occurs once, and no ``shape_keys`` shrink as it grows."""
    arms: dict[tuple[Hashable, ...], list[tuple[int, tuple[float, ...]]]] = {}
    for curve, size in zip(curves, sizes, strict=True):
        shape = tuple(float(str(curve[key])) for key in shape_keys)
        arms.setdefault(tuple(curve[key] for key in keys), []).append((size, shape))
    steps = [(a, b) for arm in arms.values() for a, b in zip(sorted(arm), sorted(arm)[1:], strict=False)]
    return all(a[0] < b[0] and all(x <= y for x, y in zip(a[1], b[1], strict=True)) for a, b in steps)


def _implied(key: str, keys: list[str], curves: Sequence[Curve]) -> bool:
    """Whether the name of a key's group (``optimizer.name``, ``intervention``), if among ``keys``, determines it."""
    group = key.split(".")[0]
    data = [k for k in keys if k.startswith("data.")]
    names = {"intervention": ["intervention"], "guest": ["guest"], "data_fingerprint": data}
    naming = [name for name in names.get(group, [f"{group}.name"]) if name in keys and name != key]
    distinct = {tuple(curve[name] for name in naming) for curve in curves}
    return bool(naming) and len({(*(curve[name] for name in naming), curve[key]) for curve in curves}) == len(distinct)


def _sort_key(key: str, curve: Curve) -> tuple[int, float, str]:
    """Order of arms: absent before numbers before words; fewer interventions before more."""
    value = curve[key]
    if key == "intervention":
        names = str(value).split("+")
        return (0, 0 if names == ["none"] else len(names), str(value))
    if value is None:
        return (0, 0, "")
    return (1, value, "") if isinstance(value, float) else (2, 0, str(value))


def _label(curve: Curve, keys: list[str]) -> str:
    names = [_short_name(key, curve) for key in keys]
    parts = [
        str(curve[key]) if key == "intervention" else f"{name}={spell(curve[key])}"
        for key, name in zip(keys, names, strict=True)
        if curve[key] is not None
    ]
    if not keys:
        return str(curve["intervention"])
    return " ".join(parts) or f"no {', '.join(names)}"


def _short_name(key: str, others: Iterable[str]) -> str:
    """The end of a dotted key, as much of it as no other key has; of a name the group: ``optimizer``."""
    path = key.removesuffix(".name").split(".")
    paths = [other.removesuffix(".name").split(".") for other in others if other != key]
    ends = (path[-length:] for length in range(1, len(path)))
    return ".".join(next((end for end in ends if all(other[-len(end) :] != end for other in paths)), path))


LR, EPSILON = "optimizer.lr", "optimizer.eps"
# Keys that do not set curves apart: those that vary along a curve, and those that change no result.
FREE = {LR, "seed", "data.seed", "model.name", "scale.name", "out", "device"}
# Parameter counts within this ratio are one size: an intervention may add a few gains.
GAINS_TOLERANCE = 1.05


def load(*folders: str | Path) -> Records:
    """Read the records of one or more results folders as one; of runs with equal ids one stays, failed ones last.

    Raises:
        RequestError: a folder is absent, empty, or of another record version.
    """
    tables = [store.read(Path(folder)) for folder in folders]
    runs = pd.concat([table.runs.assign(folder=index) for index, table in enumerate(tables)], ignore_index=True)
    runs = runs.loc[(runs["status"] == "failed").sort_values(kind="stable").index].drop_duplicates("id")
    kept = [set(runs.loc[runs["folder"] == index, "id"]) for index in range(len(tables))]
    metrics = [table.metrics[table.metrics["id"].isin(ids)] for table, ids in zip(tables, kept, strict=True)]
    runs = runs.drop(columns="folder").sort_values("id", ignore_index=True)
    return Records(runs, pd.concat(metrics, ignore_index=True))


def points(runs: pd.DataFrame) -> pd.DataFrame:
    """Points of curves: one row per run that did not fail.

    Of runs that repeat a point (on another device, say) the one with the first id stays.

    Args:
        runs: table of run cards, as ``load`` reads them.

    Returns:
        Columns ``id``, ``curve`` (a number), ``arm`` (a label), ``size`` (``parameters``, rounded down where only
        gains differ), ``parameters`` (without embeddings), ``lr`` (peak), ``seed`` (text; a data seed that differs
        follows after a slash), ``loss`` (final, held-out), ``loss_at_init``, ``loss_bigram`` (nats per token),
        ``status``, ``diverged_at`` (step). Sorted by arm, size, learning rate, seed.
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
            "position": [arms[key].position for key in keys],
            "arm": pd.Series([arms[key].label for key in keys], ended.index, dtype="string"),
            "size": [sizes[count] for count in counts],
            "parameters": counts,
            "lr": significant(ended[LR]),
            "seed": _seed_labels(ended),
            "loss": ended["final_val_loss"],
            **{name: ended[name] for name in ("loss_at_init", "loss_bigram", "status", "diverged_at")},
        }
    )
    frame = frame.drop_duplicates(["curve", "lr", "seed"]).sort_values(["position", "size", "lr", "seed"])
    return frame.drop(columns="position").reset_index(drop=True)


def configs(runs: pd.DataFrame) -> tuple[list[Hashable], dict[Hashable, Curve]]:
    """Key of each run's curve, and by that key each curve's config: plain values by dotted key."""
    config = sorted(key for key in set(map(str, runs)) - set(store.RUN_COLUMNS) - FREE if key.split(".")[0] != "probes")
    columns = ["intervention", *config, "data_fingerprint"]
    keys: list[Hashable] = [tuple(map(plain, row)) for row in runs[columns].itertuples(index=False, name=None)]
    return keys, {key: dict(zip(columns, key, strict=True)) for key in keys}  # type: ignore[call-overload]


def plain(value: Any) -> Hashable:
    """Make a config value comparable: ``None`` if absent, a number as float, a list or boolean as text."""
    if isinstance(value, list | tuple | np.ndarray):
        return f"[{', '.join(map(str, value))}]"
    if value is None or value is pd.NA or value != value:
        return None
    return float(value) if isinstance(value, Real) and not isinstance(value, bool | np.bool_) else str(value)


def significant(values: Iterable[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Round to six digits, so that 0.1 * 3 and 0.3, or single and double precision, compare equal."""
    return np.array([float(f"{value:.6g}") for value in values], dtype=float)


def same_sizes(counts: Sequence[int]) -> dict[int, int]:
    """Map each parameter count to its size: the smallest count that is within ``GAINS_TOLERANCE`` of it."""
    sizes: dict[int, int] = {}
    size = -1
    for count in sorted(set(counts)):
        size = count if count > GAINS_TOLERANCE * size else size
        sizes[count] = size
    return sizes


def _seed_labels(runs: pd.DataFrame) -> list[str]:
    data_seeds = runs["data.seed"] if "data.seed" in runs else [None] * len(runs)
    pairs = [(plain(seed), plain(data_seed)) for seed, data_seed in zip(runs["seed"], data_seeds, strict=True)]
    return [spell(seed) if data in (None, seed) else f"{spell(seed)}/{spell(data)}" for seed, data in pairs]
