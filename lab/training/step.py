"""A training step as functions of tensors: forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lab.core import distributed
from lab.core.axes import over
from lab.core.distributed import gradients
from lab.core.rounding import rounded
from lab.model.custom import CustomModel
from lab.model.loss import IGNORED, losses
from lab.model.low_precision import LowPrecision, RoundingPass, rounding_pass
from lab.model.transformer import Transformer
from lab.optim.links import Now, Tensors
from lab.probes.earlier import compare_with_earlier
from lab.probes.gradients import HeldOutLoss
from lab.training import accumulation
from lab.training.accumulation import Accumulation, sum_in_fp16
from lab.training.building import loss_terms, operand_format, weight_interventions
from lab.training.config import RunConfig
from lab.training.gating import gate_update, rescale, update_kept
from lab.training.state import TrainingState

Forward = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # tokens to logits and hidden states


class StepFunction:
    """Forward, backward and update of a fleet; what they change is in their first argument.

    Args:
        config: of the fleet; a restart sets another.
        model: of the fleet.
        shared: the module that a step calls on several ranks, which averages gradients over them.
        lr_factor: what the learning rate of each weight is multiplied by.
        roles: of the weights, by name; those of a custom model are unknown.
        held_out: the held-out windows ``[n t+1]`` on which probes may measure a step.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Transformer | CustomModel,
        shared: nn.Module,
        lr_factor: Mapping[str, float],
        roles: Mapping[str, str],
        held_out: Callable[[], Tensor],
    ) -> None:
        self.config, self.model, self.shared, self.held_out = config, model, shared, held_out
        self.lr_factor, self.roles = lr_factor, roles
        stored, operands = operand_format(config), model.operands
        self.stored = stored if config.master_weights == "none" and not isinstance(stored, LowPrecision) else None
        self.low_precision = operands if isinstance(operands, LowPrecision) else None

    def rounding(self, links: Mapping[str, Tensors]) -> AbstractContextManager[RoundingPass | None]:
        """Within the block products round with the state that a fleet keeps for it, if any."""
        return rounding_pass(self.low_precision, links.get("rounding", {}))

    def update(self, state: TrainingState, tokens_rbt: Tensor, step: Tensor, shape_r: Tensor) -> None:
        """Carry out a step of one batch ``[r b t+1]``, with the learning rate ``shape_r`` over its peak."""
        scale_r = state.loss_scale.get("scale")
        with self.rounding(state.links) as rounding:
            with self.config.optimizer.measuring() as measured:
                weight_gradients, loss_r = self.gradients_of(state.weights, tokens_rbt, scale_r)
            if rounding:
                rounding.keep()
            self._change(state, weight_gradients, loss_r, step, shape_r, measured)

    def accumulate(self, state: tuple[Tensors, Accumulation, Tensors], tokens_rbt: Tensor) -> None:
        """Add the gradients of a micro-batch to the sums; ``state`` is weights, sums and state of the loss scale."""
        weights, sums, loss_scale = state
        weight_gradients, loss_r = self.gradients_of(weights, tokens_rbt, loss_scale.get("scale"))
        targets_r = (tokens_rbt[..., 1:] != IGNORED).flatten(1).sum(1).to(loss_r.dtype)
        accumulation.add(sums, weight_gradients, loss_r, targets_r, sum_in_fp16(self.config, loss_scale))

    def update_by_sums(self, state: TrainingState, step: Tensor, shape_r: Tensor, count: Tensor) -> None:
        """As ``update``, with the gradients summed over ``count`` micro-batches."""
        assert state.sums, "a step of several micro-batches"
        weight_gradients, loss_r = accumulation.mean(state.sums, sum_in_fp16(self.config, state.loss_scale))
        memory = self.config.adaptive.memory if self.config.adaptive else 1.0
        accumulation.add_noise(state.sums, weight_gradients, self.config.rows, count, memory)
        self._change(state, weight_gradients, loss_r, step, shape_r, {})

    def gradients_of(
        self, weights: dict[str, Tensor], tokens_rbt: Tensor, scale_r: Tensor | None = None
    ) -> tuple[Tensors, Tensor]:
        """Gradients of the mean loss over these tokens, and that loss ``[r]``; a loss scale is divided out again."""
        forward: Forward = self.shared
        if distributed.is_joined():
            trained = weights
        else:
            trained = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            names = (name for name, weight in self.model.named_parameters() if weight.requires_grad)
            forward = partial(functional_call, self.model, dict(zip(names, trained.values(), strict=True)))
        logits_rbtv, hidden_rbtd = forward(tokens_rbt[..., :-1])
        loss_r, _ = losses(logits_rbtv, tokens_rbt[..., 1:], loss_terms(self.config), hidden_rbtd)
        weight_gradients = gradients(loss_r if scale_r is None else loss_r * scale_r, trained)
        if self.config.precision == "fp16_emulated":
            weight_gradients = {name: rounded(each, torch.float16) for name, each in weight_gradients.items()}
        if scale_r is not None:
            weight_gradients = {name: each / over(scale_r, each) for name, each in weight_gradients.items()}
        return weight_gradients, loss_r.detach()

    def _change(
        self,
        state: TrainingState,
        weight_gradients: Tensors,
        loss_r: Tensor,
        step: Tensor,
        shape_r: Tensor,
        measured: Mapping[str, Tensors],
    ) -> None:
        weights, links, first_bad_r, readings, _ = state
        newly_bad_r = (first_bad_r < 0) & ~distributed.mean_over_ranks(loss_r).isfinite()
        first_bad_r.copy_(torch.where(newly_bad_r, step, first_bad_r))
        gate = gate_update(self.config, weight_gradients, loss_r, step, readings)
        if gate.lr_factor_r is not None:
            shape_r = shape_r * gate.lr_factor_r
        windows_rbt, lr_of = self.held_out().expand(len(loss_r), -1, -1), self.config.optimizer.lr_of
        held_out = HeldOutLoss(
            self.gradients_of,
            weights,
            windows_rbt,
            lambda name: lr_of(self.roles.get(name)) * self.lr_factor[name] * shape_r,
        )
        now = Now(step, weights, shape_r, self.lr_factor, held_out, self.roles, steps=self.config.steps)
        update = partial(self._update_weights, weight_gradients, links, now, measured)
        if gate.keep_r is None:
            update()
        else:
            kept = [*weights.values(), *(tensor for link in links.values() for tensor in link.values())]
            update_kept(update, gate.keep_r, kept, traced=self.config.engine == "compiled")
        self.store(weights)
        compare_with_earlier(links, weights, weight_gradients)
        rescale(self.config, state.loss_scale, readings)

    @torch.no_grad()
    def _update_weights(
        self, weight_gradients: Tensors, links: dict[str, Tensors], now: Now, measured: Mapping[str, Tensors]
    ) -> None:
        self.config.optimizer.step(weight_gradients, links, now, measured)
        for _, each in sorted(weight_interventions(self.config).items()):
            each.after_update(now.weights)

    @torch.no_grad()
    def store(self, weights: Mapping[str, Tensor]) -> None:
        """Round weights to the precision in which they are kept, if there are no master weights."""
        if self.stored:
            for weight in weights.values():
                weight.copy_(rounded(weight, self.stored))
