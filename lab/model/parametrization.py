"""How initial scale and learning rate follow a weight's role and the model's width."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lab.fields import bounded
from lab.registry import PARAMETRIZATIONS


class Role(StrEnum):
    """What a weight does; every weight has exactly one role."""

    EMBEDDING = "embedding"
    MATRIX = "matrix"
    READOUT = "readout"
    GAIN = "gain"


@dataclass(frozen=True)
class Factors:
    """Standard deviation at initialization (a gain has none: it starts at one), and what multiplies the peak LR."""

    init_std: float
    lr: float = 1.0


def _init_std(role: Role, fan_in: int) -> float:
    return 0.0 if role is Role.GAIN else fan_in**-0.5


@PARAMETRIZATIONS.register("standard")
@dataclass(frozen=True)
class Standard:
    """The same learning rate for every weight, std 1/sqrt(fan_in) (Wortsman et al. 2023, sec. 2.1)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """Factors of a weight with this role; an embedding's ``fan_in`` is the width."""
        return Factors(_init_std(role, fan_in))


@PARAMETRIZATIONS.register("mup_simple")
@dataclass(frozen=True)
class MuPSimple:
    """Learning rate of linear layers, head included, times base fan-in / fan-in (Wortsman et al. 2023, sec. 3.2.4)."""

    base_width: int = bounded(above=0)

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """As standard, but for the LR; every fan-in is a multiple of the width, so base/fan-in is base/width."""
        linear = role in (Role.MATRIX, Role.READOUT)
        return Factors(_init_std(role, fan_in), lr=self.base_width / width if linear else 1.0)
