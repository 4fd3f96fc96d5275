"""Mixtures of experts: router, terms of the loss and the bias that balance it, and what a fleet keeps of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import over
from lab.core.hooks import Act, HookIntervention, HookPoint, LossTerm, Predictions, WeightIntervention, announce
from lab.core.number_formats import begin_random, mixed_bits, next_random, random_noise, signed
from lab.core.registry import INTERVENTIONS
from lab.core.roles import Role
from lab.core.routing import Routes, balance, gates, log_z, route, within_capacity
from lab.core.schema import PerRun, bounded, one_of
from lab.model.config import ModelConfig
from lab.model.layers import Layer, product

WINDOW = 50  # updates over which loads of experts are measured


@INTERVENTIONS.register("experts")
@dataclass(frozen=True)
class Experts(HookIntervention):
    """A mixture of experts in place of the MLP: each token passes the ``top_k`` experts with the highest scores.

    The experts are one MLP whose hidden layer holds those of all, multiplied by their gates: a gate commutes with an
    output without bias. So what treats a matrix as a whole (Muon, a spectral norm, one scale in fp8) treats the
    matrices of all experts as one, and an output's bias is shared by all.

    Attributes:
        number: experts of a block.
        top_k: experts of a token.
        hidden: hidden units of an expert over the width of the model; the dense MLP has 4.
        router: scores are a ``softmax`` (Fedus et al. 2021, arXiv:2101.03961) or ``sigmoid`` s (DeepSeek-V3).
        gates: the ``raw`` scores, or ``normalized`` by the sum of those chosen.
        shared: experts beside these that all tokens pass, without a gate.
        capacity: places of an expert over its fair share of the routes of a batch, or of a rank's part of it; routes
            without a place are dropped.  Infinity drops none.
        router_init: factor of the initial values of the router.
        router_precision: ``fp32``, whatever the precision of other products, or ``bf16`` for logits and scores.
        jitter: in training, the router's input is multiplied by random numbers within 1 plus or minus this.

    Raises:
        ValueError: a token cannot have that many experts.
    """

    hook_points: ClassVar = {"mlp_gate": Act.REPLACE}
    excludes: ClassVar = ("normformer", "sub_ln")
    number: int = bounded(at_least=1)
    top_k: int = bounded(at_least=1)
    hidden: float = bounded(above=0)
    router: str = one_of("softmax", "sigmoid")
    gates: str = one_of("raw", "normalized")
    shared: int = bounded(at_least=0)
    capacity: float = bounded(above=0, infinite=True)
    router_init: float = bounded(at_least=0)
    router_precision: str = one_of("fp32", "bf16")
    jitter: float = bounded(at_least=0, below=1)

    def __post_init__(self) -> None:
        if self.top_k > self.number:
            raise ValueError(f"top_k {self.top_k} is above the number of experts, {self.number}")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Mixture(self, point, runs, config.width)

    def mlp_parts(self, width: int) -> tuple[int, int]:
        return self.number + self.shared, max(1, round(self.hidden * width))

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return std * self.router_init if weight.endswith(".experts") else std

    def fair_share(self, tokens: int) -> float:
        """Routes of each expert if those of so many tokens were spread evenly."""
        return tokens * self.top_k / self.number


class Mixture(Layer):
    """Multiplies the hidden layer ``[r b t m]`` of all experts by gates, which it makes of the branch's input."""

    def __init__(self, experts: Experts, point: HookPoint, runs: int, width: int) -> None:
        super().__init__(runs, (width, experts.number), Role.MATRIX, fan_in=width)
        self.experts, self.where, self.block = experts, point.where, point.block

    def forward(self, hidden_rbtm: Tensor, x_rbtd: Tensor) -> Tensor:
        experts, kept = self.experts, _kept.get()
        in_bf16 = experts.router_precision == "bf16"
        if "random" in kept:
            key_r = signed(mixed_bits(kept["random"] ^ self.block))
            x_rbtd = x_rbtd * (1 + 2 * experts.jitter * random_noise(x_rbtd, key_r))
        x_rnd = x_rbtd.to(self.weight.dtype).flatten(1, 2)
        logits_rne = product(x_rnd, self.weight, torch.bfloat16 if in_bf16 else None).to(self.weight.dtype)
        routing = route(
            logits_rne.view(*x_rbtd.shape[:3], -1),
            experts.top_k,
            is_sigmoid=experts.router == "sigmoid",
            bias_re=kept.get(f"bias.{self.where}"),
            in_bf16=in_bf16,
        )
        announce("router", self.where, routing)
        gates_rbte = gates(routing, is_normalized=experts.gates == "normalized")
        if not math.isinf(experts.capacity):
            places = math.ceil(experts.capacity * experts.fair_share(x_rnd.shape[1]))
            gates_rbte = torch.where(within_capacity(routing.chosen_rbte, places), gates_rbte, 0.0)
        if experts.shared:
            always_rbte = gates_rbte.new_ones(*gates_rbte.shape[:3], experts.shared)
            gates_rbte = torch.cat([gates_rbte, always_rbte], dim=-1)
        hidden_rbteh = hidden_rbtm.view(*gates_rbte.shape, -1)
        gated_rbtm: Tensor = (hidden_rbteh * gates_rbte.unsqueeze(-1)).flatten(-2)
        return gated_rbtm


@INTERVENTIONS.register("balance")
@dataclass(frozen=True)
class Balance(LossTerm):
    """coefficient * the load-balancing loss of each block, so that experts get equal shares (arXiv:2101.03961, eq. 4).

    Loads are those of the forward pass, that is of a micro-batch where a batch has several.
    """

    uses: ClassVar = ("routes",)
    requires: ClassVar = ("experts",)
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions: Predictions) -> Tensor:
        term_rbt = sum(balance(routing) for routing in predictions.routes.values())
        assert isinstance(term_rbt, Tensor)
        return over(self.coefficient, term_rbt) * term_rbt


@INTERVENTIONS.register("router_z")
@dataclass(frozen=True)
class RouterZ(LossTerm):
    """coefficient * (log Z)^2 of each block's router, per token (Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""

    uses: ClassVar = ("routes",)
    requires: ClassVar = ("experts",)
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions: Predictions) -> Tensor:
        term_rbt = sum(log_z(routing).square() for routing in predictions.routes.values())
        assert isinstance(term_rbt, Tensor)
        return over(self.coefficient, term_rbt) * term_rbt


@INTERVENTIONS.register("router_bias")
@dataclass(frozen=True)
class RouterBias(WeightIntervention):
    """A bias per expert that the choice adds to the scores, moved by ``rate`` after each update.

    It rises for experts with fewer routes than the mean and falls for those with more (Wang et al. 2024,
    arXiv:2408.15664, alg. 1).  Gates do not have it, and it learns from training batches only.
    """

    requires: ClassVar = ("experts",)
    rate: PerRun = bounded(at_least=0)


_kept: ContextVar[Mapping[str, Tensor]] = ContextVar("kept", default=MappingProxyType({}))


@contextmanager
def routing_with(kept: Mapping[str, Tensor], *, is_training: bool) -> Iterator[None]:
    """Within the block routers choose with what a fleet keeps for them; only in training at random."""
    token = _kept.set({name: tensor for name, tensor in kept.items() if is_training or name != "random"})
    try:
        yield
    finally:
        _kept.reset(token)


def begin_routing(
    interventions: Mapping[str, Any], blocks: Sequence[str], seeds: Sequence[int], like: Tensor, *, with_load: bool
) -> dict[str, Tensor]:
    """What routers need between steps: biases ``[r e]``, loads ``[r step e]`` and a random number of each run.

    Args:
        interventions: of the runs, by name.
        blocks: names of the blocks.
        seeds: one of each run.
        like: a weight, for its precision and device.
        with_load: whether loads are measured.
    """
    experts = interventions.get("experts")
    kept: dict[str, Tensor] = {}
    if experts is None:
        return kept
    for where in blocks:
        if "router_bias" in interventions:
            kept[f"bias.{where}"] = torch.zeros(len(seeds), experts.number, dtype=like.dtype, device=like.device)
        if with_load:
            kept[f"load.{where}"] = torch.zeros(
                len(seeds), WINDOW, experts.number, dtype=like.dtype, device=like.device
            )
    if experts.jitter:
        kept["random"] = begin_random(seeds, like.device)
    return kept


@torch.no_grad()
def learn_from_routes(kept: Mapping[str, Tensor], routes: Routes, interventions: Mapping[str, Any]) -> None:
    """Move the biases, keep the loads and announce them, and draw the next random number, after an update."""
    for where, routing in routes.items():
        counts_re = routing.counts()
        if f"bias.{where}" in kept:
            bias_re = kept[f"bias.{where}"]
            # whole numbers, so that a load equal to the mean moves nothing
            below_re = counts_re.sum(-1, keepdim=True) - counts_re.shape[-1] * counts_re
            bias_re.add_(over(interventions["router_bias"].rate, bias_re) * below_re.sign())
        if f"load.{where}" in kept:
            load_rse = kept[f"load.{where}"]
            load_rse.copy_(torch.cat([load_rse[:, 1:], counts_re[:, None]], 1))
            announce("router_load", where, load_rse)
    if "random" in kept:
        kept["random"].copy_(next_random(kept["random"]))
