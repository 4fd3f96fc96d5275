"""Probes of the routers of experts: their logits and scores, and how evenly they load the experts.

Every probe returns one number per run, ``[r]``, for each block.  Loads are shares of routes, over the last 50 updates
or in one batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.core.axes import per_run_max, per_run_mean
from lab.core.number_formats import rounded
from lab.core.routing import Routing, balance, log_z, route, variation
from lab.probes.listener import probe

DEAD = 0.1  # an expert is dead with less than this share of an even load


@probe(event="router", largest=True)
def router_logit_max(routing: Routing) -> Tensor:
    """Largest logit of the router."""
    return per_run_max(routing.logits_rbte)


@probe(event="router")
def router_log_z(routing: Routing) -> Tensor:
    """Mean log of the sum of the exponentials of the router's logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""
    return per_run_mean(log_z(routing))


@probe(event="router", falls=True)
def router_entropy(routing: Routing) -> Tensor:
    """Mean entropy of a token's scores over their sum, nats."""
    return per_run_mean(torch.special.entr(routing.shares_rbte).sum(-1))


@probe(event="router")
def router_balance(routing: Routing) -> Tensor:
    """Load-balancing loss without its coefficient, about 1 where loads are even (Fedus et al. 2021, eq. 4)."""
    return per_run_mean(balance(routing))


@probe(event="router")
def router_flips(routing: Routing) -> Tensor:
    """Share of routes that would go to another expert if the router's logits and scores were rounded to bf16."""
    logits_rbte = rounded(routing.logits_rbte, torch.bfloat16)
    other = route(logits_rbte, routing.top_k, is_sigmoid=routing.is_sigmoid, bias_re=routing.bias_re, in_bf16=True)
    flipped_rbte = routing.chosen_rbte & ~other.chosen_rbte
    return per_run_mean(flipped_rbte.sum(-1).to(logits_rbte.dtype)) / routing.top_k


@probe(event="router", largest=True)
def router_bias_max(routing: Routing) -> Tensor:
    """Largest absolute bias of the choice; 0 without one."""
    if routing.bias_re is None:
        return torch.zeros_like(routing.logits_rbte[:, 0, 0, 0])
    return routing.bias_re.abs().amax(-1)


@probe(event="router")
def expert_load_cv_batch(routing: Routing) -> Tensor:
    """Coefficient of variation over experts of the routes of this batch, or of a micro-batch."""
    return variation(routing.counts())


@probe(event="router_load")
def expert_load_cv(load_rse: Tensor) -> Tensor:
    """Coefficient of variation over experts of the routes of the last 50 updates."""
    return variation(load_rse.sum(1))


@probe(event="router_load")
def expert_load_max(load_rse: Tensor) -> Tensor:
    """Largest number of routes of an expert over the mean of all, in the last 50 updates."""
    load_re = load_rse.sum(1)
    return load_re.amax(-1) / load_re.mean(-1)


@probe(event="router_load")
def dead_experts(load_rse: Tensor) -> Tensor:
    """Number of experts with less than a tenth of an even share of the routes of the last 50 updates."""
    load_re = load_rse.sum(1)
    return (load_re < DEAD * load_re.mean(-1, keepdim=True)).sum(-1).to(load_re.dtype)
