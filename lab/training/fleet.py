"""A fleet: runs of one shape trained as one, each step in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.core.distributed import distribute, initial_device
from lab.core.hooks import attach
from lab.core.schema import stack
from lab.training import accumulation
from lab.training.building import build_model, hook_interventions, lr_shape, pick_device, role_lr
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.control import Control
from lab.training.engine import Compiled, Eager, ProbeValues
from lab.training.evaluation import Evaluation
from lab.training.feed import DataFeed
from lab.training.identity import static_key
from lab.training.state import begin_state, fresh_links
from lab.training.step import StepFunction


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
        with initial_device(config.ranks):
            self.model = build_model(config, self.runs).to(dtype)
        blocks = map(self.model.get_submodule, self.model.blocks)
        shared = distribute(self.model, blocks, config.ranks, self.device)
        factors = self.model.factors(config.parametrization.entry, config.model.width, partial(role_lr, config))
        self.model.initialize(config.seed, factors)
        self.evaluation = Evaluation(config, self.model, self.corpus, self.device, self._averages, self._rounding)
        lr_factor = {name: factor.lr for name, factor in factors.items()}
        roles = self.model.roles()
        self.step_function = StepFunction(config, self.model, shared, lr_factor, roles, self.evaluation.slice)
        weights = {name: weight for name, weight in self.model.weights().items() if weight.requires_grad}
        self.step_function.store(weights)
        # of all links that a restart brings, so that the tensors of a fleet are the same throughout
        optimizers = [phase.optimizer for phase in configs[0].phases]
        fresh = fresh_links(config, optimizers, weights, roles, self.model.operands)
        self.state = state = begin_state(config, weights, fresh)
        self.feed = DataFeed(config, configs, self.corpus, self.device, state.sums.smoothed if state.sums else {})
        self.shape_sr = lr_shape(config, self.feed.seen_before_s())
        self.step_sr = torch.arange(config.steps, device=self.device).unsqueeze(1).repeat(1, self.runs)
        self.run_r = torch.arange(self.runs, device=self.device)
        engine = Compiled if config.engine == "compiled" else Eager
        if state.sums:
            self.engine = engine(self.step_function.update_by_sums, state, config.probes.names)
            of_micro_batches = (weights, state.sums, state.loss_scale)
            self.summing = engine(self.step_function.accumulate, of_micro_batches, config.probes.names)
            self.summing.faults = self.engine.faults
        else:
            self.engine = self.summing = engine(self.step_function.update, state, config.probes.names)
        self.control = Control(configs, state, partial(state.reset, fresh)) if config.is_controlled else None

    def restart(self, configs: Sequence[RunConfig]) -> None:
        """Go on with the optimizer, schedule and interventions of other configs; all else stays bit for bit."""
        self.config = self.step_function.config = config = stack(configs, self.device)
        attach(self.model, hook_interventions(config), self.runs, config.model)
        self.shape_sr = lr_shape(config, self.feed.seen_before_s())
        self.engine.forget()
        self.summing.forget()

    def _averages(self) -> Mapping[str, Tensor]:
        """Weights that are evaluated in place of those that are trained, by name."""
        averages: Mapping[str, Tensor] = self.config.optimizer.evaluated(self.state.links)
        return averages

    def _rounding(self) -> AbstractContextManager[Any]:
        """Within the block products round with the state of the fleet."""
        return self.step_function.rounding(self.state.links)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by which the next step depends on those before, by name, for a checkpoint."""
        return self.state.tensors() | self.feed.tensors()

    def step(self, step: int) -> ProbeValues:
        """Forward, backward, update; returns values ``[r]`` of the probes that fire, by (probe, hook point)."""
        with_probes = self.config.probes.fires(step, self.feed.updates(step))
        count = self.feed.count(step)
        if self.config.adaptive:
            self.shape_sr[step] = lr_shape(self.config, self.feed.seen.numpy())[0]
        values = self._step(step, count, self.step_sr[step], self.shape_sr[step], with_probes=with_probes)
        self.feed.seen += count * self.config.rows
        return values

    def advance(self, clock: Clock, *, with_probes: bool) -> ProbeValues:
        """As ``step``, with each run where the clock says it stands; a run beyond its last step repeats that."""
        step_r, age_r = (
            torch.from_numpy(number_r.clip(max=self.config.steps - 1)).to(self.device)
            for number_r in (clock.step_r, clock.age_r)
        )
        shape_r = self.shape_sr[step_r, self.run_r] * torch.from_numpy(clock.lr_factor_r).to(self.shape_sr)
        return self._step(clock.batch_r, self.feed.count(0), age_r, shape_r, with_probes=with_probes)

    def _step(
        self, batch: int | NDArray[np.int64], count: int, age_r: Tensor, shape_r: Tensor, *, with_probes: bool
    ) -> ProbeValues:
        """Update by one batch of the data, or by the summed gradients of its ``count`` micro-batches.

        Of what a probe measures in the forward passes, the largest counts if it is a maximum, else the mean.
        """
        loader, sums = self.feed.loader, self.state.sums
        if not sums:
            return self.engine(loader.batch(batch), age_r, shape_r, with_probes=with_probes)
        accumulation.clear(sums)
        measured = [
            self.summing(windows_rbt, with_probes=with_probes)
            for windows_rbt in loader.micro_batches(batch, count, self.config.rows)
        ]
        values = {key: accumulation.combine(key[0], [each[key] for each in measured]) for key in measured[0]}
        count_ = torch.tensor(count, dtype=self.shape_sr.dtype, device=self.device)
        values |= self.engine(age_r, shape_r, count_, with_probes=with_probes)
        if with_probes:
            accumulation.clear_noise(sums)
        return values
