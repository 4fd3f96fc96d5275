"""The corpus of an endless language: its rows are a function of (stream, seed, step), so no length runs out of them."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import scipy  # its parts are loaded when they are used
from numpy.typing import NDArray

from lab.data.corpus import COUNTED, HELD_OUT, TRAINING, Corpus, Tokens, count_pairs, fingerprint

COUNTED_SEQ_LEN = 64  # of the rows that the bigram model is counted on


@dataclass(frozen=True, eq=False, kw_only=True)
class EndlessCorpus(Corpus):
    """Rows of a language, those of batches, of validation and of the bigram model from streams of their own.

    Attributes:
        held_out_targets: predicted tokens of a validation; few, so that it costs a short run less than training.
        counted_rows: rows of 65 tokens that the bigram model is counted on.
    """

    held_out_targets: ClassVar[int] = 8_192
    counted_rows: ClassVar[int] = 4_096

    @abstractmethod
    def rows_of(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""

    @property
    def longest(self) -> int:
        """No row is too long."""
        return sys.maxsize

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Rows ``[batch_size, seq_len + 1]`` of one step."""
        return self.rows_of(TRAINING, seed, step, batch_size, seq_len + 1)

    def held_out_rows(self, seq_len: int) -> int:
        """The number of rows of a validation."""
        return -(-self.held_out_targets // seq_len)

    def held_out(self, seq_len: int) -> Tokens:
        """Rows ``[n, seq_len + 1]`` from a stream that no seed of a batch reaches."""
        return self.rows_of(HELD_OUT, 0, 0, self.held_out_rows(seq_len), seq_len + 1)

    def pair_counts(self) -> scipy.sparse.csr_array:
        """How often a token follows another in rows drawn as batches are: ``[vocabulary, vocabulary]``, sparse."""
        return count_pairs(self.rows_of(COUNTED, 0, 0, self.counted_rows, COUNTED_SEQ_LEN + 1), self.vocabulary)

    def identified(self, *numbers: NDArray[np.generic]) -> Self:
        """The same with the fingerprint of its numbers and of a sample.

        The sample stands for the recipe: whatever changes a row changes the fingerprint.
        """
        return replace(self, fingerprint=fingerprint(*numbers, self.held_out(COUNTED_SEQ_LEN)))


Language = TypeVar("Language", bound=EndlessCorpus)


def open_source(
    kind: Callable[..., Language],
    scores: NDArray[np.float64],
    exponent: float,
    notes: Callable[[float], Mapping[str, Any]],
) -> Language:
    """Make the tables of an endless language: ``thresholds [rank]`` of 2**32, and ``successors [..., rank]``.

    Args:
        kind: takes the tables.
        scores: of each next token after each context, ``[..., next]``; the lowest has rank 0.
        exponent: of the Zipf law over the ranks of a successor.
        notes: what is noted of the corpus, from the entropy of a rank in nats.
    """
    share = np.arange(1.0, scores.shape[-1] + 1) ** -exponent
    share /= share.sum()
    # Integers, so that no machine sees another rank or order: logarithms and powers differ between machines by about
    # 1e-15, whereas every threshold is further than 1e-3 from where its rounding turns, and any two scores of a
    # context's successors differ by more than 1e-8.
    thresholds = np.rint(share.cumsum() * 2**32).astype(np.uint64)
    successors = np.argsort(scores, axis=-1, kind="stable")
    language = kind(
        fingerprint="",
        notes=notes(float(-(share * np.log(share)).sum())),
        vocabulary=scores.shape[-1],
        thresholds=thresholds,
        successors=successors,
    )
    return language.identified(thresholds, successors)
