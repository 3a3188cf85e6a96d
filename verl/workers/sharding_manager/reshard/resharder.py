"""Running a layout change over a process group, one bucket at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import WeightSyncError
from verl.utils.distributed import get_rank
from verl.workers.sharding_manager.reshard.plan import BucketItem, Plan, SliceMove


@dataclass
class ReshardReport:
    """What one rank did, in bytes where nothing else is said.

    Attributes:
        sent, received: exchanged with other ranks.
        copied: copied within the rank into its target tensors.
        aliased: target tensors that are the source's own.
        allocated: memory of new target tensors.
        staged: largest staging memory of a bucket, sends and receives together.
        peak: largest sum of source tensors, target tensors and staging at any time; shared memory counts once.
        messages: messages sent and received.
        buckets: buckets in which this rank exchanged something.
        seconds: wall time, without the time that the caller of ``stream`` took.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    aliased: int = 0
    allocated: int = 0
    staged: int = 0
    peak: int = 0
    messages: int = 0
    buckets: int = 0
    seconds: float = 0.0


@dataclass
class _Message:
    """Slices between two ranks in one bucket, one after the other in ``buffer``."""

    peer: int
    buffer: Tensor
    staged: bool
    parts: list[tuple[Tensor, torch.dtype]] = field(default_factory=list)  # view of a weight, dtype on the wire


class Resharder:
    """Changes the layout of one rank's tensors as a plan says; every rank of the plan runs one.

    Slices for one peer travel in one message per bucket, straight from and into the weights where the message is a
    single contiguous slice. At any time a rank holds its shards, its target tensors and one bucket.

    With ``adopt`` it does not even hold the shards: as soon as a target tensor is complete, the training tensor that
    it contains becomes a view of it (``tensor.data``) and gives up its own memory, so that the peak is the generation
    shard plus what one bucket needs (HybridFlow's zero redundancy). :meth:`reclaim` undoes this before training goes
    on. It is for training tensors without padding that own their memory; FSDP2's are views of a storage that it keeps.

    Args:
        plan: from :func:`~verl.workers.sharding_manager.reshard.planner.plan`.
        group: process group whose ranks include all ranks of the plan; None: the default group.
        rank: global rank; None: this process's.
        device: of new target tensors and staging.
        adopt: see above.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        device: str | torch.device = "cpu",
        adopt: bool = False,
    ) -> None:
        self.plan = plan
        self.group = group
        self.rank = get_rank() if rank is None else rank
        self.device = torch.device(device)
        self.adopt = adopt
        self.view = plan.for_rank(self.rank)
        self.report = ReshardReport()
        self._adopted: set[str] = set()

    def run(self, source: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Change the layout; see :meth:`stream`.

        Returns:
            All target tensors of this rank by name.
        """
        return {name: tensor for bucket in self.stream(source, into) for name, tensor in bucket}

    def stream(
        self, source: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Change the layout and give out target tensors as they become complete, in plan order. Collective.

        A tensor whose layout does not change is given out itself, not copied, unless ``into`` has it.

        Args:
            source: the rank's local tensors in the source layout.
            into: existing local tensors of the target layout to write to; those that it lacks are made.

        Raises:
            WeightSyncError: a source tensor is missing or has another shape, or a peer failed.
        """
        into = into or {}
        self._check(source, "source")
        self._check(into, "target", complete=False)
        report = self.report = ReshardReport()
        held = _bytes_of([*source.values(), *into.values()])
        report.peak = held
        names = self.plan.names
        open_targets: dict[int, Tensor] = {}
        for bucket in self.plan.buckets:
            started = time.perf_counter()
            for item in bucket:
                if item.part == 0:
                    tensor = self._open(item.tensor, source, into)
                    if tensor is None:
                        continue
                    open_targets[item.tensor] = tensor
                    name = names[item.tensor]
                    if tensor is not source.get(name) and name not in into:
                        report.allocated += tensor.nbytes
                        held += tensor.nbytes
            staged = self._exchange(bucket, source, open_targets)
            report.staged = max(report.staged, staged)
            report.peak = max(report.peak, held + staged)
            complete = []
            for item in bucket:
                if item.part == item.parts - 1 and item.tensor in open_targets:
                    name, tensor = names[item.tensor], open_targets.pop(item.tensor)
                    complete.append((name, tensor))
                    if self.adopt and name in source and name not in into:
                        held -= self._adopt(name, source[name], tensor)
            report.seconds += time.perf_counter() - started
            if complete:
                yield complete

    def reclaim(self, source: Mapping[str, Tensor], target: MutableMapping[str, Tensor]) -> None:
        """Give adopted training tensors memory of their own again and drop the target tensors one by one.

        Args:
            source: the training tensors that were given to :meth:`run`.
            target: what it returned; emptied.
        """
        for name, tensor in source.items():
            if name in self._adopted:
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
            target.pop(name, None)
        target.clear()
        self._adopted.clear()

    def _check(self, tensors: Mapping[str, Tensor], side: str, *, complete: bool = True) -> None:
        layout = self.plan.source if side == "source" else self.plan.target
        for name, info in layout.tensors.items():
            shape = layout.local_shape(name, self.rank)
            if name not in tensors:
                if complete and shape is not None and 0 not in shape:
                    raise WeightSyncError(f"rank {self.rank} should hold a part of {name!r} but did not give it")
                continue
            if shape is None or tuple(tensors[name].shape) != shape or tensors[name].dtype != info.dtype:
                raise WeightSyncError(
                    f"rank {self.rank}: the {side} tensor {name!r} is {tuple(tensors[name].shape)} of "
                    f"{tensors[name].dtype}, the layout says {shape} of {info.dtype}"
                )

    def _open(self, index: int, source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> Tensor | None:
        """The target tensor with what the rank holds already in place; None when it has none."""
        name = self.plan.names[index]
        shape = self.plan.target.local_shape(name, self.rank)
        if shape is None:
            return None
        target = into.get(name)
        if target is None:
            if self.view.unchanged(index) and name in source:
                self.report.aliased += source[name].nbytes
                return source[name]
            boxes = self.plan.target.placements[name].boxes_of(self.rank)
            filled = sum(math.prod(int(part.stop - part.start) for part in local) for _, local in boxes)
            make = torch.empty if filled == math.prod(shape) else torch.zeros  # padding is zero
            target = make(shape, dtype=self.plan.target.tensors[name].dtype, device=self.device)
        for move in self.view.copies(index):
            assert move.source is not None
            assert move.target is not None
            piece = target[move.target]
            piece.copy_(source[name][move.source].detach())
            self.report.copied += piece.nbytes
        return target

    def _exchange(
        self, bucket: tuple[BucketItem, ...], source: Mapping[str, Tensor], targets: Mapping[int, Tensor]
    ) -> int:
        """Send and receive one bucket; returns the bytes that it staged."""
        leaving: dict[int, list[tuple[Tensor, torch.dtype]]] = {}
        arriving: dict[int, list[tuple[Tensor, torch.dtype]]] = {}
        # Wide types first: every slice then begins at a multiple of its item size without padding.
        for item in sorted(bucket, key=lambda item: -self.plan.wire[item.tensor].itemsize):
            wire = self.plan.wire[item.tensor]
            for move in self.view.sends(item):
                piece = source[self.plan.names[item.tensor]].detach()[_index(move, "source")]
                leaving.setdefault(move.peer, []).append((piece, wire))
            for move in self.view.receives(item):
                piece = targets[item.tensor].detach()[_index(move, "target")]
                arriving.setdefault(move.peer, []).append((piece, wire))
        if not leaving and not arriving:
            return 0
        sends = [_message(peer, parts) for peer, parts in leaving.items()]
        receives = [_message(peer, parts) for peer, parts in arriving.items()]
        for message in sends:
            if message.staged:
                _pack(message)
        operations = [dist.P2POp(dist.irecv, message.buffer, message.peer, self.group) for message in receives]
        operations += [dist.P2POp(dist.isend, message.buffer, message.peer, self.group) for message in sends]
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            peers = sorted({message.peer for message in [*sends, *receives]})
            raise WeightSyncError(
                f"rank {self.rank} lost a peer while weights were changing layout (one of {peers}): {error}; the "
                "weights of the target are incomplete"
            ) from error
        for message in receives:
            if message.staged:
                _unpack(message)
        self.report.sent += sum(message.buffer.nbytes for message in sends)
        self.report.received += sum(message.buffer.nbytes for message in receives)
        self.report.messages += len(operations)
        self.report.buckets += 1
        return sum(message.buffer.nbytes for message in [*sends, *receives] if message.staged)

    def _adopt(self, name: str, mine: Tensor, target: Tensor) -> int:
        """Turn the training tensor into a view of the target; returns the bytes that this frees."""
        if mine is target or mine.dtype != target.dtype or mine.device != target.device or not mine.numel():
            return 0
        held = self.plan.source.placements[name].boxes_of(self.rank)
        if len(held) != 1 or held[0][1] != tuple(slice(0, size) for size in mine.shape):  # fused, or padded
            return 0
        whole = held[0][0]
        for outer, local in self.plan.target.placements[name].boxes_of(self.rank):
            if all(o.start <= w.start and w.stop <= o.stop for o, w in zip(outer, whole, strict=True)):
                index = tuple(
                    slice(at.start + w.start - o.start, at.start + w.stop - o.start)
                    for o, w, at in zip(outer, whole, local, strict=True)
                )
                freed = mine.nbytes
                mine.data = target.detach()[index]
                self._adopted.add(name)
                return freed
        return 0


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors of which some may be given under several names."""
    return sum({(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in tensors}.values())


def _index(move: SliceMove, side: str) -> tuple[slice, ...]:
    index = move.source if side == "source" else move.target
    assert index is not None
    return index


def _message(peer: int, parts: list[tuple[Tensor, torch.dtype]]) -> _Message:
    if len(parts) == 1:
        piece, wire = parts[0]
        if piece.dtype == wire and piece.is_contiguous():
            return _Message(peer, piece.view(-1).view(torch.uint8), staged=False)
    size = sum(piece.numel() * wire.itemsize for piece, wire in parts)
    return _Message(peer, torch.empty(size, dtype=torch.uint8, device=parts[0][0].device), True, parts)


def _pieces(message: _Message) -> Iterator[tuple[Tensor, Tensor]]:
    """(view of the buffer, view of the weight) for each slice."""
    begin = 0
    for piece, wire in message.parts:
        end = begin + piece.numel() * wire.itemsize
        yield message.buffer[begin:end].view(wire).view(piece.shape), piece
        begin = end


def _pack(message: _Message) -> None:
    for staged, piece in _pieces(message):
        staged.copy_(piece)


def _unpack(message: _Message) -> None:
    for staged, piece in _pieces(message):
        piece.copy_(staged)
