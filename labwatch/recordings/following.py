"""Follows a recording that grows: what left its usual values, told once by a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labwatch.events.levels import Level
from labwatch.recordings.recording import is_recording
from labwatch.recordings.words import report


class GrowingRecording:
    """A file that may be a recording, to be read again whenever it has grown."""

    def __init__(self, path: Path, levels: Mapping[str, Level]) -> None:
        self.path, self.levels = path, levels
        self.size, self.told = -1, set[int]()

    def poll(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a line, and values for JSON, for what is new since the last call.

        Raises:
            RequestError: the file cannot be read.
        """
        size = self.path.stat().st_size if self.path.is_file() else -1
        if size == self.size or not is_recording(self.path):
            return
        self.size = size
        found = report(self.path, self.levels)
        for line, plain in found.found:
            if plain["step"] not in self.told:
                self.told.add(plain["step"])
                yield line, plain
