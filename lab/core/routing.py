"""Routing of tokens to experts: scores, the choice by them, gates, capacity, and how evenly the experts are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from lab.core.axes import in_whole_vectors
from lab.core.distributed import mean_over_ranks
from lab.core.number_formats import as_kept_in


class Routing(NamedTuple):
    """What the router of a block makes of a batch.

    Attributes:
        logits_rbte: of the router.
        scores_rbte: by which experts are chosen, a softmax or sigmoids of the logits.
        chosen_rbte: whether a token is routed to an expert, whatever the capacity.
        bias_re: what the choice adds to the scores, and the gates do not have; None for nothing.
        top_k: experts of a token.
        is_sigmoid: whether scores are sigmoids.
    """

    logits_rbte: Tensor
    scores_rbte: Tensor
    chosen_rbte: Tensor
    bias_re: Tensor | None
    top_k: int
    is_sigmoid: bool

    @property
    def log_scores_rbte(self) -> Tensor:
        """Logarithm of the scores, up to a number per token."""
        return in_whole_vectors(F.logsigmoid, self.logits_rbte) if self.is_sigmoid else self.logits_rbte

    @property
    def shares_rbte(self) -> Tensor:
        """Scores over their sum, exact where all of them underflow."""
        return F.softmax(self.log_scores_rbte, dim=-1)

    def counts(self) -> Tensor:
        """Number of tokens routed to each expert ``[r e]``, a mean over ranks."""
        return mean_over_ranks(self.chosen_rbte.flatten(1, 2).sum(1).to(self.logits_rbte.dtype))

    def of_tokens(self, counted_rbt: Tensor) -> Routing:
        """The routing with logits of 0 and no routes at tokens that do not count."""
        counted_rbt1 = counted_rbt.unsqueeze(-1)
        return self._replace(
            logits_rbte=torch.where(counted_rbt1, self.logits_rbte, 0.0),
            chosen_rbte=self.chosen_rbte & counted_rbt1,
        )


Routes = Mapping[str, Routing]  # by block


def route(
    logits_rbte: Tensor, top_k: int, *, is_sigmoid: bool, bias_re: Tensor | None = None, in_bf16: bool = False
) -> Routing:
    """Choose the experts of each token.

    Args:
        logits_rbte: of the router.
        top_k: experts of a token.
        is_sigmoid: whether scores are sigmoids, and not a softmax.
        bias_re: added to the scores for the choice alone.
        in_bf16: whether the scores are rounded to bf16.
    """
    scores_rbte = in_whole_vectors(torch.sigmoid, logits_rbte) if is_sigmoid else F.softmax(logits_rbte, dim=-1)
    if in_bf16:
        scores_rbte = as_kept_in(scores_rbte, torch.bfloat16)
    choice_rbte = scores_rbte if bias_re is None else scores_rbte + bias_re[:, None, None]
    return Routing(logits_rbte, scores_rbte, highest(choice_rbte.detach(), top_k), bias_re, top_k, is_sigmoid)


def highest(choice_rbte: Tensor, top_k: int) -> Tensor:
    """Where the ``top_k`` highest numbers of the last axis are; of equal ones the first."""
    experts_e = torch.arange(choice_rbte.shape[-1], device=choice_rbte.device)
    chosen_rbte = torch.zeros_like(choice_rbte, dtype=torch.bool)
    for _ in range(top_k):
        best_rbt1 = choice_rbte.masked_fill(chosen_rbte, -torch.inf).argmax(-1, keepdim=True)
        chosen_rbte = chosen_rbte | (best_rbt1 == experts_e)
    return chosen_rbte


def gates(routing: Routing, *, is_normalized: bool) -> Tensor:
    """What the output of each expert is multiplied by ``[r b t e]``: its score, or that over the sum of those chosen.

    The gate of an expert that was not chosen is 0.
    """
    if is_normalized:
        return F.softmax(torch.where(routing.chosen_rbte, routing.log_scores_rbte, -torch.inf), dim=-1)
    return torch.where(routing.chosen_rbte, routing.scores_rbte, 0.0)


def within_capacity(chosen_rbte: Tensor, places: int) -> Tensor:
    """Routes that an expert has a place for; earlier positions come first, so that no token sees later ones."""
    batch = chosen_rbte.shape[1]
    chosen_rne = rearrange(chosen_rbte, "r b t e -> r (t b) e")
    kept_rne = chosen_rne & (chosen_rne.cumsum(1) <= places)
    return rearrange(kept_rne, "r (t b) e -> r b t e", b=batch)


def balance(routing: Routing) -> Tensor:
    """Load-balancing loss of each token ``[r b t]``: E times the sum of f P over experts (Fedus et al. 2021, eq. 4).

    f is the share of routes that go to an expert, to which the loss is constant, and P the token's share of its score.
    The mean over tokens is 1 where both are even; it may be smaller.
    """
    counts_re = routing.counts()
    load_re = counts_re / counts_re.sum(-1, keepdim=True)
    return load_re.shape[-1] * (load_re[:, None, None] * routing.shares_rbte).sum(-1)


def log_z(routing: Routing) -> Tensor:
    """Log of the sum of the exponentials of the router's logits ``[r b t]``."""
    return routing.logits_rbte.logsumexp(-1)


def variation(load_re: Tensor) -> Tensor:
    """Coefficient of variation ``[r]`` of the loads of experts: standard deviation over mean."""
    return load_re.std(-1, correction=0) / load_re.mean(-1)
