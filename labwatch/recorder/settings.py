"""What optimizers are told: the numbers of each of their groups of weights, which are written where they change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labwatch.recorder.parts import Parts
from labwatch.recordings.recording import DECAYS, OF_PARTS, SETTINGS, STATES_LOST, SWITCHES, UPDATES

CLIPPING = "clipping"  # the name under which ``MAX_NORM`` stands beside the groups
USUAL = {**dict.fromkeys(SWITCHES, 0), STATES_LOST: 0, UPDATES: 1}  # which are written where they differ alone
SMALLEST = 1e-30  # the logarithm of zero is that of it
# A number jumps from one update to the next if it changes by more than this factor, or if what a decay leaves to the
# next number does. Smaller changes, those of a schedule, are written at the next update that is measured.
JUMP = 1.5


class Settings:
    """The numbers of all groups at each update, of which those around a jump and of measured updates are written.

    A hook reads them just before the update, since a loop may step its schedules before or after it.

    Attributes:
        is_measured: whether the next update is; of others no tensor is read, since the device would be waited for.
        travelled: by optimizer and group the sum of the rates of all updates, see ``rate``.
        decayed: in the same way the sum of the logarithms of what a second moment keeps in each update.
        updates: by optimizer how many updates there were, with the one that is being made.
    """

    def __init__(self, model: nn.Module, parts: Parts, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.where = {id(weight): parts.where[name] for name, weight in model.named_parameters()}
        self.is_measured = False
        self.travelled, self.decayed = (defaultdict[tuple[int, int], float](float) for _ in range(2))
        self.updates, self.updates_before = defaultdict[int, int](int), dict[int, int]()
        self.has_state = defaultdict[int, set[int]](set)
        self.before, self.now, self.told = (dict[str, dict[str, Any]]() for _ in range(3))
        self.kept = defaultdict[int, dict[str, dict[str, Any]]](dict)
        self.hooks = ExitStack()
        for number, optimizer in enumerate(optimizers):
            self.hooks.callback(optimizer.register_step_pre_hook(partial(self._read, number)).remove)

    def _read(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.updates[number] += 1
        for index, group in enumerate(optimizer.param_groups):
            name = f"{number}.{index}"
            of = self.before[name][OF_PARTS] if name in self.before else self._parts(group)
            self.now[name] = {OF_PARTS: of} | dict(_numbers(group, optimizer.defaults, self.is_measured))
            self.travelled[number, index] += rate(group)
            self.decayed[number, index] += log_kept(group) or 0.0
            weights = {id(weight) for weight in group["params"]}
            has_state = {id(weight) for weight in group["params"] if optimizer.state.get(weight)}
            self.now[name][STATES_LOST] = len(self.has_state[number] & weights - has_state)
            self.has_state[number] = self.has_state[number] - weights | has_state

    def _parts(self, group: Mapping[str, Any]) -> list[str]:
        return sorted({self.where[id(weight)] for weight in group["params"] if id(weight) in self.where})

    def end_of_update(self, step: int) -> None:
        """Keep the numbers that have jumped since the update before, with those before; at a measured update all."""
        for name, now in self.now.items():
            if name != CLIPPING:
                number = int(name.partition(".")[0])
                now = self.now[name] = now | {UPDATES: self.updates[number] - self.updates_before.get(number, 0)}
            before = self.before.get(name, now) if name != CLIPPING else now  # which is read at measured updates alone
            jumped = {
                key: [before[key], now[key]] for key in now if key in before and _jumps(key, before[key], now[key])
            }
            if jumped or self.is_measured:
                self.kept[step][name] = (now if self.is_measured else {}) | jumped
            self.before[name] = now
        self.updates_before = dict(self.updates)

    def add_to(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add to each row what was kept of its update and differs from what was written before."""
        for row in rows:
            news = dict[str, dict[str, Any]]()
            for name, numbers in self.kept.pop(row["step"], {}).items():
                told = self.told.setdefault(name, {})
                if changed := {key: value for key, value in numbers.items() if told.get(key, USUAL.get(key)) != value}:
                    news[name] = changed
                    told |= {key: value[1] if _is_pair(key, value) else value for key, value in changed.items()}
            if news:
                row[SETTINGS] = news


def rate(group: Mapping[str, Any]) -> float:
    """The learning rate, or one of a group that has none, or whose rate is on a device."""
    return group["lr"] if isinstance(group.get("lr"), int | float) else 1.0


def log_kept(group: Mapping[str, Any]) -> float | None:
    """The logarithm of what a second moment keeps in an update, Adam's beta2 or RMSprop's alpha; None of others."""
    betas = group.get("betas", (0.0, group.get("alpha")))
    return math.log(max(float(betas[1]), SMALLEST)) if len(betas) == 2 and betas[1] is not None else None


def _numbers(group: Mapping[str, Any], settings: Mapping[str, Any], is_measured: bool) -> Iterator[tuple[str, float]]:
    """The numbers among the settings of an optimizer, those of a pair as ``NAME1`` and ``NAME2``."""
    for key in settings:
        value = group.get(key)
        if isinstance(value, Tensor) and value.numel() == 1 and is_measured:
            value = value.item()
        of = dict(enumerate(value, 1)) if isinstance(value, tuple | list) else {"": value}
        for number, each in of.items():
            if isinstance(each, int | float) and (key in SWITCHES or not isinstance(each, bool)):
                yield f"{key.removesuffix('s') if number else key}{number}", int(each) if key in SWITCHES else each


def _is_pair(key: str, value: Any) -> bool:
    """Whether it is a number before a jump and the one after it."""
    return isinstance(value, list) and key != OF_PARTS


def _jumps(key: str, before: Any, now: Any) -> bool:
    if key == OF_PARTS or before == now:
        return False
    pairs = [(before, now), *([(1 - before, 1 - now)] if key.startswith(DECAYS) else [])]
    return any(not (1 / JUMP < a / b < JUMP if b else a == b) for a, b in pairs)
