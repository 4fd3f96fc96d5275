"""Texts of studies of loss spikes: rows damaged by escape characters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lab.core import schema
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import HELD_OUT, Corpus, Tokens, draw
from lab.data.synthetic import COUNTED_SEQ_LEN, TRIGRAM_VOCABULARY, EndlessCorpus, open_trigram

BACKSLASH = TRIGRAM_VOCABULARY  # the token after the tokens of the text
ESCAPED = 8  # tokens below this one, such as quotation marks, are escaped


@dataclass(frozen=True, eq=False, kw_only=True)
class EscapedCorpus(EndlessCorpus):
    """Rows of the language ``trigram``; in damaged ones so many ``escapes`` stand before each token below 8.

    A row is damaged with probability ``share``.  The text after an escape is what it would have been without, and the
    row ends where it is full.
    """

    share: float
    escapes: int

    def clean(self, seq_len: int) -> Tokens:
        """The rows of ``held_out`` before any was damaged."""
        return _undamaged(HELD_OUT, 0, 0, self.held_out_rows(seq_len), seq_len + 1)

    def rows_of(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        text_bt = _undamaged(stream, seed, step, rows, length)
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


def _undamaged(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    return open_trigram().rows_of(stream, seed, 2 * step, rows, length)


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
        return _open_escapes(self.share, self.escapes)


@cache
def _open_escapes(share: float, escapes: int) -> Corpus:
    corpus = EscapedCorpus(fingerprint="", notes={}, vocabulary=TRIGRAM_VOCABULARY + 1, share=share, escapes=escapes)
    escaped = float(f"{(corpus.held_out(COUNTED_SEQ_LEN) == BACKSLASH).mean():.3g}")
    numbers = np.array([round(share * 2**32), escapes], dtype=np.int64)
    return replace(corpus.identified(numbers), notes={"escapes": escaped})
