"""Probes of the forward pass: losses, attention scores and weights, logits, residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from lab.axes import per_run_max, per_run_mean, per_run_rms
from lab.probes.probe import probe
from lab.ranks import mean_over_ranks


@probe(hears="train_loss")
def train_loss(loss_r: Tensor) -> Tensor:
    """Cross-entropy of the batch before the update, nats per token, without added terms."""
    return mean_over_ranks(loss_r)


@probe(hears="val_loss")
def val_loss(loss_r: Tensor) -> Tensor:
    """Held-out cross-entropy: all of it at the start and after the last update, a fixed slice in between."""
    return loss_r


@probe(hears="scores")
def attention_logit_max(scores_rbhts: Tensor) -> Tensor:
    """Largest causal score, after 1/sqrt(head width) and before any cap (Wortsman et al. 2023, fig. 9)."""
    past_ts = torch.ones(scores_rbhts.shape[-2:], dtype=torch.bool, device=scores_rbhts.device).tril()
    return per_run_max(torch.where(past_ts, scores_rbhts, -torch.inf))


@probe(hears="attention")
def attention_entropy(weights_rbhts: Tensor) -> Tensor:
    """Mean entropy of the attention weights over queries and heads, nats (Zhai et al., arXiv:2303.06296)."""
    return per_run_mean(torch.special.entr(weights_rbhts).sum(-1))


@probe(hears="logits")
def output_logit_mean(logits_rbtv: Tensor) -> Tensor:
    """Mean output logit; its drift is the output-logit divergence of Wortsman et al., fig. 4."""
    return per_run_mean(logits_rbtv)


@probe(hears="logits")
def output_logit_rms(logits_rbtv: Tensor) -> Tensor:
    """Root mean square of the output logits."""
    return per_run_rms(logits_rbtv)


@probe(hears="log_z")
def log_z(log_z_r: Tensor) -> Tensor:
    """Mean log of the softmax normalizer over the tokens that count."""
    return mean_over_ranks(log_z_r)


@probe(hears="block_output")
def block_rms(x_rbtd: Tensor) -> Tensor:
    """Root mean square of a block's output, the residual stream after it (Wortsman et al., fig. C.1)."""
    return per_run_rms(x_rbtd)
