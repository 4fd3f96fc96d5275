"""A decoder-only Transformer: attention with explicit scores, blocks, embedding and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from lab.core.axes import causal_mask
from lab.core.distributed import copy_whole
from lab.core.hooks import HookIntervention, HookPoint, announce, attach, is_heard
from lab.core.roles import Role
from lab.model import kernels
from lab.model.config import ModelConfig
from lab.model.layers import Embedding, Layer, LayerNorm, Linear, Operands, draw, gelu, product, rounding_at
from lab.model.low_precision import LowPrecision
from lab.model.parametrization import Factors

ROPE_BASE = 10_000.0
PRODUCTS = ("qkv", "scores", "mixing")  # of attention, besides its output projection
WITHIN = ("query", "key", "query_key", "scores", "attention", "value")  # announced between these products
OF_QKV = ("attention.query", "attention.key", "attention.value")  # layers that share a product


@cache
def _rotations(length: int, size: int, scale: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign of each half, ``[t k]``, times ``scale``."""
    frequency_k = ROPE_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle_tk = torch.outer(torch.arange(length, dtype=torch.float64), frequency_k)
    cos_tk, sin_tk = scale * angle_tk.cos(), scale * angle_tk.sin()
    return (
        torch.cat([cos_tk, cos_tk], dim=-1).to(device, dtype),
        torch.cat([-sin_tk, sin_tk], dim=-1).to(device, dtype),
    )


@cache
def _turns(length: int, size: int, scale: float) -> Tensor:
    """Cosines and signed sines of queries, which carry the scale, then of keys ``[2 2 t k]``, for the CPU's kernel."""
    each = [_rotations(length, size, factor, torch.float32, torch.device("cpu")) for factor in (scale, 1.0)]
    return torch.stack([torch.stack(pair) for pair in each])


class Rotate(torch.autograd.Function):
    """Turns vectors ``[... t k]`` by angles whose cosines and signed sines are ``[t k]``.

    Written out because autograd would pass over each half by itself; the backward pass turns back.
    """

    @staticmethod
    def forward(ctx: Any, x_tk: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
        ctx.save_for_backward(cos_tk, sin_tk)
        first_tk, second_tk = x_tk.chunk(2, dim=-1)
        return torch.cat([second_tk, first_tk], dim=-1).mul_(sin_tk).add_(x_tk * cos_tk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_tk, sin_tk = ctx.saved_tensors
        return Rotate.apply(gradients[0], cos_tk, -sin_tk), None, None  # type: ignore[no-untyped-call]


class CausalSoftmax(torch.autograd.Function):
    """Scores ``[... t s]`` to attention weights over s <= t.

    Written out because autograd would mask gradients of masked scores again, although they are zero.
    """

    @staticmethod
    def forward(ctx: Any, scores_ts: Tensor) -> Tensor:
        weights_ts = F.softmax(torch.where(causal_mask(scores_ts), scores_ts, -torch.inf), dim=-1)
        ctx.save_for_backward(weights_ts)
        return weights_ts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (weights_ts,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], weights_ts, -1, weights_ts.dtype)  # type: ignore


class Norm(LayerNorm):
    """A LayerNorm of the model; a module attached at its hook point takes its place, gain included.

    Attributes:
        feeds_products: whether only matrix products in bf16 read what it returns, so that it may round it for them.
    """

    feeds_products = False

    def __init__(self, runs: int, width: int, where: str) -> None:
        super().__init__(runs, width)
        self.at_norm = HookPoint("norm", where, width)

    def forward(self, x_rbtd: Tensor) -> Tensor:
        fits = self.feeds_products and not x_rbtd.shape[-1] % kernels.LANES
        if fits and kernels.can_take(x_rbtd, torch.float32):
            return kernels.LayerNorm.apply(x_rbtd.flatten(1, 2), self.weight).view_as(x_rbtd)  # type: ignore
        return super().forward(x_rbtd)


class Projection(Linear):
    """A linear layer of a block; an attached module makes its matrix from the weight."""

    def __init__(
        self, runs: int, fan_in: int, fan_out: int, operands: Operands | None, where: str, role: Role = Role.MATRIX
    ) -> None:
        super().__init__(runs, fan_in, fan_out, operands, role)
        self.at_weight = HookPoint("weight", where, fan_out, inputs=fan_in)

    def matrix(self) -> Tensor:
        matrix_rio: Tensor = self.weight
        for module in self.at_weight.changes.values():
            matrix_rio = module(matrix_rio)
        return matrix_rio


class Gate(HookPoint):
    """A tensor and the normalized input ``[r b t d]`` of its branch, to the tensor as attached modules change it."""

    def forward(self, tensor_r: Tensor, x_rbtd: Tensor) -> Tensor:  # type: ignore[override]
        for module in self.changes.values():
            tensor_r = module(tensor_r, x_rbtd)
        return tensor_r


class Weighing(HookPoint):
    """Turns scores ``[... t s]`` into attention weights: by causal softmax, or by the attached module."""

    def forward(self, scores_ts: Tensor) -> Tensor:
        if self.changes:
            return super().forward(scores_ts)
        return CausalSoftmax.apply(scores_ts)  # type: ignore


class Activation(HookPoint):
    """The activation of the MLP: GELU, or the attached module."""

    def forward(self, x_rbtm: Tensor) -> Tensor:
        for module in self.changes.values():
            return module(x_rbtm)  # type: ignore[no-any-return]
        return gelu(x_rbtm)


class Rotation(HookPoint):
    """Brings positions and scale to queries and keys: by rotary positions, the scale on the queries.

    An attached module gets queries and keys ``[... t k]`` and the scale, and returns both.
    """

    def forward(  # type: ignore[override]
        self, q_tk: Tensor, k_sk: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        for module in self.changes.values():
            return module(q_tk, k_sk, scale)  # type: ignore[no-any-return]
        return rotate(q_tk, scale), rotate(k_sk)


class Residual(HookPoint):
    """Adds a branch to the residual stream: ``x + branch(norm(x))``, or what the attached module makes of the three."""

    def forward(  # type: ignore[override]
        self, x_rbtd: Tensor, branch: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]
    ) -> Tensor:
        for module in self.changes.values():
            return module(x_rbtd, branch, norm)  # type: ignore[no-any-return]
        return x_rbtd + branch(norm(x_rbtd))


class Branches(HookPoint):
    """Adds attention and then the MLP to the residual stream, or what the attached module makes of the block."""

    def forward(self, x_rbtd: Tensor, block: Block) -> Tensor:  # type: ignore[override]
        for module in self.changes.values():
            return module(x_rbtd, block.attend, block.mlp, block.attention_norm)  # type: ignore[no-any-return]
        gates = (block.attention.at_gate, block.at_gate)
        residuals, norms = (block.at_attention_residual, block.at_mlp_residual), (block.attention_norm, block.mlp_norm)
        for norm, gate, residual in zip(norms, gates, residuals, strict=True):
            norm.feeds_products = block.in_bf16 and not (gate.changes or residual.changes)
        x_rbtd = block.at_attention_residual(x_rbtd, block.attend, block.attention_norm)
        output_rbtd: Tensor = block.at_mlp_residual(x_rbtd, block.mlp, block.mlp_norm)
        return output_rbtd


class Readout(HookPoint):
    """Hidden states ``[r b t d]`` to logits: by the head, or by the attached module from the embedding ``[r v d]``."""

    def forward(self, hidden_rbtd: Tensor, model: Transformer) -> Tensor:  # type: ignore[override]
        for module in self.changes.values():
            return module(hidden_rbtd, model.embedding.weight, model.readout_operands)  # type: ignore[no-any-return]
        logits_rbtv: Tensor = model.head(hidden_rbtd)
        return logits_rbtv


def rotate(x_tk: Tensor, scale: float = 1.0) -> Tensor:
    """Rotary positions over the last two axes; entry i is paired with i + k/2 (Su et al., arXiv:2104.09864)."""
    output_tk: Tensor = Rotate.apply(x_tk, *_rotations(*x_tk.shape[-2:], scale, x_tk.dtype, x_tk.device))  # type: ignore[no-untyped-call]
    return output_tk


class Attention(nn.Module):
    """Causal attention, ``[r b t d]`` to ``[r b t d]``; scores are products of queries and keys times ``scale``.

    With fewer heads of keys and values than of queries, neighbouring queries share one.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    at_query: HookPoint
    at_key: HookPoint
    at_value: HookPoint
    at_scores: HookPoint
    at_attention: HookPoint
    at_heads: HookPoint

    def __init__(
        self, runs: int, config: ModelConfig, key_heads: int, where: str, scale: float, operands: Operands | None
    ) -> None:
        super().__init__()
        self.scale, self.sharing, self.in_bf16 = scale, config.heads // key_heads, operands is torch.bfloat16
        self.heads = {"query": config.heads, "key": key_heads, "value": key_heads}
        self.rounding = {part: rounding_at(operands, f"{where}.attention.{part}") for part in PRODUCTS}
        for part in ("query", "key", "value", "output"):
            role = Role.QUERY if part == "query" else Role.MATRIX
            outputs = self.heads.get(part, config.heads) * config.head_width
            setattr(self, part, Projection(runs, config.width, outputs, operands, where, role))
        for kind in ("query", "key", "value", "heads"):
            heads = self.heads.get(kind, config.heads)
            setattr(self, f"at_{kind}", HookPoint(kind, where, config.head_width, heads))
        self.at_scores, self.at_attention = HookPoint("scores", where), HookPoint("attention", where)
        self.at_weighing = Weighing("weighing", where)
        self.at_rotation = Rotation("rotation", where, config.head_width)
        self.at_gate = Gate("attention_gate", where, config.head_width)

    def forward(self, x_rbtd: Tensor) -> Tensor:
        qkv_rbtn = self.project(x_rbtd)
        gains = self.gains_of_norms() if self.in_bf16 and kernels.can_take(qkv_rbtn) else None
        if gains and self.is_plain_within and not self.at_value.changes and kernels.multiplies_tiles():
            turns_tk = _turns(x_rbtd.shape[2], self.at_query.size, self.scale)
            mixed_rbhtk = kernels.Attention.apply(qkv_rbtn, *gains, turns_tk).transpose(2, 3)  # type: ignore
            if any(map(is_heard, WITHIN)):
                with torch.no_grad():
                    self.mix(qkv_rbtn, gains)
        else:
            mixed_rbhtk = self.mix(qkv_rbtn, gains)
        mixed_rbhtk = self.at_gate(self.at_heads(mixed_rbhtk), x_rbtd)
        output_rbtd: Tensor = self.output(rearrange(mixed_rbhtk, "r b h t k -> r b t (h k)"))
        return output_rbtd

    def mix(self, qkv_rbtn: Tensor, gains: tuple[Tensor | None, Tensor | None] | None) -> Tensor:
        """Return what the heads mix ``[r b h t k]``, and announce what they compute on the way."""
        dtype = self.query.weight.dtype
        q_rbhtk, k_rbhsk, v_rbhsk = self.split(qkv_rbtn)
        if gains:
            announce("query", self.at_query.where, q_rbhtk)
            announce("key", self.at_key.where, k_rbhsk)
            turns_tk = _turns(*q_rbhtk.shape[-2:], self.scale)
            q_rbhtk, k_rbhsk, v_rbhsk = kernels.SplitHeads.apply(qkv_rbtn, *gains, turns_tk)  # type: ignore
        else:
            k_rbhsk = self.shared(self.at_key(k_rbhsk.to(dtype)))
            q_rbhtk, k_rbhsk = self.at_rotation(self.at_query(q_rbhtk.to(dtype)), k_rbhsk, self.scale)
        announce("query_key", self.at_scores.where, q_rbhtk, k_rbhsk, self.scale)
        scores_rbhts = product(q_rbhtk, k_rbhsk.transpose(-1, -2), self.rounding["scores"])
        if self.in_bf16 and self.is_plain_within and kernels.can_take(scores_rbhts):
            weights_rbhts = self.at_attention(kernels.CausalSoftmax.apply(self.at_scores(scores_rbhts)))  # type: ignore[no-untyped-call]
        else:
            weights_rbhts = self.at_attention(self.at_weighing(self.at_scores(scores_rbhts.to(dtype))))
        return product(weights_rbhts, self.shared(self.at_value(v_rbhsk)), self.rounding["mixing"])

    def gains_of_norms(self) -> tuple[Tensor | None, Tensor | None] | None:
        """Gains of the LayerNorms of queries and keys per head, None without one; None if other modules change them."""
        attached = [list(point.changes.values()) for point in (self.at_query, self.at_key)]
        is_plain = self.sharing == 1 and not self.at_rotation.changes and self.at_query.size in kernels.HEAD_WIDTHS
        if not is_plain or any(len(norms) > 1 or type(norm) is not LayerNorm for norms in attached for norm in norms):
            return None
        q_gain_rk, k_gain_rk = (norms[0].weight if norms else None for norms in attached)
        return q_gain_rk, k_gain_rk  # type: ignore[return-value]

    @property
    def is_plain_within(self) -> bool:
        """Whether attention weights are the causal softmax of the scores."""
        return not (self.at_scores.changes or self.at_weighing.changes or self.at_attention.changes)

    def shared(self, x_rbhsk: Tensor) -> Tensor:
        """Return keys or values for every head of queries."""
        return x_rbhsk if self.sharing == 1 else repeat(x_rbhsk, "r b h s k -> r b (h n) s k", n=self.sharing)

    def project(self, x_rbtd: Tensor) -> Tensor:
        """Return queries, keys and values side by side ``[r b t n]``: on a CPU one product is faster than three."""
        weight_rdn = torch.cat([part.matrix() for part in (self.query, self.key, self.value)], dim=-1)
        qkv_rmn = product(x_rbtd.flatten(1, 2), weight_rdn, self.rounding["qkv"], has_weight=True)
        return qkv_rmn.view(*x_rbtd.shape[:3], -1)

    def split(self, qkv_rbtn: Tensor) -> list[Tensor]:
        """Return queries, keys and values ``[r b h t k]``."""
        size = self.at_query.size
        parts_rbtn = torch.split(qkv_rbtn, [heads * size for heads in self.heads.values()], dim=-1)
        return [rearrange(part_rbtn, "r b t (h k) -> r b h t k", k=size) for part_rbtn in parts_rbtn]


class Block(nn.Module):
    """Pre-LayerNorm attention, then an MLP with GELU, each added to the residual stream.

    ``mlp_parts`` is how many MLPs stand side by side in one, and the hidden units of each.
    """

    at_attention_output: HookPoint
    at_mlp_up: HookPoint
    at_mlp_hidden: HookPoint
    at_mlp_output: HookPoint

    def __init__(
        self,
        runs: int,
        config: ModelConfig,
        key_heads: int,
        mlp_parts: tuple[int, int],
        where: str,
        scale: float,
        operands: Operands | None,
    ) -> None:
        super().__init__()
        width, hidden, self.in_bf16 = config.width, math.prod(mlp_parts), operands is torch.bfloat16
        self.attention_norm = Norm(runs, width, f"{where}.attention")
        self.attention = Attention(runs, config, key_heads, where, scale, operands)
        self.mlp_norm = Norm(runs, width, f"{where}.mlp")
        self.mlp_up = Projection(runs, width, hidden, operands, where)
        self.mlp_down = Projection(runs, hidden, width, operands, where)
        self.mlp_down.fan_in = mlp_parts[1]
        # Weights of interventions are summed over in this order, and so their norms have bits that depend on it.
        self.at_attention_output = HookPoint("attention_output", where, width)
        self.at_mlp_up, self.at_mlp_hidden = (HookPoint(kind, where, hidden) for kind in ("mlp_up", "mlp_hidden"))
        self.at_mlp_output = HookPoint("mlp_output", where, width)
        self.at_activation, self.at_gate = Activation("activation", where, hidden), Gate("mlp_gate", where, hidden)
        self.at_attention_residual, self.at_mlp_residual = (Residual("residual", where, width) for _ in range(2))
        self.at_branches = Branches("branches", where, width)
        self.at_output = HookPoint("block_output", where, width)

    def forward(self, x_rbtd: Tensor) -> Tensor:
        output_rbtd: Tensor = self.at_output(self.at_branches(x_rbtd, self))
        return output_rbtd

    def attend(self, x_rbtd: Tensor) -> Tensor:
        """Return what attention adds to the residual stream."""
        output_rbtd: Tensor = self.at_attention_output(self.attention(x_rbtd))
        return output_rbtd

    def mlp(self, x_rbtd: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream."""
        up_rbtm = self.mlp_up(x_rbtd)
        points = (self.at_mlp_up, self.at_activation, self.at_gate, self.at_mlp_hidden)
        if self.in_bf16 and kernels.can_take(up_rbtm) and not any(point.changes for point in points):
            hidden_rbtm = self.at_mlp_hidden(kernels.Gelu.apply(self.at_mlp_up(up_rbtm)))  # type: ignore[no-untyped-call]
        else:
            up_rbtm = self.at_mlp_up(up_rbtm.to(self.mlp_up.weight.dtype))
            hidden_rbtm = self.at_mlp_hidden(self.at_gate(self.at_activation(up_rbtm), x_rbtd))
        output_rbtd: Tensor = self.at_mlp_output(self.mlp_down(hidden_rbtm))
        return output_rbtd


def mlp_parts(interventions: Iterable[HookIntervention], width: int) -> tuple[int, int]:
    """Number of MLPs side by side in a block, and hidden units of each: one of four widths, or several of experts."""
    return next((parts for entry in interventions if (parts := entry.mlp_parts(width))), (1, 4 * width))


class Transformer(nn.Module):
    """Tokens ``[r b t]`` to logits ``[r b t v]`` and hidden states ``[r b t d]``: models of one shape side by side.

    Args:
        config: the shape of one model.
        vocabulary: number of tokens.
        runs: size of the run axis.
        interventions: hook interventions by name.
        attention_scale: factor of the products of queries and keys.
        operands: the precision to which every matrix product, forward and backward, rounds its operands and its
            result; everything else, logits included, keeps the precision of the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        runs: int,
        interventions: Mapping[str, HookIntervention],
        attention_scale: float,
        operands: Operands | None = None,
    ) -> None:
        super().__init__()
        self.config, self.interventions, self.operands = config, interventions, operands
        self.embedding = Embedding(runs, vocabulary, config.width)
        self.at_embedding = HookPoint("embedding", "", config.width)
        self.blocks = [f"block{index}" for index in range(config.depth)]
        key_heads = min((entry.key_value_heads(config.heads) for entry in interventions.values()), default=config.heads)
        parts = mlp_parts(interventions.values(), config.width)
        for where in self.blocks:
            setattr(self, where, Block(runs, config, key_heads, parts, where, attention_scale, operands))
        self.final_norm = Norm(runs, config.width, "")
        self.head = Linear(runs, config.width, vocabulary, operands, Role.HEAD)
        self.at_readout = Readout("readout", "", vocabulary)
        self.at_logits = HookPoint("logits", "", vocabulary)
        attach(self, interventions, runs, config)
        self.ends: tuple[str, ...] = ("embedding", "head")  # weights not counted among those "without embeddings"
        # What an attached module replaces would be a weight without a gradient.
        for path, norm in [(path, module) for path, module in self.named_modules() if isinstance(module, Norm)]:
            if norm.at_norm.changes:
                self.set_submodule(path, norm.at_norm)
        for block in [module for module in self.modules() if isinstance(module, Block)]:
            if block.at_branches.changes:  # which gives one norm to both
                del block.mlp_norm
        self.readout_operands = rounding_at(operands, "readout") if self.at_readout.changes else None
        if self.at_readout.changes:
            del self.head
            self.ends = ("embedding",)
        for name, layer in self.layers():  # its own, and those of interventions
            if isinstance(layer, Linear) and not name.endswith(OF_QKV):
                layer.operands = rounding_at(self.operands, name)
            if isinstance(self.operands, LowPrecision) and self.operands.rounds_gain(name):
                layer.gain_rounding = self.operands

    def forward(self, tokens_rbt: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[r b t v]`` and the hidden states ``[r b t d]`` before the head."""
        x_rbtd: Tensor = self.at_embedding(self.embedding(tokens_rbt))
        for where in self.blocks:
            x_rbtd = self.get_submodule(where)(x_rbtd)
        hidden_rbtd: Tensor = self.final_norm(x_rbtd)
        logits_rbtv: Tensor = self.at_readout(hidden_rbtd, self)
        if self.operands is not torch.bfloat16 or self.at_logits.changes or not kernels.can_take(logits_rbtv):
            logits_rbtv = logits_rbtv.to(x_rbtd.dtype)
        return self.at_logits(logits_rbtv), hidden_rbtd

    def layers(self) -> Iterator[tuple[str, Layer]]:
        """Yield every layer that owns a weight, by the weight's name (``block0.attention.query``)."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield f".{path}".replace(".at_", ".").replace(".changes.", ".")[1:], module

    def weights(self) -> dict[str, Tensor]:
        """Return every weight ``[r ...]`` by its name."""
        return {name: layer.weight for name, layer in self.layers()}

    def roles(self) -> dict[str, str]:
        """Return the role of every weight by its name."""
        return {name: layer.role for name, layer in self.layers()}

    def freeze(self, is_frozen: Callable[[Role], bool]) -> None:
        """Train no weights of these roles."""
        for _, layer in self.layers():
            layer.weight.requires_grad_(not is_frozen(layer.role))

    def factors(
        self, parametrization: Any, width: int, role_lr: Callable[[Role], float] = lambda _: 1.0
    ) -> dict[str, Factors]:
        """Return initial scale and LR multiplier of every weight, by name; ``role_lr`` multiplies the latter."""
        factors = dict[str, Factors]()
        for name, layer in self.layers():
            factor = parametrization.factors(layer.role, layer.fan_in, width)
            factors[name] = replace(factor, lr=factor.lr * role_lr(layer.role))
        for _, intervention in sorted(self.interventions.items()):
            for name, factor in factors.items():
                std = intervention.initial_std(name, factor.init_std, self.config)
                factors[name] = replace(factor, init_std=std)
        return factors

    @torch.no_grad()
    def initialize(self, seeds: Sequence[int], factors: Mapping[str, Factors]) -> None:
        """Draw every weight of run i from seed i alone."""
        for name, layer in self.layers():
            for run, seed in enumerate(seeds):
                copy_whole(layer.weight[run], draw(layer, name, seed, factors[name].init_std))
