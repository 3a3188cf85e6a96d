"""Reading ``torch.distributed.checkpoint`` directories as data.

Such a directory is described by a pickle, ``.metadata``, and entries that are no tensors are pickles too; torch reads
both without limits, so that a file from elsewhere could run code. Here the description may refer only to what describes
tensors, and it is read before torch sees it.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from verl.errors import CheckpointError
from verl.utils.plain_pickle import PlainUnpickler, describe_damage

_DESCRIPTION = ".metadata"
_KNOWN = frozenset(
    {
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "_MEM_FORMAT_ENCODING",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        # Megatron-core keeps the plan by which it saved
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
        # where Python 3.13 has them
        *(f"pathlib._local.{name}" for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
    }
)


class PlainReader(FileSystemReader):
    """Reads tensors, and nothing that could run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the directory.

        Raises:
            CheckpointError: it holds more than a description of tensors.
        """
        metadata = _read(Path(self._get_metadata_path(kwargs.get("rank"))))
        others = [name for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)]
        if others:
            raise CheckpointError(f"{self.path}: {others[:3]} are pickled objects where tensors are expected")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def check_plain(directory: Path) -> None:
    """Check a directory that other code will read without limits, as Megatron-core does.

    Raises:
        CheckpointError: its description, or an entry that is no tensor, refers to anything but plain data.
    """
    metadata = _read(directory / _DESCRIPTION)
    for index, place in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            continue  # torch itself reads tensors as nothing but tensors
        file = directory / place.relative_path
        with file.open("rb") as stream:
            stream.seek(place.offset)
            content = stream.read(place.length)
        try:
            with torch.serialization.safe_globals([io.BytesIO]):
                torch.load(io.BytesIO(content), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise CheckpointError(
                f"{file}: the entry {index.fqn!r} is no plain data: {describe_damage(error)}"
            ) from error


def _read(path: Path) -> Metadata:
    try:
        with path.open("rb") as stream:
            metadata = PlainUnpickler(stream, _KNOWN).load()
    except Exception as error:  # pickle raises whatever the bytes lead it to
        raise CheckpointError(
            f"{path} is damaged or no description of a checkpoint: {describe_damage(error)}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__} and no description of a checkpoint")
    return metadata
