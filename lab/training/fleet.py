"""A fleet: runs of one shape trained as one, with their weights, batches, step and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from lab.core import distributed
from lab.core.axes import over, per_run_norm
from lab.core.distributed import distribute, gradients, initial_device
from lab.core.hooks import announce, attach
from lab.core.registry import PROBES
from lab.core.rounding import rounded
from lab.core.schema import leaves, stack
from lab.model.loss import IGNORED, losses
from lab.optim.batch_schedule import Adaptive
from lab.optim.links import Now, Tensors
from lab.probes.earlier import begin_earlier, compare_with_earlier
from lab.probes.gradients import HeldOutLoss
from lab.responses.response import Gate
from lab.training import accumulation
from lab.training.accumulation import Accumulation, sum_in_fp16
from lab.training.batches import BatchLoader as BatchLoader
from lab.training.batches import burst_draws
from lab.training.building import (
    build_model,
    hook_interventions,
    loss_terms,
    operand_format,
    pick_device,
    role_lr,
    weight_interventions,
)
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.control import Control, begin_readings, is_controlled
from lab.training.engine import Compiled, Eager, ProbeValues
from lab.training.identity import static_key

# Both are the same for every fleet, so that a run's bits do not depend on its neighbours.
VALIDATION_TOKENS = 1024  # held-out tokens of an evaluation between start and end
PASS_TOKENS = 2048  # held-out tokens of one pass through the model


NO_READINGS: Mapping[str, Tensor] = {}
Forward = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # tokens to logits and hidden states
# Weights, state of the links, first step with a bad loss, and readings if there are any.
TrainingState = tuple[Any, ...]


class Fleet:
    """Runs trained side by side; a fleet of one is a run, and there is no second code path.

    Args:
        configs: one per run; they differ only in numbers per run.
        dtype: the precision of weights, optimizer state and losses.
    """

    def __init__(self, configs: Sequence[RunConfig], dtype: torch.dtype = torch.float32) -> None:
        assert len({static_key(config) for config in configs}) == 1, "runs of different shapes cannot share a fleet"
        self.runs, self.device = len(configs), pick_device(configs[0].device)
        self.config = config = stack(configs, self.device)
        self.corpus = config.data.entry.open()
        self.loader = BatchLoader(
            self.corpus,
            config.data.entry.seed,
            config.batch_size,
            config.seq_len,
            self.device,
            resident=self.device.type != "cpu",
            draws=burst_draws(configs, self.corpus),
        )
        self.forward_differs = config.precision == "mantissa" or any(
            is_free for *_, is_free in leaves(hook_interventions(config))
        )
        self.terms = loss_terms(config)
        with initial_device(config.ranks):
            self.model = build_model(config, self.runs).to(dtype)
        blocks = map(self.model.get_submodule, self.model.blocks)
        self.shared = distribute(self.model, blocks, config.ranks, self.device)
        factors = self.model.factors(config.parametrization.entry, config.model.width, partial(role_lr, config))
        self.model.initialize(config.seed, factors)
        self.weights = {name: weight for name, weight in self.model.weights().items() if weight.requires_grad}
        self.stored = operand_format(config) if config.master_weights == "none" else None
        self._store(self.weights)
        self.lr_factor = {name: factor.lr for name, factor in factors.items()}
        self.adaptive: Adaptive | None = None
        if config.batch is not None and isinstance(config.batch.entry, Adaptive):
            assert self.runs == 1, "runs that choose their own batches cannot share a fleet"
            self.adaptive = config.batch.entry
        self.counts_s = config.micro_batches
        self.seen = torch.zeros(1, dtype=torch.int64)  # sequences; only an adaptive batch counts them
        self.shape_sr = self._shape(np.insert(self.counts_s[:-1].cumsum(), 0, 0) * config.rows)
        # of all links that a restart brings, so that the tensors of a fleet are the same throughout
        self.links = {name: link for phase in configs[0].phases for name, link in phase.optimizer.links.items()}
        self.state = self._begin_state()
        self.first_bad_r = torch.full((self.runs,), -1, device=self.device)
        self.step_sr = torch.arange(config.steps, device=self.device).unsqueeze(1).repeat(1, self.runs)
        self.run_r = torch.arange(self.runs, device=self.device)
        self.readings = begin_readings(self.runs, self.device) if is_controlled(configs[0]) else {}
        engine = Compiled if config.engine == "compiled" else Eager
        training_state = (self.weights, self.state, self.first_bad_r, self.readings)
        self.sums: Accumulation | None = None
        if config.batch is None:
            self.engine = self.summing = engine(self._update, training_state, config.probes.names)
        else:
            self.sums = accumulation.begin(
                self.weights,
                with_noise="noise_scale" in config.probes.names or self.adaptive is not None,
                adaptive=self.adaptive is not None,
            )
            self.engine = engine(self._apply, (*training_state, self.sums), config.probes.names)
            loss_scale = self.state.get("loss_scale", {})
            self.summing = engine(self._accumulate, (self.weights, self.sums, loss_scale), config.probes.names)
            self.summing.faults = self.engine.faults
        self.held_out_nt = torch.from_numpy(self.corpus.validation(config.seq_len, config.validation_targets))
        self.held_out_nt = self.held_out_nt.to(self.device)
        self.control: Control | None = None
        if self.readings:
            self.control = Control(configs, self.readings, self.tensors(), self._fresh)

    def _begin_state(self) -> dict[str, Tensors]:
        """State of the links, and what else a step keeps: what probes compare it with, and the loss scale."""
        earlier = begin_earlier({PROBES[name].hears for name in self.config.probes.names}, self.weights)
        names = [*self.links, "loss_scale"] if self.config.loss_scale else self.links
        return {name: self._begin(name) for name in names} | earlier

    def _begin(self, name: str) -> Tensors:
        if name == "loss_scale":
            return dict(self.config.loss_scale.entry.begin(self.runs, self.device))
        return self.links[name].begin(self.weights)

    def restart(self, config: RunConfig) -> None:
        """Go on with the optimizer, schedule and interventions of another config; all else stays bit for bit."""
        self.config = config
        attach(self.model, hook_interventions(config), self.runs, config.model)
        self.terms = loss_terms(config)
        self.shape_sr = self._shape(np.insert(self.counts_s[:-1].cumsum(), 0, 0) * config.rows)
        self.engine.forget()
        self.summing.forget()

    def _fresh(self, name: str) -> dict[str, Tensor]:
        """The state of a link, or of the loss scale, before the first update, named as in ``tensors``."""
        return {f"{name}.{tensor}": value for tensor, value in self._begin(name).items()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes in place, by name: the weights and the state of the optimizer."""
        links = {f"{link}.{name}": tensor for link, tensors in self.state.items() for name, tensor in tensors.items()}
        noise = {f"noise.{name}": sum_r for name, sum_r in (self.sums.noise if self.sums else {}).items()}
        smoothed = {f"smoothed.{name}": mean_r for name, mean_r in (self.sums.smoothed if self.sums else {}).items()}
        seen = {"seen": self.seen} if self.adaptive else {}
        return {f"weight.{name}": weight for name, weight in self.weights.items()} | links | noise | smoothed | seen

    def _shape(self, seen_s: NDArray[np.int64]) -> Tensor:
        """LR over peak ``[s r]`` of the updates before which the run has seen so many sequences."""
        config = self.config
        if config.schedule.over == "steps":
            shape_sr: Tensor = config.schedule.entry.shape(config.steps, config.optimizer.lr)
        else:
            done_s = torch.from_numpy(seen_s * config.seq_len)
            shape_sr = config.schedule.entry.shape(config.duration, config.optimizer.lr, done_s)
        return shape_sr

    def micro_batches(self, step: int) -> int:
        """Micro-batches of this update; an adaptive batch chooses them by the noise of the updates before."""
        if self.adaptive is None or self.sums is None:
            return int(self.counts_s[step])
        noise = {name: float(mean_r) for name, mean_r in self.sums.smoothed.items()}
        size = self.adaptive.adapted(noise["trace"], noise["squared_norm"], self.config.batch_size)
        return max(1, min(size, self._left()) // self.adaptive.micro_batch)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Sequences of this update and tokens seen before it, ``[r]`` each."""
        seen = int(self.seen) if self.adaptive else int(self.counts_s[:step].sum()) * self.config.rows
        numbers = self.micro_batches(step) * self.config.rows, seen * self.config.seq_len
        sequences_r, tokens_r = (self.shape_sr.new_full((self.runs,), number) for number in numbers)
        return sequences_r, tokens_r

    def _left(self) -> int:
        """Sequences left of the budget."""
        budget: int = self.config.trained_tokens // self.config.seq_len
        return budget - int(self.seen)

    def updates(self, step: int) -> int:
        """Updates in all; of an adaptive batch at most as many, as long as this update is not the last."""
        steps: int = self.config.steps
        is_last = self.adaptive is not None and self.micro_batches(step) * self.adaptive.micro_batch == self._left()
        return step + 1 if is_last else steps

    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters of one run: all, and without input embedding and output head."""
        sizes = {name: weight[0].numel() for name, weight in self.model.weights().items()}
        total = sum(sizes.values())
        return total, total - sum(sizes[name] for name in self.model.ends)

    def step(self, step: int) -> ProbeValues:
        """Forward, backward, update; returns values ``[r]`` of the probes that fire, by (probe, hook point)."""
        with_probes = self.config.probes.fires(step, self.updates(step))
        count = self.micro_batches(step)
        if self.adaptive:
            self.shape_sr[step] = self._shape(self.seen.numpy())[0]
        values = self._step(step, count, self.step_sr[step], self.shape_sr[step], with_probes)
        self.seen += count * self.config.rows
        return values

    def advance(self, clock: Clock, *, with_probes: bool) -> ProbeValues:
        """As ``step``, with each run where the clock says it stands; a run beyond its last step repeats that."""
        step_r, age_r = (
            torch.from_numpy(number_r.clip(max=self.config.steps - 1)).to(self.device)
            for number_r in (clock.step_r, clock.age_r)
        )
        shape_r = self.shape_sr[step_r, self.run_r] * torch.from_numpy(clock.lr_factor_r).to(self.shape_sr)
        return self._step(clock.batch_r, int(self.counts_s[0]), age_r, shape_r, with_probes)

    def _step(
        self, batch: int | NDArray[np.int64], count: int, age_r: Tensor, shape_r: Tensor, with_probes: bool
    ) -> ProbeValues:
        if self.sums is not None:
            return self._step_of_micro_batches(self.sums, batch, count, age_r, shape_r, with_probes)
        return self.engine(self.loader.batch(batch), age_r, shape_r, with_probes=with_probes)

    def _step_of_micro_batches(
        self,
        sums: Accumulation,
        batch: int | NDArray[np.int64],
        count: int,
        age_r: Tensor,
        shape_r: Tensor,
        with_probes: bool,
    ) -> ProbeValues:
        """Sum the gradients of the micro-batches, then update.

        Of what a probe measures in the forward passes, the largest counts if it is a maximum, else the mean.
        """
        measured = list[ProbeValues]()
        accumulation.clear(sums)
        for windows_rbt in self.loader.micro_batches(batch, count, self.config.rows):
            measured.append(self.summing(windows_rbt, with_probes=with_probes))
        values = {key: accumulation.combine(key[0], [each[key] for each in measured]) for key in measured[0]}
        count_ = torch.tensor(count, dtype=self.shape_sr.dtype, device=self.device)
        values |= self.engine(age_r, shape_r, count_, with_probes=with_probes)
        if with_probes:
            accumulation.clear_noise(sums)
        return values

    def _update(self, training_state: TrainingState, tokens_rbt: Tensor, step: Tensor, shape_r: Tensor) -> None:
        """Carry out a step as a function of tensors; also record each run's first step with a non-finite loss."""
        weights, state, *_ = training_state
        weight_gradients, loss_r = self.gradients_of(weights, tokens_rbt, state.get("loss_scale", {}).get("scale"))
        self._change(training_state, weight_gradients, loss_r, step, shape_r)

    def _accumulate(self, training_state: tuple[Tensors, Accumulation, Tensors], tokens_rbt: Tensor) -> None:
        """Add the gradients of a micro-batch to the sums, as a function of tensors."""
        weights, sums, loss_scale = training_state
        weight_gradients, loss_r = self.gradients_of(weights, tokens_rbt, loss_scale.get("scale"))
        targets_r = (tokens_rbt[..., 1:] != IGNORED).flatten(1).sum(1).to(loss_r.dtype)
        accumulation.add(sums, weight_gradients, loss_r, targets_r, sum_in_fp16(self.config, loss_scale))

    def _apply(self, training_state: Any, step: Tensor, shape_r: Tensor, count: Tensor) -> None:
        """Update with the summed gradients, as a function of tensors."""
        *rest, sums = training_state
        loss_scale = rest[1].get("loss_scale", {})
        weight_gradients, loss_r = accumulation.mean(sums, sum_in_fp16(self.config, loss_scale))
        memory = self.adaptive.memory if self.adaptive else 1.0
        accumulation.add_noise(sums, weight_gradients, self.config.rows, count, memory)
        self._change(tuple(rest), weight_gradients, loss_r, step, shape_r)

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
        loss_r, _ = losses(logits_rbtv, tokens_rbt[..., 1:], self.terms, hidden_rbtd)
        weight_gradients = gradients(loss_r if scale_r is None else loss_r * scale_r, trained)
        if self.config.precision == "fp16_emulated":
            weight_gradients = {name: rounded(each, torch.float16) for name, each in weight_gradients.items()}
        if scale_r is not None:
            weight_gradients = {name: each / over(scale_r, each) for name, each in weight_gradients.items()}
        return weight_gradients, loss_r.detach()

    def _change(
        self, training_state: TrainingState, weight_gradients: Tensors, loss_r: Tensor, step: Tensor, shape_r: Tensor
    ) -> None:
        weights, state, first_bad_r, *readings = training_state
        newly_bad_r = (first_bad_r < 0) & ~distributed.mean_over_ranks(loss_r).isfinite()
        first_bad_r.copy_(torch.where(newly_bad_r, step, first_bad_r))
        gate = self._gate(weight_gradients, loss_r, step, *readings)
        if gate.lr_factor_r is not None:
            shape_r = shape_r * gate.lr_factor_r
        windows_rbt, lr = self._slice().expand(self.runs, -1, -1), self.config.optimizer.lr
        held_out = HeldOutLoss(
            self.gradients_of, weights, windows_rbt, lambda name: lr * self.lr_factor[name] * shape_r
        )
        now = Now(step, weights, shape_r, self.lr_factor, held_out)
        update = partial(self._update_weights, weight_gradients, state, now)
        if gate.keep_r is None:
            update()
        else:
            links = (tensor for link in state.values() for tensor in link.values())
            self._update_kept(update, gate.keep_r, [*weights.values(), *links])
        self._store(weights)
        compare_with_earlier(state, weights, weight_gradients)
        if self.config.loss_scale:
            self._rescale(state["loss_scale"], readings[0])

    @torch.no_grad()
    def _update_weights(self, weight_gradients: Tensors, state: dict[str, Tensors], now: Now) -> None:
        self.config.optimizer.step(weight_gradients, state, now)
        for _, each in sorted(weight_interventions(self.config).items()):
            each.after_update(now.weights)

    @torch.no_grad()
    def _store(self, weights: Mapping[str, Tensor]) -> None:
        """Round weights to the precision in which they are kept, if there are no master weights."""
        if self.stored:
            for weight in weights.values():
                weight.copy_(rounded(weight, self.stored))

    @torch.no_grad()
    def _rescale(self, scale: dict[str, Tensor], readings: Mapping[str, Tensor]) -> None:
        """Adapt the loss scale to whether gradients overflowed, and write down how long it has been at its floor."""
        announce("loss_scale", "", scale["scale"])
        for name, after_r in self.config.loss_scale.entry.after(scale, ~readings["norm"].isfinite()).items():
            scale[name].copy_(after_r)
        readings["at_floor"].copy_(scale["at_floor"])

    @torch.no_grad()
    def _gate(
        self, weight_gradients: Tensors, loss_r: Tensor, step: Tensor, readings: Mapping[str, Tensor] = NO_READINGS
    ) -> Gate:
        """Write down what control reads, and ask the response how to change this update."""
        if not readings:
            return Gate()
        norm_r = per_run_norm(weight_gradients.values())
        readings["loss"].copy_(loss_r)
        readings["norm"].copy_(norm_r)
        gate = Gate()
        if self.config.response is not None:
            gate = self.config.response.entry.gate(step, loss_r, norm_r, readings["usual_loss"])
        if self.config.loss_scale is not None:
            finite_r = norm_r.isfinite()
            gate = gate._replace(keep_r=finite_r if gate.keep_r is None else gate.keep_r & finite_r)
        if gate.keep_r is not None:
            readings["kept"].copy_(gate.keep_r)
        return gate

    @torch.no_grad()
    def _update_kept(self, update: Callable[[], None], keep_r: Tensor, tensors: Sequence[Tensor]) -> None:
        """Update the runs to keep; the others' weights and state stay bit for bit, whatever their gradients are."""
        if self.config.engine != "compiled" and bool(keep_r.all()):
            return update()
        before = [tensor.clone() for tensor in tensors]
        update()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(keep_r.view(-1, *(1,) * (tensor.ndim - 1)), tensor, old))
        return None

    def models_at_init(self) -> int:
        """How many models the runs are before the first update: one for each seed.

        Every run counts if an intervention brings a number per run into the forward pass, or on several ranks.
        """
        return self.runs if self.forward_differs or distributed.is_joined() else len(set(self.config.seed))

    def evaluate_at_init(self) -> Tensor:
        """Return ``evaluate(whole=True)`` before the first update, with each of ``models_at_init`` evaluated once."""
        if self.models_at_init() == self.runs:
            return self.evaluate(whole=True)
        first_run = {seed: self.config.seed.index(seed) for seed in self.config.seed}
        loss = dict(zip(first_run, self.evaluate(whole=True, indices=list(first_run.values())), strict=True))
        return torch.stack([loss[seed] for seed in self.config.seed])

    def _slice(self) -> Tensor:
        """The held-out windows ``[n t+1]`` that are evaluated between start and end."""
        windows_nt = self.held_out_nt
        return windows_nt[:: max(1, windows_nt[:, 1:].numel() // VALIDATION_TOKENS)]

    @torch.no_grad()
    def evaluate(self, *, whole: bool, indices: Sequence[int] | None = None) -> Tensor:
        """Evaluate the fleet on held-out text.

        Args:
            whole: on all windows, or else on a fixed slice of them.
            indices: the runs to evaluate; None means all.

        Returns:
            Cross-entropy ``[r]``, nats per token.
        """
        windows_nt = self.held_out_nt if whole else self._slice()
        length = windows_nt.shape[1] - 1
        model: Forward = self.model
        if indices is not None:
            weights = {name: weight[indices] for name, weight in self.model.named_parameters()}
            model = partial(functional_call, self.model, weights)
        runs = self.runs if indices is None else len(indices)
        total_r = self.shape_sr.new_zeros(runs)
        for chunk_bt in torch.split(windows_nt, max(1, PASS_TOKENS // length)):
            tokens_rbt = chunk_bt.expand(runs, -1, -1)
            logits_rbtv, _ = model(tokens_rbt[..., :-1])
            _, loss_r = losses(logits_rbtv, tokens_rbt[..., 1:], {})
            total_r += loss_r * len(chunk_bt)
        return torch.div(total_r, len(windows_nt))
