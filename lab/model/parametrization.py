"""Parametrizations: initial scale, learning rate and attention scale by a weight's role and the model's width.

For width d, base width b, fan-in n and head width k:

==================  ==========================  =================  ===============
parametrization     std at initialization       LR of a linear     attention scale
==================  ==========================  =================  ===============
standard            1/sqrt(n)                   1                  1/sqrt(k)
inverse_head_width  1/sqrt(n)                   1                  1/k
mup_simple          1/sqrt(n)                   b/d                1/sqrt(k)
mup_intermediate    as above; head sqrt(b/d/n)  b/d                1/sqrt(k)
mup_full            as above; queries 0         b/d                1/k
==================  ==========================  =================  ===============

Embeddings and gains have LR multiplier 1 in all of them.  The fan-in of an embedding is d; gains start at one.

References:
    Wortsman et al. 2023, arXiv:2309.14322, sec. 2.1, sec. 3.2.4 and app. E.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lab.core.registry import PARAMETRIZATIONS
from lab.core.roles import LINEAR, Role
from lab.core.schema import bounded


@dataclass(frozen=True)
class Factors:
    """Factors of one weight.

    Attributes:
        init_std: standard deviation at initialization; unused for gains, which start at one.
        lr: multiplier of the peak learning rate.
    """

    init_std: float
    lr: float = 1.0


@PARAMETRIZATIONS.register("standard")
@dataclass(frozen=True)
class Standard:
    """The same learning rate for every weight, std 1/sqrt(fan_in) (Wortsman et al. 2023, sec. 2.1)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """Return the factors of a weight with this role; an embedding's ``fan_in`` is the width."""
        return Factors(0.0 if role is Role.GAIN else fan_in**-0.5)

    def attention_scale(self, head_width: int) -> float:
        """Return the factor that multiplies the products of queries and keys."""
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
        """Return standard's factors but for the LR: fan-ins grow with the width, so base/fan-in is base/width."""
        lr = self.base_width / width if role in LINEAR else 1.0
        return replace(super().factors(role, fan_in, width), lr=lr)


@PARAMETRIZATIONS.register("mup_intermediate")
@dataclass(frozen=True)
class MuPIntermediate(MuPSimple):
    """As mup_simple, and the head starts with std sqrt(base fan-in) / fan-in (Wortsman et al. 2023, app. E)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """Return mup_simple's factors; the head's std is multiplied by a number that is exactly 1 at the base width."""
        simple = super().factors(role, fan_in, width)
        if role is not Role.HEAD:
            return simple
        return replace(simple, init_std=simple.init_std * (self.base_width / width) ** 0.5)


@PARAMETRIZATIONS.register("mup_full")
@dataclass(frozen=True)
class MuPFull(MuPIntermediate):
    """As mup_intermediate, but attention scale 1/head width, and queries from zero (Wortsman et al. 2023, app. E)."""

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        """Return mup_intermediate's factors; queries start from zero."""
        intermediate = super().factors(role, fan_in, width)
        return replace(intermediate, init_std=0.0) if role is Role.QUERY else intermediate

    def attention_scale(self, head_width: int) -> float:
        return 1 / head_width
