"""Batch schedules: how many sequences each update sees, and in how many micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lab.core.errors import RequestError
from lab.core.registry import BATCHES
from lab.core.schema import bounded


@dataclass(frozen=True)
class BatchSchedule(ABC):
    """Batch size as a function of the sequences seen; subclasses are frozen dataclasses.

    Attributes:
        micro_batch: sequences in a forward and backward pass; memory depends on these alone.
    """

    micro_batch: int = bounded(above=0)

    @abstractmethod
    def size(self, seen: int, batch_size: int) -> int:
        """Sequences in the next update after ``seen`` sequences; ``batch_size`` is the size that the run ends with."""

    def micro_batches(self, batch_size: int, steps: int) -> NDArray[np.int64]:
        """Micro-batches in each update ``[steps]``.

        Raises:
            RequestError: the micro-batch does not divide a batch, or the batch has not reached ``batch_size`` by the
                last update.
        """
        counts, seen, size = np.empty(steps, dtype=np.int64), 0, 0
        for step in range(steps):
            size = self.size(seen, batch_size)
            if size % self.micro_batch:
                raise RequestError(
                    f"batch.micro_batch={self.micro_batch} does not divide the batch of {size} sequences"
                )
            counts[step], seen = size // self.micro_batch, seen + size
        if size != batch_size:
            raise RequestError(f"the batch reaches {size} of {batch_size} sequences in {steps} steps; shorten its ramp")
        return counts


@BATCHES.register("constant")
@dataclass(frozen=True)
class Constant(BatchSchedule):
    """Every update sees ``batch_size`` sequences."""

    def size(self, seen: int, batch_size: int) -> int:
        """Return ``batch_size``."""
        return batch_size


@BATCHES.register("linear_samples")
@dataclass(frozen=True)
class LinearSamples(BatchSchedule):
    """The batch grows in a straight line over the first sequences, in whole micro-batches (Brown et al. 2020, app. B).

    Attributes:
        start: sequences in the first update.
        ramp: sequences seen when the batch has grown to ``batch_size``.
    """

    start: int = bounded(above=0)
    ramp: int = bounded(above=0)

    def size(self, seen: int, batch_size: int) -> int:
        """Return the batch on the line, rounded down to whole micro-batches above ``start``."""
        grown = (batch_size - self.start) * min(seen, self.ramp) // self.ramp
        return self.start + grown // self.micro_batch * self.micro_batch if seen < self.ramp else batch_size


@BATCHES.register("increments")
@dataclass(frozen=True)
class Increments(BatchSchedule):
    """The batch grows by equal increments, each held for as many sequences (Smith et al. 2022, arXiv 2201.11990).

    Attributes:
        start: sequences in the first update.
        increment: sequences added at a time.
        ramp: sequences seen when the batch has grown to ``batch_size``.
    """

    start: int = bounded(above=0)
    increment: int = bounded(above=0)
    ramp: int = bounded(above=0)

    def size(self, seen: int, batch_size: int) -> int:
        """Return the batch after ``seen`` sequences.

        Raises:
            RequestError: the increment does not divide the growth.
        """
        growth = batch_size - self.start
        if growth < 0 or growth % self.increment:
            raise RequestError(
                f"batch.increment={self.increment} does not divide the growth from {self.start} to {batch_size}"
            )
        if seen > self.ramp or not growth:
            return batch_size
        return min(batch_size, self.start + self.increment * (seen * (growth // self.increment) // self.ramp))


@BATCHES.register("steps")
@dataclass(frozen=True)
class Steps(BatchSchedule):
    """The batch doubles twice, after shares of all sequences (Chowdhery et al. 2022, arXiv 2204.02311, sec. 5).

    Attributes:
        half: sequences seen when the batch doubles from a quarter to half of ``batch_size``.
        full: sequences seen when it doubles to ``batch_size``.
    """

    half: int = bounded(above=0)
    full: int = bounded(above=0)

    def size(self, seen: int, batch_size: int) -> int:
        """Return a quarter of ``batch_size``, half of it, or all."""
        return batch_size // (4 if seen < self.half else 2 if seen < self.full else 1)
