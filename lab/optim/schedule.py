"""Learning-rate schedules: functions of the step, with values in [0, 1] that multiply the peak.

A schedule may run over tokens instead: then ``steps`` is the number of tokens of the run, a warm-up of 1 or more counts
tokens, and ``done_s`` holds the tokens seen before each update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.registry import SCHEDULES
from lab.core.schema import PerRun, bounded


@dataclass(frozen=True)
class LearningRateSchedule(ABC):
    """A linear warm-up to the peak, and then what a subclass says.

    Attributes:
        warmup: in steps, or below 1 a fraction of them.
    """

    warmup: PerRun = bounded(at_least=0)

    def shape(self, steps: float, peak_r: Tensor, done_s: Tensor | None = None) -> Tensor:
        """Return LR over peak ``[s r]``; computed as a shape, never as one rate over the other."""
        done_s = torch.arange(int(steps)) if done_s is None else done_s
        step_s1 = done_s.to(peak_r.device, peak_r.dtype).unsqueeze(1)
        warmup_r = torch.as_tensor(self.warmup, dtype=peak_r.dtype, device=peak_r.device)
        warmup_r = torch.where(warmup_r < 1, warmup_r * steps, warmup_r)
        after_sr = self.after_warmup(step_s1, warmup_r, steps, peak_r)
        return torch.where(step_s1 < warmup_r, step_s1 / warmup_r, after_sr).expand(-1, len(peak_r))

    @abstractmethod
    def after_warmup(self, step_s1: Tensor, warmup_r: Tensor, steps: float, peak_r: Tensor) -> Tensor | float:
        """LR over peak ``[s r]`` of steps that come after the warm-up; at others it does not count."""


def _floor(floor: Tensor | float, share: Tensor | float, peak_r: Tensor) -> Tensor:
    """Return the floor ``[r]`` over the peak: the higher of an absolute one and a share of the peak, at most 1."""
    return torch.maximum(floor / peak_r, torch.as_tensor(share, dtype=peak_r.dtype, device=peak_r.device)).clamp(max=1)


def _progress(step_s1: Tensor, begin_r: Tensor, steps: float) -> Tensor:
    """Return the way ``[s r]`` from ``begin_r`` to ``steps``, from 0 to 1."""
    return ((step_s1 - begin_r) / (steps - begin_r).clamp(min=1)).clamp(0, 1)


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(LearningRateSchedule):
    """Linear warm-up, then half a cosine down to a floor (Wortsman et al. 2023, sec. 2.1).

    Attributes:
        floor: the learning rate at the end.
        floor_share: the same as a share of the peak; the higher of the two holds.
    """

    floor: PerRun = bounded(at_least=0)
    floor_share: PerRun = bounded(0.0, at_least=0, at_most=1)

    def after_warmup(self, step_s1: Tensor, warmup_r: Tensor, steps: float, peak_r: Tensor) -> Tensor:
        """Return half a cosine."""
        floor_r = _floor(self.floor, self.floor_share, peak_r)
        return floor_r + (1 - floor_r) * 0.5 * (1 + torch.cos(math.pi * _progress(step_s1, warmup_r, steps)))


@SCHEDULES.register("linear")
@dataclass(frozen=True)
class LinearDecay(LearningRateSchedule):
    """Linear warm-up, then a straight line down to a floor, which is given as in ``cosine``."""

    floor: PerRun = bounded(at_least=0)
    floor_share: PerRun = bounded(0.0, at_least=0, at_most=1)

    def after_warmup(self, step_s1: Tensor, warmup_r: Tensor, steps: float, peak_r: Tensor) -> Tensor:
        """Return a straight line."""
        floor_r = _floor(self.floor, self.floor_share, peak_r)
        return 1 - (1 - floor_r) * _progress(step_s1, warmup_r, steps)


@SCHEDULES.register("rsqrt")
@dataclass(frozen=True)
class ReciprocalSquareRoot(LearningRateSchedule):
    """Linear warm-up, then sqrt(warm-up / step) (Vaswani et al. 2017, sec. 5.3)."""

    def after_warmup(self, step_s1: Tensor, warmup_r: Tensor, steps: float, peak_r: Tensor) -> Tensor:
        """Return the root."""
        return (warmup_r.ceil().clamp(min=1) / step_s1.clamp(min=1)).clamp(max=1).sqrt()


@SCHEDULES.register("wsd")
@dataclass(frozen=True)
class WarmupStableDecay(LearningRateSchedule):
    """Linear warm-up, then the peak, then a straight line down to a floor (Hu et al. 2024, sec. 4).

    The floor is given as in ``cosine``.
    """

    cooldown: PerRun = bounded(above=0, at_most=1)
    floor: PerRun = bounded(at_least=0)
    floor_share: PerRun = bounded(0.0, at_least=0, at_most=1)
    power: ClassVar[float] = 1.0  # of the progress through the cooldown

    def after_warmup(self, step_s1: Tensor, warmup_r: Tensor, steps: float, peak_r: Tensor) -> Tensor:
        """Return the peak, and its fall in the fraction ``cooldown`` of the steps."""
        begin_r = torch.maximum(
            warmup_r, torch.as_tensor((1 - self.cooldown) * steps, dtype=peak_r.dtype, device=peak_r.device)
        )
        floor_r = _floor(self.floor, self.floor_share, peak_r)
        return 1 - (1 - floor_r) * _progress(step_s1, begin_r, steps) ** self.power


@SCHEDULES.register("wsd_sqrt")
@dataclass(frozen=True)
class WarmupStableRoot(WarmupStableDecay):
    """As wsd, but the cooldown falls by the root of its progress (Hägele et al. 2024, arXiv:2405.18392, sec. 4.1)."""

    power: ClassVar[float] = 0.5


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(LearningRateSchedule):
    """Linear warm-up, then the peak."""

    def after_warmup(self, step_s1: Tensor, warmup_r: Tensor, steps: float, peak_r: Tensor) -> float:
        """Return the peak."""
        return 1.0
