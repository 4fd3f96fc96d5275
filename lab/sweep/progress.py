"""How far a sweep is: fleets say it through the results folder, wherever they run, and one watcher tells the user."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lab.core import distributed
from lab.core.errors import RequestError
from lab.core.files import printable
from lab.records import plans

if TYPE_CHECKING:
    from torch import Tensor

    from lab.training.loop import Moment

SAY_EVERY, LOOK_EVERY = 0.5, 0.5  # seconds


class ProgressWriter:
    """One fleet's voice; speaks at most twice a second."""

    def __init__(self, folder: Path, plan: str, index: int, steps: int, runs: int) -> None:
        self.folder, self.plan, self.index, self.steps = folder, plan, index, steps
        self.started, self.said, self.step = time.monotonic(), 0.0, 0
        self.timed_from: tuple[float, int] | None = None
        self.loss_r: Tensor | None = None
        self.losses: list[float | None] = [None] * runs
        self.first = 0
        self.notes: list[str] = []
        self.say()

    def hear(self, moment: Moment, first: int = 0) -> None:
        """A step is done, by the runs from the ``first`` on; losses are copied off the device when they are said."""
        if moment.step < self.step:  # a half of the fleet begins anew
            self.timed_from = None
        self.first = first
        heard = [moment.heard.get((probe, "")) for probe in ("val_loss", "train_loss")]
        self.loss_r = next((loss_r for loss_r in (moment.val_loss_r, *heard) if loss_r is not None), self.loss_r)
        self.step = moment.step
        if self.step and not self.timed_from:  # the first step may have been compiled
            self.timed_from = time.monotonic(), self.step
        if time.monotonic() - self.said >= SAY_EVERY:
            self.say()

    def note(self, text: str) -> None:
        """Something for the user's eyes, whatever machine this is; fleets that note the same are heard once."""
        self.notes.append(text)
        self.say()

    def end(self, verdict: str, losses: Sequence[float | None]) -> None:
        """The fleet's last word; a run that failed has no loss."""
        self.step, self.loss_r, self.losses = self.steps, None, list(losses)
        self.say(verdict)

    def say(self, verdict: str | None = None) -> None:
        """Leave word in the folder."""
        if not distributed.is_first_rank():
            return
        self.said = now = time.monotonic()
        if self.loss_r is not None:
            losses, self.loss_r = self.loss_r.tolist(), None
            self.losses[self.first : self.first + len(losses)] = losses
        since, first = self.timed_from or (now, self.step)
        standing = FleetProgress(
            self.step,
            self.steps,
            now - self.started,
            (self.step - first) / (now - since) if now > since else 0.0,
            self.losses,
            self.notes,
            verdict,
        )
        with suppress(RequestError):  # a run must not fail because nobody can be told of it
            plans.write_progress(self.folder, self.plan, self.index, standing._asdict())


class FleetProgress(NamedTuple):
    """How far one fleet is; a rate of 0 is not known yet, a verdict ends it."""

    step: int
    steps: int
    seconds: float
    rate: float  # steps per second, from its first step on
    losses: Sequence[float | None]  # latest of each run, nats per token; None is not known
    notes: Sequence[str]
    verdict: str | None

    @classmethod
    def of(cls, said: Any) -> FleetProgress:
        """What a fleet said, as it was meant; ``ValueError`` when it makes no sense."""
        try:
            losses = [None if loss is None else float(loss) for loss in said["losses"]]
            notes = [str(note) for note in said["notes"]]
            seconds, rate = float(said["seconds"]), float(said["rate"])
            return cls(int(said["step"]), max(1, int(said["steps"])), seconds, rate, losses, notes, said["verdict"])
        except (KeyError, TypeError, OverflowError) as fault:
            raise ValueError(f"no word of a fleet: {said!r}") from fault

    @property
    def diverged(self) -> int:
        """Runs whose loss is not finite."""
        return sum(loss is not None and not math.isfinite(loss) for loss in self.losses)


class Screen(Protocol):
    """A terminal that shows where a sweep stands."""

    def show(self, standings: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Draw it anew: how far each fleet is that has begun, the share that is done, and the seconds it took."""

    def close(self) -> None:
        """Leave a clean terminal."""


class ProgressMonitor(threading.Thread):
    """Looks at the folder twice a second while the block runs: a line per finished fleet, and all on the screen."""

    def __init__(
        self,
        folder: Path,
        plan: str,
        labels: Sequence[str],
        sizes: Sequence[float],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        screen: Screen | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.plan, self.labels, self.sizes = folder, plan, labels, sizes
        self.say, self.warn, self.screen, self.over = say, warn, screen, threading.Event()
        self.started, self.told, self.noted = time.monotonic(), set[int](), set[str]()

    def __enter__(self) -> ProgressMonitor:
        plans.forget_progress(self.folder, self.plan)
        self.start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.over.set()
        self.join()
        try:
            self.tell()
        finally:
            if self.screen:
                self.screen.close()
        plans.forget_progress(self.folder, self.plan)

    def run(self) -> None:
        """Until the block is left."""
        while not self.over.wait(LOOK_EVERY):
            self.tell()

    def tell(self) -> None:
        """Say what is new: notes, each once, and fleets that ended; then show how far the others are."""
        standings = self.standings()
        for index, standing in sorted(standings.items()):
            for note in standing.notes:
                if note not in self.noted:
                    self.noted.add(note)
                    self.warn(note)
            if standing.verdict and index not in self.told:
                self.told.add(index)
                with suppress(BrokenPipeError):  # nobody reads any more; there is work to end all the same
                    self.say(printable(self.ended(index, standing)))
        if self.screen:
            shares = (self.sizes[index] * s.step / s.steps for index, s in standings.items())
            self.screen.show(standings, sum(shares) / sum(self.sizes), time.monotonic() - self.started)

    def standings(self) -> dict[int, FleetProgress]:
        """How far each fleet is that has begun; a word that makes no sense is not heard."""
        found = {}
        for index, said in plans.read_progress(self.folder, self.plan).items():
            with suppress(ValueError):
                if index < len(self.labels):
                    found[index] = FleetProgress.of(said)
        return found

    def ended(self, index: int, standing: FleetProgress) -> str:
        """A fleet's last line."""
        count = f"{len(self.told):>{len(str(len(self.labels)))}}/{len(self.labels)}"
        return f"{count}  {self.labels[index]}  {standing.seconds:.0f} s  {standing.verdict}"
