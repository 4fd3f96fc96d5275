"""Bursts: batches of a training run that are replaced, in part or whole, by sequences known to make the loss spike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from lab.core.errors import RequestError
from lab.core.registry import BURSTS
from lab.core.schema import PerRun, batches_of_bursts, bounded
from lab.data.corpus import BURST, Corpus, Tokens, below, draw

BACKSLASH = 92  # of a byte corpus
SEPARATED = 5  # every so manieth token is the separator
SELECTED, CONTENT = 0, 1  # streams of random numbers of a batch


@dataclass(frozen=True)
class Burst(ABC):
    """Ranges of batches in which some sequences come from another source; a pure function of (seed, batch).

    Training that skips these batches never sees the burst, and training that goes back sees it again.

    Attributes:
        start: index of the first batch; below 1, a share of the steps.
        length: number of batches; below 1, a share of the steps, rounded up; 0 is a run without a burst.
        fraction: share of a batch's sequences that come from the burst.
        repeats: how often the burst comes, spread evenly from the start to the end of the run.
    """

    start: PerRun = bounded(at_least=0)
    length: PerRun = bounded(at_least=0)
    fraction: PerRun = bounded(at_least=0, at_most=1)
    _: KW_ONLY
    repeats: PerRun = bounded(1.0, at_least=1)

    def batches(self, steps: int) -> tuple[range, ...]:
        """The batches of the burst each time it comes, in a run of so many steps."""
        return batches_of_bursts(float(self.start), float(self.length), steps, int(self.repeats))

    def check(self, steps: int) -> None:
        """Refuse a burst beyond the last step, and bursts that overlap.

        Raises:
            RequestError: one begins or ends there, begins before another has ended, or comes a fraction of a time.
        """
        start, length, repeats = (float(number) for number in (self.start, self.length, self.repeats))
        keys = f"bad_batches.start={start:g} bad_batches.length={length:g}"
        if not repeats.is_integer():
            raise RequestError(f"bad_batches.repeats must be a whole number, not {repeats:g}")
        first = batches_of_bursts(start, length, steps)[0]
        if len(first) and first.stop > steps:
            raise RequestError(
                f"{keys} ends with batch {first.stop - 1}, and the run has batches 0 to {steps - 1}; "
                f"end it by steps={steps}"
            )
        if len(first) and len(first) * repeats > steps - first.start:
            most = (steps - first.start) // len(first)
            raise RequestError(
                f"{keys} bad_batches.repeats={repeats:g} overlap: {repeats:g} bursts of {len(first)} batches do not "
                f"fit into the {steps - first.start} batches from the first on; say bad_batches.repeats={most} at most"
            )

    def covers(self, batch: int, steps: int) -> bool:
        """Whether any sequence of this batch comes from the burst."""
        return any(batch in covered for covered in self.batches(steps)) and self.share(batch, steps) > 0

    def share(self, batch: int, steps: int) -> float:
        """Share of the sequences of a batch of the burst that come from it."""
        return float(self.fraction)

    def sources(self, seed: int, batch: int, batch_size: int, steps: int) -> NDArray[np.bool_]:
        """Which sequences ``[batch_size]`` of a batch come from the burst, drawn at random."""
        count = round(self.share(batch, steps) * batch_size) if self.covers(batch, steps) else 0
        order = np.argsort(_draw(SELECTED, seed, batch, batch_size, 1)[:, 0], kind="stable")
        return np.isin(np.arange(batch_size), order[:count])

    def batch(self, corpus: Corpus, seed: int, batch: int, batch_size: int, seq_len: int, steps: int) -> Tokens:
        """The windows ``[batch_size, seq_len + 1]`` of a batch, the corpus's but for the burst's sequences."""
        windows_nt = corpus.batch(seed, batch, batch_size, seq_len)
        if not self.covers(batch, steps):
            return windows_nt
        drawn_nt = _draw(CONTENT, seed, batch, batch_size, seq_len + 1)
        changed_nt = self.change(windows_nt, drawn_nt, corpus.vocabulary)
        return np.where(self.sources(seed, batch, batch_size, steps)[:, None], changed_nt, windows_nt)

    @abstractmethod
    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        """The burst's sequences ``[n, t + 1]`` in place of these, with uniform random bits of the same shape."""


def _draw(stream: int, seed: int, batch: int, rows: int, columns: int) -> NDArray[np.uint64]:
    return draw(BURST, seed, 2 * batch + stream, rows, columns)


def permutation(vocabulary: int) -> Tokens:
    """A fixed random order of the tokens: what each becomes in another language."""
    return np.argsort(draw(BURST, 2**63, 0, vocabulary, 1)[:, 0], kind="stable").astype(np.int64)


@BURSTS.register("conflicting_labels")
@dataclass(frozen=True)
class ConflictingLabels(Burst):
    """Every second token is renamed, so that familiar contexts are followed by consistently wrong tokens."""

    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        is_label_t = np.arange(windows_nt.shape[1]) % 2 == 1
        return np.where(is_label_t, permutation(vocabulary)[windows_nt], windows_nt)


@BURSTS.register("repeated_character")
@dataclass(frozen=True)
class RepeatedCharacter(Burst):
    """Each sequence repeats a single token, drawn from the vocabulary."""

    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        return np.broadcast_to(below(vocabulary, drawn_nt[:, :1]), windows_nt.shape)


@BURSTS.register("shift")
@dataclass(frozen=True)
class Shift(Burst):
    """The text of the corpus in another language, all of whose tokens are renamed."""

    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        return permutation(vocabulary)[windows_nt]


@BURSTS.register("ramped_shift")
@dataclass(frozen=True)
class RampedShift(Shift):
    """As shift, but the share of the other language rises in a straight line from 0 to ``fraction``."""

    def share(self, batch: int, steps: int) -> float:
        """The share on the line; the last batch of the burst has ``fraction``."""
        (covered,) = (burst for burst in self.batches(steps) if batch in burst)
        return float(self.fraction) * (batch - covered.start + 1) / len(covered)


@BURSTS.register("rare_tokens")
@dataclass(frozen=True)
class RareTokens(Burst):
    """Tokens of the upper half of the vocabulary, drawn alike: bytes 128 to 255, or a tokenizer's rare words."""

    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        common = vocabulary // 2
        return common + below(vocabulary - common, drawn_nt)


@BURSTS.register("separator")
@dataclass(frozen=True)
class Separator(Burst):
    """Every fifth token is a backslash, as after a faulty removal of duplicates (Zhang et al. 2022, chronicles)."""

    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        is_separator_t = np.arange(windows_nt.shape[1]) % SEPARATED == SEPARATED - 1
        return np.where(is_separator_t, min(BACKSLASH, vocabulary - 1), windows_nt)


@BURSTS.register("huge_loss")
@dataclass(frozen=True)
class HugeLoss(Burst):
    """Tokens drawn from the whole vocabulary alike; as a single batch, one loss far above the others."""

    def change(self, windows_nt: Tokens, drawn_nt: NDArray[np.uint64], vocabulary: int) -> Tokens:
        return below(vocabulary, drawn_nt)
