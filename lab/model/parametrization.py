"""How initial scale, learning rate and attention scale follow a weight's role and the model's width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from lab.core.registry import PARAMETRIZATIONS
from lab.core.schema import bounded


class Role(StrEnum):
    """What a weight does; every weight has exactly one role."""

    EMBEDDING = "embedding"
    MATRIX = "matrix"
    QUERY = "query"
    READOUT = "readout"
    GAIN = "gain"


LINEAR = (Role.MATRIX, Role.QUERY, Role.READOUT)


@dataclass(frozen=True)
class Factors:
    """Standard deviation at initialization (a gain has none: it starts at one), and what multiplies the peak LR."""

    init_std: float
    lr: float = 1.0


@PARAMETRIZATIONS.register("standard")
@dataclass(frozen=True)
class Standard:
    """The same learning rate for every weight, std 1/sqrt(fan_in) (Wortsman et al. 2023, sec. 2.1)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """Factors of a weight with this role; an embedding's ``fan_in`` is the width."""
        return Factors(0.0 if role is Role.GAIN else fan_in**-0.5)

    def attention_scale(self, head_width: int) -> float:
        """What multiplies the products of queries and keys."""
        return float(head_width**-0.5)


@PARAMETRIZATIONS.register("inverse_head_width")
@dataclass(frozen=True)
class InverseHeadWidth(Standard):
    """As standard, but products of queries and keys times 1/head width (Wortsman et al. 2023, app. E, fig. E.6)."""

    def attention_scale(self, head_width: int) -> float:
        return 1 / head_width


@PARAMETRIZATIONS.register("mup_simple")
@dataclass(frozen=True)
class MuPSimple(Standard):
    """Learning rate of linear layers, head included, times base fan-in / fan-in (Wortsman et al. 2023, sec. 3.2.4)."""

    base_width: int = bounded(above=0)

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """As standard, but for the LR; every fan-in is a multiple of the width, so base/fan-in is base/width."""
        lr = self.base_width / width if role in LINEAR else 1.0
        return replace(super().factors(role, fan_in, width), lr=lr)


@PARAMETRIZATIONS.register("mup_intermediate")
@dataclass(frozen=True)
class MuPIntermediate(MuPSimple):
    """As mup_simple, and the head starts with std sqrt(base fan-in) / fan-in (Wortsman et al. 2023, app. E)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """As simple, but for the head's std: standard's times a number that is exactly one at the base width."""
        simple = super().factors(role, fan_in, width)
        if role is not Role.READOUT:
            return simple
        return replace(simple, init_std=simple.init_std * (self.base_width / width) ** 0.5)


@PARAMETRIZATIONS.register("mup_full")
@dataclass(frozen=True)
class MuPFull(MuPIntermediate):
    """As mup_intermediate, but attention scale 1/head width, and queries from zero (Wortsman et al. 2023, app. E)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """As intermediate, but for the queries."""
        intermediate = super().factors(role, fan_in, width)
        return replace(intermediate, init_std=0.0) if role is Role.QUERY else intermediate

    def attention_scale(self, head_width: int) -> float:
        return 1 / head_width
