"""An endless language of 32 tokens, each drawn by the two before it: a tiny model beats bigrams within 100 steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lab.core import schema
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import DEFINITION, Corpus, Tokens, draw
from lab.data.endless import EndlessCorpus, open_source

VOCABULARY = 32
EXPONENT = 2.5  # of the Zipf law over the ranks of a successor
FIRST = 0  # the two tokens assumed before every row


@dataclass(frozen=True, eq=False, kw_only=True)
class TrigramCorpus(EndlessCorpus):
    """Rows from a second-order source: ``successors[two back, one back, rank]``, the rank from a Zipf law.

    A successor's score is one number for the token before plus one for the token two back, so attention to the token
    two back adds what a bigram model lacks.  Every target costs at least the entropy of the rank.
    """

    thresholds: NDArray[np.uint64]
    successors: Tokens

    def rows_of(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        bits = draw(stream, seed, step, rows, length)
        rank_bt = np.searchsorted(self.thresholds, bits >> np.uint64(32), side="right")
        row_bt = np.full((rows, length + 2), FIRST, dtype=np.int64)
        for t in range(length):
            row_bt[:, t + 2] = self.successors[row_bt[:, t], row_bt[:, t + 1], rank_bt[:, t]]
        return np.ascontiguousarray(row_bt[:, 2:])


@DATA.register("trigram")
@dataclass(frozen=True)
class Trigram:
    """An endless language of 32 tokens, the same on every machine, of known entropy; it needs no file."""

    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Make the tables of the language, once per process."""
        return open_language()


@cache
def open_language() -> TrigramCorpus:
    """Make the tables of the language, once per process."""
    return open_source(TrigramCorpus, successor_scores(), EXPONENT, lambda entropy: {"entropy": entropy})


def successor_scores() -> NDArray[np.float64]:
    """Scores ``[two back, one back, next]``: the sum of a Gumbel number for each of the two; the lowest has rank 0."""
    uniform = ((draw(DEFINITION, 1, 0, 2 * VOCABULARY, VOCABULARY) >> np.uint64(12)) + 0.5) * 2.0**-52
    one_back, two_back = np.split(np.log(-np.log(uniform)), 2)
    return np.asarray(two_back[:, None] + one_back[None])
