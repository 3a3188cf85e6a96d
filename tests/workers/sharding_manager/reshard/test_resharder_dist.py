"""Layout changes on 4 gloo ranks. One group of processes runs all cases: starting it costs more than they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.workers.engine.ranks import run_ranks
from tests.workers.sharding_manager.models import llama_tensors, total_bytes, values_for
from verl.errors import WeightSyncError
from verl.workers.sharding_manager.reshard.grid import RankGrid, generation_groups
from verl.workers.sharding_manager.reshard.layout import (
    Layout,
    TensorInfo,
    aligned_shard_dim,
    dense_splits,
    layout_of,
    parallel_layout,
    pipeline_stages,
    replicated_layout,
    shard_placement_fn,
)
from verl.workers.sharding_manager.reshard.planner import plan
from verl.workers.sharding_manager.reshard.resharder import Resharder

TENSORS = llama_tensors()
SPLITS = dense_splits(kv_heads=2, vocab_multiple_of=8)
BUCKET = 2000


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype, name
        assert torch.equal(tensor, want[name]), name


def run(source: Layout, target: Layout, rank: int, **options: bool) -> tuple[Resharder, dict[str, Tensor]]:
    whole = values_for(dict(source.tensors))
    made = plan(source, target, bucket_bytes=BUCKET)
    change = Resharder(made, **options)
    result = change.run(source.shard(whole, rank))
    assert_same(result, target.shard(whole, rank))
    report = change.report
    index = made.ranks.tolist().index(rank)
    assert report.received == made.received[index], "what went over the wire is what was planned"
    assert report.sent == made.sent[index]
    assert report.copied == made.copied[index]
    assert report.staged <= BUCKET
    assert report.peak <= made.peak_bytes()[index]
    return change, result


def lay(grid: RankGrid, **options: object) -> Layout:
    return parallel_layout(TENSORS, grid, splits=SPLITS, **options)  # type: ignore[arg-type]


def layouts(rank: int) -> None:
    tp4, fsdp4 = RankGrid.regular(tp=4), RankGrid.regular(fsdp=4)
    grid = RankGrid.regular(tp=2, pp=2)
    staged = lay(grid, stages=pipeline_stages(TENSORS, 2))
    run(lay(tp4), lay(generation_groups(tp4, tp=2)), rank)
    run(lay(fsdp4), lay(generation_groups(fsdp4, tp=2)), rank)
    run(lay(fsdp4, pad_shards=True), replicated_layout(TENSORS, range(4)), rank)
    run(staged, lay(generation_groups(grid, tp=2)), rank)
    # trainers 0 and 1, rollout 2 and 3: each side has nothing of the other
    run(lay(RankGrid.regular(fsdp=2)), lay(RankGrid.regular(tp=2, first_rank=2)), rank)
    # half of the bytes when the rollout wants half precision
    half = {name: replace(info, dtype=torch.bfloat16) for name, info in TENSORS.items()}
    whole = values_for(TENSORS)
    source, target = lay(fsdp4), replicated_layout(half, range(4))
    change = Resharder(plan(source, target, bucket_bytes=BUCKET))
    assert_same(change.run(source.shard(whole, rank)), {name: value.bfloat16() for name, value in whole.items()})
    assert change.report.received == change.plan.received[rank]
    assert change.plan.total_bytes == total_bytes(TENSORS) // 2 * 3


def same_layout(rank: int) -> None:
    layout = lay(RankGrid.regular(tp=4))
    mine = layout.shard(values_for(TENSORS), rank)
    change = Resharder(plan(layout, lay(RankGrid.regular(tp=4))))
    result = change.run(mine)
    assert all(result[name] is mine[name] for name in mine)
    report = change.report
    assert (report.sent, report.received, report.copied, report.allocated, report.messages) == (0, 0, 0, 0, 0)
    assert report.aliased == report.peak == layout.local_bytes()[rank]


def existing_targets(rank: int) -> None:
    train = RankGrid.regular(tp=4)
    source, target = lay(train), lay(generation_groups(train, tp=2))
    whole, newer = values_for(TENSORS), values_for(TENSORS, seed=1)
    change = Resharder(plan(source, target, bucket_bytes=BUCKET))
    into = {name: tensor.clone() for name, tensor in change.run(source.shard(whole, rank)).items()}
    storage = {name: tensor.data_ptr() for name, tensor in into.items()}
    names = [name for bucket in change.stream(source.shard(newer, rank), into) for name, _ in bucket]
    assert names == list(TENSORS)
    assert_same(into, target.shard(newer, rank))
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == storage
    assert change.report.allocated == 0


def adoption(rank: int) -> None:
    train = RankGrid.regular(tp=4)
    rules = dense_splits(kv_heads=2)
    source = parallel_layout(TENSORS, train, splits=rules)
    target = parallel_layout(TENSORS, generation_groups(train, tp=2), splits=rules)
    whole = values_for(TENSORS)
    mine = {name: nn.Parameter(tensor) for name, tensor in source.shard(whole, rank).items()}
    change = Resharder(plan(source, target, bucket_bytes=BUCKET), adopt=True)
    result = change.run(mine)
    assert_same(result, target.shard(whole, rank))
    assert change.report.peak <= target.local_bytes()[rank] + 1.5 * BUCKET  # half: the bucket's own shards
    for name, parameter in mine.items():  # no second copy: what is trained is inside of what generates
        inside = parameter.untyped_storage().data_ptr() == result[name].untyped_storage().data_ptr()
        assert inside, name
    change.reclaim(mine, result)
    assert result == {}
    assert_same({name: parameter.data for name, parameter in mine.items()}, source.shard(whole, rank))
    assert all(parameter.is_contiguous() for parameter in mine.values())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Block()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(6, 8, bias=True)
        self.down_proj = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6, bias=False)


def real_fsdp(rank: int) -> None:
    """Layouts read from FSDP2's own parameters, sharded by rows, aligned with generation, and over replicas."""
    rules = dense_splits()
    mesh = init_device_mesh("cpu", (4,))
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    for place, device_mesh, grid, dim in (
        (False, mesh, RankGrid.regular(fsdp=4), 0),
        (True, mesh, RankGrid.regular(fsdp=4), aligned_shard_dim(rules)),
        (False, replicas, RankGrid.regular(fsdp=2, dp=2), 0),
    ):
        torch.manual_seed(0)
        module = Model()
        whole = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        placed = shard_placement_fn(module.named_parameters(), 4, rules) if place else None
        fully_shard(module, mesh=device_mesh, shard_placement_fn=placed)
        tensors = dict(module.named_parameters())
        source = layout_of(tensors, range(4))
        local = {name: tensor.to_local().detach() for name, tensor in tensors.items()}  # type: ignore[attr-defined]
        assert_same(local, source.shard(whole, rank))
        described = parallel_layout(source.tensors, grid, shard_dim=dim)
        assert {name: item.key for name, item in described.placements.items()} == {
            name: item.key for name, item in source.placements.items()
        }
        target = parallel_layout(source.tensors, generation_groups(grid, tp=2), splits=rules)
        change = Resharder(plan(source, target, bucket_bytes=BUCKET))
        assert_same(change.run(local), target.shard(whole, rank))
        if place:  # every matrix's shard lies inside its slice; only the norm, which is whole there, does not align
            assert change.plan.redundant.tolist() == [0, 0, 0, 0]


def mistakes(rank: int) -> None:
    source = lay(RankGrid.regular(tp=4))
    change = Resharder(plan(source, replicated_layout(TENSORS, range(4))))
    mine = source.shard(values_for(TENSORS), rank)
    short = {name: tensor for name, tensor in mine.items() if name != "lm_head.weight"}
    with pytest.raises(WeightSyncError, match=rf"rank {rank} should hold a part of 'lm_head.weight'"):
        change.run(short)
    with pytest.raises(
        WeightSyncError, match=r"'lm_head.weight' is \(2, 2\) of torch.float32, the layout says \(6, 16\)"
    ):
        change.run({**mine, "lm_head.weight": torch.zeros(2, 2)})


def dead_peer(rank: int) -> None:
    """The last case: it breaks the group."""
    tensors = {"w": TensorInfo((4,), torch.float32)}
    source = parallel_layout(tensors, RankGrid.regular(fsdp=4))
    change = Resharder(plan(source, replicated_layout(tensors, range(4))))
    if rank == 3:
        return  # leaves without taking part
    with pytest.raises(WeightSyncError, match=f"rank {rank} lost a peer"):
        change.run({"w": torch.ones(1)})


def cases(rank: int) -> None:
    for case in (layouts, same_layout, existing_targets, adoption, real_fsdp, mistakes):
        case(rank)
        dist.barrier()
    dead_peer(rank)


@pytest.mark.dist
def test_four_ranks() -> None:
    run_ranks(4, cases)
