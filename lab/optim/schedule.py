"""Learning-rate schedules: functions of the step, with values in [0, 1] that multiply the peak.

A schedule may run over tokens instead: then ``steps`` is the number of tokens of the run, a warm-up of 1 or more counts
tokens, and ``done_s`` holds the tokens seen before each update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.registry import SCHEDULES
from lab.core.schema import PerRun, bounded


def _ramp(step_s1: Tensor, steps: float, warmup: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the warm-up in steps (a value below 1 is a fraction of them) and the ramp ``[s r]`` up to 1."""
    warmup_r = torch.as_tensor(warmup, dtype=step_s1.dtype, device=step_s1.device)
    warmup_r = torch.where(warmup_r < 1, warmup_r * steps, warmup_r)
    return warmup_r, torch.where(step_s1 < warmup_r, step_s1 / warmup_r, 1.0)


def _steps(steps: float, peak_r: Tensor, done_s: Tensor | None) -> Tensor:
    done_s = torch.arange(int(steps)) if done_s is None else done_s
    return done_s.to(peak_r.device, peak_r.dtype).unsqueeze(1)


def _floor(floor: Tensor | float, share: Tensor | float, peak_r: Tensor) -> Tensor:
    """Return the floor ``[r]`` over the peak: the higher of an absolute one and a share of the peak, at most 1."""
    return torch.maximum(floor / peak_r, torch.as_tensor(share, dtype=peak_r.dtype, device=peak_r.device)).clamp(max=1)


def _fall(step_s1: Tensor, begin_r: Tensor, steps: float, floor_r: Tensor, power: float = 1.0) -> Tensor:
    """Return a fall ``[s r]`` from 1 at ``begin_r`` to the floor at ``steps``, by the ``power`` of the progress."""
    progress_sr = ((step_s1 - begin_r) / (steps - begin_r).clamp(min=1)).clamp(0, 1)
    return 1 - (1 - floor_r) * progress_sr**power


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine down to a floor (Wortsman et al. 2023, sec. 2.1).

    Attributes:
        floor: the learning rate at the end.
        floor_share: the same as a share of the peak; the higher of the two holds.
    """

    warmup: PerRun = bounded(at_least=0)
    floor: PerRun = bounded(at_least=0)
    floor_share: PerRun = bounded(0.0, at_least=0, at_most=1)

    def shape(self, steps: float, peak_r: Tensor, done_s: Tensor | None = None) -> Tensor:
        """Return LR over peak ``[s r]``; computed as a shape, never as one rate over the other."""
        step_s1 = _steps(steps, peak_r, done_s)
        warmup_r, ramp_sr = _ramp(step_s1, steps, self.warmup)
        floor_r = _floor(self.floor, self.floor_share, peak_r)
        progress_sr = ((step_s1 - warmup_r) / (steps - warmup_r).clamp(min=1)).clamp(0, 1)
        cosine_sr = floor_r + (1 - floor_r) * 0.5 * (1 + torch.cos(math.pi * progress_sr))
        return torch.where(step_s1 < warmup_r, ramp_sr, cosine_sr)


@SCHEDULES.register("linear")
@dataclass(frozen=True)
class LinearDecay:
    """Linear warm-up, then a straight line down to a floor, which is given as in ``cosine``."""

    warmup: PerRun = bounded(at_least=0)
    floor: PerRun = bounded(at_least=0)
    floor_share: PerRun = bounded(0.0, at_least=0, at_most=1)

    def shape(self, steps: float, peak_r: Tensor, done_s: Tensor | None = None) -> Tensor:
        """Return LR over peak at every step, ``[s r]``."""
        step_s1 = _steps(steps, peak_r, done_s)
        warmup_r, ramp_sr = _ramp(step_s1, steps, self.warmup)
        floor_r = _floor(self.floor, self.floor_share, peak_r)
        return torch.where(step_s1 < warmup_r, ramp_sr, _fall(step_s1, warmup_r, steps, floor_r))


@SCHEDULES.register("rsqrt")
@dataclass(frozen=True)
class ReciprocalSquareRoot:
    """Linear warm-up, then sqrt(warm-up / step) (Vaswani et al. 2017, sec. 5.3)."""

    warmup: PerRun = bounded(at_least=0)

    def shape(self, steps: float, peak_r: Tensor, done_s: Tensor | None = None) -> Tensor:
        """Return LR over peak at every step, ``[s r]``."""
        step_s1 = _steps(steps, peak_r, done_s)
        warmup_r, ramp_sr = _ramp(step_s1, steps, self.warmup)
        root_sr = (warmup_r.ceil().clamp(min=1) / step_s1.clamp(min=1)).clamp(max=1).sqrt()
        return torch.where(step_s1 < warmup_r, ramp_sr, root_sr).expand(-1, len(peak_r))


@SCHEDULES.register("wsd")
@dataclass(frozen=True)
class WarmupStableDecay:
    """Linear warm-up, then the peak, then a straight line down to a floor (Hu et al. 2024, sec. 4).

    The floor is given as in ``cosine``.
    """

    warmup: PerRun = bounded(at_least=0)
    cooldown: PerRun = bounded(above=0, at_most=1)
    floor: PerRun = bounded(at_least=0)
    floor_share: PerRun = bounded(0.0, at_least=0, at_most=1)
    power: ClassVar[float] = 1.0  # of the progress through the cooldown

    def shape(self, steps: float, peak_r: Tensor, done_s: Tensor | None = None) -> Tensor:
        """Return LR over peak ``[s r]``; ``cooldown`` is the fraction of steps in which it decays."""
        step_s1 = _steps(steps, peak_r, done_s)
        warmup_r, ramp_sr = _ramp(step_s1, steps, self.warmup)
        begin_r = torch.maximum(
            warmup_r, torch.as_tensor((1 - self.cooldown) * steps, dtype=peak_r.dtype, device=peak_r.device)
        )
        floor_r = _floor(self.floor, self.floor_share, peak_r)
        return torch.where(step_s1 < begin_r, ramp_sr, _fall(step_s1, begin_r, steps, floor_r, self.power))


@SCHEDULES.register("wsd_sqrt")
@dataclass(frozen=True)
class WarmupStableRoot(WarmupStableDecay):
    """As wsd, but the cooldown falls by the root of its progress (Hägele et al. 2024, arXiv:2405.18392, sec. 4.1)."""

    power: ClassVar[float] = 0.5


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant:
    """Linear warm-up, then the peak."""

    warmup: PerRun = bounded(at_least=0)

    def shape(self, steps: float, peak_r: Tensor, done_s: Tensor | None = None) -> Tensor:
        """Return LR over peak at every step, ``[s r]``."""
        return _ramp(_steps(steps, peak_r, done_s), steps, self.warmup)[1].expand(-1, len(peak_r))
