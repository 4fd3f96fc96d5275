"""Checkpoints: save and restore the whole state of a fleet, in one process or on several ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.core import distributed, files
from lab.core.distributed import copy_whole
from lab.core.errors import RequestError
from lab.core.schema import bounded
from lab.records import plans


@dataclass(frozen=True)
class CheckpointConfig:
    """Save a fleet every so many ``steps`` and every so many ``minutes`` (0: never); the newest ``keep`` are kept."""

    steps: int = bounded(at_least=0)
    minutes: float = bounded(at_least=0)
    keep: int = bounded(at_least=1)


class Checkpointer:
    """Saves and restores the checkpoints of one fleet; every rank calls it, at the same steps."""

    def __init__(self, folder: Path, ids: Sequence[str], config: CheckpointConfig) -> None:
        self.root, self.ids, self.config = folder, list(ids), config
        self.folder = plans.checkpoint_folder(folder, ids)
        self.saved = time.monotonic()

    def due(self, done: int) -> bool:
        """Whether to save after ``done`` updates."""
        every, seconds = self.config.steps, self.config.minutes * 60
        return bool(every and done % every == 0) or bool(seconds and time.monotonic() - self.saved >= seconds)

    def save(self, done: int, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Write the fleet's tensors and the rest of its state after ``done`` updates, and remove older checkpoints.

        Raises:
            RequestError: it cannot be written; earlier checkpoints remain.
        """
        rest, self.saved = {**rest, "done": done, "ids": self.ids}, time.monotonic()
        try:
            _first_rank(lambda: files.write_text(self.folder / "fleet.json", json.dumps(self.ids), within=self.root))
            if distributed.is_joined():
                self._save_shards(self.folder / str(done), tensors, rest)
            else:
                with files.atomic_write(self.folder / f"{done}.pt", within=self.root) as beside:
                    torch.save({"tensors": dict(tensors), "rest": rest}, beside)
        except (OSError, RuntimeError, RequestError) as error:
            raise RequestError(f"no checkpoint in {self.folder}: {str(error).splitlines()[0]}") from None
        if distributed.is_first_rank():
            with suppress(OSError):  # another process that trains the same may have removed them all
                self._remove_older()

    def _remove(self, path: Path) -> None:
        files.remove(path, within=self.root)

    def _remove_older(self) -> None:
        kept = self._newest_first()[: self.config.keep]
        for path in self.folder.iterdir():
            if path not in kept and path.name != "fleet.json":
                with suppress(OSError):  # another rank may still have it open
                    self._remove(path)

    def _save_shards(self, path: Path, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        from lab.training.shards import write_shards  # needed on several ranks only, and slow to load

        beside = path.with_name(f".{path.name}")
        _first_rank(lambda: self._remove(beside))
        write_shards(beside, tensors)

        def complete() -> None:
            metadata = files.file_digest(beside / ".metadata")
            torch.save({**rest, "metadata": metadata}, beside / "rest.pt")
            self._remove(path)
            os.replace(beside, path)

        _first_rank(complete)

    def restore(self, tensors: Mapping[str, Tensor], note: Callable[[str], None]) -> dict[str, Any] | None:
        """Fill ``tensors`` from the newest intact checkpoint; returns the rest of its state, or None without one.

        ``note`` gets a line for each checkpoint that is skipped, because it is damaged or of another fleet.
        """
        for path in self._newest_first():
            message = None
            try:
                rest, fill_all = self._open(path, tensors)
            except Exception as error:  # a damaged file fails in many ways
                message = (str(error) or type(error).__name__).splitlines()[0]
                if type(error).__name__ == "UnpicklingError":  # torch's own message says how to read it unchecked
                    message = "it is damaged, or holds more than tensors and plain values"
                note(f"checkpoint {path} is not used: {message}")
            if not distributed.highest_on_any_rank(message is not None):
                try:
                    fill_all()
                except RuntimeError:  # too late to take another now; the next attempt will
                    _first_rank(partial(self._remove, path))
                    raise
                return rest
        return None

    def _newest_first(self) -> list[Path]:
        paths = [path for path in self.folder.glob("[0-9]*") if path.stem.isdecimal()]
        return sorted(paths, key=lambda path: int(path.stem), reverse=True)

    def _open(self, path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], Callable[[], None]]:
        """The rest of a checkpoint's state, and a function that fills the tensors; raises if it does not fit."""
        with files.open_file(path / "rest.pt" if path.is_dir() else path) as file:
            files.check_zip(file)
        if path.is_dir():
            from lab.training.shards import ShardedReader

            rest = torch.load(path / "rest.pt", map_location="cpu", weights_only=True)
            if rest["metadata"] != files.file_digest(path / ".metadata"):
                raise ValueError(".metadata is damaged")
            reader = ShardedReader(path)
            shapes = reader.shapes()
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            rest = content["rest"]
            shapes = {name: tuple(tensor.shape) for name, tensor in content["tensors"].items()}
        if rest["ids"] != self.ids or shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise ValueError("it is of another config")

        def fill_all() -> None:
            if path.is_dir():
                reader.fill(tensors)
            else:
                for name, tensor in tensors.items():
                    copy_whole(tensor, content["tensors"][name])

        return rest, fill_all


def _first_rank(work: Callable[[], None]) -> None:
    """Do work on the first rank while the others wait; if it fails, raise on all, so that none goes on alone."""
    failure: Exception | None = None
    if distributed.is_first_rank():
        try:
            work()
        except (OSError, RuntimeError, RequestError) as error:
            failure = error
    if distributed.highest_on_any_rank(failure is not None):
        raise failure or OSError("the first rank could not")
