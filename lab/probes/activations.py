"""Probes of activations: attention logits, norms of queries and keys, output logits, and what rounding does to them.

Every probe returns one number per run, ``[r]``, for each hook point that announces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.core.axes import causal_mask, mean_over_tokens, per_run_max, per_run_mean, per_run_rms
from lab.core.distributed import mean_over_ranks
from lab.probes.listener import probe, share


@probe(event="train_loss")
def train_loss(loss_r: Tensor) -> Tensor:
    """Cross-entropy of the batch before the update, nats per token, without added terms."""
    return mean_over_ranks(loss_r)


@probe(event="val_loss")
def val_loss(loss_r: Tensor) -> Tensor:
    """Held-out cross-entropy, nats per token: of all windows at the start and the end, of a fixed slice in between."""
    return loss_r


@probe(event="clean_val_loss")
def clean_val_loss(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cross-entropy on held-out text without the artefact of the corpus, of a fixed slice; other data have none."""
    return losses


@probe(event="scores", largest=True)
def attention_logit_max(scores_rbhts: Tensor) -> Tensor:
    """Largest causal score, after 1/sqrt(head width) and before any cap (Wortsman et al. 2023, fig. 9)."""
    return per_run_max(torch.where(causal_mask(scores_rbhts), scores_rbhts, -torch.inf))


@probe(event="attention", falls=True)
def attention_entropy(weights_rbhts: Tensor) -> Tensor:
    """Mean entropy of the attention weights over queries and heads, nats (Zhai et al. 2023, arXiv:2303.06296)."""
    return per_run_mean(torch.special.entr(weights_rbhts).sum(-1))


@probe(event="logits")
def output_logit_mean(logits_rbtv: Tensor) -> Tensor:
    """Mean output logit; its drift is the output logit divergence of Wortsman et al. 2023, fig. 4."""
    return per_run_mean(logits_rbtv)


@probe(event="logits", is_root=True)
def output_logit_rms(logits_rbtv: Tensor) -> Tensor:
    """Root mean square of the output logits."""
    return per_run_rms(logits_rbtv)


@probe(event="log_z")
def log_z(log_z_rbt: Tensor, counted_rbt: Tensor) -> Tensor:
    """Mean log of the softmax normalizer over the tokens that count."""
    return mean_over_ranks(mean_over_tokens(log_z_rbt, counted_rbt))


@probe(event="log_z")
def log_z_square(log_z_rbt: Tensor, counted_rbt: Tensor) -> Tensor:
    """Mean square of log Z over the tokens that count, which z-loss penalizes (Wortsman et al. 2023, fig. 4)."""
    return mean_over_ranks(mean_over_tokens(log_z_rbt.square(), counted_rbt))


@probe(event="log_z")
def log_z_std(log_z_rbt: Tensor, counted_rbt: Tensor) -> Tensor:
    """Standard deviation of log Z over the tokens that count."""
    mean_r = mean_over_ranks(mean_over_tokens(log_z_rbt, counted_rbt))
    square_rbt = (log_z_rbt - mean_r[:, None, None]).square()
    return mean_over_ranks(mean_over_tokens(square_rbt, counted_rbt)).sqrt()


@probe(event="query_key")
def query_norm(q_rbhtk: Tensor, k_rbhsk: Tensor, scale: float) -> Tensor:
    """Mean norm of a head's query, after qk-layernorm if there is one (Wortsman et al. 2023, fig. E.1).

    The attention scale is divided out.  Where an intervention moves a factor, this divides by the scale as before:
    query norms are head width ** 1/4 larger under ``split_qk_scaling``, and head width ** 1/2 larger under
    ``late_qk_scaling``.
    """
    return per_run_mean(q_rbhtk.norm(dim=-1)) / scale


@probe(event="query_key")
def key_norm(q_rbhtk: Tensor, k_rbhsk: Tensor, scale: float) -> Tensor:
    """Mean norm of a head's key, after qk-layernorm if there is one (Wortsman et al. 2023, fig. E.1).

    Under ``split_qk_scaling`` it contains the factor that moved: key norms are head width ** 1/4 smaller.
    """
    return per_run_mean(k_rbhsk.norm(dim=-1))


@probe(event="query_key")
def query_key_cosine(q_rbhtk: Tensor, k_rbhsk: Tensor, scale: float) -> Tensor:
    """Mean absolute cosine between a query and the keys it may see, after rotation (Wortsman et al. 2023, fig. E.1)."""
    q_rbhtk, k_rbhsk = F.normalize(q_rbhtk, dim=-1), F.normalize(k_rbhsk, dim=-1)
    cosine_rbhts = torch.matmul(q_rbhtk, k_rbhsk.transpose(-1, -2)).abs()
    past_ts = causal_mask(cosine_rbhts)
    return per_run_mean(torch.where(past_ts, cosine_rbhts, 0.0)) * past_ts.numel() / past_ts.sum()


@probe(event="block_output", is_root=True)
def block_rms(x_rbtd: Tensor) -> Tensor:
    """Root mean square of a block's output, the residual stream after it (Wortsman et al. 2023, fig. C.1)."""
    return per_run_rms(x_rbtd)


@probe(event="block_output")
def block_kurtosis(x_rbtd: Tensor) -> Tensor:
    """Mean fourth power of a block's output over its squared mean square: 3 if normal, more with outlier features."""
    square_rbtd = x_rbtd.square()
    return per_run_mean(square_rbtd.square()) / per_run_mean(square_rbtd).square()


@probe(event="gradient_rounding")
def gradient_underflow(before_r: Tensor, after_r: Tensor, beyond: Tensor | float) -> Tensor:
    """Share of a gradient's entries that are not zero and round to zero, where a product takes it in low precision.

    Of formats with a scale for each block it is the rounding for the gradient of the product's left operand, which goes
    on to earlier layers.
    """
    return share((before_r != 0) & (after_r == 0), before_r)


@probe(event="rounding")
def saturation(before_r: Tensor, after_r: Tensor, beyond: Tensor | float) -> Tensor:
    """Share of an operand's entries that the largest number of its format takes the place of.

    Rounding to nearest would leave them beyond it.  A scale by the largest entry of the operand itself leaves none;
    delayed scales do where an operand has grown, and MX where the largest of a block has a large mantissa.  A block
    without a scale, in which all is zero, has none either.
    """
    return share((before_r.abs() >= beyond) & (after_r != 0), before_r)
