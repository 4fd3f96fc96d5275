"""The corpus that every data source opens: batches addressed by (seed, step), and fixed held-out windows."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used
from numpy.typing import NDArray

from lab.core.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

HELD_OUT_TARGETS = 65_536  # predicted tokens of a validation, fewer in a small corpus
BACKOFF = 2.0  # pseudo-counts that a bigram row borrows from the unigram

# Independent random streams: no two overlap, for any seeds.
TRAINING, HELD_OUT, COUNTED, DEFINITION, BURST = range(5)

Tokens = NDArray[np.int64]
Bits = NDArray[np.uint64]
Arguments = ParamSpec("Arguments")
Windows = TypeVar("Windows", Tokens, "Tensor")


def draw(stream: int, seed: int, step: int, rows: int, columns: int) -> Bits:
    """Uniform 64-bit integers ``[rows, columns]``, a pure function of the arguments; more rows change no earlier row.

    Philox-4x64-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): the key is (seed, stream), the
    counter (position in the step, step).  Only raw bits are used, since numpy guarantees them on every machine and in
    every version, unlike its distributions.
    """
    bits = np.random.Philox(key=seed % 2**64 + stream * 2**64, counter=step * 2**128)
    return bits.random_raw(rows * columns).reshape(rows, columns)


def below(limit: int | Tokens, bits: Bits) -> Tokens:
    """Whole numbers from 0 to below the limit, made of uniform 64-bit integers.

    The remainder favours small numbers by less than limit / 2**64, which cannot be measured.
    """
    return (bits % np.asarray(limit, dtype=np.uint64)).astype(np.int64)


def fingerprint(*parts: NDArray[np.generic]) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of the parts' own digests, in this order."""
    combined = hashlib.sha256()
    for part in parts:
        combined.update(hashlib.sha256(part.data).digest())
    return combined.hexdigest()[:16]


def fewer(windows: Windows, targets: float) -> Windows:
    """The windows ``[n, seq_len + 1]``, or about as many of them, evenly spaced, as hold so many targets."""
    count, length = windows.shape
    return windows[:: max(1, int(count * (length - 1) // targets))]


def count_pairs(tokens: NDArray[np.integer], vocabulary: int) -> scipy.sparse.csr_array:
    """Count how often a token follows another along the last axis: ``[previous, next]``, sparse."""
    previous, following = tokens[..., :-1].ravel(), tokens[..., 1:].ravel()
    chunk = 2**22  # a pair's index takes 8 bytes; a large text must not need eight times its size
    counts = scipy.sparse.csr_array((vocabulary, vocabulary), dtype=np.int64)
    for start in range(0, previous.size, chunk):
        pairs = previous[start : start + chunk].astype(np.int64) * vocabulary + following[start : start + chunk]
        chunk_counts = pd.Series(pairs).value_counts(sort=False)
        counts += scipy.sparse.csr_array(
            (chunk_counts.to_numpy(), np.divmod(chunk_counts.index.to_numpy(), vocabulary)), shape=counts.shape
        )
    return counts


def bigram_loss(counts: scipy.sparse.csr_array, windows: Tokens) -> float:
    """Mean loss (nats per token) on ``windows [n, seq_len + 1]`` of a bigram model made from ``counts [v, v]``.

    Each row backs off to an add-one unigram (MacKay and Peto 1995, https://doi.org/10.1017/S1351324900000218):
    ``p(b | a) = (c(ab) + mu p(b)) / (c(a) + mu)``, with ``mu = BACKOFF``.
    """
    previous, following = windows[:, :-1], windows[:, 1:]
    share = counts.sum(0) + 1.0
    prior = share / share.sum()
    pairs = counts[previous, following].toarray()
    return float(-np.log((pairs + BACKOFF * prior[following]) / (counts.sum(1)[previous] + BACKOFF)).mean())


def unigram_loss(counts: scipy.sparse.csr_array, windows: Tokens) -> float:
    """Mean loss (nats per token) on ``windows [n, seq_len + 1]`` of the add-one unigram of ``counts [v, v]``."""
    share = counts.sum(0) + 1.0
    return float(-np.log(share / share.sum())[windows[:, 1:]].mean())


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus(ABC):
    """Training tokens and held-out tokens, all below ``vocabulary``.

    Attributes:
        fingerprint: a digest of the tokens, whatever their source.
        notes: further properties of the data, for the record of a run.
        vocabulary: number of token values.
    """

    fingerprint: str
    notes: dict[str, str | float]
    vocabulary: int = 256

    @property
    @abstractmethod
    def longest(self) -> int:
        """The largest ``seq_len`` that training part and held-out part allow."""

    @abstractmethod
    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Training windows ``[batch_size, seq_len + 1]`` of one step, a pure function of the arguments."""

    @abstractmethod
    def held_out(self, seq_len: int) -> Tokens:
        """Validation windows ``[n, seq_len + 1]``, of 65,536 targets or more unless the corpus has fewer; no seed."""

    @abstractmethod
    def pair_counts(self) -> scipy.sparse.csr_array:
        """Count how often a token follows another in the training part: ``[vocabulary, vocabulary]``, sparse."""

    def rows_by_source(self, seed: int, step: int, batch_size: int) -> dict[str, int]:
        """How many of the training windows of a step are of each source, by its name; empty if they have none."""
        return {}

    def clean(self, seq_len: int) -> Tokens | None:
        """Validation windows ``[n, seq_len + 1]`` without the artefact of this corpus; None if it has no known one."""
        return None

    def validation(self, seq_len: int, targets: float = math.inf) -> Tokens:
        """``held_out`` windows, or about as many of them, evenly spaced, as hold so many targets."""
        return fewer(self.held_out(seq_len), targets)

    def loss_bigram(self, seq_len: int, targets: float = math.inf) -> float:
        """``bigram_loss`` (nats per token) on the windows of ``validation``."""
        key = seq_len, targets
        if key not in self._bigram_losses:
            self._bigram_losses[key] = bigram_loss(self._counted, self.validation(*key))
        return self._bigram_losses[key]

    def loss_unigram(self, seq_len: int, targets: float = math.inf) -> float:
        """``unigram_loss`` (nats per token) on the windows of ``validation``, about where runs that diverge end."""
        return unigram_loss(self._counted, self.validation(seq_len, targets))

    @cached_property
    def _bigram_losses(self) -> dict[tuple[int, float], float]:
        return {}

    @cached_property
    def _counted(self) -> scipy.sparse.csr_array:
        return self.pair_counts()

    def check(self, batch_size: int, seq_len: int) -> None:
        """Refuse windows longer than the corpus; any ``batch_size`` is possible, since windows may overlap.

        Raises:
            RequestError: a part of the corpus is too short for a window of ``seq_len + 1`` tokens.
        """
        if seq_len > self.longest:
            raise RequestError(
                f"the text is too short for seq_len={seq_len}: its training and held-out parts "
                f"allow at most seq_len={self.longest}"
            )


_corpora: dict[tuple[Any, ...], Corpus] = {}
_up_to_date: set[tuple[Any, ...]] = set()


def once(read: Callable[Arguments, Corpus]) -> Callable[Arguments, Corpus]:
    """Decorator: cache the corpus of these positional arguments until ``look_again``.

    A corpus that is read again with the same fingerprint stays the same object.
    """

    @wraps(read)
    def opened(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Corpus:
        key = (read, *arguments)
        if key not in _up_to_date:
            corpus = read(*arguments, **keywords)
            if key not in _corpora or _corpora[key].fingerprint != corpus.fingerprint:
                _corpora[key] = corpus
            _up_to_date.add(key)
        return _corpora[key]

    return opened


def look_again() -> None:
    """Read every source again when it is next opened, since its files may have changed."""
    _up_to_date.clear()
