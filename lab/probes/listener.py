"""Registration of probes, the steps at which they fire, and the listener that evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.core.hooks import Measure, Probe
from lab.core.machine import is_out_of_memory
from lab.core.registry import PROBES
from lab.core.schema import bounded


def probe(hears: str) -> Callable[[Measure], Measure]:
    """Register a function as the probe of its own name."""

    def file(measure: Measure) -> Measure:
        name = measure.__name__
        PROBES.register(name)(Probe(name, hears, measure))
        return measure

    return file


@dataclass(frozen=True)
class ProbesConfig:
    """Which probes listen, and every how many steps."""

    name: str
    every: int = bounded(at_least=1)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.names:
            PROBES[name]

    def fires(self, step: int, steps: int) -> bool:
        """Whether probes listen at ``step``: the first, every ``every``-th, the last; never without probes."""
        return bool(self.names) and (step % self.every == 0 or step == steps - 1)


class Listener:
    """Evaluates the named probes on the announcements of one step: values ``[r]`` by (probe, where).

    A probe that raises is silent at this step and in every listener with the same ``faults``, which say why, by name.
    """

    def __init__(self, names: Iterable[str], faults: dict[str, str] | None = None) -> None:
        self.probe_values: dict[tuple[str, str], Tensor] = {}
        self.faults = {} if faults is None else faults
        self._by_kind: dict[str, list[Probe]] = {}
        for name in sorted(names):
            self._by_kind.setdefault(PROBES[name].hears, []).append(PROBES[name])

    def hears(self, kind: str) -> bool:
        """Whether any of its probes listens to this kind."""
        return kind in self._by_kind

    @torch.no_grad()
    def __call__(self, kind: str, where: str, *announced: Any) -> None:
        for each in self._by_kind.get(kind, ()):
            if each.name in self.faults:
                continue
            try:
                value = each.measure(*announced)
                values = dict(value) if isinstance(value, Mapping) else {where: value.clone()}
                self.probe_values |= {(each.name, name): number_r for name, number_r in values.items()}
            except Exception as fault:  # the run goes on without the probe
                if is_out_of_memory(fault):
                    raise
                message = f"{type(fault).__name__}: {fault}".split("\n")[0]
                self.faults[each.name] = f"probe {each.name} is silent, having raised {message}"
                self.probe_values = {key: value_r for key, value_r in self.probe_values.items() if key[0] != each.name}
