"""Links that leave out whole updates of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.core.axes import per_run_norm
from lab.core.distributed import mean_over_ranks
from lab.core.registry import LINKS
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors, per_run


class Gate(Link):
    """A link that decides whether an update takes place: ``kept`` in its state is 1 or 0 for each run.

    Weights, and the state of all other links, stay bit for bit where it does not.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {"kept": per_run(weights, 1.0)}


@LINKS.register("skip_sigma")
@dataclass(frozen=True)
class SkipSigma(Gate):
    """Leave out updates whose loss or gradient norm is ``skip_sigmas`` standard deviations above the mean (OLMo 2).

    Mean and deviation are those of the last ``skip_window`` updates that were made; the first ``skip_fewest`` are all
    made.  What is left out does not count, so a limit stays while an event lasts.  A loss or norm that is not finite
    is always left out.
    """

    events: ClassVar = ("train_loss",)
    skip_sigmas: PerRun = bounded(above=0)
    skip_fewest: PerRun = bounded(at_least=2)
    skip_window: int = bounded(at_least=2)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        past = {name: per_run(weights)[:, None].repeat(1, self.skip_window) for name in ("losses", "norms")}
        return {**super().begin(weights), "count": per_run(weights), **past}

    def observe(self, *announced: Any) -> Tensor:
        """The loss of the batch, ``[r]``."""
        (loss_r,) = announced
        return mean_over_ranks(loss_r)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        count_r = state["count"]
        values = {"losses": now.measured[""].to(count_r), "norms": per_run_norm(now.gradients.values())}
        is_early_r = count_r < torch.as_tensor(self.skip_fewest).to(count_r)
        keep_r = torch.ones_like(is_early_r)
        for name, value_r in values.items():
            keep_r = keep_r & value_r.isfinite() & (is_early_r | (value_r <= self._limit(state[name], count_r)))
        for name, value_r in values.items():
            past_rw = state[name]
            newest_rw = torch.cat([past_rw[:, 1:], value_r[:, None]], 1)
            past_rw.copy_(torch.where(keep_r[:, None], newest_rw, past_rw))
        count_r.add_(keep_r.to(count_r))
        state["kept"].copy_(keep_r)
        return dict(updates)

    def _limit(self, past_rw: Tensor, count_r: Tensor) -> Tensor:
        """Mean plus so many standard deviations ``[r]`` of those of the window that are filled, the last ones."""
        filled_r1 = count_r.clamp(max=self.skip_window)[:, None]
        is_filled_rw = torch.arange(self.skip_window, 0, -1, device=past_rw.device) <= filled_r1
        mean_r1 = torch.where(is_filled_rw, past_rw, 0.0).sum(1, keepdim=True) / filled_r1
        square_r1 = torch.where(is_filled_rw, (past_rw - mean_r1).square(), 0.0).sum(1, keepdim=True)
        deviation_r = (square_r1 / (filled_r1 - 1)).sqrt()[:, 0]
        return mean_r1[:, 0] + torch.as_tensor(self.skip_sigmas).to(deviation_r) * deviation_r
