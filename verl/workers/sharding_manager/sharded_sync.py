"""Hand-over to a rollout that splits the model over ranks: every rank receives its generation shard and no more."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl.workers.rollout.types import WeightPart
from verl.workers.sharding_manager.base import ShardedSource, SyncReport, WeightSink
from verl.workers.sharding_manager.reshard.held_weights import HeldWeights, Holding
from verl.workers.sharding_manager.reshard.layout import Layout, Placement, TensorInfo
from verl.workers.sharding_manager.reshard.plan import Plan
from verl.workers.sharding_manager.reshard.planner import plan
from verl.workers.sharding_manager.reshard.resharder import Resharder
from verl.workers.sharding_manager.sync import WeightSync, updating
from verl.workers.sharding_manager.transports.base import in_buckets

logger = logging.getLogger(__name__)

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, stop
Parts = Mapping[str, list[WeightPart]]


@dataclass(frozen=True)
class _Offer:
    """What the ranks tell each other before they plan, by piece.

    Attributes:
        holds: what training keeps here, where that is not a ``DTensor``.
        reads: boxes that generation reads here; None where it takes whole tensors.
        dtypes: in which it does.
    """

    holds: dict[str, Holding]
    reads: dict[str, list[Box]] | None
    dtypes: dict[str, torch.dtype]


class ShardedSync(WeightSync):
    """Gives every rank its part of the weights, written straight into the rollout's memory.

    The rollout says which boxes of which weights it reads, on every rank; the layout change from the training engine's
    shards is planned once and then run at each weight sync. The peak is shards + one bucket + the generation shard.
    :class:`WeightSync` moves every whole tensor to every rank instead. A rollout that cannot name boxes of a weight, on
    any rank, gets whole tensors.

    Args:
        source: the training engine, spread over all ranks of the default group.
        sink: this rank's part of the rollout.
        bucket_bytes, on_unchanged: as in :class:`WeightSync`.
    """

    def __init__(
        self,
        source: ShardedSource,
        sink: WeightSink,
        *,
        bucket_bytes: int = 512 << 20,
        on_unchanged: str = "ignore",
    ) -> None:
        super().__init__(source, sink, bucket_bytes=bucket_bytes, on_unchanged=on_unchanged)
        self.sharded = source
        self._agreed = False
        self._plan: Plan | None = None
        self.resharder: Resharder | None = None

    async def transfer(self, version: int, *, stepped: bool) -> SyncReport:
        """See :meth:`WeightSync.transfer`; collective over all ranks."""
        started = time.perf_counter()
        received = None
        buckets = 0
        async with updating(self.sink, version):
            shards = self.sharded.shards()
            assert shards is not None, "a source that has to put its tensors together belongs to WeightSync"
            held = HeldWeights(shards)
            parts = self.sink.shard_views(shards)
            if not self._agreed:
                self._plan = self._make_plan(held, parts)
                self._agreed = True
            if self._plan is not None and parts is not None:
                received, buckets = self._reshard(self._plan, held, parts)
                changed = self.changes.finish(version, stepped=stepped, combine=dist.all_reduce)
            else:
                for bucket in in_buckets(self.changes.watch(self.source.named_tensors()), self.bucket_bytes):
                    await self.sink.load(bucket, live=False)
                    buckets += 1
                changed = self.changes.finish(version, stepped=stepped)
        memory = self.sink.memory()
        return SyncReport(
            version=version,
            seconds=time.perf_counter() - started,
            bytes_copied=memory.owned_weights,
            bytes_shared=memory.aliased_weights,
            tensors=len(shards),
            buckets=buckets,
            changed=changed,
            bytes_received=received,
        )

    def _reshard(self, change: Plan, held: HeldWeights, parts: Parts) -> tuple[int, int]:
        """Write this rank's parts; returns bytes received and buckets."""
        for _ in self.changes.watch(held.slices()):
            pass
        local = held.tensors()
        numbered = [key.rsplit("#", 1) for key in change.names]
        source = {_key(key, int(number)): local[key] for key, number in numbered if key in local}
        into = {
            _key(piece.key, number): part.tensor
            for piece in held.pieces
            for number, part in enumerate(piece.within(parts[piece.weight]))
        }
        resharder = self.resharder = Resharder(change, device=next(iter(local.values())).device)
        resharder.run(source, into)
        self.sink.mark_loaded(held.shards)
        return resharder.report.received, resharder.report.buckets

    def _make_plan(self, held: HeldWeights, parts: Parts | None) -> Plan | None:
        """Exchange which rank holds and reads what; None when one of them needs whole tensors. Collective."""
        reads: dict[str, list[Box]] | None = None
        dtypes: dict[str, torch.dtype] = {}
        devices = {tensor.device.type for tensor in held.tensors().values()}
        if parts is not None and devices == {part.tensor.device.type for some in parts.values() for part in some}:
            cut = {piece.key: piece.within(parts[piece.weight]) for piece in held.pieces}
            reads = {key: [(part.start, part.stop) for part in some] for key, some in cut.items()}
            dtypes = {key: some[0].tensor.dtype for key, some in cut.items() if some}
        everyone: list[_Offer] = [_Offer({}, None, {})] * dist.get_world_size()
        dist.all_gather_object(everyone, _Offer(held.holdings(), reads, dtypes))
        boxes = [offer.reads for offer in everyone if offer.reads is not None]
        if len(boxes) < len(everyone):
            logger.info("the rollout takes whole tensors on some rank; all of them stream the whole model")
            return None
        dtypes = {key: dtype for offer in everyone for key, dtype in offer.dtypes.items()}
        source, target = _numbered_layouts(held.layout([offer.holds for offer in everyone]), boxes, dtypes)
        return plan(source, target, bucket_bytes=self.bucket_bytes)


def _numbered_layouts(
    shards: Layout, boxes: Sequence[Mapping[str, list[Box]]], dtypes: Mapping[str, torch.dtype]
) -> tuple[Layout, Layout]:
    """Source and target layout in which a piece appears once for each part that a rank has of it.

    A rollout that keeps a weight in several places, such as the sections of a fused projection, thus has one target
    tensor for each.
    """
    infos: dict[str, TensorInfo] = {}
    before: dict[str, Placement] = {}
    after: dict[str, Placement] = {}
    wanted: dict[str, TensorInfo] = {}
    stored_in: dict[str, str] = {}
    for name, info in shards.tensors.items():
        for number in range(max(len(held[name]) for held in boxes)):
            held_by = [(rank, held[name][number]) for rank, held in enumerate(boxes) if number < len(held[name])]
            key = _key(name, number)
            infos[key], before[key] = info, shards.placements[name]
            stored_in[key] = shards.stored_in.get(name, name)
            wanted[key] = TensorInfo(info.shape, dtypes[name])
            after[key] = Placement.build(
                len(info.shape),
                [
                    (
                        rank,
                        [tuple((first, end, 0) for first, end in zip(start, stop, strict=True))],
                        tuple(end - first for first, end in zip(start, stop, strict=True)),
                    )
                    for rank, (start, stop) in held_by
                ],
            )
    return Layout(infos, before, stored_in), Layout(wanted, after)


def _key(name: str, number: int) -> str:
    return f"{name}#{number}"
