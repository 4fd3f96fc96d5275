"""Batches on the device: of tokens that lie there already, the host draws no more than where windows begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lab.core import distributed
from lab.data.corpus import Corpus, Tokens
from lab.data.packing import PackedCorpus

RESIDENT_TOKENS = 2**28  # that an accelerator keeps at most; a longer text stays on the host


class Feed:
    """Windows ``[r b t+1]`` of a step, this rank's rows; runs of equal data seed see the same ones.

    On an accelerator the training part of a packed corpus lies in its memory, a token in one to four bytes.  What else
    there is, such as a language without end, is drawn on the host and sent.
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
    ) -> None:
        self.batch_size, self.seq_len, self.device = batch_size, seq_len, device
        self.seeds = sorted(set(seed))
        self.seed_r = torch.tensor([self.seeds.index(one) for one in seed], device=device)
        self.draw: Callable[[int, int, int, int], Tokens] = corpus.batch
        self.tokens_n: Tensor | None = None
        # of a kind of its own nobody knows that its batches are windows of its text
        if resident and type(corpus) is PackedCorpus and corpus.training.size <= RESIDENT_TOKENS:
            kind = next(k for k in (np.uint8, np.int16, np.int32) if corpus.vocabulary - 1 <= np.iinfo(k).max)
            self.draw = corpus.starts
            self.tokens_n = torch.from_numpy(corpus.training.astype(kind)).to(device)
            self.place_t = torch.arange(seq_len + 1, device=device)

    def batch(self, step: int) -> Tensor:
        """The windows of this step."""
        mine = distributed.batch_rows(self.batch_size)
        drawn = [self.draw(seed, step, self.batch_size, self.seq_len)[mine] for seed in self.seeds]
        # each sent to the device once, and copied there for the runs that share it
        drawn_sbt = torch.from_numpy(np.stack(drawn)).to(self.device)
        if self.tokens_n is not None:
            drawn_sbt = self.tokens_n[drawn_sbt + self.place_t].long()
        return drawn_sbt[self.seed_r]
