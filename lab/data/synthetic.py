"""Endless synthetic languages, the same on every machine: their rows are a function of (stream, seed, step)."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Self

import numpy as np
import scipy  # its parts are loaded when they are used
from numpy.typing import NDArray

from lab.core import schema
from lab.core.errors import RequestError
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import (
    COUNTED,
    DEFINITION,
    HELD_OUT,
    HELD_OUT_TARGETS,
    TRAINING,
    Bits,
    Corpus,
    Tokens,
    below,
    count_pairs,
    draw,
    fingerprint,
)

COUNTED_SEQ_LEN = 64  # of the rows that the bigram model is counted on


@dataclass(frozen=True, eq=False, kw_only=True)
class EndlessCorpus(Corpus):
    """Rows of a language; batches, validation and the bigram model draw from a stream each.

    Attributes:
        held_out_targets: predicted tokens of a validation; few, so that it costs a short run less than training.
        counted_rows: rows of 65 tokens that the bigram model is counted on.
    """

    held_out_targets: ClassVar[int] = 8_192
    counted_rows: ClassVar[int] = 4_096

    @abstractmethod
    def draw_rows(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""

    @property
    def longest(self) -> int:
        """No row is too long."""
        return sys.maxsize

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Rows ``[batch_size, seq_len + 1]`` of one step."""
        return self.draw_rows(TRAINING, seed, step, batch_size, seq_len + 1)

    def held_out_rows(self, seq_len: int) -> int:
        """The number of rows of a validation."""
        return -(-self.held_out_targets // seq_len)

    def held_out(self, seq_len: int) -> Tokens:
        """Rows ``[n, seq_len + 1]`` from a stream that no seed of a batch reaches."""
        return self.draw_rows(HELD_OUT, 0, 0, self.held_out_rows(seq_len), seq_len + 1)

    def pair_counts(self) -> scipy.sparse.csr_array:
        """How often a token follows another in rows drawn as batches are: ``[vocabulary, vocabulary]``, sparse."""
        return count_pairs(self.draw_rows(COUNTED, 0, 0, self.counted_rows, COUNTED_SEQ_LEN + 1), self.vocabulary)

    def identified(self, *numbers: NDArray[np.generic]) -> Self:
        """The same with the fingerprint of its numbers and of a sample.

        The sample stands for the recipe: whatever changes a row changes the fingerprint.
        """
        return replace(self, fingerprint=fingerprint(*numbers, self.held_out(COUNTED_SEQ_LEN)))


@dataclass(frozen=True, eq=False, kw_only=True)
class RankedCorpus(EndlessCorpus):
    """Rows in which each token is a successor of those before it, of a rank that is drawn by a Zipf law.

    Attributes:
        thresholds: by which a rank is drawn, ``[rank]`` of 2**32.
        successors: the tokens that may follow each context, ``[..., rank]``.
    """

    thresholds: NDArray[np.uint64]
    successors: Tokens

    @classmethod
    def of_scores(
        cls, scores: NDArray[np.float64], exponent: float, notes: Callable[[float], dict[str, str | float]]
    ) -> Self:
        """Make the tables of a language.

        Args:
            scores: of each next token after each context, ``[..., next]``; the lowest has rank 0.
            exponent: of the Zipf law over the ranks of a successor.
            notes: what is noted of the corpus, from the entropy of a rank in nats.
        """
        share = np.arange(1.0, scores.shape[-1] + 1) ** -exponent
        share /= share.sum()
        # Integers, so that no machine sees another rank or order: logarithms and powers differ between machines by
        # about 1e-15, whereas every threshold is further than 1e-3 from where its rounding turns, and any two scores of
        # a context's successors differ by more than 1e-8.
        thresholds = np.rint(share.cumsum() * 2**32).astype(np.uint64)
        successors = np.argsort(scores, axis=-1, kind="stable")
        language = cls(
            fingerprint="",
            notes=notes(float(-(share * np.log(share)).sum())),
            vocabulary=scores.shape[-1],
            thresholds=thresholds,
            successors=successors,
        )
        return language.identified(thresholds, successors)


SYNTHETIC_VOCABULARY = 256
SYNTHETIC_EXPONENT = 1.8  # of the Zipf law over the ranks of a successor
TILT = 0.3  # how much low tokens are preferred as successors
QUOTING = 0.9  # share of the rows that quote themselves
SHORTEST = 8  # tokens of a quotation; the longest is a third of the row
FIRST = 0  # the token assumed before every row, once or twice


@dataclass(frozen=True, eq=False, kw_only=True)
class SyntheticCorpus(RankedCorpus):
    """Rows from a first-order source: ``successors[previous, rank]``, the rank below ``thresholds[rank]`` of 2**32.

    The rank follows a Zipf law of exponent 1.8 and entropy h.  In nine of ten rows a segment of 8 tokens to a third of
    the row comes again later in the row, and the tokens after it follow from its last.  To whoever knows the source a
    quoted token costs nothing once the quotation is known, any other token h nats: the entropy per target is at least
    h times the share of targets that are not quoted, and at most h, since quoting saves more than the choice of a
    segment costs.  Rows shorter than 24 tokens quote nothing.
    """

    held_out_targets: ClassVar = HELD_OUT_TARGETS
    counted_rows: ClassVar = 16_384

    def draw_rows(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
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
    size = SHORTEST + below(length // 3 - SHORTEST + 1, size_bits)
    start = size + below(length - 2 * size + 1, start_bits)
    source = below(start - size + 1, source_bits)
    quotes = quotes < np.uint64(int(QUOTING * 2**64))
    quoted = quotes & (place_t1 >= start) & (place_t1 < start + size)
    return place_t1 - np.where(quoted, start - source, 0)


@DATA.register("synthetic")
@dataclass(frozen=True)
class Synthetic:
    """An endless language of 256 tokens, the same on every machine, of known entropy; it needs no file."""

    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Make the tables of the language, once per process."""
        return open_synthetic()


@cache
def open_synthetic() -> Corpus:
    """Make the tables of the language, once per process."""
    # The largest share of targets that are quoted; it falls with the length of the row, from the shortest that quotes.
    quoted = QUOTING * SHORTEST / (3 * SHORTEST - 1)
    return SyntheticCorpus.of_scores(
        synthetic_scores(),
        SYNTHETIC_EXPONENT,
        lambda entropy: {"entropy_at_most": entropy, "entropy_at_least": (1 - quoted) * entropy},
    )


def synthetic_scores() -> NDArray[np.float64]:
    """Scores ``[previous, next]``; the successor of lowest score has rank 0.  A preference plus Gumbel noise."""
    uniform = ((draw(DEFINITION, 0, 0, SYNTHETIC_VOCABULARY, SYNTHETIC_VOCABULARY) >> np.uint64(12)) + 0.5) * 2.0**-52
    scores: NDArray[np.float64] = TILT * np.log(np.arange(1.0, SYNTHETIC_VOCABULARY + 1)) - np.log(-np.log(uniform))
    return scores


TRIGRAM_VOCABULARY = 32
TRIGRAM_EXPONENT = 2.5  # of the Zipf law over the ranks of a successor


@dataclass(frozen=True, eq=False, kw_only=True)
class TrigramCorpus(RankedCorpus):
    """Rows from a second-order source: ``successors[two back, one back, rank]``, the rank from a Zipf law.

    A successor's score is one number for the token before plus one for the token two back, so attention to the token
    two back adds what a bigram model lacks.  Every target costs at least the entropy of the rank.
    """

    def draw_rows(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
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
        return open_trigram()


@cache
def open_trigram() -> TrigramCorpus:
    """Make the tables of the language, once per process."""
    return TrigramCorpus.of_scores(trigram_scores(), TRIGRAM_EXPONENT, lambda entropy: {"entropy": entropy})


def trigram_scores() -> NDArray[np.float64]:
    """Scores ``[two back, one back, next]``: the sum of a Gumbel number for each of the two; the lowest has rank 0."""
    uniform = ((draw(DEFINITION, 1, 0, 2 * TRIGRAM_VOCABULARY, TRIGRAM_VOCABULARY) >> np.uint64(12)) + 0.5) * 2.0**-52
    one_back, two_back = np.split(np.log(-np.log(uniform)), 2)
    return np.asarray(two_back[:, None] + one_back[None])


@dataclass(frozen=True, eq=False, kw_only=True)
class EchoCorpus(EndlessCorpus):
    """Rows of cycles: ``fresh`` letters drawn uniformly of ``letters``, then ``echoes`` of letters drawn before.

    The first echo of a cycle repeats the letter ``distance`` letters before the last one, the next echo the letter
    before that, and so on.  Echoes are tokens of their own: letter k is token k, its echo token ``letters`` + k.
    So each token says whether it is a letter or an echo, and its place in the row which of the two comes next.

    A row begins with a cycle.  A target costs log(``letters``) nats if it is the first in its row that shows its
    letter, and else nothing to whoever knows the source: ``entropy`` has the mean of this over a row, which no
    model can go below.  In long rows it is log(``letters``) ``fresh`` / (``fresh`` + ``echoes``).

    A text of so many ``rows`` is no language but a sample: each batch is all of it, so gradients have no noise.
    """

    letters: int
    distance: int
    fresh: int
    echoes: int
    rows: int = 0

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Rows ``[batch_size, seq_len + 1]`` of one step; of a text of so many rows, all of them at every step."""
        return self.draw_rows(TRAINING, seed, 0 if self.rows else step, batch_size, seq_len + 1)

    def check(self, batch_size: int, seq_len: int) -> None:
        """Refuse batches that are not the whole text of so many rows."""
        super().check(batch_size, seq_len)
        if self.rows and batch_size != self.rows:
            raise RequestError(
                f"data.rows={self.rows} is a text that each batch holds as a whole; say batch_size={self.rows}"
            )

    def predictable(self, seq_len: int) -> NDArray[np.bool_]:
        """Whether the letter of each target ``[seq_len]`` was shown before in its row."""
        drawn_t, _ = self._places(seq_len + 1)
        first_t = np.unique(drawn_t, return_index=True)[1]
        is_first_t = np.zeros(seq_len + 1, dtype=bool)
        is_first_t[first_t] = True
        return ~is_first_t[1:]

    def entropy(self, seq_len: int) -> float:
        """Entropy of a target given those before it in its row, the mean over ``seq_len`` targets, nats per token."""
        return float(math.log(self.letters) * np.mean(~self.predictable(seq_len)))

    def _places(self, length: int) -> tuple[Tokens, Tokens]:
        """Which letter of those drawn for its row each token ``[length]`` shows, and whether (1) or not it is an echo.

        The first are those that only echoes show, since they lie before the row.
        """
        cycle_t, place_t = np.divmod(np.arange(length), self.fresh + self.echoes)
        echo_t = (place_t >= self.fresh).astype(np.int64)
        before = self.distance + self.echoes - 1
        repeated_t = (cycle_t + 1) * self.fresh - 1 - self.distance - (place_t - self.fresh)
        return before + np.where(echo_t, repeated_t, cycle_t * self.fresh + place_t), echo_t

    def draw_rows(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        drawn_t, echo_t = self._places(length)
        bits = draw(stream, seed, step, rows, int(drawn_t.max()) + 1)
        return np.ascontiguousarray(below(self.letters, bits)[:, drawn_t] + self.letters * echo_t)


@DATA.register("echo")
@dataclass(frozen=True)
class Echo:
    """An endless language of letters and their echoes, the same on every machine, of known entropy; it needs no file.

    Attributes:
        letters: size of the alphabet; the vocabulary is twice as large.
        distance: letters from the one that an echo repeats to the last before it; the larger, the harder.
        fresh: letters of a cycle, which nothing predicts.
        echoes: predictable tokens of a cycle; their share of targets in long rows is echoes / (fresh + echoes).
        rows: 0 for an endless text; else the text of a seed is so many rows, and each batch is all of them.
        seed: of the batches.
    """

    letters: int = schema.bounded(16, at_least=2, at_most=2**15)
    distance: int = schema.bounded(3, at_least=0, at_most=2**15)
    fresh: int = schema.bounded(1, at_least=1, at_most=2**15)
    echoes: int = schema.bounded(1, at_least=0, at_most=2**15)
    rows: int = schema.bounded(0, at_least=0, at_most=2**15)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Make the language, once per process."""
        return open_echo(self.letters, self.distance, self.fresh, self.echoes, self.rows)


@cache
def open_echo(letters: int, distance: int = 3, fresh: int = 1, echoes: int = 1, rows: int = 0) -> EchoCorpus:
    """Make the language of these numbers, once per process."""
    share = echoes / (fresh + echoes)
    corpus = EchoCorpus(
        fingerprint="",
        notes={"predictable": share, "entropy_at_least": (1 - share) * math.log(letters)},
        vocabulary=2 * letters,
        letters=letters,
        distance=distance,
        fresh=fresh,
        echoes=echoes,
        rows=rows,
    )
    return corpus.identified(np.array([letters, distance, fresh, echoes, *[rows] * bool(rows)], dtype=np.int64))
