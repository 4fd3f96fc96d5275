"""The identity of a run: the columns of its config, its id, and which runs may share a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lab.core import files, shipped
from lab.core.hooks import non_alphabetical_orders
from lab.core.schema import recorded
from lab.model.low_precision import PRECISIONS as LOW_PRECISIONS
from lab.records import store
from lab.training.building import hook_interventions
from lab.training.config import RunConfig

FIRST: Mapping[str, Sequence[str]] = shipped.load(Path(__file__).with_suffix(".yaml"))

Rows = Mapping[str, tuple[Any, bool]]  # by dotted config key: a value, and whether it may differ inside a fleet


def _rows(config: RunConfig) -> Rows:
    """Every value of the config that has a column."""
    owned = config.optimizer.owned
    named = ((_column(key, owned), value, varies) for key, value, varies in recorded(config, _is_first))
    rows = {column: (value, varies) for column, value, varies in named if column}
    for group in store.SPIKE_LAB:  # a column of its own name says which it is
        rows.pop(f"{group}.name", None)
    if config.restarts is not None:  # what runs of a fleet share of it is in the static key
        del rows["restarts.restarts"]  # they follow from its entries
        rows[store.ENTRIES] = (config.restarts.entries, True)
    if config.precision not in LOW_PRECISIONS:  # attention has the precision of all else
        rows.pop("attention_precision", None)
    rows["optimizer.chain"] = (tuple(config.optimizer.links), False)
    return rows


@cache
def _is_first(key: str) -> bool:
    """Whether a dotted key, such as ``data.entry.seed``, is among ``FIRST``."""
    group, _, name = key.replace(".entry.", ".").partition(".")
    return name in FIRST.get(group, ())


@cache
def _column(key: str, owned: Sequence[str]) -> str | None:
    """The column of a leaf, given the keys that links of the optimizer own; None for what a role has as all others."""
    key = key.replace(".entry.", ".")
    if key.startswith("optimizer.links."):
        field = key.removeprefix("optimizer.links.")
        key = f"optimizer.{field if field in owned else field.partition('.')[2]}"
    if key.startswith("optimizer.by_role."):
        role, _, name = key.removeprefix("optimizer.by_role.").split(".")
        if f"{role}.{name}" not in owned:  # as for all roles
            return None
        key = f"optimizer.{role}.{name}"
    return "recipe" if key == "recipe.name" else key


def _columns(config: RunConfig, rows: Rows) -> dict[str, Any]:
    flat = {key: "+".join(value) if isinstance(value, tuple) else value for key, (value, _) in rows.items()}
    names = {"intervention": "+".join(sorted(config.intervention)) or "none", **_spike_lab(config)}
    # in which interventions act, before and after restarts, where these are not alphabetical
    orders = set().union(*(non_alphabetical_orders(hook_interventions(phase)) for phase in config.phases))
    order = {store.ORDER: ", ".join(sorted(orders))} if orders else {}
    return {**flat, **names, **order, **_custom_model(config)}


def _spike_lab(config: RunConfig) -> dict[str, str]:
    """Names of the burst, the response and the restart schedule, or ``none``."""
    entries = {group: getattr(config, group) for group in store.SPIKE_LAB}
    return {group: entry.name if entry else "none" for group, entry in entries.items()}


def columns(config: RunConfig) -> dict[str, Any]:
    """Return one run's config as the columns of its record: dotted keys, lists joined with ``+``; and its tokens."""
    return {**_columns(config, _rows(config)), "tokens": config.trained_tokens}


def _custom_model(config: RunConfig) -> dict[str, str]:
    """The column with the custom model's name; absent without one, so that ids of other runs do not depend on it."""
    return {"custom_model": next(iter(config.custom_model))} if config.custom_model else {}


def _static_key(config: RunConfig, rows: Rows) -> str:
    restarts = config.restarts.restarts if config.restarts else ()
    after = [
        (restart.step, _shared(phase, _rows(phase))) for restart, phase in zip(restarts, config.phases[1:], strict=True)
    ]
    return files.digest({**_shared(config, rows), **({"restarts": after} if after else {})})


def _shared(config: RunConfig, rows: Rows) -> dict[str, Any]:
    """Settings that may not differ inside a fleet, between two restarts."""
    labels = ("out", "model.name", "scale.name", "recipe")
    shared = {key: value for key, (value, varies) in rows.items() if not varies and key not in labels}
    present = {group: name for group, name in _spike_lab(config).items() if name != "none"}
    links = {role: sorted(links) for role, links in config.optimizer.by_role.items()}
    roles = {"optimizer.by_role": links} if links else {}  # which links have numbers of a role, as stacking needs
    return {**shared, "intervention": sorted(config.intervention), **present, **_custom_model(config), **roles}


def updates_in_lockstep(config: RunConfig) -> bool:
    """Whether all runs of a fleet make one step: none leaves out updates while a restart changes what they share."""
    if config.loss_scale is None or config.restarts is None:
        return True
    first, *others = [_shared(phase, _rows(phase)) for phase in config.phases]
    return all(other == first for other in others)


def static_key(config: RunConfig) -> str:
    """Digest the settings that may not differ inside a fleet; runs with equal keys have the same shapes."""
    return _static_key(config, _rows(config))


def differs_in_fleet(config: RunConfig, column: str) -> bool:
    """Whether runs that share a fleet may differ in this column."""
    return _rows(config).get(column, (None, False))[1]


def run_id(config: RunConfig, fingerprint: str) -> str:
    """Return the id of the run with this config, on data with this fingerprint."""
    return store.run_id({**columns(config), "data_fingerprint": fingerprint})


def identify(config: RunConfig, fingerprint: str) -> tuple[str, str]:
    """Return ``run_id`` and ``static_key``, for less than both take."""
    rows = _rows(config)
    return store.run_id({**_columns(config, rows), "data_fingerprint": fingerprint}), _static_key(config, rows)
