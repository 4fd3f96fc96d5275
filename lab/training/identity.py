"""What a run is known by: the columns of its config, its id, and which runs may share a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lab.core import files
from lab.core.schema import leaves
from lab.records import store
from lab.training.config import OPTIONAL, SPIKE_LAB, RunConfig

# Keys without a column: names of other columns, and how a run was saved and split among ranks, which its id ignores.
NO_COLUMN = ("optimizer.owned", "ranks", "checkpoint.steps", "checkpoint.minutes", "checkpoint.keep")

Rows = Mapping[str, tuple[Any, bool]]  # by dotted config key: a value, and whether it may differ inside a fleet


def _rows(config: RunConfig) -> Rows:
    """Every value of the config that has a column."""
    owned = config.optimizer.owned
    named = ((_column(key, owned), value, varies) for key, value, varies in leaves(config))
    rows = {column: (value, varies) for column, value, varies in named if column}
    for group in OPTIONAL:
        if getattr(config, group) is None:
            del rows[group]
    for group in SPIKE_LAB:  # a column of its own name says which it is
        rows.pop(f"{group}.name", None)
    rows.pop("ledger.restarts", None)  # they follow from its entries
    rows["optimizer.chain"] = (tuple(config.optimizer.links), False)
    # absent, so that ids of runs from before these keys do not depend on them
    if config.validation == "whole":
        del rows["validation"]
    if config.master_weights == "fp32":
        del rows["master_weights"]
    if config.schedule.over == "steps":
        del rows["schedule.over"]
    if "burst.repeats" in rows and rows["burst.repeats"][0] == 1:
        del rows["burst.repeats"]
    return rows


@cache
def _column(key: str, owned: Sequence[str]) -> str | None:
    """The column of a leaf, given the keys that links of the optimizer own; None if it has none."""
    key = key.replace(".entry.", ".")
    if key.startswith("optimizer.links."):
        field = key.removeprefix("optimizer.links.")
        key = f"optimizer.{field if field in owned else field.partition('.')[2]}"
    return None if key in NO_COLUMN or key.startswith("tracker.") else key


def _columns(config: RunConfig, rows: Rows) -> dict[str, Any]:
    flat = {key: "+".join(value) if isinstance(value, tuple) else value for key, (value, _) in rows.items()}
    names = {"intervention": "+".join(sorted(config.intervention)) or "none", **_spike_lab(config)}
    return {**flat, **names, **_custom_model(config)}


def _spike_lab(config: RunConfig) -> dict[str, str]:
    """Names of the burst, the response and the ledger, or ``none``."""
    entries = {group: getattr(config, group) for group in SPIKE_LAB}
    return {group: entry.name if entry else "none" for group, entry in entries.items()}


def columns(config: RunConfig) -> dict[str, Any]:
    """Return one run's config as the columns of its record: dotted keys, lists joined with ``+``; and its tokens."""
    return {**_columns(config, _rows(config)), "tokens": config.trained_tokens}


def _custom_model(config: RunConfig) -> dict[str, str]:
    """The column with the custom model's name; absent without one, so that ids of other runs do not depend on it."""
    return {"guest": next(iter(config.guest))} if config.guest else {}


def _static_key(config: RunConfig, rows: Rows) -> str:
    labels = ("out", "model.name", "scale.name")
    shared = {key: value for key, (value, varies) in rows.items() if not varies and key not in labels}
    present = {group: name for group, name in _spike_lab(config).items() if name != "none"}
    return files.digest({**shared, "intervention": sorted(config.intervention), **present, **_custom_model(config)})


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
