"""A fleet: runs of one shape trained as one, each step in turn, and the batches that feed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.core import distributed
from lab.core.distributed import distribute, initial_device
from lab.core.hooks import attach
from lab.core.schema import stack
from lab.data.corpus import Corpus, Tokens
from lab.data.packing import PackedCorpus
from lab.training import accumulation
from lab.training.building import build_model, hook_interventions, lr_shape, pick_device, role_lr
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.control import Control
from lab.training.engine import Compiled, Eager, ProbeValues, Traced
from lab.training.evaluation import Evaluation
from lab.training.identity import static_key
from lab.training.step import StepFunction, begin_state, fresh_links

Draw = Callable[[int, int, int, int], Tokens]  # windows of (seed, batch, windows, tokens)
RESIDENT_TOKENS = 2**28  # the longest text that an accelerator keeps in its memory


class BatchLoader:
    """Batches of a fleet, this rank's rows of them; runs of equal data seed see the same windows.

    An accelerator keeps the training part of a packed corpus in its memory, at one to four bytes a token.  Batches of
    any other corpus, such as an endless language, are drawn on the host and copied.

    Args:
        corpus: the source of the windows.
        seed: the data seed of each run.
        batch_size: windows per batch, over all ranks.
        seq_len: tokens per window, without the last target.
        device: where batches are returned.
        resident: whether the device may keep the text in its memory.
        draws: of each run, what draws its windows from (seed, batch, windows, tokens) if not the corpus alone; runs of
            equal data seed and equal function, or None, see the same windows.
    """

    def __init__(
        self,
        corpus: Corpus,
        seed: Sequence[int],
        batch_size: int,
        seq_len: int,
        device: torch.device,
        *,
        resident: bool,
        draws: Sequence[Draw | None] = (),
    ) -> None:
        self.batch_size, self.seq_len, self.device = batch_size, seq_len, device
        self.source_of_run = list(zip(seed, draws or [None] * len(seed), strict=True))
        self.sources = list(dict.fromkeys(self.source_of_run))
        self.source_r = torch.tensor([self.sources.index(source) for source in self.source_of_run], device=device)
        self.draw: Draw = corpus.batch
        self.tokens_n: Tensor | None = None
        # a subclass may draw batches that are not windows of its text
        if resident and not any(draws) and type(corpus) is PackedCorpus and corpus.training.size <= RESIDENT_TOKENS:
            dtype = next(d for d in (np.uint8, np.int16, np.int32) if corpus.vocabulary - 1 <= np.iinfo(d).max)
            self.draw = corpus.starts
            self.tokens_n = torch.from_numpy(corpus.training.astype(dtype)).to(device)
            self.offset_t = torch.arange(seq_len + 1, device=device)

    def batch(self, step: int | NDArray[np.int64]) -> Tensor:
        """The windows ``[r b t+1]`` of this batch of the data, or of one batch for each run."""
        (windows_rbt,) = self.micro_batches(step, 1, self.batch_size)
        return windows_rbt

    def micro_batches(self, step: int | NDArray[np.int64], count: int, size: int) -> Iterator[Tensor]:
        """The windows ``[r b t+1]`` of this batch, ``count`` times ``size`` of them, one micro-batch after another."""
        rows = distributed.batch_rows(size)
        distinct, index_r = self._distinct(step)
        drawn_snbt = np.stack(
            [(draw or self.draw)(seed, batch, count * size, self.seq_len) for (seed, draw), batch in distinct]
        )
        for drawn_sbt in np.split(drawn_snbt, count, axis=1):
            # each distinct batch is copied to the device once, and repeated there for the runs that share it
            windows_sbt = torch.from_numpy(np.ascontiguousarray(drawn_sbt[:, rows])).to(self.device)
            if self.tokens_n is not None:
                windows_sbt = self.tokens_n[windows_sbt + self.offset_t].long()
            yield windows_sbt[index_r]

    def _distinct(self, step: int | NDArray[np.int64]) -> tuple[list[tuple[Any, int]], Tensor]:
        """The distinct pairs of source and batch, and which of them each run sees ``[r]``."""
        if isinstance(step, int):
            return [(source, step) for source in self.sources], self.source_r
        wanted = list(zip(self.source_of_run, step.tolist(), strict=True))
        distinct = list(dict.fromkeys(wanted))
        return distinct, torch.tensor([distinct.index(pair) for pair in wanted], device=self.device)


def burst_draws(configs: Sequence[RunConfig], corpus: Corpus) -> list[Draw | None]:
    """Of each run, what draws the windows of its burst; runs with equal bursts share one."""
    bursts = [config.bad_batches.entry if config.bad_batches else None for config in configs]
    draws: dict[Any, Draw] = {burst: partial(burst.batch, corpus, steps=configs[0].steps) for burst in bursts if burst}
    return [draws[burst] if burst else None for burst in bursts]


class DataFeed:
    """Gives each update its micro-batches, as many as the batch schedule or the gradient noise says.

    Args:
        config: of the fleet.
        configs: of each run.
        corpus: the source of the windows.
        device: where batches are returned.
        noise: trace and squared norm ``[r]`` of the gradient noise, smoothed, which an adaptive batch follows.
    """

    def __init__(
        self,
        config: RunConfig,
        configs: Sequence[RunConfig],
        corpus: Corpus,
        device: torch.device,
        noise: Mapping[str, Tensor],
    ) -> None:
        self.config, self.noise, self.corpus = config, noise, corpus
        self.loader = BatchLoader(
            corpus,
            config.data.entry.seed,
            config.batch_size,
            config.seq_len,
            device,
            resident=device.type != "cpu",
            draws=burst_draws(configs, corpus),
        )
        self.counts_s = config.micro_batches
        self.seen = torch.zeros(1, dtype=torch.int64)  # sequences; only an adaptive batch counts them

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, by name."""
        return {"seen": self.seen} if self.config.adaptive else {}

    def count(self, step: int) -> int:
        """Micro-batches of this update; an adaptive batch chooses them by the noise of the updates before."""
        adaptive = self.config.adaptive
        if adaptive is None:
            return int(self.counts_s[step])
        size = adaptive.adapted(float(self.noise["trace"]), float(self.noise["squared_norm"]), self.config.batch_size)
        return max(1, min(size, self._left()) // adaptive.micro_batch)

    def _left(self) -> int:
        """Sequences left of the budget."""
        budget: int = self.config.trained_tokens // self.config.seq_len
        return budget - int(self.seen)

    def updates(self, step: int) -> int:
        """Updates in all; of an adaptive batch at most as many, as long as this update is not the last."""
        is_last = self.config.adaptive is not None and self.count(step) * self.config.rows == self._left()
        return step + 1 if is_last else self.config.steps

    def seen_before_s(self) -> NDArray[np.int64]:
        """Sequences seen before each update ``[s]``; of an adaptive batch as if it never grew."""
        return np.insert(self.counts_s[:-1].cumsum(), 0, 0) * self.config.rows

    def sizes(self, step: int) -> tuple[Tensor, Tensor]:
        """Sequences of this update and tokens seen before it, ``[r]`` each."""
        seen = int(self.seen) if self.config.adaptive else int(self.seen_before_s()[step])
        numbers = self.count(step) * self.config.rows, seen * self.config.seq_len
        sequences_r, tokens_r = (torch.full_like(self.config.optimizer.lr, number) for number in numbers)
        return sequences_r, tokens_r

    def rows_by_source(self, step: int) -> dict[str, Tensor]:
        """Sequences ``[r]`` of this update that are of each source, by its name."""
        rows = self.count(step) * self.config.rows
        by_seed = {seed: self.corpus.rows_by_source(seed, step, rows) for seed in set(self.config.data.entry.seed)}
        of_run = [by_seed[seed] for seed in self.config.data.entry.seed]
        lr_r = self.config.optimizer.lr
        return {name: lr_r.new_tensor([counts[name] for counts in of_run]) for name in of_run[0]}


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
        self.evaluation = Evaluation(
            config,
            self.model,
            self.corpus,
            self.device,
            averages=lambda: self.config.optimizer.evaluated(self.state.links),
            kept_state=lambda: self.step_function.kept_state(self.state.links),
        )
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
        engine = {"captured": Traced, "compiled": Compiled}.get(config.engine, Eager)
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
        values = {key: accumulation.combine(key[0], [values[key] for values in measured]) for key in measured[0]}
        count_ = torch.tensor(count, dtype=self.shape_sr.dtype, device=self.device)
        values |= self.engine(age_r, shape_r, count_, with_probes=with_probes)
        if with_probes:
            accumulation.clear_noise(sums)
        return values
