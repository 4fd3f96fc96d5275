"""Config fields, static or per run, with their bounds; plain values become a typed config, and configs a stack."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from lab.core.errors import RequestError, nearest

# A field annotated with one of these may differ between the runs of a fleet; stacking turns it into a tensor [r]
# (a tuple of r integers for seeds).  Everything else is static and must agree.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

    PerRun = Annotated[float | Tensor, "per run"]
else:
    PerRun = Annotated[float, "per run"]  # data sources have such fields, and reading them must load no torch
PerRunSeed = Annotated[int | tuple[int, ...], "per run"]
# The metadata of a field that has no column in records: it only observes a run, or says how it is carried out.
UNRECORDED = {"recorded": False}

# Keys that were renamed, oldest first, and what each is called now; the name of a group stands for all keys in it.
# Records and requests are read under the names of now, and ids digest the first name of a key, so they stay.
FORMER_KEYS = {"guest": "custom_model", "ledger": "restarts", "burst": "bad_batches"}

WITHIN = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}
Config = TypeVar("Config")
Leaf = tuple[str, Any, bool]


def bounded(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    infinite: bool = False,
) -> Any:
    """A number within the bounds given; never NaN, and infinite only if ``infinite`` says so."""
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most, "infinite": infinite}
    return dataclasses.field(default=default, metadata=bounds)


def seed(default: Any = dataclasses.MISSING) -> Any:
    """A seed: a number that a random generator takes and a table of 64-bit integers can hold."""
    return bounded(default, at_least=0, below=2**63)


def one_of(*choices: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """One of the given words; ``metadata`` may be that of ``recorded``."""
    return dataclasses.field(default=default, metadata={"choices": choices, **metadata})


@cache
def batches_of_bursts(start: float, length: float, steps: int, repeats: int = 1) -> tuple[range, ...]:
    """The batches of each burst of a run of so many steps; a start or a length below 1 is a share of the steps.

    The first begins at ``start``, and the bursts divide the rest of the run evenly.
    """
    first = round(start * steps) if start < 1 else int(start)
    count = math.ceil(length * steps) if length < 1 else int(length)
    starts = (first + index * (steps - first) // repeats for index in range(repeats if count else 1))
    return tuple(range(begin, begin + count) for begin in starts)


def key_now(key: str) -> str:
    """What a dotted key, which may be a former one, is called now."""
    for former, now in FORMER_KEYS.items():
        key = _under(now, former, key)
    return key


def first_key(key: str) -> str:
    """What a dotted key was called first."""
    for former, now in reversed(FORMER_KEYS.items()):
        key = _under(former, now, key)
    return key


def _under(name: str, other: str, key: str) -> str:
    """The key with ``name`` in the place of ``other``, if it is this one or lies in it."""
    return name + key.removeprefix(other) if f"{key}.".startswith(f"{other}.") else key


def former_keys(tree: Mapping[str, Any]) -> list[str]:
    """The former keys in nested mappings."""
    return [former for former in FORMER_KEYS if _taken(tree, former.split("."))[0] is not dataclasses.MISSING]


def with_keys_now(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A nested mapping with each value of a former key under the key of now, where it replaces what is there."""
    for former, now in FORMER_KEYS.items():
        value, others = _taken(tree, former.split("."))
        if value is not dataclasses.MISSING:
            tree = _placed(others, now.split("."), value)
    return tree


def _taken(tree: Any, path: Sequence[str]) -> tuple[Any, Any]:
    """The value at a path of nested mappings, and a copy without it; MISSING if there is none."""
    first, *rest = path
    if not isinstance(tree, Mapping) or first not in tree:
        return dataclasses.MISSING, tree
    if not rest:
        return tree[first], {key: value for key, value in tree.items() if key != first}
    value, inner = _taken(tree[first], rest)
    return value, {**tree, first: inner}


def _placed(tree: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with a value at a path; two mappings are merged."""
    first, *rest = path
    there = tree[first] if isinstance(tree.get(first), Mapping) else {}
    if rest:
        return {**tree, first: _placed(there, rest, value)}
    return {**tree, first: {**there, **value} if isinstance(value, Mapping) else value}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _types(kind: type) -> dict[str, Any]:
    """The types of a kind's fields before stacking."""
    return {name: {PerRun: float, PerRunSeed: int}.get(hint, hint) for name, hint in _hints(kind).items()}


@cache
def _per_run(kind: type) -> dict[str, bool]:
    """The fields of a dataclass, and whether runs that share a fleet may differ in each."""
    return {field.name: _hints(kind)[field.name] in (PerRun, PerRunSeed) for field in dataclasses.fields(kind)}


@cache
def _all_fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    if hasattr(kind, "_fields"):  # a NamedTuple
        default = {name: kind._field_defaults.get(name, dataclasses.MISSING) for name in kind._fields}
        return {name: dataclasses.field(default=default[name]) for name in kind._fields}
    return {field.name: field for field in dataclasses.fields(kind)}


@cache
def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {name: field for name, field in _all_fields(kind).items() if field.init}


def build(kind: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """Make ``kind``, a dataclass or a NamedTuple, from plain ``values`` read from config key ``where``.

    Raises:
        RequestError: an unknown or missing key, a value of the wrong type or out of bounds.
    """
    fields = _fields(kind)  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise RequestError(f"unknown key '{_dotted(where, key)}'; {nearest(key, fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RequestError(f"key '{_dotted(where, missing[0])}' is missing")
    converted = {name: convert(kind, name, value, _dotted(where, name)) for name, value in values.items()}
    try:
        return kind(**converted)
    except RequestError:
        raise
    except ValueError as fault:
        raise RequestError(f"{where}: {fault}") from None


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def convert(kind: type, name: str, value: Any, where: str) -> Any:
    """Convert the plain value of one field of ``kind``, read from config key ``where``.

    Raises:
        RequestError: it is of the wrong type or out of bounds.
    """
    return _converted(_types(kind)[name], value, _fields(kind)[name].metadata, where)


def _converted(hint: Any, value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    if get_origin(hint) is UnionType and NoneType in get_args(hint):
        if value is None:
            return None
        hint = reduce(operator.or_, (kind for kind in get_args(hint) if kind is not NoneType))
    if get_origin(hint) is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise RequestError(f"{where} must be a list, not {value!r}")
        of_items = get_args(hint)[0]
        return tuple(str(item) if of_items is str else _converted(of_items, item, {}, where) for item in value)
    if hint in (int, float):
        return _number(hint, value, metadata, where)
    if hint is str:
        choices = metadata.get("choices", ())
        if choices and value not in choices:
            raise RequestError(f"{where} is {value!r}; {nearest(str(value), choices)}")
        return text_value(value, where)
    is_kind = isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))
    return build(hint, value, where) if is_kind and isinstance(value, Mapping) else value


def text_value(value: Any, where: str) -> str:
    """Text that a table and a file name can hold; a number becomes its digits.

    Raises:
        RequestError: ``value`` is not a word of that kind.
    """
    if not isinstance(value, (str, int, float)):
        raise RequestError(f"{where} must be a word, not {value!r}")
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in str(value)):
        raise RequestError(f"{where} must be Unicode text without NUL, not {value!r}")
    return str(value)


def _number(hint: type, value: Any, bounds: Mapping[str, Any], where: str) -> int | float:
    try:
        if isinstance(value, bool) or value is None:
            raise ValueError
        number = float(value)
        if hint is int and not number.is_integer():
            raise ValueError
        exact = value if isinstance(value, int) else number  # a large seed would lose its last digits
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if hint is int else "a number"
        raise RequestError(f"{where} must be {kind}, not {value!r}") from None
    if math.isnan(number):
        raise RequestError(f"{where} is NaN")
    if math.isinf(number) and not bounds.get("infinite"):
        raise RequestError(f"{where} must be finite, not {value}")
    for bound, holds in WITHIN.items():
        limit = bounds.get(bound)
        if limit is not None and not holds(exact, limit):
            raise RequestError(f"{where} must be {bound} {limit:g}, not {value}")
    if hint is float and 0 < abs(number) < sys.float_info.min:
        raise RequestError(f"{where} is {value}, which training rounds to 0; the least is {sys.float_info.min:.3g}")
    if hint is float:
        return number + 0.0  # -0.0 becomes 0.0, so that equal numbers have one id
    if not -(2**63) <= exact < 2**63:
        raise RequestError(f"{where} must be below 2**63, as in any table, not {value}")
    return int(exact)


def leaves(config: Any, prefix: str = "") -> list[Leaf]:
    """Every value of a nested config as ``(dotted key, value, whether it may differ inside a fleet)``."""
    return [leaf for leaf, _ in _leaves(config, prefix)]


def recorded(config: Any, always: Callable[[str], bool]) -> list[Leaf]:
    """Those of ``leaves`` that a record holds.

    A field with a default is left out where it has that value, so that a field which is added changes no earlier
    record. Its metadata may say more:

    - ``older``: the value that earlier runs had without the field, if that is not its default;
    - ``recorded``: False for a field that is never recorded, with all that it holds.

    The fields of another package's entry, or of a user's own code, are recorded whatever their value.

    Args:
        config: a nested config.
        always: whether the field with this dotted key is recorded whatever its value.
    """
    return [leaf for leaf, usual in _leaves(config, "", UNRECORDED) if always(leaf[0]) or leaf[1] != usual]


def _leaves(config: Any, prefix: str, without: Mapping[str, Any] | None = None) -> Iterator[tuple[Leaf, Any]]:
    """``leaves``, each with the value in which earlier records lack it; without fields that have this metadata."""
    if isinstance(config, Mapping):
        for key in sorted(config):
            yield from _leaves(config[key], f"{prefix}{key}.", without)
        return
    kind: type = type(config)
    for name, varies in _per_run(kind).items():
        if without and without.items() <= _all_fields(kind)[name].metadata.items():
            continue
        value = getattr(config, name)
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.", without)
        else:
            yield (prefix + name, value, varies), usual_value(kind, name)


@cache
def usual_value(kind: type, name: str) -> Any:
    """The value of a field in which earlier records lack it; for one that they all have, none of its values."""
    field = _all_fields(kind)[name]
    owner = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", ()))
    is_ours = owner.__module__.startswith("lab.") and not getattr(owner, "is_of_user", False)
    return field.metadata.get("older", field.default) if is_ours else dataclasses.MISSING


def stack(configs: Sequence[Any], device: torch.device) -> Any:
    """Combine N configs of one static shape: floats per run become a float64 tensor ``[r]``, seeds a tuple."""
    first = configs[0]
    if isinstance(first, Mapping):
        return {key: stack([config[key] for config in configs], device) for key in first}
    return dataclasses.replace(
        first,
        **{field.name: _stacked(first, field.name, configs, device) for field in dataclasses.fields(first)},
    )


def _stacked(first: Any, name: str, configs: Sequence[Any], device: torch.device) -> Any:
    values = [getattr(config, name) for config in configs]
    if dataclasses.is_dataclass(values[0]) or isinstance(values[0], Mapping):
        return stack(values, device)
    kind: type = type(first)
    if _hints(kind)[name] == PerRunSeed:
        return tuple(values)
    if _hints(kind)[name] == PerRun:
        import torch

        precision = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        return torch.tensor(values, dtype=precision, device=device)
    return values[0]
