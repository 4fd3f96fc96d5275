"""Arms: what sets curves of one size apart, and how it is called."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

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


def spell(value: Hashable) -> str:
    """A plain value as a label shows it, exact."""
    return repr(float(value)).removesuffix(".0") if isinstance(value, float) else str(value)


def count(parameters: float) -> str:
    """``98688 -> 98.7k``."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= 0.9995 * scale:
            return f"{parameters / scale:.3g}{unit}"
    return f"{parameters:.0f}"
