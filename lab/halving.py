"""Where memory does not do for all runs of a fleet: halves, trained one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from lab.core import machine
from lab.training.recorder import Run, failure

Asked = TypeVar("Asked")
Attempt = Callable[[Sequence[Asked]], Sequence[Run]]


def outcomes(
    asked: Sequence[Asked], attempt: Attempt[Asked], tell: Callable[[str], None], too_large: tuple[int, ...] = ()
) -> Iterator[Run]:
    """Outcomes of runs that ``attempt`` trains as one fleet, in their order, each as soon as it is known.

    Where that runs out of memory, its halves are attempted, down to single runs, which then have failed.  A run has the
    same bits in any fleet, so only its notes tell of it: ``too_large`` are the sizes that did not do.
    """
    runs, short = _attempted(asked, attempt)
    # not while the fault is at hand: it holds the frames of the attempt, and with them the tensors
    machine.release_memory()
    if short and len(asked) > 1:
        tell(f"out of memory with {len(asked)} runs in a fleet; its halves are trained one after the other")
        middle = len(asked) // 2
        for half in (asked[:middle], asked[middle:]):
            yield from outcomes(half, attempt, tell, (*too_large, len(asked)))
        return
    halved = f"out of memory in fleets of {', '.join(map(str, too_large))}" if too_large else None
    for outcome, metrics in runs:
        yield {**outcome, "notes": "; ".join(filter(None, [outcome.get("notes"), halved])) or None}, metrics


def _attempted(asked: Sequence[Asked], attempt: Attempt[Asked]) -> tuple[Sequence[Run], bool]:
    """Outcomes, and whether memory did not do."""
    try:
        return attempt(asked), False
    except Exception as fault:
        if not machine.is_out_of_memory(fault):
            raise
        return [failure(f"out of memory: {fault}")] * len(asked), True
