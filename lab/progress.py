"""How far a sweep is: fleets say it through the results folder, wherever they run, and one watcher tells the user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lab import plan as plans
from lab import ranks
from lab.registry import RequestError

SAY_EVERY, LOOK_EVERY = 0.5, 0.5  # seconds


class Sayer:
    """One fleet's voice; speaks at most twice a second."""

    def __init__(self, folder: Path, plan: str, index: int, steps: int) -> None:
        self.folder, self.plan, self.index, self.steps = folder, plan, index, steps
        self.started, self.said = time.time(), 0.0

    def say(self, step: int, verdict: str | None = None) -> None:
        """This many steps are done; a verdict ends the fleet."""
        now = time.time()
        if not ranks.is_first() or (verdict is None and now - self.said < SAY_EVERY):
            return
        self.said = now
        progress = {"step": step, "steps": self.steps, "seconds": now - self.started, "verdict": verdict}
        with suppress(RequestError):  # a run must not fail because nobody can be told of it
            plans.write_progress(self.folder, self.plan, self.index, progress)


class Watcher(threading.Thread):
    """Looks at the folder twice a second while the block runs: a line per finished fleet, and how long is left."""

    def __init__(
        self,
        folder: Path,
        plan: str,
        labels: Sequence[str],
        sizes: Sequence[float],
        say: Callable[[str], None],
        *,
        live: bool,
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.plan, self.labels, self.sizes = folder, plan, labels, sizes
        self.say, self.live, self.over, self.told = say, live, threading.Event(), set[int]()

    def __enter__(self) -> Watcher:
        plans.forget_progress(self.folder, self.plan)
        self.started = time.time()
        self.start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.over.set()
        self.join()
        self.tell()
        if self.live:
            self.say("\r\x1b[K")
        plans.forget_progress(self.folder, self.plan)

    def run(self) -> None:
        """Until the block is left."""
        while not self.over.wait(LOOK_EVERY):
            self.tell()

    def tell(self) -> None:
        """Say what is new: fleets that ended, and in a terminal how far the others are."""
        progress = plans.read_progress(self.folder, self.plan)
        for index in sorted(progress):
            if progress[index]["verdict"] and index not in self.told:
                self.told.add(index)
                self.say(("\r\x1b[K" if self.live else "") + self.ended(index, progress[index]) + "\n")
        if self.live and progress:
            self.say(f"\r{self.under_way(progress)[:110]}\x1b[K")

    def ended(self, index: int, progress: dict[str, Any]) -> str:
        """A fleet's last line."""
        count = f"{len(self.told):>{len(str(len(self.labels)))}}/{len(self.labels)}"
        return f"{count}  {self.labels[index]}  {progress['seconds']:.0f} s  {progress['verdict']}"

    def under_way(self, progress: dict[int, dict[str, Any]]) -> str:
        """Where the sweep stands, in one line."""
        shares = {index: p["step"] / p["steps"] for index, p in progress.items()}
        done = sum(self.sizes[index] * share for index, share in shares.items()) / sum(self.sizes)
        elapsed = time.time() - self.started
        left = f"{elapsed / done * (1 - done):.0f} s left" if done > 0.01 else "..."
        busy = {index: p for index, p in progress.items() if not p["verdict"]}
        running = [f"{self.labels[index].split('  ')[0]} {p['step']}/{p['steps']}" for index, p in busy.items()]
        return f"{done:4.0%}  {elapsed:.0f} s, {left}  |  {len(running)} under way: {', '.join(running)}"
