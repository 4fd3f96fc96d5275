"""Batch schedules: how many sequences each update sees, and in how many micro-batches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, islice, takewhile
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lab.core.errors import RequestError
from lab.core.registry import BATCHES
from lab.core.schema import bounded

ENDLESS = 2**62  # sequences; more than any run sees


@dataclass(frozen=True)
class BatchSchedule(ABC):
    """Batch size as a function of the sequences seen; subclasses are frozen dataclasses.

    Attributes:
        micro_batch: sequences in a forward and backward pass; memory depends on these alone.
        of_batch: fields in sequences, where a value below 1 is a fraction of ``batch_size``.
        of_run: fields in sequences, where a value below 1 is a fraction of all that the run sees.
    """

    of_batch: ClassVar[tuple[str, ...]] = ()
    of_run: ClassVar[tuple[str, ...]] = ()

    micro_batch: int = bounded(above=0)

    @abstractmethod
    def size(self, seen: int, batch_size: int) -> int:
        """Sequences in the next update after ``seen`` sequences; ``batch_size`` is the size that the run ends with."""

    def in_sequences(self, batch_size: int, total: int) -> Self:
        """The same schedule of a run of ``total`` sequences, without fractions; a batch has whole micro-batches.

        Raises:
            RequestError: a number of sequences is not whole.
        """
        counts = dict[str, int]()
        for name in (*self.of_run, *self.of_batch):
            number = float(getattr(self, name))
            if number >= 1 and not number.is_integer():
                raise RequestError(f"batch.{name}={number:g} must be a whole number or a fraction below 1")
            if number >= 1:
                counts[name] = int(number)
            elif name in self.of_run:
                counts[name] = max(1, round(total * number))
            else:
                counts[name] = max(1, round(batch_size * number / self.micro_batch)) * self.micro_batch
        return replace(self, **counts)

    def sizes(self, batch_size: int) -> Iterator[int]:
        """Sequences in one update after another, without end.

        Raises:
            RequestError: the micro-batch does not divide one of them.
        """
        seen = 0
        while True:
            size = self.size(seen, batch_size)
            if size % self.micro_batch or not size:
                raise RequestError(
                    f"batch.micro_batch={self.micro_batch} does not divide the batch of {size} sequences"
                )
            yield size
            seen += size

    def steps_within(self, batch_size: int, total: int) -> int:
        """Number of whole updates within ``total`` sequences."""
        return sum(1 for _ in takewhile(lambda seen: seen <= total, accumulate(self.sizes(batch_size))))

    def fewest(self, batch_size: int, steps: int) -> int:
        """Sequences in so many updates, whether or not the batch has grown by then."""
        return sum(islice(self.sizes(batch_size), steps))

    def micro_batches(self, batch_size: int, steps: int) -> NDArray[np.int64]:
        """Micro-batches in each update ``[steps]``.

        Raises:
            RequestError: the micro-batch does not divide a batch, or the batch has not reached its last size by the
                last update.
        """
        return _micro_batches(self, batch_size, steps)

    def sequences(self, batch_size: int, steps: int) -> int:
        """Sequences that the run trains on."""
        return int(self.micro_batches(batch_size, steps).sum()) * self.micro_batch


@cache
def _micro_batches(schedule: BatchSchedule, batch_size: int, steps: int) -> NDArray[np.int64]:
    sizes = np.fromiter(islice(schedule.sizes(batch_size), steps), dtype=np.int64, count=steps)
    if sizes[-1] != (last := schedule.size(ENDLESS, batch_size)):
        raise RequestError(f"the batch reaches {sizes[-1]} of {last} sequences in {steps} steps; shorten its ramp")
    return sizes // schedule.micro_batch


@cache
def resolve(schedule: BatchSchedule, batch_size: int, steps: int) -> BatchSchedule:
    """The schedule of a run of so many ``steps``, without fractions.

    Fractions are of the fewest sequences that take as many steps.

    Raises:
        RequestError: a number of sequences is not whole, or the micro-batch does not divide a batch.
    """

    def steps_within(total: int) -> int:
        return schedule.in_sequences(batch_size, total).steps_within(batch_size, total)

    has_fractions = any(getattr(schedule, name) < 1 for name in schedule.of_run)
    total = bisect_left(range(steps * batch_size), steps, key=steps_within) if has_fractions else steps * batch_size
    return schedule.in_sequences(batch_size, total)


def resolve_within(schedule: BatchSchedule, batch_size: int, total: int) -> tuple[BatchSchedule, int]:
    """The schedule of a run of ``total`` sequences, without fractions, and its number of whole updates.

    Fractions round, so a ramp of a few more sequences may fit one update more; a run of as many steps then has it, and
    its own sequences lead back to these steps.

    Raises:
        RequestError: as ``resolve``.
    """
    entry = schedule.in_sequences(batch_size, total)
    steps = entry.steps_within(batch_size, total)
    if schedule.in_sequences(batch_size, total + batch_size).fewest(batch_size, steps + 1) <= total:
        longer = resolve(schedule, batch_size, steps + 1)
        if longer.fewest(batch_size, steps + 1) <= total:
            return longer, steps + 1
    return entry, steps


@BATCHES.register("constant")
@dataclass(frozen=True)
class ConstantBatch(BatchSchedule):
    """Every update sees ``batch_size`` sequences."""

    def size(self, seen: int, batch_size: int) -> int:
        """Return ``batch_size``."""
        return batch_size


@BATCHES.register("quarter")
@dataclass(frozen=True)
class Quarter(BatchSchedule):
    """Every update sees a quarter of ``batch_size`` sequences, with which the ramp ``palm`` starts."""

    def size(self, seen: int, batch_size: int) -> int:
        """Return a quarter of ``batch_size``."""
        return batch_size // 4


@BATCHES.register("gpt3")
@dataclass(frozen=True)
class LinearSamples(BatchSchedule):
    """The batch grows in a straight line over the first sequences, in whole micro-batches (Brown et al. 2020, app. B).

    Attributes:
        start: sequences in the first update, or below 1 a fraction of ``batch_size``.
        ramp: sequences seen when the batch has grown to ``batch_size``, or below 1 a fraction of all.
    """

    of_batch: ClassVar = ("start",)
    of_run: ClassVar = ("ramp",)

    start: float = bounded(above=0)
    ramp: float = bounded(above=0)

    def size(self, seen: int, batch_size: int) -> int:
        """Return the batch on the line, rounded down to whole micro-batches above ``start``."""
        start, ramp = int(self.start), int(self.ramp)
        grown = (batch_size - start) * min(seen, ramp) // ramp
        return start + grown // self.micro_batch * self.micro_batch if seen < ramp else batch_size


@BATCHES.register("glm_130b")
@BATCHES.register("mt_nlg")
@BATCHES.register("increments")
@dataclass(frozen=True)
class Increments(BatchSchedule):
    """The batch grows by equal increments, each held for as many sequences (Smith et al. 2022, arXiv 2201.11990).

    Attributes:
        start: sequences in the first update, or below 1 a fraction of ``batch_size``.
        increment: sequences added at a time, or below 1 a fraction of ``batch_size``.
        ramp: sequences seen when the batch has grown to ``batch_size``, or below 1 a fraction of all.
    """

    of_batch: ClassVar = ("start", "increment")
    of_run: ClassVar = ("ramp",)

    start: float = bounded(above=0)
    increment: float = bounded(above=0)
    ramp: float = bounded(above=0)

    def size(self, seen: int, batch_size: int) -> int:
        """Return the batch after ``seen`` sequences.

        Raises:
            RequestError: the increment does not divide the growth.
        """
        start, increment, ramp = int(self.start), int(self.increment), int(self.ramp)
        growth = batch_size - start
        if growth < 0 or growth % increment:
            raise RequestError(f"batch.increment={increment} does not divide the growth from {start} to {batch_size}")
        if seen > ramp or not growth:
            return batch_size
        return min(batch_size, start + increment * (seen * (growth // increment) // ramp))


@BATCHES.register("palm")
@BATCHES.register("steps")
@dataclass(frozen=True)
class Steps(BatchSchedule):
    """The batch doubles twice, after shares of all sequences (Chowdhery et al. 2022, arXiv 2204.02311, sec. 5).

    Attributes:
        half: sequences seen when the batch doubles from a quarter to half of ``batch_size``, or below 1 a fraction of
            all.
        full: those seen when it doubles to ``batch_size``.
    """

    of_run: ClassVar = ("half", "full")

    half: float = bounded(above=0)
    full: float = bounded(above=0)

    def size(self, seen: int, batch_size: int) -> int:
        """Return a quarter of ``batch_size``, half of it, or all."""
        return batch_size // (4 if seen < self.half else 2 if seen < self.full else 1)


@BATCHES.register("adaptive")
@dataclass(frozen=True)
class Adaptive(BatchSchedule):
    """The batch follows the run's own noise scale, ``sqrt(exchange * B_noise)`` (McCandlish et al. 2018, app. D).

    It lies between ``start`` and ``batch_size`` and has whole micro-batches. Trace and squared norm of the gradient are
    smoothed apart. The run ends after as many sequences as ``steps`` batches of ``start`` hold, in fewer updates.

    Attributes:
        start: sequences in the first update and fewest in any, or below 1 a fraction of ``batch_size``.
        exchange: sequences that are worth one update.
        memory: updates over which the noise is averaged.
    """

    of_batch: ClassVar = ("start",)

    start: float = bounded(above=0)
    exchange: float = bounded(above=0)
    memory: float = bounded(at_least=1)

    def size(self, seen: int, batch_size: int) -> int:
        """Return the fewest sequences, which an update has as long as no noise is known."""
        return int(self.start)

    def adapted(self, trace: float, squared_norm: float, batch_size: int) -> int:
        """Sequences in the next update, given the smoothed trace and squared norm.

        Without any noise it is ``start``; where the gradient cannot be told from its noise it is ``batch_size``.
        """
        if not trace > 0:
            return int(self.start)
        ideal = math.sqrt(self.exchange * trace / squared_norm) if squared_norm > 0 else math.inf
        return max(int(self.start), int(min(ideal, batch_size) / self.micro_batch) * self.micro_batch)
