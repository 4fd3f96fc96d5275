"""Batches of a fleet: drawn by seed and index, from the corpus and the bursts of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.core import distributed
from lab.data.corpus import Corpus, Tokens
from lab.data.packing import PackedCorpus
from lab.training.config import RunConfig

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
        return distinct, torch.tensor([distinct.index(each) for each in wanted], device=self.device)


def burst_draws(configs: Sequence[RunConfig], corpus: Corpus) -> list[Draw | None]:
    """Of each run, what draws the windows of its burst; runs with equal bursts share one."""
    bursts = [config.burst.entry if config.burst else None for config in configs]
    steps = configs[0].steps
    draws: dict[Any, Draw] = {
        burst: lambda seed, batch, size, seq_len, burst=burst: burst.batch(corpus, seed, batch, size, seq_len, steps)  # type: ignore[misc]
        for burst in bursts
        if burst
    }
    return [draws[burst] if burst else None for burst in bursts]
