"""An endless synthetic language: Zipf-distributed successors, and rows that quote themselves to reward attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lab.core import schema
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import (
    DEFINITION,
    HELD_OUT_TARGETS,
    Bits,
    Corpus,
    Tokens,
    draw,
    fingerprint,
)
from lab.data.endless import COUNTED_SEQ_LEN, EndlessCorpus, open_source
from lab.data.packing import PackedCorpus

VOCABULARY = 256
EXPONENT = 1.8  # of the Zipf law over the ranks of a successor
TILT = 0.3  # how much low tokens are preferred as successors
QUOTING = 0.9  # share of the rows that quote themselves
SHORTEST = 8  # tokens of a quotation; the longest is a third of the row
FIRST = 0  # the token assumed before every row


@dataclass(frozen=True, eq=False, kw_only=True)
class SyntheticCorpus(EndlessCorpus):
    """Rows from a first-order source: ``successors[previous, rank]``, the rank below ``thresholds[rank]`` of 2**32.

    The rank follows a Zipf law of exponent 1.8 and entropy h.  In nine of ten rows a segment of 8 tokens to a third of
    the row comes again later in the row, and the tokens after it follow from its last.  To whoever knows the source a
    quoted token costs nothing once the quotation is known, any other token h nats: the entropy per target is at least
    h times the share of targets that are not quoted, and at most h, since quoting saves more than the choice of a
    segment costs.  Rows shorter than 24 tokens quote nothing.
    """

    held_out_targets: ClassVar = HELD_OUT_TARGETS
    counted_rows: ClassVar = 16_384

    thresholds: NDArray[np.uint64]
    successors: Tokens

    def rows_of(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        bits = draw(stream, seed, step, rows, length + 4)
        rank_tb = np.searchsorted(self.thresholds, bits[:, 4:].T >> np.uint64(32), side="right")
        # A quoted token is drawn again as its original was: after the same token, at the same rank.
        origin_tb = _origins(bits[:, :4], length)
        rank_tb = np.take_along_axis(rank_tb, origin_tb, axis=0)
        before_tb = origin_tb * rows + np.arange(rows)  # place in the flat chain, which begins one token early
        chain = np.full((length + 1) * rows, FIRST, dtype=np.int64)
        for t in range(length):
            chain[(t + 1) * rows : (t + 2) * rows] = self.successors[chain[before_tb[t]], rank_tb[t]]
        return np.ascontiguousarray(chain[rows:].reshape(length, rows).T)


def _origins(bits: Bits, length: int) -> Tokens:
    """Where in its row each token is drawn first ``[length, rows]``: its own place, or the one it quotes."""
    place_t1 = np.arange(length, dtype=np.int64)[:, None]
    if length // 3 < SHORTEST:
        return np.broadcast_to(place_t1, (length, len(bits)))
    quotes, size_bits, start_bits, source_bits = bits.T
    size = SHORTEST + _below(length // 3 - SHORTEST + 1, size_bits)
    start = size + _below(length - 2 * size + 1, start_bits)
    source = _below(start - size + 1, source_bits)
    quotes = quotes < np.uint64(int(QUOTING * 2**64))
    quoted = quotes & (place_t1 >= start) & (place_t1 < start + size)
    return place_t1 - np.where(quoted, start - source, 0)


def _below(count: int | Tokens, bits: Bits) -> Tokens:
    return (bits % np.asarray(count, dtype=np.uint64)).astype(np.int64)


@DATA.register("synthetic")
@dataclass(frozen=True)
class Synthetic:
    """An endless language of 256 tokens, the same on every machine, of known entropy; it needs no file."""

    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Make the tables of the language, once per process."""
        return _open()


@cache
def _open() -> Corpus:
    # The largest share of targets that are quoted; it falls with the length of the row, from the shortest that quotes.
    quoted = QUOTING * SHORTEST / (3 * SHORTEST - 1)
    return open_source(
        SyntheticCorpus,
        successor_scores(),
        EXPONENT,
        lambda entropy: {"entropy_at_most": entropy, "entropy_at_least": (1 - quoted) * entropy},
    )


def successor_scores() -> NDArray[np.float64]:
    """Scores ``[previous, next]``; the successor of lowest score has rank 0.  A preference plus Gumbel noise."""
    uniform = ((draw(DEFINITION, 0, 0, VOCABULARY, VOCABULARY) >> np.uint64(12)) + 0.5) * 2.0**-52
    scores: NDArray[np.float64] = TILT * np.log(np.arange(1.0, VOCABULARY + 1)) - np.log(-np.log(uniform))
    return scores


@DATA.register("synthetic_sample")
@dataclass(frozen=True)
class SyntheticSample:
    """The first ``tokens`` tokens of the synthetic language's held-out rows, on which runs are trained and validated.

    With ``seq_len = tokens - 1`` one window holds the whole text: every gradient is exact, and the validation loss is
    the mean over all that there is to predict.
    """

    tokens: int = schema.bounded(512, at_least=2, at_most=HELD_OUT_TARGETS)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Draw the text, once per process."""
        return _open_sample(self.tokens)


@cache
def _open_sample(size: int) -> Corpus:
    tokens = _open().held_out(COUNTED_SEQ_LEN).ravel()[:size].astype(np.uint8)
    return PackedCorpus(
        training=tokens, reserved=tokens, fingerprint=fingerprint(tokens), notes={"held_out": "the training text"}
    )
