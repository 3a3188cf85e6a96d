"""The parts of the Megatron engine that need no Megatron: weight forms, off-loading, log-probs over a vocabulary."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from verl.errors import ConfigError
from verl.models.logprobs import IDENTITY, LogitTransform, token_log_probs, token_sum_pi_squared
from verl.models.parallel_logprobs import VocabShard, parallel_sum_pi_squared, parallel_token_log_probs
from verl.workers.engine.megatron.optimizer import optimizer_overrides
from verl.workers.engine.megatron.storage_offload import StorageOffloader
from verl.workers.engine.megatron.tensor_layouts import (
    Cut,
    Form,
    FusedQKV,
    GateUp,
    SomeRows,
    Stacked,
    Vocabulary,
    Whole,
    slices_of,
)


def test_fused_projections_are_ordered_by_key_value_head() -> None:
    # 4 query heads and 2 key-value heads of one row each: rows are named by their head
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    form = FusedQKV(heads=4, kv_heads=2, head_dim=1)
    assert form.shard([q, k, v], 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert form.shard([q, k, v], 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_every_rank_has_its_part_of_gate_and_up() -> None:
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]
    assert GateUp().shard([gate, up], 1, 2).flatten().tolist() == [2, 3, 12, 13]
    assert GateUp(stacked=True).shard([torch.cat([gate, up])], 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_a_vocabulary_is_padded_at_its_end() -> None:
    form = Vocabulary(tokens=5, multiple_of=2)
    rows = torch.arange(1.0, 6.0)[:, None]
    assert form.shard([rows], 0, 2).flatten().tolist() == [1, 2, 3, 4]
    assert form.shard([rows], 1, 2).flatten().tolist() == [5, 0, 0, 0]


def test_some_rows_lie_where_the_whole_weight_has_them() -> None:
    form = SomeRows(FusedQKV(heads=2, kv_heads=2, head_dim=1), rows=(2, 2, 2), chosen=(0, 2))
    assert form.owners(0, 1).tolist() == [0, 1, 2, 0, 1, 2]
    q, v = torch.tensor([[1.0], [2]]), torch.tensor([[21.0], [22]])
    assert form.shard([q, v], 0, 1).flatten().tolist() == [1, 21, 2, 22]
    assert form.shard([q, v], 1, 2).flatten().tolist() == [2, 22]
    assert form.mine(1, 2).tolist() == [True, False, True]


FORMS: list[tuple[Form, list[tuple[int, ...]]]] = [
    (Whole(), [(3,)]),
    (Cut(0), [(8, 3)]),
    (Cut(1), [(3, 8)]),
    (Vocabulary(13, 2), [(13, 3)]),
    (FusedQKV(8, 4, 3), [(24, 5), (12, 5), (12, 5)]),
    (FusedQKV(8, 2, 4), [(32,), (8,), (8,)]),  # biases; fewer key-value heads than ranks
    (GateUp(), [(8, 3), (8, 3)]),
    (GateUp(stacked=True), [(16, 3)]),
    (SomeRows(FusedQKV(8, 4, 3), (24, 12, 12), (0, 1, 2)), [(24, 2), (12, 2), (12, 2)]),
    (SomeRows(FusedQKV(8, 4, 3), (24, 12, 12), (0, 2)), [(24, 2), (12, 2)]),
    (SomeRows(GateUp(), (8, 8), (1,)), [(8, 2)]),
    (Stacked(2), [(3, 5), (3, 5)]),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("form", "shapes"), FORMS, ids=str)
def test_parts_join_to_what_was_cut(form: Form, shapes: list[tuple[int, ...]], ranks: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    joined = form.join([form.shard(tensors, rank, ranks) for rank in range(ranks)])
    assert all(torch.equal(got, want) for got, want in zip(joined, tensors, strict=True))


def test_slices_say_where_fused_rows_lie() -> None:
    shapes = ((4, 7), (2, 7), (2, 7))  # as above: 2 queries, then a key, then a value, for each of two heads
    query, key, value = slices_of(FusedQKV(heads=4, kv_heads=2, head_dim=1), shapes, 0, 1)
    assert query == (((0, 2, 0), (0, 7, 0)), ((2, 4, 4), (0, 7, 0)))
    assert key == (((0, 1, 2), (0, 7, 0)), ((1, 2, 6), (0, 7, 0)))
    assert value == (((0, 1, 3), (0, 7, 0)), ((1, 2, 7), (0, 7, 0)))
    assert slices_of(Vocabulary(5, 2), ((5, 7),), 1, 2) == ((((4, 5, 0), (0, 7, 0)),),)  # three rows of padding
    assert slices_of(Vocabulary(3, 4), ((3, 7),), 1, 2) == ((),)  # nothing but padding
    assert slices_of(Cut(1), ((7, 6),), 2, 3) == ((((0, 7, 0), (4, 6, 0)),),)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("form", "shapes"), FORMS, ids=str)
def test_slices_are_what_was_cut(form: Form, shapes: list[tuple[int, ...]], ranks: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    rebuilt = [torch.full(shape, torch.nan) for shape in shapes]
    for rank in range(ranks):
        part = form.shard(tensors, rank, ranks)
        unread = torch.ones_like(part)
        for whole, boxes in zip(rebuilt, slices_of(form, tuple(shapes), rank, ranks), strict=True):
            for box in boxes:
                there = tuple(slice(start, stop) for start, stop, _ in box)
                here = tuple(slice(at, at + stop - start) for start, stop, at in box)
                whole[there] = part[here]
                unread[here] = 0
        assert not part[unread.bool()].any(), "what no slice covers is padding"
    assert all(torch.equal(got, want) for got, want in zip(rebuilt, tensors, strict=True))


@pytest.mark.parametrize("transform", [IDENTITY, LogitTransform(0.5, 2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [7 * 11, 10_000], ids=["chunks", "whole"])
def test_log_probs_are_those_of_the_plain_function(entropy: bool, chunk: int, transform: LogitTransform) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 6, generator=generator), torch.randn(11, 6, generator=generator)
    targets = torch.randint(0, 11, (20,), generator=generator)
    up_log_probs, up_entropy = torch.randn(2, 20, generator=generator)
    padded = torch.cat([weight, torch.full((3, 6), 1e3)])  # rows that are no tokens
    results = []
    for one, two, parallel in ((hidden, weight, False), (hidden, padded, True)):
        h, w = one.clone().requires_grad_(), two.clone().requires_grad_()
        if parallel:
            shard = VocabShard(0, 11)
            lp, ent = parallel_token_log_probs(
                h, w, targets, shard, temperature=0.7, transform=transform, entropy=entropy, chunk_numbers=chunk
            )
        else:
            lp, ent = token_log_probs(h, w, None, targets, temperature=0.7, transform=transform, entropy=entropy)
        total = (lp * up_log_probs).sum() + (0.0 if ent is None else (ent * up_entropy).sum())
        total.backward()
        results.append((lp.detach(), ent if ent is None else ent.detach(), h.grad, w.grad[:11]))
        if parallel:
            assert not w.grad[11:].any()
    for got, want in zip(results[1], results[0], strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_squared_probabilities_are_those_of_the_plain_function() -> None:
    hidden, weight = torch.randn(5, 6), torch.randn(11, 6)
    torch.testing.assert_close(
        parallel_sum_pi_squared(hidden, weight, VocabShard(0, 11), temperature=0.7, chunk_numbers=22),
        token_sum_pi_squared(hidden, weight, None, temperature=0.7),
    )


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
def test_the_adaptation_to_cpus_leaves_torch_alone() -> None:
    script = """
import torch
before = {name: getattr(torch, name) for name in ("empty", "zeros", "tensor", "compile", "device", "get_rng_state")}
methods = torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda, torch.cuda.current_device
from verl.workers.engine.megatron.cpu import adapt_to_cpu, cpu_construction
adapt_to_cpu()
assert all(getattr(torch, name) is function for name, function in before.items())
import megatron.core.tensor_parallel.mappings as theirs
assert theirs.torch.empty(2, device=theirs.torch.cuda.current_device()).device.type == "cpu"
assert theirs.torch.Tensor is torch.Tensor
with cpu_construction():
    assert torch.zeros(1).cuda().type() == "torch.cuda.FloatTensor"
assert methods == (torch.Tensor.cuda, torch.Tensor.type, torch.nn.Module.cuda, torch.cuda.current_device)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_settings_of_the_optimizer() -> None:
    known = {"lr", "exp_avg_dtype", "optimizer_cpu_offload"}
    assert optimizer_overrides({"exp_avg_dtype": "bfloat16", "optimizer_cpu_offload": True}, known) == {
        "exp_avg_dtype": torch.bfloat16,
        "optimizer_cpu_offload": True,
    }
    for name, value, text in (
        ("exp_avg_dtyp", "bf16", "no such field; did you mean 'exp_avg_dtype'"),
        ("exp_avg_dtype", "wide", "is no type of torch"),
        ("lr", 1.0, "follows from the keys of the optim"),
    ):
        with pytest.raises(ConfigError, match=text):
            optimizer_overrides({name: value}, known)


def test_parked_memory_is_freed_and_views_of_it_survive() -> None:
    buffer = torch.arange(8.0)
    view = buffer[2:4]
    offloader = StorageOffloader(lambda: [buffer, view])
    offloader.offload()
    offloader.offload()
    assert buffer.untyped_storage().nbytes() == 0
    offloader.reload()
    assert view.tolist() == [2, 3]
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_memory_that_need_not_be_kept_comes_back_as_zeros() -> None:
    buffer = torch.ones(4)
    offloader = StorageOffloader(lambda: [buffer], keep=False)
    offloader.offload()
    offloader.reload()
    assert buffer.tolist() == [0, 0, 0, 0]
