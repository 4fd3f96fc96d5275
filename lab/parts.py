"""Tensors that several ranks write side by side and any number of ranks reads, by torch's distributed checkpoints."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lab.core.files import check_zip

# What torch writes into a folder's ``.metadata``, which is a pickle; anything else in it is refused.
HARMLESS = {
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


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every rank writes its part of the tensors into ``folder``.

    Raises:
        RuntimeError: one of them could not.
    """
    try:
        save(dict(tensors), checkpoint_id=folder)
    except CheckpointException as fault:  # no Exception, so nobody would catch it
        raise RuntimeError(str(fault)) from None


class _Harmless(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in HARMLESS or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


class Parts(FileSystemReader):
    """What several ranks wrote; torch's own reader would run whatever the metadata hold."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Harmless(file).load()

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
