"""An endless language of random letters and their echoes: a share of its targets is predictable, the rest is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lab.core import schema
from lab.core.errors import RequestError
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import TRAINING, Corpus, Tokens, draw
from lab.data.endless import EndlessCorpus


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
        return self.rows_of(TRAINING, seed, 0 if self.rows else step, batch_size, seq_len + 1)

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

    def rows_of(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        drawn_t, echo_t = self._places(length)
        bits = draw(stream, seed, step, rows, int(drawn_t.max()) + 1)
        letters = (bits % np.uint64(self.letters)).astype(np.int64)
        return np.ascontiguousarray(letters[:, drawn_t] + self.letters * echo_t)


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
        return open_language(self.letters, self.distance, self.fresh, self.echoes, self.rows)


@cache
def open_language(letters: int, distance: int = 3, fresh: int = 1, echoes: int = 1, rows: int = 0) -> EchoCorpus:
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
