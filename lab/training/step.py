"""A step of training: the state that it changes in place, what may gate its update, and the step itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lab.core import distributed
from lab.core.axes import over, per_run_norm, select_per_run
from lab.core.distributed import gradients
from lab.core.hooks import announce, collecting
from lab.core.number_formats import rounded
from lab.core.registry import PROBES
from lab.core.routing import Routes
from lab.interventions.experts import begin_routing, learn_from_routes, routing_with
from lab.model.custom import CustomModel
from lab.model.layers import Operands
from lab.model.loss import IGNORED, losses
from lab.model.low_precision import LowPrecision, RoundingPass, rounding_pass
from lab.model.transformer import Transformer
from lab.optim.links import Now, Tensors
from lab.optim.optimizer import Optimizer
from lab.probes.updates import HeldOutLoss, begin_earlier, compare_with_earlier
from lab.responses.response import Gate
from lab.training import accumulation
from lab.training.accumulation import Accumulation, sum_in_fp16
from lab.training.building import loss_terms, operand_format, weight_interventions
from lab.training.config import RunConfig


def begin_readings(runs: int, device: torch.device) -> dict[str, Tensor]:
    """Measurements of an update for each run ``[r]``, and the usual loss, which the next update reads."""
    readings = {name: torch.zeros(runs, dtype=torch.float64, device=device) for name in ("loss", "norm", "at_floor")}
    kept_r = torch.ones(runs, dtype=torch.float64, device=device)
    return {**readings, "kept": kept_r, "usual_loss": torch.full_like(kept_r, math.inf)}


@torch.no_grad()
def gate_update(
    config: RunConfig, gradients: Mapping[str, Tensor], loss_r: Tensor, step: Tensor, readings: Mapping[str, Tensor]
) -> Gate:
    """Write down what control reads, if anything, and ask response and loss scale how to change this update."""
    gate = Gate()
    if not readings:
        return gate
    norm_r = per_run_norm(gradients.values())
    readings["loss"].copy_(loss_r)
    readings["norm"].copy_(norm_r)
    if config.response is not None:
        gate = config.response.entry.gate(step, loss_r, norm_r, readings["usual_loss"])
    if config.loss_scale is not None:
        finite_r = norm_r.isfinite()
        gate = gate._replace(keep_r=finite_r if gate.keep_r is None else gate.keep_r & finite_r)
    if gate.keep_r is not None:
        readings["kept"].copy_(gate.keep_r)
    return gate


@torch.no_grad()
def update_kept(update: Callable[[], None], keep_r: Tensor, tensors: Sequence[Tensor], *, traced: bool) -> None:
    """Update the runs to keep; the others' tensors stay bit for bit, whatever their gradients are.

    A step that is ``traced`` cannot branch on whether all are kept.
    """
    if not traced and bool(keep_r.all()):
        update()
        return
    before = [tensor.clone() for tensor in tensors]
    update()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(select_per_run(keep_r, tensor, old))


@torch.no_grad()
def rescale(config: RunConfig, scale: Mapping[str, Tensor], readings: Mapping[str, Tensor]) -> None:
    """Adapt the loss scale to whether gradients overflowed, and write down how long it has been at its floor."""
    if config.loss_scale is not None:
        announce("loss_scale", "", scale["scale"])
        for name, after_r in config.loss_scale.entry.after(scale, ~readings["norm"].isfinite()).items():
            scale[name].copy_(after_r)
        readings["at_floor"].copy_(scale["at_floor"])


Initializers = Mapping[str, Callable[[], Tensors]]  # of the state of each link, and of the loss scale


class TrainingState(NamedTuple):
    """Everything that a step changes in place; a tree of tensors, as an engine takes it.

    Attributes:
        weights: those that are trained.
        links: state of the optimizer's links by their names, of loss scale and rounding, and what probes compare a
            step with.
        first_bad_r: first step with a non-finite loss, or -1.
        readings: what control reads after a step; empty unless the fleet is controlled.
        sums: over the micro-batches of a step; empty for steps of one batch.
    """

    weights: Tensors
    links: dict[str, Tensors]
    first_bad_r: Tensor
    readings: Tensors
    sums: Accumulation | tuple[()]

    @property
    def loss_scale(self) -> Tensors:
        """State of the loss scale; empty without one."""
        return self.links.get("loss_scale", {})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of checkpoints and snapshots, by name; the first bad step is stored apart."""
        links = {f"{link}.{name}": tensor for link, tensors in self.links.items() for name, tensor in tensors.items()}
        noise = {f"noise.{name}": sum_r for name, sum_r in self.sums.noise.items()} if self.sums else {}
        smoothed = {f"smoothed.{name}": mean_r for name, mean_r in self.sums.smoothed.items()} if self.sums else {}
        return {f"weight.{name}": weight for name, weight in self.weights.items()} | links | noise | smoothed

    @torch.no_grad()
    def reset(self, fresh: Initializers, run: int, name: str, begin_of_names: str = "") -> None:
        """Put one run's state of a link, or of the loss scale, to what it was before the first update.

        Args:
            fresh: what begins the states.
            run: whose state it is.
            name: of the link.
            begin_of_names: how names of its tensors begin, after the role; others stay.
        """
        for key, tensor in fresh[name]().items():
            if key.rpartition("/")[2].startswith(begin_of_names):
                self.links[name][key][run].copy_(tensor[run])


def fresh_links(
    config: RunConfig,
    optimizers: Iterable[Optimizer],
    weights: Tensors,
    roles: Mapping[str, str],
    operands: Operands | None,
) -> Initializers:
    """Return the initial state of the links of these optimizers, and of loss scale, rounding and routers with one."""
    fresh: dict[str, Callable[[], Tensors]] = {
        name: partial(optimizer.begin_link, name, weights, roles)
        for optimizer in optimizers
        for name in optimizer.links
    }
    if config.loss_scale is not None:
        first = next(iter(weights.values()))
        fresh["loss_scale"] = partial(config.loss_scale.entry.begin, len(first), first.device)
    if isinstance(operands, LowPrecision) and operands.is_stateful:
        seeds: Any = config.seed
        fresh["rounding"] = partial(operands.begin, seeds, next(iter(weights.values())).device)
    begin = partial(begin_router, config, weights)
    if begin():
        fresh["router"] = begin
    return fresh


def begin_router(config: RunConfig, weights: Tensors) -> Tensors:
    """What routers of experts need between steps; empty for those that need nothing."""
    blocks = [f"block{index}" for index in range(config.model.depth)]
    measures_load = any(PROBES[name].event == "router_load" for name in config.probes.names)
    seeds: Any = config.seed
    return begin_routing(config.intervention, blocks, seeds, next(iter(weights.values())), with_load=measures_load)


def begin_state(config: RunConfig, weights: Tensors, fresh: Initializers) -> TrainingState:
    """The state of a fleet with this config before the first update."""
    first = next(iter(weights.values()))
    runs, device, names = len(first), first.device, config.probes.names
    links = {name: begin() for name, begin in fresh.items()}
    links |= begin_earlier({PROBES[name].event for name in names}, weights)
    readings = begin_readings(runs, device) if config.is_controlled else {}
    sums: Accumulation | tuple[()] = ()
    if config.batch is not None:
        with_noise = "noise_scale" in names or config.adaptive is not None
        sums = accumulation.begin(weights, with_noise=with_noise, adaptive=config.adaptive is not None)
    return TrainingState(weights, links, torch.full((runs,), -1, device=device), readings, sums)


Forward = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # tokens to logits and hidden states


class StepFunction:
    """Forward, backward and update of a fleet; what they change is in their first argument.

    Args:
        config: of the fleet; a restart sets another.
        model: of the fleet.
        shared: the module that a step calls on several ranks, which averages gradients over them.
        lr_factor: what the learning rate of each weight is multiplied by.
        roles: of the weights, by name; the roles of a custom model's weights are unknown.
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

    @contextmanager
    def kept_state(self, links: Mapping[str, Tensors], *, is_training: bool = False) -> Iterator[RoundingPass | None]:
        """Within the block products round, and routers choose, with the state that a fleet keeps for it, if any."""
        with (
            rounding_pass(self.low_precision, links.get("rounding", {})) as rounding,
            routing_with(links.get("router", {}), is_training=is_training),
        ):
            yield rounding

    def update(self, state: TrainingState, tokens_rbt: Tensor, step: Tensor, shape_r: Tensor) -> None:
        """Carry out a step of one batch ``[r b t+1]``, with the learning rate ``shape_r`` over its peak."""
        scale_r = state.loss_scale.get("scale")
        with self.kept_state(state.links, is_training=True) as rounding:
            with self.config.optimizer.measuring() as measured, collecting("router") as routes:
                weight_gradients, loss_r = self.gradients_of(state.weights, tokens_rbt, scale_r)
            if rounding:
                rounding.keep()
            self._change(state, weight_gradients, loss_r, step, shape_r, measured, routes)

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
        self._change(state, weight_gradients, loss_r, step, shape_r, {}, {})

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
        with collecting("router") as routes:
            logits_rbtv, hidden_rbtd = forward(tokens_rbt[..., :-1])
        loss_r, _ = losses(logits_rbtv, tokens_rbt[..., 1:], loss_terms(self.config), hidden_rbtd, routes)
        weight_gradients = gradients(loss_r if scale_r is None else loss_r * scale_r, trained)
        if self.config.precision == "fp16_emulated":
            weight_gradients = {name: rounded(gradient, torch.float16) for name, gradient in weight_gradients.items()}
        if scale_r is not None:
            weight_gradients = {name: gradient / over(scale_r, gradient) for name, gradient in weight_gradients.items()}
        return weight_gradients, loss_r.detach()

    def _change(
        self,
        state: TrainingState,
        weight_gradients: Tensors,
        loss_r: Tensor,
        step: Tensor,
        shape_r: Tensor,
        measured: Mapping[str, Tensors],
        routes: Routes,
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
        update = partial(self._update_weights, weight_gradients, links, now, measured, routes)
        if gate.keep_r is None:
            update()
        else:
            kept = [*weights.values(), *(tensor for link in links.values() for tensor in link.values())]
            update_kept(update, gate.keep_r, kept, traced=self.config.is_traced)
        self.store(weights)
        compare_with_earlier(links, weights, weight_gradients)
        rescale(self.config, state.loss_scale, readings)

    @torch.no_grad()
    def _update_weights(
        self,
        weight_gradients: Tensors,
        links: dict[str, Tensors],
        now: Now,
        measured: Mapping[str, Tensors],
        routes: Routes,
    ) -> None:
        self.config.optimizer.step(weight_gradients, links, now, measured)
        learn_from_routes(links.get("router", {}), routes, self.config.intervention)
        for _, entry in sorted(weight_interventions(self.config).items()):
            entry.after_update(now.weights)

    @torch.no_grad()
    def store(self, weights: Mapping[str, Tensor]) -> None:
        """Round weights to the precision in which they are kept, if there are no master weights."""
        if self.stored:
            for weight in weights.values():
                weight.copy_(rounded(weight, self.stored))
