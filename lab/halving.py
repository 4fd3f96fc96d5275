"""Where memory does not do for all runs of a fleet: halves, trained one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lab import machine
from lab.config import RunConfig
from lab.record import Run, failure

Attempt = Callable[[Sequence[RunConfig]], Sequence[Run]]


def outcomes(
    configs: Sequence[RunConfig], attempt: Attempt, tell: Callable[[str], None], too_large: tuple[int, ...] = ()
) -> Iterator[Run]:
    """Outcomes of runs that ``attempt`` trains as one fleet, in their order, each as soon as it is known.

    Where that runs out of memory, its halves are attempted, down to single runs, which then have failed.  A run has the
    same bits in any fleet, so only its notes tell of it: ``too_large`` are the sizes that did not do.
    """
    runs, short = _attempted(configs, attempt)
    # not while the fault is at hand: it holds the frames of the attempt, and with them the tensors
    machine.release()
    if short and len(configs) > 1:
        tell(f"out of memory with {len(configs)} runs in a fleet; its halves are trained one after the other")
        middle = len(configs) // 2
        for half in (configs[:middle], configs[middle:]):
            yield from outcomes(half, attempt, tell, (*too_large, len(configs)))
        return
    notes = f"out of memory in fleets of {', '.join(map(str, too_large))}" if too_large else None
    for outcome, metrics in runs:
        yield {**outcome, "notes": notes}, metrics


def _attempted(configs: Sequence[RunConfig], attempt: Attempt) -> tuple[Sequence[Run], bool]:
    """Outcomes, and whether memory did not do."""
    try:
        return attempt(configs), False
    except Exception as fault:
        if not machine.is_out_of_memory(fault):
            raise
        return [failure(f"out of memory: {fault}")] * len(configs), True
