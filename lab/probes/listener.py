"""How probes are registered, at which steps they fire, and the listener that evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.core.axes import per_run_mean
from lab.core.hooks import Measure, Probe
from lab.core.machine import is_out_of_memory
from lab.core.registry import PROBES
from lab.core.schema import bounded

Function = TypeVar("Function", bound=Measure)


def probe(event: str, **combined: bool) -> Callable[[Function], Function]:
    """Return a decorator that registers a function, under its own name, as a probe of this kind of announcement.

    How its numbers are ``combined``, such as by ``largest=True``, is said by the other fields of ``Probe``.
    """

    def decorate(measure: Function) -> Function:
        name = measure.__name__
        PROBES.register(name)(Probe(name, event, measure, **combined))
        return measure

    return decorate


def share(is_so_r: Tensor, of_r: Tensor) -> Tensor:
    """Share ``[r]`` of the entries of a tensor where the mask holds; NaN where an entry is not a number."""
    return per_run_mean(torch.where(of_r.isnan(), of_r, is_so_r.to(of_r.dtype)))


@dataclass(frozen=True)
class ProbesConfig:
    """Names of the probes that fire, every ``every`` steps."""

    name: str
    every: int = bounded(at_least=1)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            PROBES[name]

    def fires(self, step: int, steps: int) -> bool:
        """Whether probes fire at ``step``: the first, every ``every``-th and the last of ``steps``."""
        return bool(self.names) and (step % self.every == 0 or step == steps - 1)

    def missing_in(self, every: int, names: Iterable[str], steps: int) -> dict[str, str]:
        """What these probes measure in so many steps and others do not, in words, and the field that asks for it."""
        missing = {name: "names" for name in self.names if name not in {*names}}
        if self.names and self.every % every and any(step % every for step in range(0, steps, self.every)):
            missing[f"values every {self.every} steps"] = "every"
        return missing


class Listener:
    """Evaluates probes on the announcements of one step.

    A probe that raises has no values at this step, and is silent in every listener with the same ``faults``.

    Args:
        names: names of the probes.
        faults: messages of probes that raised, by name; the listener adds to it.

    Attributes:
        probe_values: numbers ``[r]`` by (probe, hook point or name of a tensor).
    """

    def __init__(self, names: Iterable[str], faults: dict[str, str] | None = None) -> None:
        self.probe_values: dict[tuple[str, str], Tensor] = {}
        self.faults = {} if faults is None else faults
        self._by_kind: dict[str, list[Probe]] = {}
        for name in sorted(names):
            self._by_kind.setdefault(PROBES[name].event, []).append(PROBES[name])

    def measures(self, kind: str) -> bool:
        """Whether any of its probes measures announcements of this kind."""
        return kind in self._by_kind

    @torch.no_grad()
    def __call__(self, kind: str, where: str, *announced: Any) -> None:
        probes = self._by_kind.get(kind, ())
        if probes:  # sums of bf16 numbers would be rounded to bf16
            announced = tuple(
                v.float() if isinstance(v, Tensor) and v.dtype is torch.bfloat16 else v for v in announced
            )
        for probe in probes:
            if probe.name in self.faults:
                continue
            try:
                value = probe.measure(*announced)
                values = dict(value) if isinstance(value, Mapping) else {where: value.clone()}
                self.probe_values |= {(probe.name, name): number_r for name, number_r in values.items()}
            except Exception as fault:  # the run goes on without the probe
                if is_out_of_memory(fault):
                    raise
                message = f"{type(fault).__name__}: {fault}".split("\n")[0]
                self.faults[probe.name] = f"probe {probe.name} is silent, having raised {message}"
                self.probe_values = {key: value_r for key, value_r in self.probe_values.items() if key[0] != probe.name}
