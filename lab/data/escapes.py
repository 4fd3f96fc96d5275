"""Text damaged by escape characters, an artefact that a model can predict, and the same text without them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import scipy  # its parts are loaded when they are used

from lab.core import schema
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import (
    COUNTED,
    COUNTED_SEQ_LEN,
    HELD_OUT,
    TRAINING,
    Corpus,
    Tokens,
    count_pairs,
    draw,
    fingerprint,
)
from lab.data.trigram import VOCABULARY, open_language

BACKSLASH = VOCABULARY  # the token after those of the text
ESCAPED = 8  # tokens below this one, such as quotation marks, are escaped
HELD_OUT_TARGETS = 8_192  # few, so that validating a short run costs less than training it
COUNTED_ROWS = 4_096  # rows of 65 tokens that the bigram model is counted on


@dataclass(frozen=True, eq=False, kw_only=True)
class EscapedCorpus(Corpus):
    """Rows of the language ``trigram``; in damaged ones so many ``escapes`` stand before each token below 8.

    A row is damaged with probability ``share``.  The text after an escape is what it would have been without, and the
    row ends where it is full.
    """

    share: float
    escapes: int

    @property
    def longest(self) -> int:
        """No row is too long."""
        return sys.maxsize

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Rows ``[batch_size, seq_len + 1]`` of one step."""
        return self.rows_of(TRAINING, seed, step, batch_size, seq_len + 1)

    def held_out(self, seq_len: int) -> Tokens:
        """Rows ``[n, seq_len + 1]``, as many of them damaged as in training, that no seed of a batch reaches."""
        return self.rows_of(HELD_OUT, 0, 0, -(-HELD_OUT_TARGETS // seq_len), seq_len + 1)

    def clean(self, seq_len: int) -> Tokens:
        """The rows of ``held_out`` before any was damaged."""
        return _text(HELD_OUT, 0, 0, -(-HELD_OUT_TARGETS // seq_len), seq_len + 1)

    def pair_counts(self) -> scipy.sparse.csr_array:
        """How often a token follows another in rows drawn as batches are: ``[33, 33]``, sparse."""
        return count_pairs(self.rows_of(COUNTED, 0, 0, COUNTED_ROWS, COUNTED_SEQ_LEN + 1), self.vocabulary)

    def rows_of(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        text_bt = _text(stream, seed, step, rows, length)
        bits_b = draw(stream, seed, 2 * step + 1, rows, 1)[:, 0]
        is_damaged_b = bits_b >> np.uint64(32) < np.uint64(round(self.share * 2**32))
        return np.where(is_damaged_b[:, None], self._damaged(text_bt), text_bt)

    def _damaged(self, text_bt: Tokens) -> Tokens:
        """The same rows with escapes, cut to the same length."""
        damaged_bt = np.full_like(text_bt, BACKSLASH)
        # where each token stands: as many escapes before it as it and earlier ones have
        place_bt = np.arange(text_bt.shape[1]) + self.escapes * (text_bt < ESCAPED).cumsum(axis=1)
        row_n, at_n = np.nonzero(place_bt < text_bt.shape[1])
        damaged_bt[row_n, place_bt[row_n, at_n]] = text_bt[row_n, at_n]
        return damaged_bt


def _text(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    return open_language().rows_of(stream, seed, 2 * step, rows, length)


@DATA.register("escapes")
@dataclass(frozen=True)
class Escapes:
    """An endless language whose rows are in part damaged by escape characters; it needs no file.

    Attributes:
        share: of the rows that are damaged.
        escapes: backslashes before each token that is escaped.
        seed: of the batches.
    """

    share: float = schema.bounded(1.0, at_least=0, at_most=1)
    escapes: int = schema.bounded(3, at_least=1, at_most=2**15)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Make the language, once per process."""
        return _open(self.share, self.escapes)


@cache
def _open(share: float, escapes: int) -> Corpus:
    corpus = EscapedCorpus(fingerprint="", notes={}, vocabulary=VOCABULARY + 1, share=share, escapes=escapes)
    rows = corpus.held_out(COUNTED_SEQ_LEN)
    # The sample stands for the recipe: whatever changes a row changes the fingerprint.
    numbers = np.array([round(share * 2**32), escapes], dtype=np.int64)
    notes: dict[str, str | float] = {"escapes": float(f"{(rows == BACKSLASH).mean():.3g}")}
    return replace(corpus, fingerprint=fingerprint(numbers, rows), notes=notes)
