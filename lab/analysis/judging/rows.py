"""Claims as rows: read from the ``claims.yaml`` of a study; every name in them is checked."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.analysis.judging import arms as arms_of_library
from lab.analysis.judging import effects as effects_of_library
from lab.analysis.judging import quantities
from lab.analysis.judging.decision import ABOVE_ZERO
from lab.analysis.judging.effects import EffectsOfArms, Qualified, exceeds, parts, qualified
from lab.analysis.judging.evidence import ArmTables, Config
from lab.analysis.judging.verdicts import CLAIM, KINDS, PLAIN, SOURCES, WIDTH, ChooseArms, Claim, Presumption
from lab.core import shipped
from lab.core.errors import RequestError, nearest

Named = Mapping[str, Any]  # functions and presumptions by their names
NEEDED = {"about", "figure", "sentence", "sweep"}
KEYS = NEEDED | {"arms", "effect", "parts", "each", "control", "resolution", *Claim._field_defaults}
_orders = count()


def read_claims(path: Path, of_study: Iterable[ModuleType]) -> Iterator[Claim]:
    """Read the claims of a file: a list of blocks, each with fields that its claims share, and ``claims`` by name.

    A row has the attributes of ``Claim``, except those that are made from the following fields:

    - ``arms``: a config for each arm, or ``{NAME: ARGUMENTS}`` of a function that picks them; by default one arm of all
      curves.
    - ``effect``: ``{NAME: ARGUMENTS}`` of an effect; by default the function with the claim's name. Or ``parts``,
      several effects by name.
    - ``control``: as ``effect``, with ``above`` if it must exceed another bound than zero.
    - ``each``: a key; effect and control are computed for each of its values.
    - ``resolution``: that of the effect, in its unit.
    - ``presumes``: the name of a ``Presumption``.

    Args:
        path: the file.
        of_study: modules with the functions and presumptions of the study, besides those of the library.

    Raises:
        RequestError: a row has an unknown field, or names an unknown function, sweep, source or kind.
    """
    known = {
        name: named
        for module in (arms_of_library, effects_of_library, *of_study)
        for name, named in vars(module).items()
        if isinstance(named, Presumption) or getattr(named, "__module__", "") == module.__name__
    }
    for block in shipped.load(path):
        shared = {key: value for key, value in block.items() if key != "claims"}
        for name, row in block["claims"].items():
            try:
                yield _claim(name, {**shared, **row}, known)
            except (TypeError, ValueError) as error:
                raise RequestError(f"{path}: {name}: {error}") from None


def _claim(name: str, row: dict[str, Any], known: Named) -> Claim:
    if missing := sorted(NEEDED - set(row)):
        raise ValueError(f"no {missing[0]}")
    answered = {key: tuple(row.get(key, ())) for key in ("affirms", "denies")}
    for kind, names, all_names in (
        ("key", row, KEYS),
        ("sweep", [row["sweep"], *answered["affirms"], *answered["denies"]], shipped.sweeps()),
        ("source", [row.get("source", SOURCES[0])], SOURCES),
        ("kind", [row.get("kind", CLAIM)], KINDS),
    ):
        for each in names:
            _check_name(kind, each, all_names)
    frees = (WIDTH, *row.get("frees", ()))
    plain = {key: value for key, value in PLAIN.items() if key not in frees}
    others = {key: row[key] for key in Claim._field_defaults if key in row}
    if "presumes" in row:
        others["presumes"] = _get("presumption", row["presumes"], known)
    derived = {
        **answered,
        "frees": frees,
        "cause": tuple(row.get("cause", row.get("frees", [WIDTH]))),
        "holds": {**plain, **_checked(row.get("holds", {}))},
        "side": tuple(row.get("side", ABOVE_ZERO)),
    }
    arms, effects = _arms(row.get("arms", [{}]), known), _effects(name, row, known)
    stated = {key: row[key] for key in NEEDED}
    return Claim(name, **stated, arms=arms, effects=effects, order=next(_orders), **{**others, **derived})


def _check_name(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(str(name), list(known))}")


def _get(kind: str, name: str, known: Named) -> Any:
    _check_name(kind, name, known)
    return known[name]


def _checked(config: Config) -> Config:
    for key, value in config.items():
        if isinstance(value, bool):
            raise ValueError(f'{key}: YAML reads on and off as truth values; write "on"')
    return config


def _arms(spec: Any, known: Named) -> ChooseArms:
    if isinstance(spec, list):
        configs = [_checked(config) for config in spec]
        return lambda group: group.arms(*configs)
    name, arguments = _split(spec)
    pick, positional = _get("choice of arms", name, known), arguments if isinstance(arguments, list) else [arguments]
    inspect.signature(pick).bind(None, *positional)
    return lambda group: list(pick(group, *positional))


def _split(spec: Any) -> tuple[str, Any]:
    """The name and the arguments of ``name`` or ``{name: arguments}``."""
    if isinstance(spec, str):
        return spec, []
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(f"{spec} must be NAME, or NAME: ARGUMENTS")
    return next(iter(spec.items()))


def _effects(name: str, row: Mapping[str, Any], known: Named) -> EffectsOfArms:
    if "parts" in row:
        named = {part: _bound(spec, known) for part, spec in row["parts"].items()}
        effect: EffectsOfArms = partial(_in_parts, named)
    else:
        effect = _bound(row.get("effect", name), known)
    if "each" in row:
        effect = partial(_in_each, row["each"], effect)
    if not {"control", "resolution"} & set(row):
        return effect
    control = None
    if "control" in row:
        spec = row["control"]
        above = spec.get("above") if isinstance(spec, Mapping) else None
        control = _bound(spec if above is None else {key: spec[key] for key in spec if key != "above"}, known)
        if "each" in row:
            control = partial(_in_each, row["each"], control)
        if above is not None:
            control = partial(_exceeding, control, above)
    return partial(_with, effect, control, row.get("resolution"))


def _bound(spec: Any, known: Named) -> EffectsOfArms:
    """An effect bound to its arguments, after checking them."""
    name, arguments = _split(spec)
    effect, arguments = _get("effect", name, known), dict(arguments)
    signature = inspect.signature(effect)
    by_name = {key for key, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY}
    for key in arguments:
        _check_name(f"argument of {name}", key, by_name)
    needed = {key for key in by_name if signature.parameters[key].default is inspect.Parameter.empty}
    if missing := sorted(needed - set(arguments)):
        raise ValueError(f"{name} takes {missing[0]}")
    of = arguments.get("of", [])
    for each in of if isinstance(of, list) else [of]:
        quantities.check(each)
    return partial(effect, **arguments) if arguments else effect


def _in_parts(effects: Mapping[str, EffectsOfArms], *arms: ArmTables) -> Qualified:
    return Qualified(parts(**{part: qualified(effect(*arms)).table for part, effect in effects.items()}))


def _in_each(key: str, effect: EffectsOfArms, *arms: ArmTables) -> Qualified:
    """The effects of the arms with each value of a key, as parts named by the value."""
    groups: dict[str, list[ArmTables]] = {}
    for arm in arms:
        groups.setdefault(str(arm.setting(key)), []).append(arm)
    return _in_parts({name: lambda group=group: effect(*group) for name, group in groups.items()})


def _exceeding(control: EffectsOfArms, bound: float, *arms: ArmTables) -> Qualified:
    return exceeds(qualified(control(*arms)).table, bound)


def _with(
    effect: EffectsOfArms, control: EffectsOfArms | None, resolution: float | None, *arms: ArmTables
) -> Qualified:
    made = qualified(effect(*arms))
    if resolution is not None:
        made = made._replace(resolution=resolution)
    return made._replace(control=qualified(control(*arms))) if control else made
