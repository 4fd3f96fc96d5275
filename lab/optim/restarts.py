"""Restart schedules: a run restarts at steps, with another optimizer, interventions, schedule or loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple

from lab.core.errors import RequestError, nearest
from lab.core.registry import INTERVENTIONS
from lab.core.roles import TUNABLE_ROLES
from lab.core.schema import key_now
from lab.optim.optimizer import link_kinds, reached

KEYS = ("name", "restarts")
LOSS_SCALE, FRESH = "loss_scale", "fresh"
CHAIN = "optimizer.chain"
GROUPS = ("optimizer", "schedule", "intervention")  # whose keys a restart may change
SWITCH = "intervention.NAME"
SPELLED = {True: "on", False: "off"}

Groups = dict[str, dict[str, Any]]  # plain values of groups by key


class Restart(NamedTuple):
    """One restart of a run.

    Attributes:
        step: updates made before it.
        groups: the groups of the config that differ, from there on, from the groups with which the run began.
        fresh_loss_scale: whether the loss scale begins anew.
    """

    step: int
    groups: Mapping[str, Any]
    fresh_loss_scale: bool


@dataclass(frozen=True)
class RestartSchedule:
    """Restarts of a run, in the order of their steps.

    Weights, the state of links that stay, and the position in the data go on bit for bit; only what an entry declares
    changes.  Links that a restart adds begin with a fresh state.

    Attributes:
        name: of the schedule.
        entries: what each restart declares: ``120: optimizer.lr=0.005 loss_scale=fresh``.
        restarts: the same as a run carries it out.
    """

    name: str
    entries: tuple[str, ...]
    restarts: tuple[Restart, ...]

    @property
    def resets_loss_scale(self) -> bool:
        """Whether a restart does."""
        return any(restart.fresh_loss_scale for restart in self.restarts)


def build_restarts(
    values: Any, tree: Mapping[str, Any], steps: int, build: Callable[[Groups], Mapping[str, Any]]
) -> RestartSchedule:
    """The restart schedule of a run with so many steps, from plain values.

    Args:
        values: ``name``, and ``restarts``, a list of mappings with ``step`` (below 1, a share of the steps) and dotted
            keys, which take their values for the rest of the run: numbers of optimizer, schedule and interventions;
            ``optimizer.chain``, whose links take the numbers that they have fields for; ``intervention.NAME``, on or
            off.  ``loss_scale: fresh`` puts the loss scale back to its initial state.
        tree: plain values of the run before the first restart.
        steps: of the run.
        build: builds groups of the config from plain values, and refuses what does not go with the rest of the run.

    Raises:
        RequestError: an unknown or missing key, a value that ``build`` refuses, or a step out of order.
    """
    if not isinstance(values, Mapping) or unknown_key(values):
        key = unknown_key(values) if isinstance(values, Mapping) else str(values)
        raise RequestError(f"unknown key 'restarts.{key}'; {nearest(key, KEYS)}")
    restarts = values.get("restarts")
    if "name" not in values or not isinstance(restarts, Sequence) or isinstance(restarts, str) or not restarts:
        raise RequestError("restarts must have a name and a list of restarts, such as {step: 100, optimizer.lr: 1e-3}")
    entries, carried_out, before = list[str](), list[Restart](), 0
    present: Groups = {group: dict(tree[group]) for group in GROUPS}
    changed: set[str] = set()
    for number, restart in enumerate(restarts):
        where = f"restarts.restarts[{number}]"
        before = _step(restart, where, before, steps)
        changes = {key_now(str(key)): value for key, value in restart.items() if key != "step"}
        entries.append(f"{before}: {' '.join(f'{key}={_spelled(value)}' for key, value in changes.items())}")
        try:
            _apply(changes, present, tree)
            changed |= {key.partition(".")[0] for key in changes} - {LOSS_SCALE}
            groups = build({group: _of_its_links(present[group], group) for group in GROUPS if group in changed})
        except RequestError as refusal:
            raise RequestError(f"{where}: {refusal}") from None
        carried_out.append(Restart(before, groups, LOSS_SCALE in changes))
    return RestartSchedule(str(values["name"]), tuple(entries), tuple(carried_out))


def _spelled(value: Any) -> str:
    if _is_number(value):
        return f"{value:.6g}"
    return ",".join(map(str, value)) if isinstance(value, list) else SPELLED.get(value, str(value))


def unknown_key(values: Mapping[Any, Any]) -> str:
    """The first key that no restart schedule has; empty if there is none."""
    return next((str(key) for key in values if key not in KEYS), "")


def _step(restart: Any, where: str, before: int, steps: int) -> int:
    given = restart.get("step") if isinstance(restart, Mapping) else None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < steps:
        raise RequestError(
            f"{where}.step must be a step from 1 to {steps - 1}, or a share of the steps below 1, not {given!r}"
        )
    step = max(1, round(float(given) * steps)) if given < 1 else int(given)
    if step != given and given >= 1:
        raise RequestError(f"{where}.step must be a whole number, not {given}")
    if step <= before:
        raise RequestError(f"{where}.step is {step}, not after the restart before it at step {before}")
    return step


def _apply(changes: Mapping[str, Any], present: Groups, tree: Mapping[str, Any]) -> None:
    """Change the groups in place: first the chain and interventions, then the numbers that these have."""
    if CHAIN in changes:
        link_kinds(changes[CHAIN])
        present["optimizer"]["chain"] = changes[CHAIN]
    switches = {f"intervention.{name}": name for name in INTERVENTIONS}
    for key in changes.keys() & switches.keys():
        _switch(switches[key], changes[key], present["intervention"])
    numbers = _numbers(present)
    known = [*numbers, LOSS_SCALE, CHAIN, *switches]
    if not changes:
        raise RequestError(
            f"a restart must change something; known: {', '.join([*numbers, LOSS_SCALE, CHAIN, SWITCH])}"
        )
    for key, value in changes.items():
        if key not in known:
            raise RequestError(_unknown(key, known, tree))
        if key == LOSS_SCALE:
            if value != FRESH:
                raise RequestError(f"{LOSS_SCALE} must be {FRESH}, not {value!r}")
        elif key in numbers:
            if not _is_number(value):
                raise RequestError(f"{key} must be a number, not {value!r}")
            *path, name = key.split(".")
            present[path[0]] = _with_number(present[path[0]], [*path[1:], name], value)


def _switch(name: str, value: Any, interventions: dict[str, Any]) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"intervention.{name} must be on or off, not {value!r}")
    if value:
        interventions.setdefault(name, {})
    elif interventions.pop(name, None) is None:
        raise RequestError(f"intervention.{name} is off already; on: {', '.join(interventions) or 'none'}")


def _numbers(present: Groups) -> list[str]:
    """Keys of the numbers that a restart may set."""
    schedule = [key for key, value in present["schedule"].items() if _is_number(value)]
    interventions = [
        f"{name}.{field.name}" for name in present["intervention"] for field in fields(INTERVENTIONS[name])
    ]
    by_group = {"optimizer": reached(present["optimizer"]), "schedule": schedule, "intervention": interventions}
    return [f"{group}.{key}" for group, keys in by_group.items() for key in keys]


def _unknown(key: str, known: Sequence[str], tree: Mapping[str, Any]) -> str:
    group = key.partition(".")[0]
    if group in tree and group not in GROUPS:
        return f"a restart cannot change {key!r}, only keys of {', '.join(GROUPS)}, and {LOSS_SCALE}"
    if key in GROUPS:
        return f"{key!r} is a group; give keys of it, such as {CHAIN} or {SWITCH}"
    choices = known if group == "intervention" else [*(key for key in known if "intervention" not in key), SWITCH]
    return f"unknown key {key!r}; {nearest(key, choices)}"


def _with_number(values: Mapping[str, Any], path: Sequence[str], number: Any) -> dict[str, Any]:
    """A copy of nested mappings with one number changed."""
    first, *rest = path
    return {**values, first: _with_number(values[first], rest, number) if rest else number}


def _of_its_links(values: dict[str, Any], group: str) -> dict[str, Any]:
    """The group; of the optimizer without numbers that links of an earlier chain took."""
    if group != "optimizer":
        return values
    kept = {"name", "chain", *values["chain"], *TUNABLE_ROLES, *reached(values)}
    return {key: value for key, value in values.items() if key in kept}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
