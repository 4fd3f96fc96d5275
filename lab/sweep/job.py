"""Jobs: one fleet of a plan trained to its end, in halves if memory runs out, from its newest checkpoint."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.data.corpus import look_again
from lab.records import plans, store
from lab.records.trackers import FleetTracker, NoTracker
from lab.sweep.progress import ProgressWriter
from lab.training import checkpoint
from lab.training.checkpoint import Checkpointer
from lab.training.config import columns, run_config, run_id
from lab.training.engine import can_compile
from lab.training.fleet import Fleet
from lab.training.loop import Moment, train
from lab.training.recorder import Recorder, Run, failure, fleet_summary, run_card

Asked = TypeVar("Asked")
Attempt = Callable[[Sequence[Asked]], Sequence[Run]]


def train_halving(
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
            yield from train_halving(half, attempt, tell, (*too_large, len(asked)))
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


Say = Callable[[str], None]


def train_resumably(
    tape: Recorder, keeper: Checkpointer, hear: Callable[[Moment], None], note: Say, told_to_stop: Callable[[], bool]
) -> bool:
    """Train the tape's fleet from where it was left; whether it came to its end, not having been told to stop before.

    ``hear`` is told of every moment, ``note`` of a checkpoint that cannot be read or written.
    """
    fleet = tape.fleet
    state = keeper.restore(fleet.tensors(), note)
    if state:
        tape.restore(state)
    for moment in train(fleet, state["done"] if state else 0):
        tape.keep(moment)
        hear(moment)
        if moment.done == fleet.config.steps:
            break
        # every rank stops, and keeps, after the same step
        stops, keeps = distributed.any_rank(told_to_stop()), distributed.any_rank(keeper.due(moment.done))
        if moment.done and (stops or keeps):
            _save_checkpoint(tape, keeper, moment.done, note)
        if stops:
            return False
    return True


def _save_checkpoint(tape: Recorder, keeper: Checkpointer, done: int, note: Say) -> None:
    try:
        keeper.save(done, tape.fleet.tensors(), tape.state())
    except RequestError as refusal:  # the run goes on, less safely
        note(str(refusal))


class Preempted(Exception):  # noqa: N818  (no error)
    """Told to stop, with a checkpoint left."""


class ChangedDataError(Exception):
    """The data are not those that the ids of a plan's runs stand for."""


def train_fleet(folder: Path, plan: str, index: int) -> bool:
    """Train one fleet of a plan and leave its runs behind; whether no run failed.  A fault is recorded, not raised.

    Raises:
        Preempted: told to stop by a signal; the same plan goes on from a checkpoint.
    """
    with machine.catching_sigterm() as told_to_stop:
        return _Job(folder, plan, index, told_to_stop).run()


class _Job:
    def __init__(self, folder: Path, plan: str, index: int, told_to_stop: Callable[[], bool]) -> None:
        machine.configure_torch()
        self.folder, self.told_to_stop = folder, told_to_stop
        named = [(point["id"], run_config(point["tree"])) for point in plans.thaw(folder, plan)["fleets"][index]]
        config = named[0][1]
        self.progress = ProgressWriter(folder, plan, index, config.steps, len(named))
        if config.engine == "compiled" and not can_compile():
            self.progress.note("no C++ compiler or no headers of Python here; steps are not compiled")
            named = [(name, replace(config, engine="eager")) for name, config in named]
        self.named = dict(named)
        tracker = config.tracker.entry if distributed.is_first_rank() else NoTracker()
        tracked = {name: columns(config) for name, config in named}
        self.tracking = FleetTracker(tracker, folder, tracked, self.progress.note)

    def run(self) -> bool:
        """Whether no run failed."""
        runs: list[Run] = []
        with self.tracking:
            asked = list(self.named)
            try:
                for name, run in zip(asked, train_halving(asked, self.attempt, self.progress.note), strict=True):
                    row = run_card(name, self.named[name], run[0])
                    if distributed.is_first_rank():
                        store.write_run(self.folder, row, run[1])
                    self.tracking.end(row)
                    runs.append(run)
            except ChangedDataError as change:  # a record would stand under an id of other data
                runs += [failure(str(change))] * (len(asked) - len(runs))
        ended = {name: run[0] for name, run in zip(asked, runs, strict=True) if run[0]["status"] != "failed"}
        self.progress.end(fleet_summary(runs), [run[0].get("final_val_loss") for run in runs])
        if distributed.is_first_rank():
            checkpoint.remove(self.folder, ended)
        if distributed.any_rank(self.told_to_stop()):
            raise Preempted
        return len(ended) == len(asked)

    def attempt(self, names: Sequence[str]) -> Sequence[Run]:
        """Train runs as one fleet; raises when they are preempted, or memory gives out in a process of its own."""
        configs, first = [self.named[name] for name in names], list(self.named).index(names[0])
        told = set[str]()

        def hear(moment: Moment) -> None:
            self.progress.hear(moment, first)
            for fault in tape.fleet.engine.faults.values():
                if fault not in told:
                    told.add(fault)
                    self.progress.note(f"{fault}; training goes on")
            if self.tracking.open:
                for step, values in tape.news():
                    self.tracking.log(step, dict(zip(names, values, strict=True)))

        try:
            self.check_data(names)
            tape = Recorder(Fleet(configs))
            keeper = checkpoint.Checkpointer(self.folder, names, configs[0].checkpoint)
            if train_resumably(tape, keeper, hear, self.progress.note, self.told_to_stop):
                self.check_data(names)
                return tape.runs()
        except ChangedDataError:
            raise
        except Exception as fault:
            # the first rank speaks for all, but not of this
            if distributed.rank() > 0 or (machine.is_out_of_memory(fault) and not distributed.is_joined()):
                raise
            self.progress.note(traceback.format_exc().rstrip())
            return [failure(f"{type(fault).__name__}: {fault}")] * len(names)
        raise Preempted

    def check_data(self, names: Sequence[str]) -> None:
        """Read the data of these runs again.

        Raises:
            ChangedDataError: they are not those that the runs' ids stand for, here or on another rank.
        """
        look_again()
        try:
            fingerprint = self.named[names[0]].data.entry.open().fingerprint
            changed = any(run_id(self.named[name], fingerprint) != name for name in names)
            fault = "the data changed since these runs were planned" if changed else None
        except RequestError as refusal:
            fault = str(refusal)
        if distributed.any_rank(fault is not None):
            what = fault or "another rank has other data"
            raise ChangedDataError(f"{what}; nothing was recorded, and the same command trains on the data as they are")
