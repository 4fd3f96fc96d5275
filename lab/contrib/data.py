"""Texts of studies: rows damaged by escape characters, mixtures of several sources, and a short text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lab.core import schema
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import HELD_OUT, HELD_OUT_TARGETS, TRAINING, Corpus, Tokens, below, draw, fingerprint
from lab.data.packing import PackedCorpus
from lab.data.synthetic import (
    COUNTED_SEQ_LEN,
    TRIGRAM_VOCABULARY,
    EndlessCorpus,
    open_echo,
    open_synthetic,
    open_trigram,
)

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
        return open_trigram().draw_rows(HELD_OUT, 0, 0, self.held_out_rows(seq_len), seq_len + 1)

    def draw_rows(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of one of the streams of random numbers, at a step."""
        text_bt = open_trigram().draw_rows(stream, seed, 2 * step, rows, length)
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


ALPHABET = 32  # common tokens; the same number of rare ones follows them
RUN = 16  # how often a token is repeated, on average, before another follows
ALL = "none"  # leaves nothing out

Rows = Callable[[int, int, int, int, int], Tokens]  # tokens [rows, length] of (stream, seed, step, rows, length)


def _trigram(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    return open_trigram().draw_rows(stream, seed, step, rows, length)


def _echo(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    return open_echo(ALPHABET // 2).draw_rows(stream, seed, step, rows, length)


def _script(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    return ALPHABET + _trigram(stream, seed, step, rows, length)


def _runs(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    bits_bt = draw(stream, seed, step, rows, length)
    begins_bt = bits_bt >> np.uint64(32) < np.uint64(2**32 // RUN)
    begins_bt[:, 0] = True
    first_bt = np.maximum.accumulate(np.where(begins_bt, np.arange(length), 0), axis=1)
    return np.take_along_axis(below(ALPHABET, bits_bt), first_bt, axis=1)


def _noise(stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
    return below(ALPHABET, draw(stream, seed, step, rows, length))


# In this order: trigram text, echoes, trigram text in an alphabet of its own, repeated tokens, noise.
KINDS: Mapping[str, Rows] = {"trigram": _trigram, "echo": _echo, "script": _script, "runs": _runs, "noise": _noise}


@dataclass(frozen=True, eq=False, kw_only=True)
class MixtureCorpus(EndlessCorpus):
    """Rows of several kinds: each row is of one kind, drawn by ``thresholds [kind]`` of 2**32, the sums of shares.

    The rows of a kind are those that it has in other shares as well, in the same order.
    """

    thresholds: NDArray[np.uint64]

    def rows_by_source(self, seed: int, step: int, batch_size: int) -> dict[str, int]:
        """How many training rows of a step are of each kind, also of those without a share."""
        counts = np.bincount(self._kinds(TRAINING, seed, step, batch_size), minlength=len(KINDS))
        return dict(zip(KINDS, counts.tolist(), strict=True))

    def _kinds(self, stream: int, seed: int, step: int, rows: int) -> Tokens:
        bits_b = draw(stream, seed, step * (len(KINDS) + 1), rows, 1)[:, 0]
        return np.searchsorted(self.thresholds, bits_b >> np.uint64(32), side="right")

    def draw_rows(self, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]`` of a stream and a step; every kind has steps of its own, so that none share bits."""
        kind_b = self._kinds(stream, seed, step, rows)
        mixed_bt = np.empty((rows, length), dtype=np.int64)
        for kind, draw_rows in enumerate(KINDS.values()):
            count = int((kind_b == kind).sum())
            if count:
                mixed_bt[kind_b == kind] = draw_rows(stream, seed, step * (len(KINDS) + 1) + 1 + kind, count, length)
        return mixed_bt


@DATA.register("mixture")
@dataclass(frozen=True)
class Mixture:
    """An endless mixture of five kinds of text, the same on every machine; it needs no file.

    Attributes:
        trigram, echo, script, runs, noise: shares of the rows, relative to their sum: the languages ``trigram`` and
            ``echo``, the first in an alphabet of its own, repeated tokens, and random tokens.
        without: a kind that is left out, or ``none``; the others keep their relative shares.
        seed: of the batches.
    """

    trigram: float = schema.bounded(1.0, at_least=0)
    echo: float = schema.bounded(1.0, at_least=0)
    script: float = schema.bounded(1.0, at_least=0)
    runs: float = schema.bounded(1.0, at_least=0)
    noise: float = schema.bounded(1.0, at_least=0)
    without: str = schema.one_of(ALL, *KINDS, default=ALL)
    seed: PerRunSeed = schema.seed(0)

    def __post_init__(self) -> None:
        if not sum(self._shares()):
            raise ValueError("no kind of text has a share")

    def _shares(self) -> tuple[float, ...]:
        return tuple(0.0 if name == self.without else getattr(self, name) for name in KINDS)

    def open(self) -> Corpus:
        """Make the mixture, once per process."""
        return _open_mixture(self._shares())


@cache
def _open_mixture(weights: tuple[float, ...]) -> Corpus:
    shares = np.array(weights) / sum(weights)
    corpus = MixtureCorpus(
        fingerprint="",
        notes={name: float(f"{share:.6g}") for name, share in zip(KINDS, shares, strict=True)},
        vocabulary=2 * ALPHABET,
        thresholds=np.rint(shares.cumsum() * 2**32).astype(np.uint64),
    )
    return corpus.identified(corpus.thresholds)


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
    tokens = open_synthetic().held_out(COUNTED_SEQ_LEN).ravel()[:size].astype(np.uint8)
    return PackedCorpus(
        training=tokens, reserved=tokens, fingerprint=fingerprint(tokens), notes={"held_out": "the training text"}
    )
