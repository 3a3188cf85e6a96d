"""Plans move exactly what is missing, each element once, from ranks that have it, evenly."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tests.workers.sharding_manager.models import llama_tensors, total_bytes
from verl.errors import WeightSyncError
from verl.workers.sharding_manager.reshard.grid import RankGrid, generation_groups, transition_cost
from verl.workers.sharding_manager.reshard.layout import (
    Experts,
    Layout,
    Placement,
    Split,
    TensorInfo,
    aligned_shard_dim,
    dense_splits,
    parallel_layout,
    pipeline_stages,
    replicated_layout,
)
from verl.workers.sharding_manager.reshard.plan import Plan
from verl.workers.sharding_manager.reshard.planner import plan

SPLITS = dense_splits(kv_heads=2, vocab_multiple_of=4)


def held(layout: Layout, name: str, rank: int) -> np.ndarray:
    """Mask of the elements that a rank holds."""
    mask = np.zeros(layout.tensors[name].shape, dtype=bool)
    if rank in layout.ranks:
        for whole, _ in layout.placements[name].boxes_of(rank):
            mask[whole] = True
    return mask


def check(source: Layout, target: Layout, bucket_bytes: int = 4096) -> Plan:
    """Compare a plan with a count over single elements."""
    made = plan(source, target, bucket_bytes=bucket_bytes)
    ranks = [int(rank) for rank in made.ranks]
    received, sent = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    missing = dict.fromkeys(ranks, 0)
    redundant = dict.fromkeys(ranks, 0)
    for name, info in target.tensors.items():
        before = {rank: held(source, name, rank) for rank in ranks}
        after = {rank: held(target, name, rank) for rank in ranks}
        arrived = {rank: np.zeros(info.shape, dtype=int) for rank in ranks}
        for transfer in made.transfers(name):
            box = tuple(slice(a, b) for a, b in zip(transfer.start, transfer.stop, strict=True))
            assert before[transfer.sender][box].all(), "the sender has what it sends"
            arrived[transfer.receiver][box] += 1
            size = int(arrived[transfer.receiver][box].size) * info.dtype.itemsize
            received[transfer.receiver] += size
            sent[transfer.sender] += size
        for rank in ranks:
            # exactly what is needed and not there, once
            np.testing.assert_array_equal(arrived[rank], after[rank] & ~before[rank])
            missing[rank] += int((after[rank] & ~before[rank]).sum()) * info.dtype.itemsize
            redundant[rank] += int((before[rank] & ~after[rank]).sum()) * info.dtype.itemsize
    assert [missing[rank] for rank in ranks] == made.received.tolist() == [received[rank] for rank in ranks]
    assert [sent[rank] for rank in ranks] == made.sent.tolist()
    assert [redundant[rank] for rank in ranks] == made.redundant.tolist()
    assert made.total_bytes == sum(missing.values())
    assert int(made.staged.max()) <= bucket_bytes
    return made


TENSORS = llama_tensors()
STAGES2 = pipeline_stages(TENSORS, 2)
EXPERTS = {
    **{f"layers.0.experts.{number}.up_proj.weight": TensorInfo((8, 4), torch.bfloat16) for number in range(4)},
    "layers.0.gate.weight": TensorInfo((4, 4), torch.bfloat16),
}


def layouts() -> dict[str, tuple[Layout, Layout]]:
    tp4 = RankGrid.regular(tp=4)
    fsdp4 = RankGrid.regular(fsdp=4)
    megatron = RankGrid.regular(tp=4, pp=2, dp=2, order="tp-fsdp-ep-dp-pp")
    hybrid = RankGrid.regular(fsdp=2, dp=4)
    mixed = RankGrid.regular(tp=2, fsdp=2)
    experts = RankGrid.regular(ep=4, dp=2)

    def lay(grid: RankGrid, **options: object) -> Layout:
        return parallel_layout(TENSORS, grid, splits=SPLITS, **options)  # type: ignore[arg-type]

    def moe(grid: RankGrid) -> Layout:
        return parallel_layout(EXPERTS, grid, splits=SPLITS, experts=Experts(4))

    return {
        "tp4 -> tp2": (lay(tp4), lay(generation_groups(tp4, tp=2))),
        "tp4 -> tp2, consecutive groups": (lay(tp4), lay(RankGrid.regular(tp=2, dp=2))),
        "tp4 -> tp4": (lay(tp4), lay(tp4)),
        "tp2 -> tp4 on other ranks": (
            lay(RankGrid.regular(tp=2, dp=2)),
            lay(RankGrid.regular(tp=4, dp=2, first_rank=4)),
        ),
        "fsdp4 -> tp2": (lay(fsdp4), lay(generation_groups(fsdp4, tp=2))),
        "fsdp3 -> whole": (lay(RankGrid.regular(fsdp=3)), replicated_layout(TENSORS, range(3))),
        "fsdp5, padded -> tp2 elsewhere": (
            lay(RankGrid.regular(fsdp=5), pad_shards=True),
            lay(RankGrid.regular(tp=2, first_rank=4)),
        ),
        "tp4 pp2 dp2 -> tp2": (lay(megatron, stages=STAGES2), lay(generation_groups(megatron, tp=2))),
        "hsdp 2x4 -> tp2": (lay(hybrid), lay(generation_groups(hybrid, tp=2))),
        "tp2 x fsdp2 -> tp2": (lay(mixed), lay(generation_groups(mixed, tp=2))),
        "whole -> fsdp4": (replicated_layout(TENSORS, [0]), lay(fsdp4)),
        "ep4 -> ep2": (moe(experts), moe(generation_groups(experts, ep=2))),
    }


@pytest.mark.parametrize("name", layouts())
def test_each_missing_element_arrives_once_and_nothing_else(name: str) -> None:
    check(*layouts()[name])


def test_fused_projections_split_and_joined() -> None:
    tensors = {"l.qkv_proj.weight": TensorInfo((32, 4), torch.float32)}
    splits = dense_splits(kv_heads=2, fused_qkv=(16, 8, 8))
    fused = parallel_layout(tensors, RankGrid.regular(tp=4), splits=splits)
    check(fused, parallel_layout(tensors, generation_groups(RankGrid.regular(tp=4), tp=2), splits=splits))
    check(parallel_layout(tensors, RankGrid.regular(fsdp=4)), fused)


def test_replicas_that_are_cut_differently() -> None:
    boxes = [(0, [((0, 6, 0),)], (6,)), (1, [((6, 12, 0),)], (6,)), (2, [((0, 12, 0),)], (12,))]
    source = Layout({"w": TensorInfo((12,), torch.float32)}, {"w": Placement.build(1, boxes)})
    target = parallel_layout(source.tensors, RankGrid.regular(tp=3), splits=[Split("w", 0)])
    made = check(source, target)
    assert made.received.tolist() == [0, 8, 0]  # rank 1 needs 4:8 and has 6:12
    whole = check(source, replicated_layout(source.tensors, range(6)))
    assert whole.total_bytes == 24 + 24 + 3 * 48
    assert max(whole.sent) < whole.total_bytes / 2


def test_same_layout_moves_and_copies_nothing() -> None:
    layout = parallel_layout(TENSORS, RankGrid.regular(tp=4, dp=2), splits=SPLITS)
    made = plan(layout, parallel_layout(TENSORS, RankGrid.regular(tp=4, dp=2), splits=SPLITS))
    assert made.total_bytes == 0
    assert made.copied.sum() == 0
    assert made.staged.sum() == 0
    assert [made.for_rank(3).unchanged(tensor) for tensor in range(3)] == [True, True, True]
    assert int(made.unchanged.sum()) == sum(layout.local_bytes().values())


def test_generation_groups_leave_nothing_redundant() -> None:
    """The paper's claim: in its groups every training shard is part of the generation shard; in others it is not."""
    train = RankGrid.regular(tp=4, pp=2, dp=2)
    source = parallel_layout(TENSORS, train, splits=SPLITS, stages=STAGES2)
    ours = plan(source, parallel_layout(TENSORS, generation_groups(train, tp=2), splits=SPLITS))
    vanilla = plan(source, parallel_layout(TENSORS, RankGrid.regular(tp=2, dp=8), splits=SPLITS))
    assert ours.redundant.tolist() == [0] * 16
    assert vanilla.redundant.max() > 0
    assert ours.total_bytes < vanilla.total_bytes


def test_bytes_and_peak_are_the_papers() -> None:
    """A model whose every tensor divides: per rank exactly the formula, for tp 8, pp 2 -> tp 2 and for aligned FSDP."""
    names = ["q_proj", "o_proj", "gate_proj", "down_proj"]
    tensors = {f"model.layers.{n}.{kind}.weight": TensorInfo((64, 64)) for n in range(4) for kind in names}
    size = total_bytes(tensors)
    train = RankGrid.regular(tp=8, pp=2, dp=2)
    source = parallel_layout(tensors, train, splits=SPLITS, stages=pipeline_stages(tensors, 2))
    target = parallel_layout(tensors, generation_groups(train, tp=2), splits=SPLITS)
    made = check(source, target, bucket_bytes=1 << 14)
    cost = transition_cost("hybridflow", size, tp=8, pp=2, dp=2, generation_tp=2)
    assert made.received.tolist() == [cost.moved] * 32
    assert set(target.local_bytes().values()) == {cost.peak}

    sharded = RankGrid.regular(fsdp=4)
    target = parallel_layout(tensors, generation_groups(sharded, tp=2), splits=SPLITS)
    aligned = parallel_layout(tensors, sharded, shard_dim=aligned_shard_dim(SPLITS))
    made = plan(aligned, target)
    assert made.received.tolist() == [transition_cost("hybridflow", size, tp=4, generation_tp=2).moved] * 4
    # cut along rows throughout, half of the tensors overlap by an eighth instead of a quarter
    plain = plan(parallel_layout(tensors, sharded), target)
    assert plain.received.tolist() == [(size // 2) * (1 / 4) + (size // 2) * (3 / 8)] * 4
    assert plain.redundant.tolist() == [size // 2 * (1 / 8)] * 4


def test_senders_share_the_load() -> None:
    tensors = {f"layers.{n}.up_proj.weight": TensorInfo((8, 8), torch.float32) for n in range(5)}
    source = replicated_layout(tensors, range(3))
    made = check(source, replicated_layout(tensors, range(10)))
    assert made.total_bytes == 7 * total_bytes(tensors)
    # 35 tensors to send, 3 senders: 12, 12 and 11 of 256 bytes
    assert sorted(made.sent.tolist())[-3:] == [11 * 256, 12 * 256, 12 * 256]
    # a rank that alone holds one tensor sends less of what others hold too
    tensors = {"big": TensorInfo((64,), torch.float32), "small": TensorInfo((64,), torch.float32)}
    both = replicated_layout(tensors, range(2))
    lone = replicated_layout(tensors, [0])
    source = Layout(tensors, {"big": lone.placements["big"], "small": both.placements["small"]})
    made = check(source, replicated_layout(tensors, range(4)))
    assert made.sent.tolist() == [3 * 256, 2 * 256, 0, 0]


def test_neighbours_serve_neighbours() -> None:
    """With equal replicas, slices stay within a replica of training."""
    train = RankGrid.regular(tp=4, dp=4)
    made = plan(
        parallel_layout(TENSORS, train, splits=SPLITS),
        parallel_layout(TENSORS, generation_groups(train, tp=2), splits=SPLITS),
    )
    assert all(transfer.sender // 4 == transfer.receiver // 4 for transfer in made.transfers())


def test_each_side_spells_out_the_same_slices() -> None:
    source, target = layouts()["hsdp 2x4 -> tp2"]
    made = plan(source, target, bucket_bytes=700)
    views = {int(rank): made.for_rank(int(rank)) for rank in made.ranks}
    assert any(item.parts > 1 for bucket in made.buckets for item in bucket)
    for bucket in made.buckets:
        load = dict.fromkeys(views, 0)
        for item in bucket:
            out: dict[tuple[int, int], list[tuple[int, ...]]] = {}
            back: dict[tuple[int, int], list[tuple[int, ...]]] = {}
            for rank, view in views.items():
                for move in view.sends(item):
                    out.setdefault((rank, move.peer), []).append(move.shape)
                    load[rank] += int(np.prod(move.shape)) * 4
                for move in view.receives(item):
                    back.setdefault((move.peer, rank), []).append(move.shape)
                    load[rank] += int(np.prod(move.shape)) * 4
            assert out == back
        assert max(load.values()) <= 700


def test_the_narrower_dtype_travels() -> None:
    source = parallel_layout({"w": TensorInfo((8,), torch.float32)}, RankGrid.regular(fsdp=2))
    target = replicated_layout({"w": TensorInfo((8,), torch.bfloat16)}, range(2))
    made = plan(source, target)
    assert made.wire == (torch.bfloat16,)
    assert made.received.tolist() == [8, 8]
    back = plan(
        parallel_layout({"w": TensorInfo((8,), torch.bfloat16)}, RankGrid.regular(fsdp=2)),
        replicated_layout({"w": TensorInfo((8,), torch.float32)}, range(2)),
    )
    assert back.wire == (torch.bfloat16,)


def test_plans_are_equal_in_every_process() -> None:
    first, second = (plan(*layouts()["tp4 pp2 dp2 -> tp2"], bucket_bytes=3000) for _ in range(2))
    assert list(first.transfers()) == list(second.transfers())
    assert first.buckets == second.buckets


def test_impossible_changes_are_refused() -> None:
    tensors = {"w": TensorInfo((4, 2), torch.float32)}
    source = parallel_layout(tensors, RankGrid.regular(fsdp=2))
    with pytest.raises(WeightSyncError, match="1 tensors are on one side of the layout change only: v"):
        plan(source, replicated_layout({**tensors, "v": TensorInfo((1,))}, [0]))
    with pytest.raises(WeightSyncError, match=r"'w' has shape \(4, 2\) in the source layout and \(4, 4\)"):
        plan(source, replicated_layout({"w": TensorInfo((4, 4))}, [0]))
    half = Layout(tensors, {"w": Placement.build(2, [(0, [((0, 2, 0), (0, 2, 0))], (2, 2))])})
    with pytest.raises(WeightSyncError, match=r"rank 5 needs 'w'\[0:4, 0:2\], of which no rank"):
        plan(half, replicated_layout(tensors, [5]))
    with pytest.raises(WeightSyncError, match="bucket_bytes=3 is too small"):
        plan(source, replicated_layout(tensors, range(2)), bucket_bytes=3)
    with pytest.raises(WeightSyncError, match="positive size"):
        plan(source, source, bucket_bytes=0)


def test_a_thousand_ranks_take_seconds() -> None:
    """70B shapes on 1,024 ranks. The bound is loose on purpose: it tells seconds from hours."""
    tensors = llama_tensors(
        hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8, vocab=128256, dtype=torch.bfloat16
    )
    splits = dense_splits(kv_heads=8)
    train = RankGrid.regular(tp=8, pp=8, dp=16)
    started = time.process_time()
    source = parallel_layout(tensors, train, splits=splits, stages=pipeline_stages(tensors, 8))
    made = plan(source, parallel_layout(tensors, generation_groups(train, tp=4), splits=splits))
    assert time.process_time() - started < 10
    expected = transition_cost("hybridflow", total_bytes(tensors), tp=8, pp=8, dp=16, generation_tp=4).moved
    assert made.received.mean() == pytest.approx(expected, rel=1e-3)
    assert made.redundant.max() == 0
    assert made.sent.sum() == made.received.sum()
