"""Logs that grow: the rows added since the last reading, even if the file was replaced or truncated."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lab.core import files
from lab.core.errors import RequestError
from labwatch.events.event_logs import RunReader
from labwatch.events.log_names import Given
from labwatch.events.log_reader import LONGEST_LINE, LONGEST_PREAMBLE, LogReader, Row
from labwatch.events.logs import history_of, names_given, reader_of_runs
from labwatch.tables.run_folders import PARQUET, STATE, log_suffix

PIECE = 2**20  # bytes that are read at once
HEAD = 4096  # bytes by which a file is recognized
EVENTS = 10_000  # events that are read at once
ENDS = re.compile(rb"[\r\n]")


class GrowingLog(Protocol):
    """A log to be read again and again."""

    is_new: bool = False  # whether another file has replaced the log since the last rows

    def read(self) -> Iterator[list[Row]]:
        """Yield the rows since the last call, in pieces of limited size."""

    def position(self) -> dict[str, Any]:
        """The position up to which the log is read, as values for JSON, from which ``resume`` goes on."""

    def resume(self, position: dict[str, Any]) -> None: ...

    def fault(self) -> str:
        """The reason why there is no row yet."""

    def close(self) -> None:
        """Close the files of the log that are open between readings; most logs have none."""
        return


def open_log(path: Path, given: Given) -> GrowingLog:
    """Open the log at a path.

    Raises:
        RequestError: the path is neither a file nor a folder of such runs, or the file is compressed or a pointer of
            Git LFS.
    """
    if reader := reader_of_runs(path):
        return GrowingRuns(path, names_given(given, path), reader)
    if path.is_dir() or not path.exists():
        raise RequestError(f"--follow takes a log or a folder of TensorBoard's event files or MLflow's; {path} is none")
    if path.suffix == files.COMPRESSED:
        raise RequestError(f"--follow takes a log that grows; {path} is compressed, and lab watch {path} reads it")
    if log_suffix(path) == PARQUET:
        raise RequestError(
            f"--follow takes a log that grows; {path} is a table that is written once, and lab watch {path} reads it"
        )
    with contextlib.suppress(OSError), files.open_file(path) as file:
        head = file.read(HEAD)
        if files.is_lfs_pointer(head):
            raise RequestError(f"{path} {files.LFS_POINTER}")
        if b"\0" in head:
            raise RequestError(f"{path} is binary")
    return GrowingState(path, given) if log_suffix(path) == STATE else GrowingLines(path, given)


class GrowingLines(GrowingLog):
    """A file to which lines are added; one that is truncated, or replaced as by rotation, is read from its start."""

    def __init__(self, path: Path, given: Given) -> None:
        self.path, self.given = path, given
        self.reader = LogReader(given)
        self.file: BinaryIO | None = None
        self.offset, self.head = 0, b""

    def read(self) -> Iterator[list[Row]]:
        """See ``GrowingLog``.

        Raises:
            RequestError: the file is no log, or cannot be read.
        """
        try:
            while (file := self._current()) is not None:
                file.seek(self.offset)
                piece = file.read(PIECE)
                while not ENDS.search(piece) and len(piece) <= LONGEST_LINE and (more := file.read(PIECE)):
                    piece += more
                end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
                if end:
                    self.head += piece[:end][: HEAD - len(self.head)]
                    self.offset += end
                    rows = self.reader.read_lines(piece[:end].decode("utf-8", errors="replace"))
                    yield [*rows, *self.reader.settle()]
                    if not self.reader.columns and self.offset > LONGEST_PREAMBLE:
                        raise RequestError(f"{self.path} {self.reader.fault()}")
                elif len(piece) > LONGEST_LINE:
                    raise RequestError(f"{self.path} has a line of more than {LONGEST_LINE // 1024} KiB, as no log has")
                elif self._is_replaced(file):  # the unfinished last line of the old file is dropped
                    self.file = None
                    file.close()
                else:
                    return
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read: {error.strerror}") from None

    def _current(self) -> BinaryIO | None:
        """The open file of the log, at ``offset``; None while there is no file."""
        if self.file is None:
            try:
                self.file = files.open_file(self.path)
            except FileNotFoundError:
                return None
        is_shorter = self.file.seek(0, os.SEEK_END) < self.offset
        if is_shorter or os.pread(self.file.fileno(), len(self.head), 0) != self.head:
            self.offset, self.head, self.is_new, self.reader = 0, b"", True, self.reader.renewed()
        return self.file

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def position(self) -> dict[str, Any]:
        state = self.reader.state() if self.reader.columns else None
        return {"offset": self.offset, "head": self.head.hex(), "reader": state}

    def resume(self, position: dict[str, Any]) -> None:
        if state := position["reader"]:
            self.reader.resume(state)
            self.offset, self.head = int(position["offset"]), bytes.fromhex(position["head"])

    def fault(self) -> str:
        return self.reader.fault()

    def close(self) -> None:
        if self.file:
            self.file.close()


class GrowingState(GrowingLog):
    """A ``trainer_state.json``, which is rewritten as a whole each time."""

    def __init__(self, path: Path, given: Given) -> None:
        self.path, self.given = path, given
        self.stamp: list[int] = []
        self.last = -1

    def read(self) -> Iterator[list[Row]]:
        try:
            now = os.stat(self.path)
            if (stamp := [now.st_mtime_ns, now.st_size]) == self.stamp:
                return
            history = history_of(self.path)
        except OSError:  # it is being replaced
            return
        reader = LogReader(self.given)
        rows = [*(row for fields in history for row in reader.add(fields)), *reader.settle()]
        if not rows:
            return
        self.stamp = stamp
        if rows[-1].step < self.last:
            self.is_new, self.last = True, -1
        if new := [row for row in rows if row.step > self.last]:
            self.last = new[-1].step
            yield new

    def position(self) -> dict[str, Any]:
        return {"last": self.last}

    def resume(self, position: dict[str, Any]) -> None:
        self.last = int(position["last"])

    def fault(self) -> str:
        return "is no trainer_state.json with a step and a loss"


class GrowingRuns(GrowingLog):
    """A folder of TensorBoard's event files, or of MLflow's measurements; or one such file."""

    def __init__(self, path: Path, given: Mapping[str, str], reader: type[RunReader]) -> None:
        self.path, self.given, self.reader = path, given, reader
        self.readers = dict[str, RunReader]()
        self.last = dict[str, int]()  # of each run, before this process read on

    def read(self) -> Iterator[list[Row]]:
        for run, paths in self.reader.runs_of(self.path).items():
            reader = self.readers.setdefault(run, self.reader(run, self.given))
            for rows in reader.read(paths, EVENTS):
                yield [row for row in rows if row.step > self.last.get(row.run, -1)]

    def position(self) -> dict[str, Any]:
        return {"last": self.last | {reader.run: reader.last for reader in self.readers.values()}}

    def resume(self, position: dict[str, Any]) -> None:
        self.last = {str(run): int(step) for run, step in position["last"].items()}

    def fault(self) -> str:
        return "holds no loss"
