"""Load records, group runs into curves (runs that differ in learning rate and seed only), and curves into arms."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.text import LEARNING_RATE, NO_AXIS, Axis, axis_called, format_value, listed
from lab.core.errors import RequestError
from lab.core.shipped import default_recipe
from lab.records import store
from lab.records.imported import AXIS, DERIVED, FOLLOWED, SINGLE_CHANGE, TRIAL
from lab.records.store import ENTRIES, TABLE, Records

# Keys of a model's shape. They are part of an arm's name only if the shape does not simply grow with size.
SHAPE = ("model.head_width", "model.depth", "model.width")

POSITIONS = "intervention.learned_positions.positions"
EXPERTS = "intervention.experts"

RECIPE = "recipe"

# With more switches than this, the arm without any does not list them.
MOST_SWITCHES = 3

# Groups of keys whose choice is a key without ``.name``.
NAMED_BY_THEMSELVES = ("intervention", "custom_model", "bad_batches", "response", "restarts")

Curve = Mapping[str, Hashable]


class Arm(NamedTuple):
    """An arm: curves that differ in the size of the model only.

    Attributes:
        position: its position in the order of arms, from 0.
        label: the settings that distinguish it from other arms, such as ``mup_full without qk-layernorm``.
        factors: these settings by dotted key; an intervention that only some arms have is a key of its own, with the
            value ``on`` or None.
    """

    position: int
    label: str
    factors: Mapping[str, Hashable]


def name_arms(curves: Sequence[Curve], sizes: Sequence[int]) -> list[Arm]:
    """Assign each curve to an arm; curves of one arm differ in size only.

    Args:
        curves: config of each curve, plain values by dotted key, ``None`` where absent; all have the same keys.
        sizes: parameters of each curve.
    """
    keys = arm_keys(curves, sizes)
    settings = [tuple(curve[key] for key in keys) for curve in curves]
    namings = {recipe: _naming(recipe, keys, curves) for recipe in {curve.get(RECIPE) for curve in curves}}
    label_keys = [key for key in {RECIPE: None, **dict.fromkeys(keys)} if any(key in n.keys for n in namings.values())]
    switches = sorted({name for naming in namings.values() for name in naming.switches})
    ordered = sorted(
        zip(settings, curves, strict=True), key=lambda pair: [_sort_key(key, pair[1]) for key in [*label_keys, *keys]]
    )
    labels = {setting: _label(curve, namings[curve.get(RECIPE)]) for setting, curve in ordered}
    if len(set(labels.values())) < len(labels):
        labels = {setting: _label(curve, namings[curve.get(RECIPE)], in_full=True) for setting, curve in ordered}
    factors = {setting: _factors(curve, label_keys, switches) for setting, curve in ordered}
    positions = {setting: position for position, setting in enumerate(labels)}
    return [Arm(positions[setting], labels[setting], factors[setting]) for setting in settings]


class _Naming(NamedTuple):
    """What names the arms of one recipe, or those without any: keys, and the interventions that only some have."""

    keys: Sequence[str]
    switches: Sequence[str]


def _naming(recipe: Hashable, keys: Sequence[str], curves: Sequence[Curve]) -> _Naming:
    """A recipe names all settings but those in which its own arms differ."""
    own = [curve for curve in curves if curve.get(RECIPE) == recipe]
    differ = [key for key in differing(own) if key in keys]
    names = [interventions(curve) for curve in own]
    labelled = [key for key in differ if not _implied(key, differ, own)]
    has_recipe = len(own) < len(curves) or recipe is not None
    return _Naming([RECIPE] * has_recipe + labelled, sorted(set().union(*names) - set(names[0]).intersection(*names)))


def interventions(curve: Curve) -> list[str]:
    """The names of the interventions of a curve."""
    return [name for name in str(curve["intervention"]).split("+") if name != "none"]


def _factors(curve: Curve, keys: Sequence[str], switches: Sequence[str]) -> dict[str, Hashable]:
    values = {key: curve[key] for key in keys if key != "intervention"}
    return values | {f"intervention.{name}": "on" if name in interventions(curve) else None for name in switches}


def differing(curves: Sequence[Curve]) -> list[str]:
    """Keys in which curves differ; an absent key counts as a value of its own."""
    keys = curves[0] if curves else ()
    return [key for key in keys if len({curve[key] for curve in curves}) > 1]


def arm_keys(curves: Sequence[Curve], sizes: Sequence[int]) -> list[str]:
    """Keys that distinguish arms: all in which curves differ, but only as many of the shape as make each arm one line.

    An arm is one line if its shape grows with size.
    """
    fixed = [key for key in differing(curves) if key not in SHAPE]
    shape = [key for key in SHAPE if key in differing(curves)]
    choices = [list(keys) for count in range(len(shape) + 1) for keys in combinations(shape, count)]
    for chosen in choices:
        left_out = [key for key in shape if key not in chosen]
        if _grows(curves, sizes, fixed + chosen, left_out):
            return fixed + chosen
    return fixed + shape


def _grows(curves: Sequence[Curve], sizes: Sequence[int], keys: list[str], shape_keys: list[str]) -> bool:
    """Whether in every arm (curves equal in ``keys``) each size occurs once, and no ``shape_keys`` shrink with size."""
    arms: dict[tuple[Hashable, ...], list[tuple[int, tuple[float, ...]]]] = {}
    for curve, size in zip(curves, sizes, strict=True):
        shape = tuple(float(str(curve[key])) for key in shape_keys)
        arms.setdefault(tuple(curve[key] for key in keys), []).append((size, shape))
    steps = [(a, b) for arm in arms.values() for a, b in zip(sorted(arm), sorted(arm)[1:], strict=False)]
    return all(a[0] < b[0] and all(x <= y for x, y in zip(a[1], b[1], strict=True)) for a, b in steps)


def _implied(key: str, keys: list[str], curves: Sequence[Curve]) -> bool:
    """Whether others of ``keys`` determine this key, such as the name of its group (``optimizer.name``)."""
    group = key.split(".")[0]
    names = {
        "data_fingerprint": [k for k in keys if k.startswith("data.")],
        "steps": ["batch.name"],
        "batch.micro_batch": ["batch.name", "batch_size"],
    }
    of_group = group if group in NAMED_BY_THEMSELVES else f"{group}.name"
    naming = [name for name in names.get(key, [of_group]) if name in keys and name != key]
    distinct = {tuple(curve[name] for name in naming) for curve in curves}
    return bool(naming) and len({(*(curve[name] for name in naming), curve[key]) for curve in curves}) == len(distinct)


def _sort_key(key: str, curve: Curve) -> tuple[int, float, str]:
    """Key of the order of arms: absent values, then numbers, then words, the default first; few interventions first."""
    value = curve[key]
    if key == "intervention":
        return (0, len(interventions(curve)), str(value))
    if value is None:
        return (0, 0, "")
    return (1, value, "") if isinstance(value, float) else (2, value != default_recipe().get(key), str(value))


def _label(curve: Curve, naming: _Naming, *, in_full: bool = False) -> str:
    """The label of a curve: its settings, then the switches it has; all its interventions if there are none."""
    switches = naming.switches
    settings = [key for key in naming.keys if key != "intervention"]
    names = {key: setting_name(key, curve) for key in settings}
    values = {key: curve[key] if in_full else _four_digits(curve[key]) for key in settings}
    parts = [setting_text(name, values[key]) for key, name in names.items() if values[key] is not None]
    if names and not switches:
        return ", ".join(parts) or f"no {', '.join(names.values())}"
    if TABLE in curve and not switches:  # the only arm of an imported table, which has no interventions to name
        return str(curve.get("arm") or curve[TABLE])
    present = [name for name in interventions(curve) if name in switches or not switches]
    return " ".join([", ".join(parts), switches_text(present, switches)]).strip()


def _four_digits(value: Hashable) -> Hashable:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def switches_text(present: Sequence[str], switches: Sequence[str]) -> str:
    """``with qk-layernorm and z-loss``, or ``without qk-layernorm or z-loss`` if none of ``switches`` is present.

    If none of more than three switches is present: ``with none of them``.
    """
    if present:
        return f"with {listed(map(hyphenated, present))}"
    if len(switches) > MOST_SWITCHES:
        return "with none of them"
    return f"without {listed(map(hyphenated, switches), 'or') if switches else 'interventions'}"


def hyphenated(name: str) -> str:
    """The name of an intervention as papers write it: ``qk_layernorm -> qk-layernorm``."""
    return name.replace("_", "-")


# Names of settings for readers, by their names in configs.
SETTING_NAMES = {"eps": "epsilon", "warmup": "warm-up"}


def setting_name(key: str, keys: Iterable[str]) -> str:
    """The name of a setting for readers: the end of its dotted key, long enough to differ from all other ``keys``."""
    end = _short_name(key, keys)
    return end if "." in end else SETTING_NAMES.get(end, end.replace("_", " "))


def setting_text(name: str, value: Hashable) -> str:
    """``epsilon 1e-08``; of a chosen config file its name alone, such as ``cosine``."""
    return format_value(value) if name in CHOICES else f"{name} {format_value(value)}"


def _short_name(key: str, others: Iterable[str]) -> str:
    """The shortest end of a dotted key that no other key has; of a name its group: ``optimizer.name -> optimizer``."""
    path = key.removesuffix(".name").split(".")
    paths = [other.removesuffix(".name").split(".") for other in others if other != key]
    ends = (path[-length:] for length in range(1, len(path)))
    return ".".join(next((end for end in ends if all(other[-len(end) :] != end for other in paths)), path))


# Groups whose files have names that say what they are.
CHOICES = ("arm", "data", "optimizer", "parametrization", "recipe", "schedule")
LR, EPSILON = "optimizer.lr", "optimizer.eps"
NUMBER = r"\d[\d.]*(?:e[-+]\d+)?"
# Keys that do not distinguish curves: those that vary along a curve, those that change no result, and those that follow
# from others.
FREE = {LR, "seed", "data.seed", "model.name", "scale.name", "out", "device", "tokens", FOLLOWED}
# Parameter counts within this ratio are one size: an intervention may add a few gains.
GAINS_TOLERANCE = 1.05


def load(*folders: str | Path) -> Records:
    """Read the records of one or more results folders as one; of runs with equal ids, keep one that did not fail.

    Raises:
        RequestError: a folder is absent, empty, or of another record version.
    """
    tables = [store.read(Path(folder)) for folder in folders]
    if len(tables) == 1:
        return tables[0]
    runs = pd.concat([table.runs.assign(folder=index) for index, table in enumerate(tables)], ignore_index=True)
    runs = runs.loc[(runs["status"] == "failed").sort_values(kind="stable").index].drop_duplicates("id")
    kept = [table.of(set(runs.loc[runs["folder"] == index, "id"])) for index, table in enumerate(tables)]
    runs = runs.drop(columns="folder").sort_values("id", ignore_index=True)
    metrics = pd.concat([table.metrics for table in kept], ignore_index=True)
    return Records(runs, metrics, pd.concat([table.events for table in kept], ignore_index=True))


def points(runs: pd.DataFrame) -> pd.DataFrame:
    """Points of curves: one row per run that did not fail and is no single change of another.

    Of runs that repeat a point, such as on another device, the one with the first id is kept.

    Args:
        runs: table of run cards, as ``load`` reads them.

    Returns:
        Columns ``id``, ``curve`` (a number), ``arm`` (a label), ``size`` (``parameters``, but those of the smallest
        model for models that differ by a few gains, or for recipes of one shape), ``parameters`` (without embeddings),
        ``lr`` (peak; or the value of ``axis_of``), ``seed`` (text; another data seed follows after a slash), ``loss``
        (final, held-out), ``loss_at_init``, ``loss_bigram``, ``loss_unigram`` (nats per token), ``status``,
        ``diverged_at`` (step).
        Sorted by arm, size, learning rate, seed.
    """
    ended = without_single_changes(runs[runs["status"] != "failed"]).sort_values("id")
    keys, curves, arms, sizes = _group(ended)
    counts = [int(count) for count in parameters(ended)]
    numbers = {key: number for number, key in enumerate(curves)}
    frame = pd.DataFrame(
        {
            "id": ended["id"],
            "curve": [numbers[key] for key in keys],
            "position": [arms[key].position for key in keys],
            "arm": pd.Series([arms[key].label for key in keys], ended.index, dtype="string"),
            "size": [sizes[count] for count in counts],
            "parameters": counts,
            "lr": significant(ended[axis_of(runs)]) if axis_of(runs) else 0.0,
            "seed": _seed_labels(ended),
            "loss": ended["final_val_loss"],
            **{name: ended[name] for name in ("loss_at_init", "loss_bigram", "status", "diverged_at")},
            "loss_unigram": ended.get("loss_unigram", np.nan),  # which older cards lack
        }
    )
    frame = frame.drop_duplicates(["curve", "lr", "seed"]).sort_values(["position", "size", "lr", "seed"])
    return frame.drop(columns="position").reset_index(drop=True)


def without_single_changes(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs without those that an imported table has as single changes of a base, which are points of no curve."""
    key = f"{SINGLE_CHANGE}.key"
    return runs[runs[key].isna()] if key in runs else runs


def axis_of(runs: pd.DataFrame) -> str:
    """The key of the setting along which curves run: the learning rate, or what ``lab import --axis`` named.

    It is empty for a table without learning rates, whose curves have one point each.

    Raises:
        RequestError: runs of several tables have different ones.
    """
    axes = sorted(set(runs[AXIS].fillna(LR))) if AXIS in runs else [LR]
    if len(axes) > 1:
        raise RequestError(f"curves along {listed(axes)} cannot be compared")
    axis = str(axes[0]) if axes else LR
    return axis if axis in runs else ""


def named_axis(runs: pd.DataFrame) -> Axis:
    """``axis_of`` in words."""
    axis = axis_of(runs)
    return LEARNING_RATE if axis == LR else axis_called(setting_name(axis, ())) if axis else NO_AXIS


def parameters(runs: pd.DataFrame) -> pd.Series[Any]:
    """Parameters of each run without head and embeddings of tokens or positions (Wortsman et al. 2023); may be null.

    Records count the table of ``learned_positions``, a row of the model's width for each position; it is subtracted.
    """
    counted = runs["parameters_without_embeddings"]
    return counted - runs[POSITIONS].fillna(0).astype(int) * runs["model.width"] if POSITIONS in runs else counted


def idle_parameters(runs: pd.DataFrame) -> pd.Series:
    """Parameters of each run, by run id, that do not act on a token: of the experts it does not pass; 0 without any."""
    by_id = runs.set_index("id")
    columns = [f"{EXPERTS}.{key}" for key in ("number", "top_k", "hidden")]
    if not {*columns} <= {*by_id}:
        return pd.Series(0, by_id.index)
    number, top_k, hidden = (by_id[column].astype(float) for column in columns)
    width, depth = by_id["model.width"].astype(float), by_id["model.depth"].astype(float)
    matrices = 2 + by_id["intervention"].str.split("+").map(lambda names: "swiglu" in names)
    idle = depth * (number - top_k) * (hidden * width).round().clip(lower=1) * width * matrices
    return idle.fillna(0).astype(int)


def epsilons(runs: pd.DataFrame) -> pd.Series:
    """Adam's epsilon of each run, by run id; NaN for a run without Adam."""
    return runs.reindex(columns=["id", EPSILON]).set_index("id")[EPSILON].astype(float)


def depths(runs: pd.DataFrame) -> pd.Series:
    """Number of blocks of each run's model, by run id; NaN where an imported table does not have it."""
    return runs.reindex(columns=["id", "model.depth"]).set_index("id")["model.depth"].astype(float)


def arm_factors(runs: pd.DataFrame) -> dict[str, Mapping[str, Hashable]]:
    """``Arm.factors`` of each arm of ``points(runs)``, by its label and in the order of arms."""
    _, _, arms, _ = _group(runs[runs["status"] != "failed"].sort_values("id"))
    return {arm.label: arm.factors for arm in sorted(arms.values(), key=lambda arm: arm.position)}


def _group(
    ended: pd.DataFrame,
) -> tuple[list[Hashable], dict[Hashable, Curve], dict[Hashable, Arm], dict[int, int]]:
    """Key of each run's curve; config and arm of each curve by that key; and the size of each parameter count."""
    if ended["parameters_without_embeddings"].isna().any():
        raise RequestError("a run does not say how many parameters_without_embeddings it has")
    settings, config_of = configs(ended)
    counts = [int(count) for count in parameters(ended)]
    sizes = same_sizes(counts)
    if RECIPE in ended and ended[RECIPE].notna().any() and {*SHAPE} <= {*ended}:
        sizes = _sizes_of_shapes(ended, counts)
    # an imported table may hold several sizes without a setting in which they differ
    keys: list[Hashable] = [(key, sizes[count]) for key, count in zip(settings, counts, strict=True)]
    size_of = {key: sizes[count] for key, count in zip(keys, counts, strict=True)}
    curves = {key: config_of[setting] for key, setting in zip(keys, settings, strict=True)}
    named = name_arms(list(curves.values()), list(size_of.values()))
    return keys, curves, dict(zip(curves, named, strict=True)), sizes


def _sizes_of_shapes(ended: pd.DataFrame, counts: Sequence[int]) -> dict[int, int]:
    """The size of each parameter count where recipes are compared: the smallest count of a model of the same shape.

    Gates of the MLP, shared keys and biases change the parameters of a shape by a third.
    """
    by_shape = pd.Series(counts, ended.index).groupby([ended[key] for key in SHAPE], dropna=False).transform("min")
    return dict(sorted(zip(counts, by_shape, strict=True), reverse=True))


def configs(runs: pd.DataFrame) -> tuple[list[Hashable], dict[Hashable, Curve]]:
    """Key of each run's curve, and the config of each curve by that key: plain values by dotted key."""
    free = FREE - {LR} | {axis_of(runs)}
    others = set(map(str, runs)) - set(store.RUN_COLUMNS) - free
    config = sorted(key for key in others if key.split(".")[0] not in ("probes", DERIVED, SINGLE_CHANGE, TRIAL))
    planted = [name for name in store.SPIKE_LAB if name in runs and (runs[name].fillna("none") != "none").any()]
    columns = ["intervention", *planted, *config, "data_fingerprint"]
    runs = runs.fillna({key: value for key, value in store.DEFAULTS.items() if key in runs})
    if ENTRIES in runs:
        runs = runs.assign(**{ENTRIES: list(map(_relative, runs[ENTRIES], runs[LR]))})
    keys: list[Hashable] = list(zip(*(_plain_values(runs[column]) for column in columns), strict=True))
    return keys, {key: dict(zip(columns, key, strict=True)) for key in keys}  # type: ignore[call-overload]


def _plain_values(column: pd.Series[Any]) -> list[Hashable]:
    """``plain`` of each value, computed once for equal ones."""
    if column.dtype == object:  # objects cannot be compared: True equals 1, and lists cannot be hashed
        return list(map(plain, column))
    code_of_run, distinct = pd.factorize(column, use_na_sentinel=False)
    values = list(map(plain, distinct))
    return [values[code] for code in code_of_run]


def _relative(entries: Any, lr: float) -> Any:
    """The entries of a restart log, with learning rates as multiples of the run's first, equal along a curve."""
    if not isinstance(entries, str):
        return entries
    return re.sub(rf"{LR}=({NUMBER})", lambda rate: f"{LR}={float(rate[1]) / lr:.3g} times", entries)


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
    """Map each parameter count to its size: the smallest count within a factor of ``GAINS_TOLERANCE`` of it."""
    sizes: dict[int, int] = {}
    size = -1
    for count in sorted(set(counts)):
        size = count if count > GAINS_TOLERANCE * size else size
        sizes[count] = size
    return sizes


def _seed_labels(runs: pd.DataFrame) -> list[str]:
    data_seeds = runs["data.seed"] if "data.seed" in runs else [None] * len(runs)
    pairs = [(plain(seed), plain(data_seed)) for seed, data_seed in zip(runs["seed"], data_seeds, strict=True)]
    return [
        format_value(seed) if data in (None, seed) else f"{format_value(seed)}/{format_value(data)}"
        for seed, data in pairs
    ]
