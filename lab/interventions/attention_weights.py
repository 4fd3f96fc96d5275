"""Interventions on attention weights: caps on scores, sinks, sigmoids, and gates on what heads mix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab.core.axes import causal_mask, in_whole_vectors, over
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.schema import PerRun, bounded
from lab.model.config import ModelConfig
from lab.model.layers import Linear, Scale

OTHER_WEIGHTS = ("pointwise_attention", "pb_relax", "fp16_softmax")


class Softcap(nn.Module):
    """``c tanh(x / c)``."""

    def __init__(self, cap: Tensor | float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x_r: Tensor) -> Tensor:
        cap = over(self.cap, x_r)
        return cap * in_whole_vectors(torch.tanh, x_r / cap)


@INTERVENTIONS.register("score_softcap")
@dataclass(frozen=True)
class ScoreSoftcap(HookIntervention):
    """Squash attention scores into (-cap, cap) before the mask (Gemma 2, arXiv:2408.00118, sec. 2)."""

    hook_points: ClassVar = {"scores": Act.OTHER}
    excludes: ClassVar = ("pb_relax",)
    cap: PerRun = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Softcap(self.cap)


@INTERVENTIONS.register("logit_softcap")
@dataclass(frozen=True)
class LogitSoftcap(HookIntervention):
    """Squash output logits into (-cap, cap) (Gemma 2, arXiv:2408.00118, sec. 2).

    Probes measure the logits before the cap, which may keep growing.
    """

    hook_points: ClassVar = {"logits": Act.OTHER}
    cap: PerRun = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Softcap(self.cap)


@INTERVENTIONS.register("attention_sink")
@dataclass(frozen=True)
class AttentionSink(HookIntervention):
    """A learned logit per head, at first 0, in the softmax: a key whose value is zero (gpt-oss, arXiv:2508.10925)."""

    hook_points: ClassVar = {"weighing": Act.REPLACE}
    excludes: ClassVar = OTHER_WEIGHTS

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return SoftmaxWithSink(runs, config.heads)


class SoftmaxWithSink(Scale):
    """Scores ``[r b h t s]`` to causal attention weights, which leave a share to the sink of each head."""

    def __init__(self, runs: int, heads: int) -> None:
        super().__init__(runs, (heads,), 0.0)

    def forward(self, scores_rbhts: Tensor) -> Tensor:
        return softmax_beside(scores_rbhts, self.weight[:, None, :, None, None].to(scores_rbhts.dtype))


@INTERVENTIONS.register("softmax_one")
@dataclass(frozen=True)
class SoftmaxOne(HookIntervention):
    """Add one to the denominator of the attention softmax, so that a head may attend to nothing (Miller 2023)."""

    hook_points: ClassVar = {"weighing": Act.REPLACE}
    excludes: ClassVar = (*OTHER_WEIGHTS, "attention_sink")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return OffByOneSoftmax()


class OffByOneSoftmax(nn.Module):
    """Scores ``[r b h t s]`` to causal attention weights ``exp(z) / (1 + sum of exp(z))``."""

    def forward(self, scores_rbhts: Tensor) -> Tensor:
        return softmax_beside(scores_rbhts, scores_rbhts.new_zeros(()))


def softmax_beside(scores_rbhts: Tensor, sink: Tensor) -> Tensor:
    """Take the causal softmax beside one more logit, which broadcasts to ``[r b h t 1]`` and gets no weight."""
    causal_rbhts = torch.where(causal_mask(scores_rbhts), scores_rbhts, -torch.inf)
    sink_rbht1 = sink.expand(*scores_rbhts.shape[:-1], 1)
    return F.softmax(torch.cat([causal_rbhts, sink_rbht1], -1), -1)[..., :-1]


@INTERVENTIONS.register("sigmoid_attention")
@dataclass(frozen=True)
class SigmoidAttention(HookIntervention):
    """Attention weights sigmoid(score - log length) in place of softmax (Ramapuram et al. 2024, arXiv:2409.04431)."""

    hook_points: ClassVar = {"weighing": Act.REPLACE}
    excludes: ClassVar = (*OTHER_WEIGHTS, "attention_sink", "softmax_one")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return CausalSigmoid()


class CausalSigmoid(nn.Module):
    """Scores ``[... t s]`` to weights sigmoid(score - log length), causal: 0 at later keys."""

    def forward(self, scores_ts: Tensor) -> Tensor:
        past_ts = causal_mask(scores_ts)
        weights_ts = in_whole_vectors(
            torch.sigmoid, torch.where(past_ts, scores_ts, 0.0) - math.log(scores_ts.shape[-1])
        )
        return torch.where(past_ts, weights_ts, 0.0)


@INTERVENTIONS.register("attention_gate")
@dataclass(frozen=True)
class AttentionGate(HookIntervention):
    """Multiply each head by a sigmoid of the block's normalized input (Qiu et al. 2025, arXiv:2505.06708).

    The gate is one number per head; it halves the branch at initialization, up to its random weights.
    """

    hook_points: ClassVar = {"attention_gate": Act.SCALE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return HeadGate(runs, config)


class HeadGate(Linear):
    """Heads ``[r b h t k]`` times the sigmoid of a linear layer of ``[r b t d]``."""

    def __init__(self, runs: int, config: ModelConfig) -> None:
        super().__init__(runs, config.width, config.heads, None)

    def forward(self, mixed_rbhtk: Tensor, x_rbtd: Tensor) -> Tensor:  # type: ignore[override]
        gate_rbth = in_whole_vectors(torch.sigmoid, super().forward(x_rbtd)[..., : mixed_rbhtk.shape[2]])
        return mixed_rbhtk.to(x_rbtd.dtype) * rearrange(gate_rbth, "r b t h -> r b h t 1")

    def matrix(self) -> Tensor:
        """Return the matrix ``[r d h]``; of one head twice, since MKL multiplies a vector in another order if alone."""
        return self.weight.repeat(1, 1, 2) if self.weight.shape[-1] == 1 else self.weight
