"""What may be attached to a hook point of the model: each entry names the kinds of points it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lab.model.layers import LayerNorm
from lab.registry import INTERVENTIONS


@INTERVENTIONS.register("qk_layernorm")
@dataclass(frozen=True)
class QKLayerNorm:
    """LayerNorm on queries and keys, per head, its gain shared by the heads (Wortsman et al. 2023, sec. 3.1.1)."""

    attaches_to: ClassVar = ("query", "key")

    def attach(self, runs: int, size: int) -> nn.Module:
        """The module to put at one hook point whose tensor has ``size`` entries along its last axis."""
        return LayerNorm(runs, size)
