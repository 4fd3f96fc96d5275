"""Interventions that keep more of the model in emulated fp16 than its matrix products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import causal_mask
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.number_formats import as_fp16
from lab.core.registry import INTERVENTIONS
from lab.model.config import ModelConfig

GELU_FACTOR, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@INTERVENTIONS.register("fp16_residual")
@dataclass(frozen=True)
class FP16Residual(HookIntervention):
    """Keep embedding, branches and residual stream in emulated fp16; beyond 65504 they are infinite."""

    hook_points: ClassVar = dict.fromkeys(("embedding", "attention_output", "mlp_output", "block_output"), Act.ROUND)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return FP16()


class FP16(nn.Module):
    """Rounds values and gradients to fp16."""

    def forward(self, x_r: Tensor) -> Tensor:
        return as_fp16(x_r)


@INTERVENTIONS.register("fp16_softmax")
@dataclass(frozen=True)
class FP16Softmax(HookIntervention):
    """Take the attention softmax in emulated fp16, each operation rounded; without it the softmax is in fp32."""

    hook_points: ClassVar = {"weighing": Act.REPLACE}
    excludes: ClassVar = ("pointwise_attention", "pb_relax")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return HalfSoftmax()


class HalfSoftmax(nn.Module):
    """Scores ``[... t s]`` to causal attention weights: difference, exponential, sum and quotient in fp16."""

    def forward(self, scores_ts: Tensor) -> Tensor:
        past_ts, scores_ts = causal_mask(scores_ts), as_fp16(scores_ts)
        largest_t1 = torch.where(past_ts, scores_ts, -torch.inf).amax(-1, keepdim=True).detach()
        below_ts = as_fp16(torch.where(past_ts, scores_ts - largest_t1, 0.0))
        share_ts = torch.where(past_ts, as_fp16(below_ts.exp()), 0.0)
        return as_fp16(share_ts / as_fp16(share_ts.sum(-1, keepdim=True)))


@INTERVENTIONS.register("fp16_gelu")
@dataclass(frozen=True)
class FP16GELU(HookIntervention):
    """Take the tanh form of GELU in emulated fp16, each operation rounded; x^3 overflows (OPT-175B, run 11.10)."""

    hook_points: ClassVar = {"activation": Act.REPLACE}
    excludes: ClassVar = ("relu",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return HalfGELU()


class HalfGELU(nn.Module):
    """``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``.

    Forward it stays right, since tanh saturates.  Its gradient is 0 times infinity once x^2 overflows, at 256.
    """

    def forward(self, x_r: Tensor) -> Tensor:
        x_r = as_fp16(x_r)
        cube_r = as_fp16(as_fp16(x_r * x_r) * x_r)
        inner_r = as_fp16(GELU_FACTOR * as_fp16(x_r + as_fp16(GELU_CUBE * cube_r)))
        return as_fp16(as_fp16(0.5 * x_r) * as_fp16(1 + as_fp16(inner_r.tanh())))
