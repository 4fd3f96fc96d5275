"""Shards of a checkpoint of several ranks: written by every rank, and read on any number of them."""

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

from lab.core.files import check_zip, open_file

# Classes that torch writes into ``.metadata``, which is a pickle; any other is refused.
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
    """Write this rank's shards of the tensors into ``folder``; every rank calls this.

    Raises:
        RuntimeError: a rank could not write.
    """
    try:
        save(dict(tensors), checkpoint_id=folder)
    except CheckpointException as error:  # a BaseException, which nobody would catch
        raise RuntimeError(str(error)) from None


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in ALLOWED_CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")


class ShardedReader(FileSystemReader):
    """Reads the shards of several ranks; torch's own reader would run code in the metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with open_file(Path(self.path) / ".metadata") as file:
            return _RestrictedUnpickler(file).load()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name.

        Raises:
            ValueError: a shard is missing or damaged.
        """
        metadata = self.read_metadata()
        for info in metadata.storage_data.values():
            shard = Path(self.path) / info.relative_path
            if (
                shard.parent != Path(self.path)
                or not shard.is_file()
                or shard.stat().st_size < info.offset + info.length
            ):
                raise ValueError(f"{info.relative_path} is not in it, or cut short")
            with open_file(shard) as file:
                file.seek(info.offset)
                check_zip(io.BytesIO(file.read(info.length)))
        return {name: tuple(tensor.size) for name, tensor in metadata.state_dict_metadata.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read every tensor in place, whatever the number of ranks now.

        Raises:
            RuntimeError: a tensor cannot be read.
        """
        try:
            with warnings.catch_warnings(action="ignore"):  # of being one process
                load(dict(tensors), storage_reader=self)
        except CheckpointException as error:
            raise RuntimeError(f"{self.path} is damaged: {error}") from None
