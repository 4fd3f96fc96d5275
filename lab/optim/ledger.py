"""Ledgers: restarts of a run by hand, each at a step and with other numbers of the optimizer from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lab.core.errors import RequestError, nearest
from lab.optim.optimizer import Optimizer, build_optimizer

KEYS = ("name", "restarts")


@dataclass(frozen=True)
class Ledger:
    """Restarts of a run, in the order of their steps.

    Weights, moments and the position in the data go on bit for bit; only what an entry declares changes.

    Attributes:
        name: of the ledger.
        entries: what each restart declares: ``120: optimizer.lr=0.005 optimizer.clip=0.3``.
        optimizers: by step, the optimizer from that update on.
    """

    name: str
    entries: tuple[str, ...]
    optimizers: tuple[tuple[int, Optimizer], ...]


def build_ledger(values: Any, optimizer: Mapping[str, Any], steps: int) -> Ledger:
    """The ledger of a run with so many steps, from plain values.

    Args:
        values: ``name``, and ``restarts``, a list of mappings with ``step`` (below 1, a share of the steps) and dotted
            keys of the optimizer, which take their values for the rest of the run.
        optimizer: plain values of the optimizer before the first restart.
        steps: of the run.

    Raises:
        RequestError: an unknown or missing key, a value that the optimizer refuses, or a step out of order.
    """
    if not isinstance(values, Mapping) or unknown_key(values):
        key = unknown_key(values) if isinstance(values, Mapping) else str(values)
        raise RequestError(f"unknown key 'ledger.{key}'; {nearest(key, KEYS)}")
    restarts = values.get("restarts")
    if "name" not in values or not isinstance(restarts, Sequence) or isinstance(restarts, str) or not restarts:
        raise RequestError("ledger must have a name and a list of restarts, such as {step: 100, optimizer.lr: 1e-3}")
    entries, optimizers, present, before = list[str](), list[tuple[int, Optimizer]](), dict(optimizer), 0
    for number, restart in enumerate(restarts):
        where = f"ledger.restarts[{number}]"
        step = _step(restart, where, before, steps)
        changes = {key: value for key, value in restart.items() if key != "step"}
        _check_keys(changes, optimizer, where)
        present |= {key.removeprefix("optimizer."): value for key, value in changes.items()}
        optimizers.append((step, build_optimizer(present)))
        entries.append(f"{step}: {' '.join(f'{key}={value:.6g}' for key, value in changes.items())}")
        before = step
    return Ledger(str(values["name"]), tuple(entries), tuple(optimizers))


def unknown_key(values: Mapping[Any, Any]) -> str:
    """The first key that no ledger has; empty if there is none."""
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


def _check_keys(changes: Mapping[Any, Any], optimizer: Mapping[str, Any], where: str) -> None:
    numbers = [f"optimizer.{key}" for key, value in optimizer.items() if _is_number(value)]
    if not changes:
        raise RequestError(f"{where} changes nothing; known: {', '.join(numbers)}")
    for key, value in changes.items():
        if key not in numbers:
            raise RequestError(f"unknown key '{key}' in {where}; {nearest(str(key), numbers)}")
        if not _is_number(value):
            raise RequestError(f"{where}: {key} must be a number, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
