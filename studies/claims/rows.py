"""Claims as rows, read from the ``claims.yaml`` of a study: fields in YAML, functions of arms in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.core import shipped
from lab.core.errors import RequestError, nearest
from studies.claims import effects as effects_of_library
from studies.claims import evidence as arms_of_library
from studies.claims.decision import ABOVE_ZERO
from studies.claims.effects import EffectsOfArms, Qualified, exceeds, parts, qualified
from studies.claims.evidence import ArmTables, Config
from studies.claims.public_claims import PublicClaim
from studies.claims.verdicts import KINDS, PLAIN, SOURCES, WIDTH, ChooseArms, Claim, Presumption

Named = Mapping[str, Any]  # functions and presumptions by their names
_orders = count()


@dataclass(frozen=True)
class RowEffects:
    """The effects of a claim, as its row states them.

    Attributes:
        effects: the effect, or an effect for each part by its name.
        control: an effect that must lie above zero, or above ``above``; None without one.
        each: a key; effects and control are computed of the arms with each of its values, as parts named by the value.
        resolution: of the effects, in their unit; None if they know it.
    """

    effects: EffectsOfArms | Mapping[str, EffectsOfArms]
    control: EffectsOfArms | None = None
    above: float | None = None
    each: str = ""
    resolution: float | None = None

    def __call__(self, *arms: ArmTables) -> Qualified:
        """Compute them, with the control."""
        effects = self._in_each(self._effects, arms)
        if self.resolution is not None:
            effects = effects._replace(resolution=self.resolution)
        if self.control is None:
            return effects
        control = self._in_each(self.control, arms)
        return effects._replace(control=control if self.above is None else exceeds(control.table, self.above))

    def _effects(self, *arms: ArmTables) -> Qualified:
        if not isinstance(self.effects, Mapping):
            return qualified(self.effects(*arms))
        return Qualified(parts(**{part: qualified(effect(*arms)).table for part, effect in self.effects.items()}))

    def _in_each(self, effect: EffectsOfArms, arms: tuple[ArmTables, ...]) -> Qualified:
        if not self.each:
            return qualified(effect(*arms))
        groups: dict[str, list[ArmTables]] = {}
        for arm in arms:
            groups.setdefault(str(arm.setting(self.each)), []).append(arm)
        return Qualified(parts(**{value: qualified(effect(*group)).table for value, group in groups.items()}))


def read_claims(path: Path, of_study: Sequence[ModuleType]) -> Iterator[Claim | PublicClaim]:
    """Read the claims of a file: a list of blocks, each with fields that its claims share, and ``claims`` by name.

    A row has the attributes of ``Claim``, except those that are made from the following fields:

    - ``arms``: a config for each arm, or ``{NAME: ARGUMENTS}`` of a function that picks them; by default one arm of all
      curves.
    - ``effect``: ``{NAME: ARGUMENTS}`` of an effect; or ``parts``, several effects by name.
    - ``control``: as ``effect``, with ``above`` if it must exceed another bound than zero.
    - ``each`` and ``resolution``, see ``RowEffects``.
    - ``presumes``: the name of a ``Presumption``.

    A row that says ``runs_of`` has the attributes of ``PublicClaim``, with ``effect`` as above; what it is measured in
    is what ``read`` of the study's module gives.

    Args:
        path: the file.
        of_study: modules with the functions and presumptions of the study, besides the library's.

    Raises:
        RequestError: a row has an unknown field, or names an unknown function, argument, sweep, source or kind.
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
            row = {**shared, **row}
            try:
                yield _public_claim(name, row, known, of_study) if "runs_of" in row else _claim(name, row, known)
            except (TypeError, ValueError) as error:
                raise RequestError(f"{path}: {name}: {error}") from None


def _claim(name: str, row: dict[str, Any], known: Named) -> Claim:
    effects, arms = _effects(row, known), _arms(row.pop("arms", [{}]), known)
    own_frees = row.pop("frees", ())
    frees = (WIDTH, *own_frees)
    plain = {key: value for key, value in PLAIN.items() if key not in frees}
    claim = Claim(
        name=name,
        arms=arms,
        effects=effects,
        order=next(_orders),
        frees=frees,
        cause=tuple(row.pop("cause", own_frees or [WIDTH])),
        holds={**plain, **_checked(row.pop("holds", {}))},
        side=tuple(row.pop("side", ABOVE_ZERO)),
        presumes=_get("presumption", row.pop("presumes"), known) if "presumes" in row else None,
        affirms=tuple(row.pop("affirms", ())),
        denies=tuple(row.pop("denies", ())),
        **row,
    )
    sweeps = shipped.sweeps()
    for sweep in (claim.sweep, *claim.affirms, *claim.denies):
        _get("sweep", sweep, sweeps)
    _get("source", claim.source, dict.fromkeys(SOURCES))
    _get("kind", claim.kind, dict.fromkeys(KINDS))
    return claim


def _public_claim(name: str, row: dict[str, Any], known: Named, of_study: Sequence[ModuleType]) -> PublicClaim:
    (read,) = (vars(module)["read"] for module in of_study)
    effect, side = _effect(row.pop("effect", ""), known), row.pop("side", ABOVE_ZERO)
    return PublicClaim(name=name, read=read, effect=effect, side=tuple(side), **row)


def _get(kind: str, name: str, known: Named) -> Any:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; {nearest(str(name), list(known))}")
    return known[name]


def _checked(config: Config) -> Config:
    for key, value in config.items():
        if isinstance(value, bool):
            raise ValueError(f'{key}: YAML reads on and off as truth values; write "on"')
    return config


def _arms(spec: Any, known: Named) -> ChooseArms:
    """Picks a config for each arm, or calls the named function, from curves that differ in the keys a claim frees."""
    if isinstance(spec, list):
        configs = list(map(_checked, spec))
        return lambda group: group.arms(*configs)
    name, arguments = _split(spec)
    pick, arguments = _get("choice of arms", name, known), arguments if isinstance(arguments, list) else [arguments]
    inspect.signature(pick).bind(None, *arguments)
    return lambda group: list(pick(group, *arguments))


def _split(spec: Any) -> tuple[str, Any]:
    """The name and the arguments of ``name`` or ``{name: arguments}``."""
    ((name, arguments),) = [(spec, [])] if isinstance(spec, str) else spec.items()
    return name, arguments


def _effects(row: dict[str, Any], known: Named) -> RowEffects:
    effect, several, control = (row.pop(field, None) for field in ("effect", "parts", "control"))
    above = None
    if isinstance(control, dict):
        above = control.get("above")
        control = {key: value for key, value in control.items() if key != "above"}
    return RowEffects(
        {part: _effect(spec, known) for part, spec in several.items()} if several else _effect(effect or "", known),
        control=control and _effect(control, known),
        above=above,
        each=row.pop("each", ""),
        resolution=row.pop("resolution", None),
    )


def _effect(spec: Any, known: Named) -> Callable[..., Any]:
    name, arguments = _split(spec)
    function, arguments = _get("effect", name, known), dict(arguments)
    inspect.signature(function).bind_partial(**arguments)
    return partial(function, **arguments)
