"""From FSDP shards to a rollout that splits the model: every rank gets its part, and what moves is what was planned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fixtures.tiny import make_tiny_model_dir
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import make_engine as make_training
from tests.workers.engine.reference import policy_batch, policy_loss
from tests.workers.rollout.helpers import generate, missing_package, random_prompts
from verl.config import ModelConfig, RolloutConfig
from verl.errors import WeightSyncError
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.rollout.types import SamplingParams, WeightPart
from verl.workers.sharding_manager import WeightSync, make_sharding_manager
from verl.workers.sharding_manager.reshard.grid import RankGrid, sharing_ranks
from verl.workers.sharding_manager.reshard.layout import (
    Layout,
    TensorInfo,
    dense_splits,
    parallel_layout,
    shard_placement_fn,
)
from verl.workers.sharding_manager.sharded_sync import ShardedSync

pytestmark = pytest.mark.dist

BUCKET = 1 << 14


def trained(path: str, *, aligned: bool = True, fsdp_size: int = -1) -> FSDPEngine:
    placement = partial(shard_placement_fn, splits=dense_splits()) if aligned else None
    return make_training(path, placement=placement, fsdp={"fsdp_size": fsdp_size})


def step(engine: FSDPEngine) -> None:
    """One optimizer step; ranks have rows of their own."""
    batch = policy_batch()
    lo = dist.get_rank() * 2 % 8
    mine = {name: value[lo : lo + 2] for name, value in batch.items()}
    engine.train_batch(mine, policy_loss, want=frozenset({"log_probs", "entropys"}), micro=MicroBatching())


def whole(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


class SplitSink:
    """A rollout that keeps its part of each weight by itself, as a layout says; ``stubborn`` wants whole tensors."""

    def __init__(self, layout: Layout, rank: int, *, stubborn: bool = False) -> None:
        self.layout, self.rank, self.stubborn = layout, rank, stubborn
        self.policy_version = -1
        self.memory_of = {
            name: torch.zeros(layout.local_shape(name, rank) or (), dtype=info.dtype)
            for name, info in layout.tensors.items()
        }
        self.loaded: dict[str, Tensor] = {}
        self.complete: set[str] = set()

    async def begin_update(self, version: int) -> None:
        self.next, self.complete = version, set()

    async def load(self, bucket: Iterable[tuple[str, Tensor]], *, live: bool = True) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in bucket}
        self.complete |= self.loaded.keys()

    def shard_views(self, names: Iterable[str]) -> dict[str, list[WeightPart]] | None:
        if self.stubborn:
            return None
        parts = {}
        for name in names:
            ((box, _),) = self.layout.placements[name].boxes_of(self.rank)
            start, stop = tuple(item.start for item in box), tuple(item.stop for item in box)
            parts[name] = [WeightPart(start, stop, self.memory_of[name])]
        return parts

    def mark_loaded(self, names: Iterable[str]) -> None:
        self.complete |= set(names)

    async def end_update(self) -> None:
        if self.complete != set(self.layout.tensors):
            raise WeightSyncError("weights are missing")
        self.policy_version = self.next

    async def checksums(self, source: Mapping[str, Tensor] | None = None) -> dict[str, str]:
        return {}

    def memory(self) -> Any:
        return SimpleNamespace(owned_weights=sum(t.nbytes for t in self.memory_of.values()), aliased_weights=0)


def generation_layout(engine: FSDPEngine, parallel: int, shards: int, dtype: torch.dtype) -> Layout:
    infos = {name: TensorInfo(tuple(tensor.shape), dtype) for name, tensor in engine.hf_tensors().items()}
    world = dist.get_world_size()
    groups = sharing_ranks(world, shards=shards, parallel=parallel)
    assert groups is not None
    part = {rank: number for group in groups for number, rank in enumerate(group)}
    ranks = torch.arange(world).numpy()
    grid = RankGrid(ranks, {"tp": parallel}, {"tp": torch.tensor([part[rank] for rank in range(world)]).numpy()})
    return parallel_layout(infos, grid, splits=dense_splits(kv_heads=2))


def parts_arrive(rank: int, path: str, fsdp_size: int, dtype: torch.dtype) -> None:
    engine = trained(path, fsdp_size=fsdp_size)
    shards = fsdp_size if fsdp_size > 0 else dist.get_world_size()
    layout = generation_layout(engine, 2, shards, dtype)
    sink = SplitSink(layout, rank)
    sync = ShardedSync(engine, sink, bucket_bytes=BUCKET, on_unchanged="error")
    for version in (0, 1):
        metrics = sync.sync(version)
        expected = layout.shard({name: value.to(dtype) for name, value in whole(engine).items()}, rank)
        assert all(torch.equal(sink.memory_of[name], value) for name, value in expected.items())
        assert sync.resharder is not None
        report, change = sync.resharder.report, sync.resharder.plan
        assert report.received == change.received[rank]
        assert metrics["weight_sync/received_mb"] == report.received / 2**20
        assert report.allocated == 0, "parts are written where the rollout reads them"
        assert report.staged <= BUCKET
        step(engine)
    # of the matrices (M), each of t shards receives (t - t_g) / (t * t_g) * M; vectors come whole
    matrices = sum(info.nbytes for info in layout.tensors.values() if len(info.shape) == 2)
    vectors = sum(info.nbytes for info in layout.tensors.values() if len(info.shape) == 1)
    formula = matrices * (shards - 2) / (shards * 2)
    assert formula <= change.received[rank] <= formula + vectors
    assert sync.sync(2)["weight_sync/changed_tensors"] == len(layout.tensors)
    with pytest.raises(WeightSyncError, match="0 of .* tensors changed"):  # on every rank, whatever it holds
        sync.sync(3)


def one_rank_wants_whole_tensors(rank: int, path: str) -> None:
    engine = trained(path)
    layout = generation_layout(engine, 2, dist.get_world_size(), torch.float32)
    sink = SplitSink(layout, rank, stubborn=rank == 1)
    sync = ShardedSync(engine, sink, bucket_bytes=BUCKET)
    metrics = sync.sync(0)
    assert "weight_sync/received_mb" not in metrics
    expected = whole(engine)
    assert sink.loaded.keys() == expected.keys()
    assert all(torch.equal(sink.loaded[name], value) for name, value in expected.items())


def cases(rank: int, path: str) -> None:
    world = dist.get_world_size()
    parts_arrive(rank, path, -1, torch.bfloat16 if world == 2 else torch.float32)
    if world == 4:
        parts_arrive(rank, path, 2, torch.float32)  # two replicas of two shards each
    one_rank_wants_whole_tensors(rank, path)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model_dir(tmp_path_factory.mktemp("models") / "served", hidden=64, heads=2, kv_heads=2)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_its_part(world: int, model_dir: str) -> None:
    run_ranks(world, cases, model_dir)


def _vllm(rank: int, path: str, aligned: bool) -> None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    world = dist.get_world_size()
    engine = trained(path, aligned=aligned)
    groups = sharing_ranks(world, shards=world, parallel=2) if aligned else None
    rollout: Any = VLLMRolloutEngine(
        ModelConfig(path=path),
        RolloutConfig(
            name="vllm",
            dtype="float32",
            prompt_length=28,
            response_length=36,
            max_num_seqs=8,
            tensor_model_parallel_size=2,
        ),
        device="cpu",
        groups=groups,
    )
    sync = make_sharding_manager("fsdp", "vllm", engine, rollout, bucket_bytes=BUCKET, on_unchanged="error")
    assert isinstance(sync, ShardedSync)
    plain = WeightSync(engine, rollout, bucket_bytes=BUCKET)
    prompts = random_prompts([5, 11, 3], seed=rank)
    params = [SamplingParams(12, seed=10 * rank + number, ignore_eos=True) for number in range(3)]
    model_bytes = sum(tensor.nbytes for tensor in whole(engine).values())
    for version in (0, 2):
        metrics = sync.sync(version)
        assert sync.resharder is not None
        received = sync.resharder.report.received
        assert received == sync.resharder.plan.received[rank]
        assert metrics["weight_sync/received_mb"] * 2**20 == received
        assert received < model_bytes * (0.05 if world == 2 and aligned else 0.5)
        parts = generate(rollout, prompts, params)
        mine = asyncio.run(rollout.checksums())
        plain.sync(version + 1)
        assert asyncio.run(rollout.checksums()) == mine
        streamed = generate(rollout, prompts, params)
        assert [item.token_ids for item in parts] == [item.token_ids for item in streamed]
        assert [item.log_probs for item in parts] == [item.log_probs for item in streamed]
        step(engine)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or "")
@pytest.mark.parametrize(("world", "aligned"), [(2, True), (2, False), (4, True)])
def test_vllm_samples_the_same_as_with_whole_tensors(world: int, aligned: bool, model_dir: str) -> None:
    run_ranks(world, _vllm, model_dir, aligned)
