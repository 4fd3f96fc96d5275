"""An intervention such as users add, with a number per run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lab.core.axes import over
from lab.core.schema import PerRun, bounded


@dataclass(frozen=True)
class Cap:
    """Squash what passes into (-cap, cap)."""

    attaches_to: ClassVar = ("scores",)
    cap: PerRun = bounded(above=0)

    def attach(self, runs: int, model: Any) -> nn.Module:
        squash = nn.Module()
        squash.forward = lambda x_r: over(self.cap, x_r) * torch.tanh(x_r / over(self.cap, x_r))  # type: ignore
        return squash
