"""The loss: cross-entropy per run, and the terms that interventions add to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.core.axes import mean_over_tokens
from lab.core.hooks import LossTerm, Predictions, announce
from lab.core.routing import Routes
from lab.model import kernels

IGNORED = -1  # a target that counts neither in the cross-entropy nor in any term


class TokenLoss(torch.autograd.Function):
    """Logits ``[r b t v]``, targets ``[r b t]`` to cross-entropy and log Z ``[r b t]``, in nats.

    Written out because its gradient is one formula, (dCE + dlogZ) softmax - dCE onehot, which autograd would spread
    over four more tensors of the logits' size.  The gradient at targets equal to IGNORED is zero, even where the
    logits are NaN.
    """

    @staticmethod
    def forward(ctx: Any, logits_rbtv: Tensor, targets_rbt: Tensor) -> tuple[Tensor, Tensor]:
        ignored_rbt1 = targets_rbt.unsqueeze(-1) == IGNORED
        index_rbt1 = targets_rbt.unsqueeze(-1).masked_fill(ignored_rbt1, 0)
        p_rbtv, largest_rbt1 = F.softmax(logits_rbtv, dim=-1), logits_rbtv.amax(-1, keepdim=True)
        ctx.save_for_backward(p_rbtv, index_rbt1, ignored_rbt1)
        log_largest_p_rbt1 = p_rbtv.amax(-1, keepdim=True).log()  # the largest p never underflows
        loss_rbt1 = largest_rbt1 - logits_rbtv.gather(-1, index_rbt1) - log_largest_p_rbt1
        return loss_rbt1.squeeze(-1), (largest_rbt1 - log_largest_p_rbt1).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        p_rbtv, index_rbt1, ignored_rbt1 = ctx.saved_tensors
        dloss_rbt1, dlog_z_rbt1 = (gradient_rbt.unsqueeze(-1) for gradient_rbt in gradients)
        gradient_rbtv = p_rbtv * (dloss_rbt1 + dlog_z_rbt1)
        gradient_rbtv.scatter_add_(-1, index_rbt1, -dloss_rbt1)
        return gradient_rbtv.masked_fill_(ignored_rbt1, 0.0), None


def _used(term: LossTerm, predictions: Predictions, counted_rbt: Tensor) -> Predictions:
    """Return the fields that a term uses, 0 at tokens that do not count, so that no NaN comes back from them."""
    used: dict[str, Any] = dict.fromkeys(Predictions._fields)
    for name in term.uses:
        value = getattr(predictions, name)
        if name == "routes":
            used[name] = {where: routing.of_tokens(counted_rbt) for where, routing in value.items()}
            continue
        counted = counted_rbt.view(*counted_rbt.shape, *(1,) * (value.ndim - counted_rbt.ndim))
        # TokenLoss returns no gradient through log Z of an ignored target
        used[name] = value if name == "log_z_rbt" else torch.where(counted, value, 0)
    return Predictions(**used)


def losses(
    logits_rbtv: Tensor,
    targets_rbt: Tensor,
    terms: Mapping[str, LossTerm],
    hidden_rbtd: Tensor | None = None,
    routes: Routes | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss to train on and the cross-entropy; targets equal to IGNORED do not count.

    Args:
        logits_rbtv: the output of the model.
        targets_rbt: the tokens to predict.
        terms: loss terms by name; those that use hidden states need ``hidden_rbtd``.
        hidden_rbtd: hidden states, from which the head computed the logits.
        routes: how tokens were routed to experts, by block.

    Returns:
        Loss ``[r]`` and cross-entropy ``[r]``, in nats per token.
    """
    counted_rbt = targets_rbt != IGNORED
    if kernels.can_take(logits_rbtv) and not any("logits_rbtv" in term.uses for term in terms.values()):
        of_tokens = kernels.TokenLoss.apply(logits_rbtv.flatten(0, 2), targets_rbt.flatten())  # type: ignore
        cross_entropy_rbt, log_z_rbt = (value_n.view(targets_rbt.shape) for value_n in of_tokens)
    else:
        if logits_rbtv.dtype is torch.bfloat16:
            logits_rbtv = logits_rbtv.float()
        cross_entropy_rbt, log_z_rbt = TokenLoss.apply(logits_rbtv, targets_rbt)  # type: ignore[no-untyped-call]
    cross_entropy_r = mean_over_tokens(cross_entropy_rbt, counted_rbt)
    announce("log_z", "", log_z_rbt, counted_rbt)
    announce("train_loss", "", cross_entropy_r)
    total_r = cross_entropy_r
    predictions = Predictions(logits_rbtv, log_z_rbt, targets_rbt, hidden_rbtd, routes or {})  # type: ignore[arg-type]
    for _, term in sorted(terms.items()):
        total_r = total_r + mean_over_tokens(term(_used(term, predictions, counted_rbt)), counted_rbt)
    return total_r, cross_entropy_r
