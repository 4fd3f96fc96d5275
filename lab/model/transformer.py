"""A decoder-only Transformer with pre-LayerNorm, RoPE and no biases, as in Wortsman et al. 2023, sec. 2.1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lab.core.distributed import copy_whole
from lab.core.hooks import HookPoint, attach
from lab.model.attention import Attention
from lab.model.gelu import gelu
from lab.model.layers import Embedding, Layer, LayerNorm, Linear, draw
from lab.model.parametrization import Factors, Role
from lab.model.shape import ModelConfig


class Block(nn.Module):
    """Attention, then an MLP of four times the width with tanh-form GELU, each added to the residual stream."""

    def __init__(self, runs: int, config: ModelConfig, where: str, scale: float, operands: torch.dtype | None) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(runs, config.width)
        self.attention = Attention(runs, config, where, scale, operands)
        self.mlp_norm = LayerNorm(runs, config.width)
        self.mlp_up = Linear(runs, config.width, 4 * config.width, operands)
        self.mlp_down = Linear(runs, 4 * config.width, config.width, operands)
        self.at_output = HookPoint("block_output", where)

    def forward(self, x_rbtd: Tensor) -> Tensor:
        x_rbtd = x_rbtd + self.attention(self.attention_norm(x_rbtd))
        up_rbtm = gelu(self.mlp_up(self.mlp_norm(x_rbtd)).to(x_rbtd.dtype))
        output_rbtd: Tensor = self.at_output(x_rbtd + self.mlp_down(up_rbtm))
        return output_rbtd


class Transformer(nn.Module):
    """Tokens ``[r b t]`` to logits ``[r b t v]``; ``runs`` models of one shape side by side.

    Given ``operands``, every matrix product rounds what it takes and what it makes to that precision, forward and
    backward; all between products keeps the weights' precision, in which the logits are returned.
    """

    ends = ("embedding", "head")  # weights that are not counted among those "without embeddings"

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        runs: int,
        interventions: Mapping[str, Any],
        attention_scale: float,
        operands: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(runs, vocabulary, config.width)
        self.blocks = [f"block{index}" for index in range(config.depth)]
        for where in self.blocks:
            setattr(self, where, Block(runs, config, where, attention_scale, operands))
        self.final_norm = LayerNorm(runs, config.width)
        self.head = Linear(runs, config.width, vocabulary, operands, Role.READOUT)
        self.at_logits = HookPoint("logits", "")
        attach(self, interventions, runs, config)

    def forward(self, tokens_rbt: Tensor) -> Tensor:
        x_rbtd: Tensor = self.embedding(tokens_rbt)
        for where in self.blocks:
            x_rbtd = self.get_submodule(where)(x_rbtd)
        logits_rbtv: Tensor = self.at_logits(self.head(self.final_norm(x_rbtd)).to(x_rbtd.dtype))
        return logits_rbtv

    def layers(self) -> Iterator[tuple[str, Layer]]:
        """Every weight-owning layer by the name its weight goes by (``block0.attention.query``)."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield path.replace(".at_", ".").replace(".changes.", "."), module

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its name."""
        return {name: layer.weight for name, layer in self.layers()}

    def factors(self, parametrization: Any, width: int) -> dict[str, Factors]:
        """Initial scale and LR multiplier of every weight, by name."""
        return {name: parametrization.factors(layer.role, layer.fan_in, width) for name, layer in self.layers()}

    @torch.no_grad()
    def initialize(self, seeds: Sequence[int], factors: Mapping[str, Factors]) -> None:
        """Draw every weight of run i from seed i; the run's neighbours play no part."""
        for name, layer in self.layers():
            for run, seed in enumerate(seeds):
                copy_whole(layer.weight[run], draw(layer, name, seed, factors[name].init_std))
