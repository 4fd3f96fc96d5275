"""The data feed of a fleet: how many micro-batches each update takes, and their windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.data.corpus import Corpus
from lab.training.batches import BatchLoader, burst_draws
from lab.training.config import RunConfig


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
        return {name: lr_r.new_tensor([each[name] for each in of_run]) for name in of_run[0]}
