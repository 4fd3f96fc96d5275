"""The optimizer: links chained from gradient to update, their order checked, their numbers read from a config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lab.core.axes import select_per_run
from lab.core.errors import RequestError, nearest
from lab.core.hooks import announce, listening_too
from lab.core.registry import LINKS
from lab.core.roles import TUNABLE_ROLES, Role, numbered_as
from lab.core.schema import UNRECORDED, build, text_value
from lab.core.shipped import optimizer_numbers
from lab.optim.links import Link, Now, Tensors
from lab.optim.links.clipping import Gate


@dataclass(frozen=True)
class Optimizer:
    """Links by name, in the order they act (dicts keep it); the order alone tells coupled from independent decay.

    Attributes:
        by_role: links with other numbers for tensors of a role, by role and by name of the link.
        owned: the numbers that not all have in common: ``LINK.KEY`` of a link, ``ROLE.KEY`` of a role.
    """

    name: str
    links: Mapping[str, Link]
    owned: tuple[str, ...] = field(default=(), metadata=UNRECORDED)
    by_role: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)

    @property
    def lr(self) -> Any:
        """Peak learning rate: a float, or ``[r]`` once stacked."""
        return self.links["peak"].lr  # type: ignore[attr-defined]

    def links_of(self, role: str | None) -> dict[str, Link]:
        """The links that act on tensors of a role, with its numbers; None stands for roles that are not known."""
        own = self.by_role.get(numbered_as(role), {}) if role else {}
        return {name: own.get(name, self.links[name]) for name in acting_on(role, self.links)}

    def lr_of(self, role: str | None) -> Any:
        """Peak learning rate of tensors with a role, without the parametrization's multiplier."""
        links = self.links_of(role)
        return links["peak"].lr * getattr(links.get("lr_factor"), "lr_factor", 1.0)  # type: ignore[attr-defined]

    def with_number(self, key: str, value: float) -> Optimizer:
        """The same optimizer with another number in every link that has a field of this name."""

        def changed(links: Mapping[str, Link]) -> dict[str, Link]:
            return {
                name: replace(link, **{key: value}) if key in _keys(link) else link  # type: ignore[type-var]
                for name, link in links.items()
            }

        by_role = {role: changed(links) for role, links in self.by_role.items()}
        return replace(self, links=changed(self.links), by_role=by_role)

    def begin(self, weights: Mapping[str, Tensor], roles: Mapping[str, str] | None = None) -> dict[str, Tensors]:
        """Fresh state of every link."""
        return {name: self.begin_link(name, weights, roles or {}) for name in self.links}

    def begin_link(self, name: str, weights: Mapping[str, Tensor], roles: Mapping[str, str]) -> Tensors:
        """Fresh state of one link; of each role with numbers of its own under ``ROLE/``."""
        state: Tensors = {}
        for group, link, names in self._parts(name, weights, roles, self._links_by_role(roles)):
            fresh = link.begin({weight: weights[weight] for weight in names})
            state |= {f"{group}/{key}" if group else key: tensor for key, tensor in fresh.items()}
        return state

    def _links_by_role(self, roles: Mapping[str, str]) -> dict[str | None, dict[str, Link]]:
        return {role: self.links_of(role) for role in {None, *roles.values()}}

    def _parts(
        self,
        name: str,
        tensors: Iterable[str],
        roles: Mapping[str, str],
        by_role: Mapping[str | None, Mapping[str, Link]],
    ) -> Iterator[tuple[str, Link, list[str]]]:
        """A link and the tensors it acts on, in their order; then the same for each role with numbers of its own."""
        parts: dict[str, tuple[Link, list[str]]] = {}
        for weight in tensors:
            role = roles.get(weight)
            if link := by_role[role].get(name):
                group = numbered_as(role) if role and name in self.by_role.get(numbered_as(role), {}) else ""
                parts.setdefault(group, (link, []))[1].append(weight)
        for group in sorted(parts):
            yield group, *parts[group]

    def evaluated(self, state: Mapping[str, Tensors]) -> Tensors:
        """Weights that are evaluated in place of those that are trained, by name."""
        averages: Tensors = {}
        for name, link in self.links.items():
            averages |= link.evaluated(state[name])
            for role in self.by_role:
                averages |= link.evaluated(_of_role(role, state[name]))
        return averages

    @contextmanager
    def measuring(self) -> Iterator[dict[str, Tensors]]:
        """Yield what links make of the announcements within the block, by link and hook point."""
        measured: dict[str, Tensors] = {name: {} for name, link in self.links.items() if link.events}

        @torch.no_grad()
        def measure(kind: str, where: str, *announced: Any) -> None:
            for name, link in self.links.items():
                if kind in link.events:
                    measured[name][where] = link.observe(*announced)

        with listening_too(measure, {kind for link in self.links.values() for kind in link.events}):
            yield measured

    @torch.no_grad()
    def step(
        self,
        gradients: Tensors,
        state: dict[str, Tensors],
        now: Now,
        measured: Mapping[str, Tensors] | None = None,
    ) -> None:
        """Update the weights in place; announce the gradients, before and after clipping, weights and direction.

        Args:
            gradients: of the trained weights.
            state: of the links, from ``begin``, changed in place.
            now: the state of training.
            measured: what ``measuring`` yielded during the forward pass.
        """
        announce("gradients", "", gradients)
        announce("parameters", "", now.weights)
        announce(
            "gains", "", {name: weight for name, weight in now.weights.items() if now.roles.get(name) == Role.GAIN}
        )
        updates, now = dict(gradients), replace(now, gradients=gradients)
        by_role = self._links_by_role(now.roles)
        pending, is_clipped = set(gradients), False  # tensors whose update is no direction yet
        gates = [name for name, link in self.links.items() if isinstance(link, Gate)]
        before = {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in state.items()
            if gates and name in self.links and name not in gates
        }
        for name, link in self.links.items():
            if not is_clipped and link.makes not in (None, "gradient"):
                announce("clipped_gradients", "", updates)
                is_clipped = True
            now = replace(now, measured=(measured or {}).get(name, {}))
            for group, part, names in self._parts(name, updates, now.roles, by_role):
                own = _of_role(group, state[name]) if group else state[name]
                updates |= part({weight: updates[weight] for weight in names}, own, now)
                pending -= {*names} if link.makes == "direction" else set()
            if link.makes == "direction" and not pending:
                announce("direction", "", updates)
                if now.held_out:
                    announce("descent", "", updates, now.held_out)
        if gates:
            self._leave_out(gates, updates, state, before)
        for name, weight in now.weights.items():
            weight.sub_(updates[name])

    def _leave_out(
        self, gates: Sequence[str], updates: Tensors, state: dict[str, Tensors], before: dict[str, Tensors]
    ) -> None:
        """Of runs that a gate does not keep, restore the state of links and make no step."""
        kept_r = torch.stack([state[name]["kept"] for name in gates]).amin(0) > 0
        for link, tensors in before.items():
            for name, old in tensors.items():
                state[link][name].copy_(select_per_run(kept_r, state[link][name], old))
        for name, update in updates.items():
            updates[name] = select_per_run(kept_r, update, torch.zeros_like(update))


def _keys(link: Any) -> list[str]:
    """The keys of the numbers that a link, or its class, takes."""
    return [field.name for field in fields(link)]


def _of_role(role: str, state: Tensors) -> Tensors:
    """The part of a link's state that holds the tensors of a role with numbers of its own."""
    return {key.removeprefix(f"{role}/"): tensor for key, tensor in state.items() if key.startswith(f"{role}/")}


def build_optimizer(values: Mapping[str, Any]) -> Optimizer:
    """Make the chain from ``{name, chain, KEY: number ..., LINK: {KEY: number ...} ..., ROLE: {KEY: number ...} ...}``.

    All links with a field KEY share the number of that key, but those that have one of their own under LINK.  Tensors
    of a ROLE take the numbers under it from all links with these fields.  Numbers of the optimizer's own file for links
    that the chain lacks are left out: whoever gives another chain did not ask for them.

    Raises:
        RequestError: an unknown link, links in a wrong order, a number that reaches no link, or a missing number.
    """
    for key in ("name", "chain"):
        if key not in values:
            raise RequestError(f"key 'optimizer.{key}' is missing")
    name, kinds = text_value(values["name"], "optimizer.name"), link_kinds(values["chain"])
    _check_order(kinds)
    numbers = {key: value for key, value in values.items() if key not in ("name", "chain")}
    nested = {key: numbers.pop(key) for key, value in values.items() if isinstance(value, Mapping)}
    of_file, taken = optimizer_numbers(name), {key for kind in kinds.values() for key in _keys(kind)}

    def asked_for(given: Mapping[str, Any], prefix: str = "", is_taken: bool = True) -> dict[str, Any]:
        """The numbers, without the ones of the file that no link takes."""
        return {
            key: value
            for key, value in given.items()
            if (is_taken and key in taken) or of_file.get(f"{prefix}{key}") != value
        }

    numbers = asked_for(numbers)
    nested = {key: asked_for(given, f"{key}.", key in [*kinds, *TUNABLE_ROLES]) for key, given in nested.items()}
    nested = {key: given for key, given in nested.items() if given}
    own = {key: given for key, given in nested.items() if key not in TUNABLE_ROLES}
    of_roles = {role: nested[role] for role in TUNABLE_ROLES if role in nested}
    _check_numbers(kinds, numbers, own)
    links = {link: _build_link(link, kind, numbers, own.get(link, {})) for link, kind in kinds.items()}
    by_role: dict[str, Mapping[str, Link]] = {
        str(role): _build_for(role, kinds, given, numbers, own) for role, given in of_roles.items()
    }
    owned = sorted(f"{group}.{key}" for group, given in nested.items() for key in given)
    return Optimizer(name, links, tuple(owned), by_role)


def _build_for(
    role: str,
    kinds: Mapping[str, Any],
    numbers_of_role: Mapping[str, Any],
    numbers: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
) -> dict[str, Link]:
    """The links that take numbers of a role, with these."""
    keys = {link: [key for key in _keys(kinds[link]) if key in numbers_of_role] for link in acting_on(role, kinds)}
    for key in numbers_of_role:
        takers = [link for link in keys if key in keys[link]]
        if not takers:
            known = [key for link in keys for key in _keys(kinds[link])]
            raise RequestError(f"unknown key 'optimizer.{role}.{key}'; {nearest(key, known)}")
        if whole := [link for link in takers if issubclass(kinds[link], Gate)]:
            raise RequestError(f"'optimizer.{role}.{key}' is a number of {whole[0]}, which acts on whole runs")
    built = dict[str, Link]()
    for link, names in keys.items():
        if names:
            values = {**own.get(link, {}), **{key: numbers_of_role[key] for key in names}}
            built[link] = _build_link(link, kinds[link], numbers, values, f"optimizer.{role}")
    return built


def reached(values: Mapping[str, Any]) -> list[str]:
    """Keys of the numbers that links of the chain share, in the order of the chain."""
    own = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    kinds = link_kinds(values["chain"])
    return list(dict.fromkeys(key for link in kinds for key in _keys(kinds[link]) if key not in own.get(link, ())))


def link_kinds(chain: Any) -> dict[str, Any]:
    """The links' classes by name, in the order of the chain.

    Raises:
        RequestError: it is no list of links, names one twice, or lacks the peak or the schedule.
    """
    links = [str(link) for link in chain] if isinstance(chain, Sequence) and not isinstance(chain, str) else []
    if len(set(links)) != len(links) or not {"peak", "schedule"} <= set(links):
        raise RequestError(f"optimizer.chain must list links, each once, with 'peak' and 'schedule', not {chain!r}")
    return {link: LINKS[link] for link in links}


def acting_on(role: str | None, kinds: Mapping[str, Any]) -> list[str]:
    """Names of the links that act on tensors of a role: those for it that take the kind of update they are given.

    Args:
        role: of the tensors; None for all links, whatever their roles.
        kinds: links, or their classes, by name, in the order of the chain.
    """
    given, names = "gradient", list[str]()
    for name, kind in kinds.items():
        if (role is None or role in kind.roles) and given in kind.takes:
            names.append(name)
            given = kind.makes or given
    return names


def _check_order(kinds: Mapping[str, Any]) -> None:
    """Refuse a chain with a link that acts on no tensor, since it takes no update that it would be given.

    Links that act on some roles only make others pass by, so updates of different roles may be of different kinds.
    """
    acting = {role: acting_on(role, kinds) for role in TUNABLE_ROLES}
    for name, kind in kinds.items():
        if any(name in names for names in acting.values()):
            continue
        role = next(role for role in TUNABLE_ROLES if role in kind.roles)
        before = [link for link in list(kinds)[: list(kinds).index(name)] if link in acting[role]]
        given = next((kinds[link].makes for link in reversed(before) if kinds[link].makes), "gradient")
        expected = " or ".join(f"a {taken}" for taken in kind.takes)
        given_by = f"follows {before[-1]!r}, which makes" if before else f"comes before {list(kinds)[1]!r} and is given"
        raise RequestError(f"optimizer.chain: {name!r} takes {expected}, but {given_by} a {given}")
    for role in TUNABLE_ROLES:
        if missing := [name for name in ("peak", "schedule") if name not in acting[role]]:
            raise RequestError(f"optimizer.chain: {missing[0]!r} does not act on weights of role {role!r}")


def _check_numbers(kinds: Mapping[str, Any], numbers: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse numbers that reach no link."""
    keys = {link: _keys(kind) for link, kind in kinds.items()}
    for link in own:
        if link not in keys:
            raise RequestError(f"optimizer.{link} holds numbers, but is no link of the chain; {nearest(link, keys)}")
    if "lr" in own.get("peak", {}):
        raise RequestError("unknown key 'optimizer.peak.lr'; the peak learning rate is 'optimizer.lr'")
    shared = {key for link in keys for key in keys[link] if key not in own.get(link, {})}
    for key in numbers:
        owners = [link for link in own if key in own[link]]
        if key not in shared and owners:
            raise RequestError(
                f"'optimizer.{key}' reaches no link: only {', '.join(owners)} takes it, and has its own; leave one out"
            )
        if key not in shared:
            raise RequestError(f"unknown key 'optimizer.{key}'; {nearest(key, [*shared, 'chain'])}")


def _build_link(
    name: str, kind: Any, numbers: Mapping[str, Any], own: Mapping[str, Any], where: str | None = None
) -> Link:
    shared = {key: numbers[key] for key in _keys(kind) if key in numbers}
    link: Link = build(kind, {**shared, **own}, where or (f"optimizer.{name}" if own else "optimizer"))
    return link
