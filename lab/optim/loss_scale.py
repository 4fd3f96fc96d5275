"""Loss scales for training in few bits: the state machines of metaseq and of torch, and a constant, one per run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.registry import LOSS_SCALES
from lab.core.schema import PerRun, bounded


class LossScale(ABC):
    """Multiplies the loss, so that small gradients do not vanish in fp16, and reacts to gradients that overflow.

    An update whose gradient norm is not finite is left out.  The state is a dict of tensors ``[r]``: ``scale``, and
    ``at_floor``, the overflows in a row that found no smaller scale; a subclass adds its own.
    """

    init: ClassVar[float]

    def begin(self, runs: int, device: torch.device) -> dict[str, Tensor]:
        """The state of a fresh start; a restart that resets the loss scale begins with it again."""
        zero_r = torch.zeros(runs, dtype=torch.float32, device=device)
        return {"scale": zero_r + torch.as_tensor(self.init).to(zero_r), "at_floor": zero_r}

    @abstractmethod
    def after(self, state: Mapping[str, Tensor], overflow_r: Tensor) -> dict[str, Tensor]:
        """The state after an update, given whether its gradient overflowed."""


@LOSS_SCALES.register("metaseq")
@dataclass(frozen=True)
class MetaseqScale(LossScale):
    """Double after a window without overflow, which doubles too; halve both at an overflow (metaseq, OPT-175B).

    At the floor the scale stays, and updates are left out until a gradient is finite.

    Attributes:
        init: the first scale.
        window: updates since the last overflow after which the scale first doubles.
        floor: an overflow that would bring the scale below it leaves the scale as it is.
        threshold: least scale after an overflow; the main run of OPT-175B had 0.25.
    """

    init: float = bounded(4.0, above=0)  # type: ignore[misc]
    window: int = bounded(256, above=0)
    floor: float = bounded(2.0**-5, above=0)
    threshold: float = bounded(0.0, at_least=0)

    def begin(self, runs: int, device: torch.device) -> dict[str, Tensor]:
        """Scale and window at their first values, as if an overflow had just been."""
        state = super().begin(runs, device)
        since_r = torch.zeros_like(state["scale"])
        return {**state, "window": torch.full_like(since_r, self.window), "since": since_r}

    def after(self, state: Mapping[str, Tensor], overflow_r: Tensor) -> dict[str, Tensor]:
        """One step of the machine; ``since`` counts updates since the last overflow."""
        scale_r, window_r, since_r = state["scale"], state["window"], state["since"] + 1
        grows_r = torch.remainder(since_r, window_r) == 0
        grown_r, wider_r = (torch.where(grows_r, 2 * number_r, number_r) for number_r in (scale_r, window_r))
        halved_r = (scale_r / 2).clamp(min=self.threshold)
        smaller_r = torch.where(halved_r < self.floor, scale_r, halved_r)
        is_stuck_r = overflow_r & (smaller_r == scale_r)
        return {
            "scale": torch.where(overflow_r, smaller_r, grown_r),
            "window": torch.where(overflow_r, (window_r / 2).floor().clamp(min=1), wider_r),
            "since": torch.where(overflow_r, 0.0, since_r),
            "at_floor": torch.where(is_stuck_r, state["at_floor"] + 1, 0.0),
        }


@LOSS_SCALES.register("torch")
@dataclass(frozen=True)
class TorchScale(LossScale):
    """Double after 2000 updates in a row without overflow, halve at each overflow, without a floor (``GradScaler``).

    Attributes:
        init: the first scale.
        interval: updates in a row without overflow after which the scale doubles.
    """

    init: float = bounded(65536.0, above=0)  # type: ignore[misc]
    interval: int = bounded(2000, above=0)

    def begin(self, runs: int, device: torch.device) -> dict[str, Tensor]:
        """The first scale, and no updates counted."""
        state = super().begin(runs, device)
        return {**state, "since": torch.zeros_like(state["scale"])}

    def after(self, state: Mapping[str, Tensor], overflow_r: Tensor) -> dict[str, Tensor]:
        """One step of the machine; ``since`` counts updates since the scale last changed."""
        scale_r, since_r = state["scale"], state["since"] + 1
        grows_r = ~overflow_r & (since_r == self.interval)
        kept_r = torch.where(grows_r, 2 * scale_r, scale_r)
        return {
            "scale": torch.where(overflow_r, scale_r / 2, kept_r),
            "since": torch.where(overflow_r | grows_r, 0.0, since_r),
            "at_floor": state["at_floor"],
        }


@LOSS_SCALES.register("constant")
@dataclass(frozen=True)
class ConstantScale(LossScale):
    """A scale that never changes; updates whose gradient overflows are left out.

    Attributes:
        init: the scale; below 1 it makes gradients underflow that the loss itself would not.
    """

    init: PerRun = bounded(above=0)  # type: ignore[misc,assignment]

    def after(self, state: Mapping[str, Tensor], overflow_r: Tensor) -> dict[str, Tensor]:
        """The same scale; every overflow finds no smaller one."""
        return {
            "scale": state["scale"],
            "at_floor": torch.where(overflow_r, state["at_floor"] + 1, 0.0),
        }
