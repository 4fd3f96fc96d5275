"""Checkpoints: the whole state of a fleet that is being trained, written by one process or several."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lab.core import distributed, files
from lab.core.distributed import copy_whole
from lab.core.errors import RequestError
from lab.core.files import check_zip
from lab.core.schema import bounded

# What torch writes into a folder's ``.metadata``, which is a pickle; anything else in it is refused.
ALLOWED_CLASSES = {
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "pathlib.PosixPath",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
}


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every rank writes its part of the tensors into ``folder``.

    Raises:
        RuntimeError: one of them could not.
    """
    try:
        save(dict(tensors), checkpoint_id=folder)
    except CheckpointException as fault:  # no Exception, so nobody would catch it
        raise RuntimeError(str(fault)) from None


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in ALLOWED_CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


class ShardedReader(FileSystemReader):
    """What several ranks wrote; torch's own reader would run whatever the metadata hold."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _RestrictedUnpickler(file).load()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor; ends with a ValueError where a part is missing or damaged."""
        metadata = self.read_metadata()
        for info in metadata.storage_data.values():
            part = Path(self.path) / info.relative_path
            if part.parent != Path(self.path) or not part.is_file() or part.stat().st_size < info.offset + info.length:
                raise ValueError(f"{info.relative_path} is not in it, or cut short")
            with open(part, "rb") as file:
                file.seek(info.offset)
                check_zip(io.BytesIO(file.read(info.length)))
        return {name: tuple(tensor.size) for name, tensor in metadata.state_dict_metadata.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read every tensor in place, however it is spread over ranks now.

        Raises:
            RuntimeError: one of them cannot be read.
        """
        try:
            with warnings.catch_warnings(action="ignore"):  # of being one process
                load(dict(tensors), storage_reader=self)
        except CheckpointException as fault:
            raise RuntimeError(f"{self.path} is damaged: {fault}") from None


@dataclass(frozen=True)
class CheckpointConfig:
    """A fleet's state is kept every so many steps and every so many minutes, 0 for never; the newest ``keep`` stay."""

    steps: int = bounded(at_least=0)
    minutes: float = bounded(at_least=0)
    keep: int = bounded(at_least=1)


def unfinished_fleets(folder: Path) -> list[list[str]]:
    """The runs of every fleet that left a checkpoint, in the fleet's order."""
    found = []
    for card in sorted(folder.glob("checkpoints/*/fleet.json")):
        with suppress(OSError, ValueError):  # gone meanwhile, or no card of ours
            found.append(list(map(str, json.loads(card.read_text()))))
    return found


def remove(folder: Path, ended: Collection[str]) -> None:
    """Remove the checkpoints of fleets all of whose runs have ended."""
    for ids in unfinished_fleets(folder):
        if set(ids) <= set(ended):
            shutil.rmtree(_place(folder, ids), ignore_errors=True)


def _place(folder: Path, ids: Sequence[str]) -> Path:
    return folder / "checkpoints" / files.digest(list(ids))


class Checkpointer:
    """Keeps and finds the checkpoints of one fleet; on several ranks each of them calls, and at the same step."""

    def __init__(self, folder: Path, ids: Sequence[str], config: CheckpointConfig) -> None:
        self.place, self.ids, self.config = _place(folder, ids), list(ids), config
        self.kept = time.monotonic()

    def due(self, done: int) -> bool:
        """Whether it is time, after so many updates."""
        every, seconds = self.config.steps, self.config.minutes * 60
        return bool(every and done % every == 0) or bool(seconds and time.monotonic() - self.kept >= seconds)

    def save(self, done: int, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Write the fleet's tensors and the rest of its state after ``done`` updates, and drop the oldest.

        Raises:
            RequestError: it cannot be written; what was there before still is.
        """
        rest, self.kept = {**rest, "done": done, "ids": self.ids}, time.monotonic()
        try:
            _first_rank(lambda: files.write_text(self.place / "fleet.json", json.dumps(self.ids)))
            if distributed.is_joined():
                self._save_parts(self.place / str(done), tensors, rest)
            else:
                with files.atomic_write(self.place / f"{done}.pt") as beside:
                    torch.save({"tensors": dict(tensors), "rest": rest}, beside)
        except (OSError, RuntimeError, RequestError) as fault:
            raise RequestError(f"no checkpoint in {self.place}: {str(fault).splitlines()[0]}") from None
        if distributed.is_first_rank():
            with suppress(OSError):  # another process that trains the same may have ended and removed them all
                self._drop_older()

    def _drop_older(self) -> None:
        kept = self._there()[: self.config.keep]
        for path in self.place.iterdir():
            if path not in kept and path.name != "fleet.json":
                with suppress(OSError):  # another rank may still have it open
                    _remove(path)

    def _save_parts(self, path: Path, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:

        beside = path.with_name(f".{path.name}")
        _first_rank(lambda: _remove(beside))
        write_shards(beside, tensors)

        def complete() -> None:
            metadata = files.file_digest(beside / ".metadata")
            torch.save({**rest, "metadata": metadata}, beside / "rest.pt")
            _remove(path)
            os.replace(beside, path)

        _first_rank(complete)

    def restore(self, tensors: Mapping[str, Tensor], note: Callable[[str], None]) -> dict[str, Any] | None:
        """Fill ``tensors`` from the newest checkpoint that fits; gives the rest of its state, or ``None``.

        One that is damaged or of another fleet is left out, and ``note`` told why.
        """
        for path in self._there():
            fault = None
            try:
                rest, fill_all = self._open(path, tensors)
            except Exception as refusal:  # a damaged file fails in many ways
                fault = (str(refusal) or type(refusal).__name__).splitlines()[0]
                note(f"checkpoint {path} is not used: {fault}")
            if not distributed.highest_on_any_rank(fault is not None):
                try:
                    fill_all()
                except RuntimeError:  # found too late for this time; the next will not find it
                    _first_rank(partial(_remove, path))
                    raise
                return rest
        return None

    def _there(self) -> list[Path]:
        """The newest first."""
        found = [path for path in self.place.glob("[0-9]*") if path.stem.isdigit()]
        return sorted(found, key=lambda path: int(path.stem), reverse=True)

    def _open(self, path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], Callable[[], None]]:
        """The rest of a checkpoint's state, and what fills the tensors once it is known to fit."""
        files.check_zip(path / "rest.pt" if path.is_dir() else path)
        if path.is_dir():
            rest = torch.load(path / "rest.pt", map_location="cpu", weights_only=True)
            if rest["metadata"] != files.file_digest(path / ".metadata"):
                raise ValueError(".metadata is damaged")

            parts = ShardedReader(path)
            shapes = parts.shapes()
        else:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            rest, shapes = held["rest"], {name: tuple(tensor.shape) for name, tensor in held["tensors"].items()}
        if rest["ids"] != self.ids or shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise ValueError("it is of another config")

        def fill_all() -> None:
            if path.is_dir():
                parts.fill(tensors)
            else:
                for name, tensor in tensors.items():
                    copy_whole(tensor, held["tensors"][name])

        return rest, fill_all


def _first_rank(work: Callable[[], None]) -> None:
    """Done by the first rank while the others wait; where it fails, it fails on all, so that none goes on alone."""
    fault = None
    if distributed.is_first_rank():
        try:
            work()
        except (OSError, RuntimeError, RequestError) as its:
            fault = its
    if distributed.highest_on_any_rank(fault is not None):
        raise fault or OSError("the first rank could not")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
