"""Follow a log that grows: each alarm is raised once, even if the follower is killed and started again."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.analysis.spikes.trend import FEWEST_ROWS, Rise, TrendWatch
from lab.core import files
from lab.core.errors import RequestError
from lab.core.windows import Numbers
from labwatch.events.attempts import Column, is_near, log_of, table_of, trains_on
from labwatch.events.detectors import LEAD, Event, Log, detect, norm_leads
from labwatch.events.growing_log import open_log
from labwatch.events.levels import Level
from labwatch.events.log_names import LOSS, Given
from labwatch.events.log_reader import Row
from labwatch.events.logit_rounding import BF16

# Rows that are kept of each column, in which alarms other than loss spikes are found.
TAIL = 512
# An alarm may be found up to this many rows after it began; it is new unless it was raised before.
LATE = 110
SPIKE = "spike"
OPEN = ("none", "stuck", "diverged")  # endings after which a spike may recover
CURSOR = "cursor.json"


class Alarm(NamedTuple):
    """An alarm that is raised, and the last rows of its run."""

    event: Event
    log: Log


class _Run:
    """The state of a run that is followed."""

    def __init__(self) -> None:
        self.watch = TrendWatch()
        self.columns: dict[str, Column] = defaultdict(Column)
        self.first = -1  # the first step
        self.offset = 0  # steps of earlier passes over the data, after which they begin anew as the loss goes on
        self.rows = 0  # number of losses read
        self.last = -1  # step of the last one
        self.open = dict[str, str]()  # the last known ending of each raised spike that has not recovered, by its step
        self.warnings = list[int]()  # steps of the last alarms of other kinds
        self.again: int | None = None  # the first step that was written again
        self.is_renewed = False  # whether the next rows are in another file
        self.last_words = ""  # with which the program said after the last row that it stops

    def add(self, rows: Iterable[Row]) -> Iterator[tuple[NDArray[np.int64], Numbers]]:
        """Keep measurements; yields the losses among them in pieces of increasing steps, for the trend."""
        steps, losses = list[int](), list[float]()
        for logged in rows:
            if LOSS in logged.values and logged.step <= self.first and logged.step + self.offset < self.last:
                known = self.columns[LOSS]
                goes_on = is_near(np.array(known.values), np.array([logged.values[LOSS]]))
                self.offset = 2 * self.last - known.steps[-2] - logged.step if goes_on else 0
            row = logged._replace(step=logged.step + self.offset)
            self.last_words = row.last_words or ("" if trains_on(row, self.last) else self.last_words)
            for name, value in row.values.items():
                column = self.columns[name]
                column.rewind(row.step)
                column.add(row.step, value)
            if LOSS not in row.values:
                continue
            if steps and steps[-1] == row.step:
                self.again = row.step if self.again is None else self.again
                losses[-1] = row.values[LOSS]
                continue
            if row.step <= self.last:
                yield np.array(steps, dtype=np.int64), np.array(losses)
                steps, losses = [], []
                self.again = row.step if self.again is None else self.again
                if row.step <= self.first:
                    self.watch, self.first = TrendWatch(), row.step
                else:
                    self.watch.rewind(row.step)
            steps.append(row.step)
            losses.append(row.values[LOSS])
            self.first = row.step if self.first < 0 else self.first
            self.last, self.rows = row.step, self.rows + 1
        yield np.array(steps, dtype=np.int64), np.array(losses)

    def state(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("watch", "columns")}
        columns = {name: [list(each.steps), list(each.values)] for name, each in self.columns.items()}
        return plain | {"columns": columns, "watch": self.watch.state()}

    @classmethod
    def resume(cls, state: dict[str, Any]) -> _Run:
        run = cls()
        vars(run).update({name: state[name] for name in vars(run) if name not in ("watch", "columns")})
        run.watch = TrendWatch.resume(state["watch"])
        for name, (steps, values) in state["columns"].items():
            for step, value in zip(steps, values, strict=True):
                run.columns[name].add(step, value)
        return run


class Follower:
    """Follows the runs of a log, in memory that does not grow with the log.

    Args:
        path: the log, or a folder of TensorBoard's event files.
        columns: names of unusual columns; see ``read_logs``.
        mantissa_bits: stored mantissa bits of the format that rounds output logits; bf16's by default.
        levels: of columns, beyond which an alarm is raised as well.

    Raises:
        RequestError: there is no such log, or the file with the state of an earlier follower cannot be read.
    """

    def __init__(
        self,
        path: Path,
        columns: Given | None = None,
        mantissa_bits: int | None = None,
        levels: Mapping[str, Level] = MappingProxyType({}),
    ) -> None:
        self.levels = levels
        self.path, self.bits = path, BF16 if mantissa_bits is None else mantissa_bits
        self.log = open_log(path, columns or {})
        folder = path / "alarms" if path.is_dir() else path.with_name(f"{path.name}.alarms")
        self.cursor = folder / CURSOR
        self.runs = dict[str, _Run]()
        self.raised = set[tuple[str, str, int]]()
        self._saved = self._state()
        self._resume()

    def poll(self) -> Iterator[Alarm | str]:
        """Yield the alarms and remarks that are new since the last call.

        An alarm is saved before it is yielded, so that it is raised once even if this process is killed.

        Raises:
            RequestError: the log cannot be read, or lacks a column of steps or of losses.
        """
        for rows in self.log.read():
            for alarm in self._add(rows):
                if isinstance(alarm, Alarm):
                    self.raised.add(_key(alarm.event))
                    self._write()
                yield alarm
            self._saved = self._state()
            self._write()

    def close(self) -> None:
        """Read the log no more."""
        self.log.close()

    def is_judged(self) -> bool:
        """Whether some run had an alarm, or enough rows for one."""
        return bool(self.raised) or any(run.rows >= FEWEST_ROWS for run in self.runs.values())

    def fault(self) -> str:
        """The reason why nothing was judged."""
        if not self.runs:
            return f"{self.path} {self.log.fault()}"
        rows = max(run.rows for run in self.runs.values())
        return f"{self.path} has too few rows to judge: {rows} of {FEWEST_ROWS}"

    def _add(self, rows: Iterable[Row]) -> Iterator[Alarm | str]:
        """Read rows, of one run or several."""
        of_run: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            of_run[row.run].append(row)
        for run in self.runs.values() if self.log.is_new else ():
            run.is_renewed = True
        self.log.is_new = False
        for name, each in of_run.items():
            shown = f"{self.path.name}{name}" if name.startswith(" ") else name or self.path.name
            if (old := self.runs.get(name)) and old.is_renewed:
                old.is_renewed = False
                if each[0].step <= old.first:  # another run under the same name
                    del self.runs[name]
                    self.raised = {key for key in self.raised if key[0] != shown}
            yield from self._add_to_run(shown, self.runs.setdefault(name, _Run()), each)

    def _add_to_run(self, shown: str, run: _Run, rows: list[Row]) -> Iterator[Alarm | str]:
        known, rises, again = run.rows, list[Rise](), run.again
        for step_n, loss_n in run.add(rows):
            rises += run.watch.add(step_n, loss_n)
        if run.again is not None and again is None:
            yield f"{shown}: step {run.again} and others are written again; the last value of each counts"
        if LOSS not in run.columns:
            return
        log = log_of(shown, table_of(run.columns)._replace(last_words=run.last_words), self.bits)
        for column in run.columns.values():
            column.trim(TAIL)
        since = log.step_n[max(0, len(log.step_n) - (run.rows - known) - LATE)]
        others = [event for event in detect(log, (), self.levels) if event.step >= since]
        new = [event for event in others if _key(event) not in self.raised]
        run.warnings = sorted({*run.warnings, *(event.step for event in new)})[-TAIL:]
        rises = [rise for rise in rises if not (log.is_of_rewards and math.isfinite(rise.peak))]
        spikes = [_spike(log, rise, run.warnings) for rise in rises]
        for event in sorted([*new, *spikes], key=lambda each: each.step):
            if _key(event) not in self.raised:
                if event.kind == SPIKE and event.ending in OPEN:
                    run.open[str(event.step)] = event.ending
                yield Alarm(event, log)
            elif event.kind == SPIKE and event.ending not in ("none", run.open.get(str(event.step), event.ending)):
                run.open[str(event.step)] = event.ending
                yield f"{shown} step {event.step}: loss spike {event.ending} at step {event.end}"
        run.open = {step: ending for step, ending in run.open.items() if ending in OPEN}

    def _state(self) -> str:
        runs = {name: run.state() for name, run in self.runs.items()}
        return json.dumps({"log": self.log.position(), "runs": runs})

    def _write(self) -> None:
        raised = json.dumps(sorted(self.raised))
        text = f'{{"raised": {raised}, "state": {self._saved}}}'
        files.write_text(self.cursor, text, within=self.cursor.parents[1])

    def _resume(self) -> None:
        if not self.cursor.exists():
            return
        try:
            cursor = files.read_json(self.cursor, dict)
            self.raised = {(str(run), str(kind), int(step)) for run, kind, step in cursor["raised"]}
            self.log.resume(cursor["state"]["log"])
            self.runs = {str(name): _Run.resume(state) for name, state in cursor["state"]["runs"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise RequestError(f"{self.cursor} is no cursor of this log; delete it to begin anew") from None
        self._saved = self._state()


def _key(event: Event) -> tuple[str, str, int]:
    return event.run, event.kind, event.step


def _spike(log: Log, rise: Rise, warnings: list[int]) -> Event:
    row = int(np.searchsorted(log.step_n, rise.step))
    earliest = int(log.step_n[max(0, row - LEAD)])
    early = [*warnings, *(int(log.step_n[first]) for first in norm_leads(log, row))]
    early = [step for step in early if earliest <= step < rise.step]
    lead = rise.step - min(early) if early else None
    return Event(log.name, rise.step, SPIKE, rise.ending, rise.end_step, rise.peak, rise.usual, lead)
