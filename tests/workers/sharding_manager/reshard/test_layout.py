"""Which slices ranks hold under each kind of parallelism."""

from __future__ import annotations

import pytest
import torch

from tests.workers.sharding_manager.models import llama_tensors
from verl.errors import WeightSyncError
from verl.workers.sharding_manager.reshard.grid import RankGrid
from verl.workers.sharding_manager.reshard.layout import (
    Experts,
    Layout,
    Split,
    TensorInfo,
    aligned_shard_dim,
    dense_splits,
    parallel_layout,
    pipeline_stages,
    replicated_layout,
)


def one(shape: tuple[int, ...], grid: RankGrid, *splits: Split, name: str = "w", **options: object) -> Layout:
    return parallel_layout({name: TensorInfo(shape, torch.int64)}, grid, splits=splits, **options)  # type: ignore[arg-type]


def local(layout: Layout, name: str = "w") -> list[list]:
    """What each rank holds of the tensor whose elements are their own positions."""
    shape = layout.tensors[name].shape
    whole = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    return [layout.shard({name: whole}, rank)[name].tolist() for rank in layout.ranks]


def test_column_and_row_splits() -> None:
    grid = RankGrid.regular(tp=2)
    assert local(one((4,), grid, Split("w", 0))) == [[1, 2], [3, 4]]
    assert local(one((2, 4), grid, Split("w", 1))) == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert local(one((2, 4), grid, Split("w", -1))) == local(one((2, 4), grid, Split("w", 1)))
    assert local(one((3,), grid, Split("other", 0))) == [[1, 2, 3], [1, 2, 3]]


def test_fused_sections_are_cut_one_by_one() -> None:
    fused = Split("w", 0, sections=(4, 2, 2))
    assert local(one((8,), RankGrid.regular(tp=2), fused)) == [[1, 2, 5, 7], [3, 4, 6, 8]]


def test_more_ranks_than_key_value_heads_share_them() -> None:
    fused = Split("w", 0, sections=(4, 2, 2), units=(0, 2, 2))
    assert local(one((8,), RankGrid.regular(tp=4), fused)) == [[1, 5, 7], [2, 5, 7], [3, 6, 8], [4, 6, 8]]


def test_padded_vocabulary() -> None:
    layout = one((5,), RankGrid.regular(tp=2), Split("w", 0, multiple_of=4))
    assert local(layout) == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert layout.local_bytes() == {0: 32, 1: 32}


def test_fsdp_shards_like_torch_chunk() -> None:
    grid = RankGrid.regular(fsdp=4)
    assert local(one((5,), grid)) == [[1, 2], [3, 4], [5], []]
    assert local(one((5,), grid, pad_shards=True)) == [[1, 2], [3, 4], [5, 0], [0, 0]]
    assert local(one((2, 4), grid, shard_dim=1)) == [[[1], [5]], [[2], [6]], [[3], [7]], [[4], [8]]]


def test_fsdp_cuts_what_tensor_parallelism_left() -> None:
    grid = RankGrid.regular(tp=2, fsdp=2, order="fsdp-tp-ep-pp-dp")
    assert local(one((8,), grid, Split("w", 0))) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert local(one((8,), grid, Split("w", 0, sections=(4, 4)))) == [[1, 2], [5, 6], [3, 4], [7, 8]]
    assert local(one((2, 2), grid, Split("w", 1))) == [[[1]], [[3]], [[2]], [[4]]]


def test_replicas_hold_the_same() -> None:
    grid = RankGrid.regular(fsdp=2, dp=2)
    assert local(one((2,), grid)) == [[1], [2], [1], [2]]


def test_scalars_are_whole_everywhere() -> None:
    layout = one((), RankGrid.regular(tp=2, fsdp=2), Split("other", 0))
    assert local(layout) == [1, 1, 1, 1]


def test_stages_own_layers_in_order() -> None:
    names = list(llama_tensors(layers=4))
    stages = pipeline_stages(names, 2)
    assert stages["model.embed_tokens.weight"] == (0,)
    assert stages["model.layers.1.self_attn.q_proj.weight"] == (0,)
    assert stages["model.layers.2.mlp.up_proj.weight"] == (1,)
    assert stages["model.norm.weight"] == stages["lm_head.weight"] == (1,)
    uneven = pipeline_stages(names, 2, layers_per_stage=[1, 3], on_first_and_last="embed_tokens")
    assert uneven["model.layers.1.self_attn.q_proj.weight"] == (1,)
    assert uneven["model.embed_tokens.weight"] == (0, 1)
    layout = parallel_layout(llama_tensors(layers=4), RankGrid.regular(tp=2, pp=2), stages=stages)
    assert set(layout.placements["model.norm.weight"].local_shapes) == {2, 3}
    assert layout.local_shape("model.norm.weight", 0) is None
    with pytest.raises(WeightSyncError, match="4 layers do not divide over 3 stages"):
        pipeline_stages(names, 3)
    with pytest.raises(WeightSyncError, match=r"\[1, 1\] must name 2 stages of 4 layers"):
        pipeline_stages(names, 2, layers_per_stage=[1, 1])


def test_expert_ownership() -> None:
    tensors = {f"layers.0.experts.{number}.up_proj.weight": TensorInfo((4, 2)) for number in range(4)}
    grid = RankGrid.regular(tp=2, ep=2)
    layout = parallel_layout(tensors, grid, splits=dense_splits(), experts=Experts(4))
    assert [sorted(layout.placements[name].local_shapes) for name in tensors] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert layout.local_shape("layers.0.experts.3.up_proj.weight", 2) == (2, 2)
    # over two axes: each rank owns one expert whole
    layout = parallel_layout(tensors, grid, experts=Experts(4, axes=("ep", "tp")))
    assert [sorted(layout.placements[name].local_shapes) for name in tensors] == [[0], [1], [2], [3]]
    # stacked in one tensor: expert by rank, then columns
    stacked = one((4, 2), grid, Split("w", 0, axis="ep"), Split("w", 1))
    assert local(stacked) == [[[1], [3]], [[2], [4]], [[5], [7]], [[6], [8]]]
    with pytest.raises(WeightSyncError, match="3 experts do not divide over 2"):
        parallel_layout(tensors, grid, experts=Experts(3))


def test_rules_of_llama_like_models() -> None:
    layout = parallel_layout(
        llama_tensors(kv_heads=2, vocab=22),
        RankGrid.regular(tp=4),
        splits=dense_splits(kv_heads=2, vocab_multiple_of=8),
    )
    prefix = "model.layers.3."
    shapes = {name.removeprefix(prefix): layout.local_shape(name, 3) for name in layout.tensors}
    assert shapes["self_attn.q_proj.weight"] == (4, 16)
    assert shapes["self_attn.k_proj.weight"] == (4, 16)
    assert shapes["self_attn.o_proj.weight"] == (16, 4)
    assert shapes["mlp.down_proj.weight"] == (16, 6)
    assert shapes["input_layernorm.weight"] == (16,)
    assert shapes["lm_head.weight"] == (6, 16)
    fused = dense_splits(kv_heads=2, fused_qkv=(16, 8, 8), fused_gate_up=(24, 24))
    tensors = {"l.qkv_proj.weight": TensorInfo((32, 16)), "l.gate_up_proj.weight": TensorInfo((48, 16))}
    layout = parallel_layout(tensors, RankGrid.regular(tp=4), splits=fused)
    assert layout.local_shape("l.qkv_proj.weight", 0) == (12, 16)
    assert layout.local_shape("l.gate_up_proj.weight", 0) == (12, 16)


def test_aligned_shards_follow_the_generations_cuts() -> None:
    dim = aligned_shard_dim(dense_splits())
    assert dim("model.layers.0.mlp.down_proj.weight") == 1
    assert dim("model.layers.0.mlp.up_proj.weight") == 0
    assert dim("model.norm.weight") == 0


def test_what_cannot_be_cut_is_refused() -> None:
    grid = RankGrid.regular(tp=4)
    with pytest.raises(WeightSyncError, match="'w': 6 rows cannot be cut into 4 equal parts"):
        one((6,), grid, Split("w", 0))
    with pytest.raises(WeightSyncError, match="12 rows in 6 units cannot be cut into 4"):
        one((12,), grid, Split("w", 0, units=6))
    with pytest.raises(WeightSyncError, match=r"sections \(2, 2\) do not add up to its 8"):
        one((8,), grid, Split("w", 0, sections=(2, 2)))
    with pytest.raises(WeightSyncError, match="axes tp and ep both cut dimension 0"):
        one((8,), RankGrid.regular(tp=2, ep=2), Split("w", 0), Split("w", 0, axis="ep"))


def test_replicated() -> None:
    layout = replicated_layout({"w": TensorInfo((2,), torch.int64)}, [3, 7])
    assert layout.ranks == (3, 7)
    assert local(layout) == [[1, 2], [1, 2]]
