"""Jobs: train one fleet of a plan to its end, in halves when memory runs out, and resume it from its checkpoint."""

from __future__ import annotations

import math
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.data.corpus import look_again
from lab.records import leases, plans, store
from lab.records.trackers import FleetTracker, NoTracker
from lab.sweeping.progress import ProgressWriter
from lab.training.building import failure_of_own_code
from lab.training.checkpoint import Checkpointer
from lab.training.config import RunConfig, run_config
from lab.training.engine import can_compile
from lab.training.fleet import Fleet
from lab.training.identity import columns, run_id
from lab.training.loop import StepResult, train
from lab.training.recorder import Recorder, Run, failure, fleet_summary, run_card

Config = TypeVar("Config")
Attempt = Callable[[Sequence[Config]], Sequence[Run]]
Note = Callable[[str], None]


def train_halving(
    configs: Sequence[Config], attempt: Attempt[Config], note: Note, too_large: tuple[int, ...] = ()
) -> Iterator[Run]:
    """Train runs as one fleet, and retry in halves, down to single runs, whenever memory runs out.

    A run has the same bits in any fleet, so only its notes say that its fleet was halved.

    Args:
        configs: one per run, in the form that ``attempt`` takes.
        attempt: trains a fleet.
        note: shows a line to the user.
        too_large: sizes of the fleets that ran out of memory so far.

    Yields:
        The outcome of each run, in order, as soon as it is known. A single run that runs out of memory has failed.
    """
    runs, out_of_memory = _attempt(configs, attempt)
    # not before: until the error is handled, it holds the frames of the attempt, and with them the tensors
    machine.release_memory()
    if out_of_memory and len(configs) > 1:
        note(f"out of memory with {len(configs)} runs in a fleet; its halves are trained one after the other")
        middle = len(configs) // 2
        for half in (configs[:middle], configs[middle:]):
            yield from train_halving(half, attempt, note, (*too_large, len(configs)))
        return
    halved = f"out of memory in fleets of {', '.join(map(str, too_large))}" if too_large else None
    for run in runs:
        notes = "; ".join(filter(None, [run.outcome.get("notes"), halved])) or None
        yield run._replace(outcome={**run.outcome, "notes": notes})


def _attempt(configs: Sequence[Config], attempt: Attempt[Config]) -> tuple[Sequence[Run], bool]:
    """Train a fleet once; returns the outcomes, and whether memory ran out."""
    try:
        return attempt(configs), False
    except Exception as error:
        if not machine.is_out_of_memory(error):
            raise
        return [failure(f"out of memory: {error}")] * len(configs), True


def train_resumably(
    recorder: Recorder,
    checkpointer: Checkpointer,
    on_result: Callable[[StepResult], None],
    note: Note,
    stop_requested: Callable[[], bool],
) -> bool:
    """Train the recorder's fleet from its newest checkpoint; returns False if a stop is requested before the end.

    ``on_result`` gets every result; ``note`` gets a line for each checkpoint that cannot be read or written.
    """
    fleet = recorder.fleet
    state = checkpointer.restore(fleet.tensors(), note)
    if state:
        recorder.restore(state)
    for result in train(fleet, state["done"] if state else 0):
        recorder.keep(result)
        on_result(result)
        if result.is_last:
            break
        # all ranks stop, and save, after the same step
        stop = distributed.highest_on_any_rank(stop_requested())
        save = distributed.highest_on_any_rank(checkpointer.due(result.done))
        if result.done and (stop or save):
            try:
                checkpointer.save(result.done, fleet.tensors(), recorder.state())
            except RequestError as refusal:  # the run goes on without it
                note(str(refusal))
        if stop:
            return False
    return True


class Preempted(Exception):  # noqa: N818  (no error)
    """A stop was requested, and a checkpoint is saved."""


class ChangedDataError(Exception):
    """The data differ from those in the ids of a plan's runs."""


Configs = Mapping[str, RunConfig]  # of the runs of a fleet, by id


def train_fleet(
    folder: Path,
    plan: str,
    index: int,
    configs: Configs | None = None,
    *,
    request: str = "",
    interrupts: bool = False,
) -> bool:
    """Train one fleet of a plan and write its records; returns whether no run failed.

    An error while training is recorded, not raised. Runs that are recorded already, or that another request trains, are
    left out, which changes no bit of the other runs.

    Args:
        folder: the results folder.
        plan: the name of the plan.
        index: which of its fleets.
        request: a name of the command that the job belongs to, see ``leases.hold``.
        configs: the configs of the fleet's runs by id; None reads them from the plan.
        interrupts: whether Ctrl-C, too, saves a checkpoint before it stops the fleet.

    Raises:
        Preempted: stopped by a signal; the same plan resumes from a checkpoint.
        KeyboardInterrupt: stopped by Ctrl-C, with ``interrupts`` only after a checkpoint.
    """
    with machine.catching_sigterm(interrupts=interrupts) as stop_requested:
        if configs is None:
            configs = {point["id"]: run_config(point["tree"]) for point in plans.thaw(folder, plan, index)}
        with _held(folder, request, index, list(configs)) as runs:
            mine = {run: configs[run] for run in runs}
            return not mine or _train_fleet(folder, plan, index, mine, stop_requested)


@contextmanager
def _held(folder: Path, request: str, index: int, runs: Sequence[str]) -> Iterator[Sequence[str]]:
    """Hold runs of a fleet within the block, see ``leases.hold``; yields those that it holds, the same on all ranks."""
    if not distributed.is_first_rank():
        yield distributed.receive_from_first()
        return
    with leases.hold(folder, runs, request, index) as held:
        if distributed.is_joined():
            distributed.send_to_all(held)
        yield held


def _train_fleet(folder: Path, plan: str, index: int, configs: Configs, stop_requested: Callable[[], bool]) -> bool:
    machine.configure_torch()
    config = next(iter(configs.values()))
    progress = ProgressWriter(folder, plan, index, config.steps, len(configs))
    progress.write()
    if config.engine == "compiled" and not can_compile():
        progress.note("no C++ compiler or no headers of Python here; steps are not compiled")
        configs = {name: replace(config, engine="eager") for name, config in configs.items()}
    tracker = config.tracker.entry if distributed.is_first_rank() else NoTracker()
    rows = {name: columns(config) for name, config in configs.items()}
    with FleetTracker(tracker, folder, rows, progress.note) as tracking:
        job = _Job(folder, configs, progress, tracking, stop_requested)
        runs = job.train()
    return job.finish(runs)


@dataclass(frozen=True)
class _Job:
    """One fleet of a plan; ``configs`` are those of its runs by id."""

    folder: Path
    configs: Configs
    progress: ProgressWriter
    tracking: FleetTracker
    stop_requested: Callable[[], bool]

    def train(self) -> list[Run]:
        """Train the runs, and write a record of each as soon as its outcome is known."""
        runs: list[Run] = []
        names = list(self.configs)
        try:
            for name, run in zip(names, train_halving(names, self.attempt, self.progress.note), strict=True):
                row = run_card(name, self.configs[name], run.outcome)
                if distributed.is_first_rank():
                    store.write_run(self.folder, row, run.metrics, run.events)
                self.tracking.end(row)
                runs.append(run)
        except ChangedDataError as change:  # no record is written, since its id would be that of other data
            runs += [failure(str(change))] * (len(names) - len(runs))
        return runs

    def finish(self, runs: Sequence[Run]) -> bool:
        """Report the end and drop checkpoints that are no longer needed; returns whether no run failed.

        Raises:
            Preempted: a stop was requested meanwhile.
        """
        outcomes = [run.outcome for run in runs]
        ended = [name for name, outcome in zip(self.configs, outcomes, strict=True) if outcome["status"] != "failed"]
        losses = [math.inf if end["status"] == "diverged" else end.get("final_val_loss") for end in outcomes]
        self.progress.end(fleet_summary(runs), losses)
        if distributed.is_first_rank():
            plans.remove_checkpoints(self.folder, ended)
        if distributed.highest_on_any_rank(self.stop_requested()):
            raise Preempted
        return len(ended) == len(self.configs)

    def attempt(self, names: Sequence[str]) -> Sequence[Run]:
        """Train runs as one fleet.

        Raises:
            Preempted: a stop was requested.
            ChangedDataError: see ``check_data``.
            Exception: memory ran out in a fleet of one process; or the error arose on a rank other than the first.
        """
        configs = [self.configs[name] for name in names]
        try:
            self.check_data(names)
            recorder = Recorder(Fleet(configs))
            checkpointer = Checkpointer(self.folder, names, configs[0].checkpoint)
            report = self._reporter(recorder, names)
            self.progress.begin(len(names) / recorder.fleet.evaluation.models_at_init())
            if train_resumably(recorder, checkpointer, report, self.progress.note, self.stop_requested):
                self.check_data(names)
                return recorder.runs()
        except ChangedDataError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # Ctrl-C reaches the process that the user sees; where it is ignored, their code has raised it
            if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
                raise
            own = failure_of_own_code(error, configs[0])
            is_last = bool(own) and len(names) == 1  # so that no half is left for which memory might suffice
            is_halved = machine.is_out_of_memory(error) and not distributed.is_joined() and not is_last
            # the first rank reports for all, but cannot report the error of another, nor shrink a shared fleet
            if distributed.rank() > 0 or is_halved:
                raise
            if not own:
                self.progress.note(traceback.format_exc().rstrip())
            return [failure(own or f"{type(error).__name__}: {error}")] * len(names)
        raise Preempted

    def _reporter(self, recorder: Recorder, names: Sequence[str]) -> Callable[[StepResult], None]:
        """A function that passes each result to the progress file and the tracker, and reports probes that failed."""
        first, noted = list(self.configs).index(names[0]), set[str]()

        def report(result: StepResult) -> None:
            self.progress.update(result, first)
            for message in recorder.fleet.engine.faults.values():
                if message not in noted:
                    noted.add(message)
                    self.progress.note(f"{message}; training goes on")
            if self.tracking.open:
                for step, values in recorder.new_values():
                    self.tracking.log(step, dict(zip(names, values, strict=True)))

        return report

    def check_data(self, names: Sequence[str]) -> None:
        """Read the data of these runs again.

        Raises:
            ChangedDataError: they are not the data in the runs' ids, here or on another rank.
        """
        look_again()
        try:
            fingerprint = self.configs[names[0]].data.entry.open().fingerprint
            changed = any(run_id(self.configs[name], fingerprint) != name for name in names)
            message = "the data changed since these runs were planned" if changed else None
        except RequestError as refusal:
            message = str(refusal)
        if distributed.highest_on_any_rank(message is not None):
            cause = message or "another rank has other data"
            raise ChangedDataError(
                f"{cause}; nothing was recorded, and the same command trains on the data as they are"
            )
