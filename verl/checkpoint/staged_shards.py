"""The file of a rank in a ``torch.distributed.checkpoint`` directory, made in host memory.

A save beside the training needs a copy of the tensors. Here that copy already is the file: each tensor has its place
between the bytes that torch's format puts around it. These bytes, the plan and the description of the directory stay as
they are from save to save, and so does the memory. A further save copies the tensors into their places, and what
is left for the background is to write one piece of memory to the disk; nothing is laid out or serialised again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from verl.checkpoint.direct_io import write_hashed
from verl.errors import CheckpointError
from verl.utils.fs import format_bytes

DESCRIPTION = ".metadata"
_ALIGNMENT = 64  # of a tensor, as inside torch's format


class StagedShard:
    """What one rank writes of a set of tensors: a file, and on the first rank the description of all files.

    Making one is collective: the ranks agree on who writes what. The tensors may be sharded (``DTensor``).

    Args:
        tensors: by name; only shapes and types matter here.
        world: number of ranks.
        pin: make copies from a GPU fast; the memory can then not be paged out.

    Attributes:
        name: of the file; empty where this rank has nothing to write.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, world: int, pin: bool = False) -> None:
        self._known = _signature(tensors)
        self._planner = dcp.DefaultSavePlanner()
        layout = _Layout(pin=pin)
        dcp.save(dict(tensors), storage_writer=layout, planner=self._planner, no_dist=world == 1)
        self.name = layout.name
        self._items = layout.items
        self._description = layout.description
        self._memory = layout.memory
        self._places = layout.places
        self._let_go()

    @property
    def nbytes(self) -> int:
        """Host memory that it holds."""
        return self._memory.bytes.numel()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it was made for tensors of these names, shapes and types; the same answer on every rank."""
        return self._known == _signature(tensors)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors to their places; the copy is complete when this returns."""
        self._planner.set_up_planner(dict(tensors))
        for item, place in zip(self._items, self._places, strict=True):
            place.copy_(_tensor_of(self._planner, item).detach(), non_blocking=True)
        if self._memory.pinned:
            torch.cuda.current_stream().synchronize()
        self._let_go()

    def _let_go(self) -> None:
        """Keep no tensor: an engine that moves its parameters to the host wants the device's memory back."""
        self._planner.set_up_planner({})

    def write(self, directory: Path) -> dict[str, str]:
        """Write this rank's files into an existing directory and force them to the disk.

        Returns:
            File name -> SHA-256 of what was written.

        Raises:
            OSError: the disk is full or fails.
        """
        digests = {}
        if self.name:
            digests[self.name] = write_hashed(directory / self.name, self._memory.view)
        if self._description:
            digests[DESCRIPTION] = write_hashed(directory / DESCRIPTION, memoryview(self._description))
        return digests


class HostMemory:
    """Whole pages of host memory, large ones where the system has them, which no forked process shares.

    Args:
        size: bytes.
        pin: register the pages with the GPU.

    Attributes:
        bytes: as a tensor.
        view: the same, for writing to a file.
        pinned: whether they are registered.
    """

    def __init__(self, size: int, *, pin: bool = False) -> None:
        try:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(
                f"a background save needs {format_bytes(size)} of host memory for its copy: {error}; set "
                "checkpoint.async_save=False"
            ) from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)[:size]
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)[:size]
        self.pinned = pin and size > 0
        if self.pinned:
            outcome = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)
            self.pinned = int(outcome) == 0  # without, copies are slower


class _Layout(dcp.StorageWriter):
    """Stands in for a file system while torch plans a save, and makes this rank's file in memory, but for the data.

    Args:
        pin: of :class:`HostMemory`.

    Attributes:
        name: of the file, empty without items.
        items: of the plan, in the order of the file.
        memory: the file.
        places: where the data of each item belongs.
        description: content of ``.metadata``, on the first rank.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self.name = ""
        self.items: list[WriteItem] = []
        self.memory = HostMemory(0)
        self.places: list[Tensor] = []
        self.description = b""

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is no directory yet."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=f"__{rank}_0{DEFAULT_SUFFIX}") for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lay the file out; what fails here fails on every rank."""
        self.items = list(plan.items)
        self.name = str(plan.storage_data) if self.items else ""
        known: dict[tuple[tuple[int, ...], torch.dtype], _Frame] = {}  # layers repeat the same shapes
        frames = []
        for item in self.items:
            tensor = _tensor_of(planner, item)
            key = tuple(tensor.shape), tensor.dtype
            frames.append(known.get(key) or known.setdefault(key, _Frame.of(*key)))
        starts = [0, *itertools.accumulate(-(-frame.nbytes // _ALIGNMENT) * _ALIGNMENT for frame in frames)]
        self.memory = HostMemory(starts[-1], pin=self._pin)
        self.places = [frame.put(self.memory, start) for frame, start in zip(frames, starts, strict=False)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(item.index, frame.nbytes, _StorageInfo(self.name, start, frame.nbytes))
                for item, frame, start in zip(self.items, frames, starts, strict=False)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta()
        self.description = pickle.dumps(metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _tensor_of(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{item.index.fqn} is no tensor")
    return tensor


class _Recorder:
    """A file that keeps what is written to it, except the content of one tensor, whose place it notes."""

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._nbytes = tensor.data_ptr(), tensor.nbytes
        self.head, self.tail = bytearray(), bytearray()
        self.found = self._nbytes == 0

    def write(self, content: memoryview) -> int:
        size = len(content)
        if not self.found and size == self._nbytes and _address(content) == self._address:
            self.found = True
        else:
            part = self.tail if self.found else self.head
            part += content
        return size

    def flush(self) -> None:
        """Nothing is held back."""


@dataclass(frozen=True)
class _Frame:
    """What ``torch.save`` writes before and after the content of a tensor, which is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    head: bytes
    tail: bytes

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> _Frame:
        tensor = torch.empty(shape, dtype=dtype)  # memory that nobody touches costs nothing
        recorder = _Recorder(tensor)
        checked = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # of a content that is not there yet; files have a SHA-256
        try:
            torch.save(tensor, recorder)  # type: ignore[arg-type]
        finally:
            torch.serialization.set_crc32_options(checked)
        if not recorder.found or len(recorder.head) % dtype.itemsize:
            raise CheckpointError(
                f"torch {torch.__version__} writes tensors in another way than background saves know; set "
                "checkpoint.async_save=False"
            )
        return cls(shape, dtype, bytes(recorder.head), bytes(recorder.tail))

    @property
    def content(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return len(self.head) + self.content + len(self.tail)

    def put(self, memory: HostMemory, start: int) -> Tensor:
        """Write the frame to a position; returns where the content belongs."""
        data = start + len(self.head)
        end = data + self.content
        memory.view[start:data] = self.head
        memory.view[end : end + len(self.tail)] = self.tail
        return memory.bytes[data:end].view(self.dtype).view(self.shape)


def _address(content: memoryview) -> int:
    return int(np.frombuffer(content, np.uint8).__array_interface__["data"][0])


def _signature(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
