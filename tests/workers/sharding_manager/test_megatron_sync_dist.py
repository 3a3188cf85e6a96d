"""From Megatron's stages and shards to the rollout: every rank receives the slices that it lacks, and no more.

Starting a process with Megatron-core takes longer than the checks, so each group of processes runs many.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fixtures.tiny import make_tiny_model_dir
from tests.models.families import make_config
from tests.workers.engine.ranks import run_ranks
from tests.workers.engine.reference import POLICY, policy_batch, policy_loss
from tests.workers.rollout.helpers import generate, hf_rollout, missing_package, random_prompts, reference_greedy
from tests.workers.sharding_manager.test_sharded_sync_dist import SplitSink
from verl.config import ModelConfig, RolloutConfig
from verl.workers.engine.base import MicroBatching
from verl.workers.rollout.types import SamplingParams
from verl.workers.sharding_manager import WeightSync, make_sharding_manager
from verl.workers.sharding_manager.reshard.grid import RankGrid, sharing_ranks
from verl.workers.sharding_manager.reshard.layout import TensorInfo, dense_splits, parallel_layout
from verl.workers.sharding_manager.sharded_sync import ShardedSync

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"),
]

BUCKET = 1 << 14
VOCABULARY = 60  # of prompts; that of every model here is larger


def trained(path: str, **sizes: Any) -> Any:
    from tests.workers.engine.megatron.ranks import make_megatron_engine
    from verl.workers.engine.megatron.parallel import leave_parallel_groups

    leave_parallel_groups()
    return make_megatron_engine(path, **sizes)


def step(engine: Any) -> None:
    from tests.workers.engine.megatron.ranks import rows_of

    mine = rows_of(policy_batch(vocab=VOCABULARY), engine.layout.dp_rank, engine.layout.dp_size)
    engine.train_batch(mine, policy_loss, want=POLICY, micro=MicroBatching(size=2))


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def trained_bytes(engine: Any) -> int:
    """Bytes of weights that this rank trains, without the rows that fill up the vocabulary."""
    local = engine.bridge.local
    total = sum(tensor.nbytes for tensor in local.values())
    tokens = engine.hf_config.vocab_size
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in local:
            rows, width = local[name].shape
            first = engine.layout.tp_rank * rows
            total -= max(0, first + rows - tokens) * width * 4
    return int(total)


def check_tokens(rollout: Any, path: str, weights: dict[str, Tensor], seed: int) -> None:
    """Greedy tokens are those of the merged model in Transformers."""
    merged = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    missing, unexpected = merged.load_state_dict(weights, strict=False)
    tied = merged.config.tie_word_embeddings
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    prompts = random_prompts([5, 11, 3], vocab=VOCABULARY, seed=seed)
    completions = generate(rollout, prompts, SamplingParams(12, temperature=0.0))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == reference_greedy(merged, prompt, 12)


def to_whole_models(path: str, **sizes: Any) -> None:
    """Every rank generates with the whole model (engine hf)."""
    engine = trained(path, **sizes)
    rank = dist.get_rank()
    rollout = hf_rollout(path)
    sync = make_sharding_manager("megatron", "hf", engine, rollout, bucket_bytes=BUCKET, on_unchanged="error")
    assert isinstance(sync, ShardedSync)
    for version in (0, 1):
        metrics = sync.sync(version)
        expected = whole(engine)
        loaded = dict(rollout.module.state_dict())
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        model = sum(tensor.nbytes for tensor in expected.values())
        mine = trained_bytes(engine)
        assert sync.resharder is not None
        report, change = sync.resharder.report, sync.resharder.plan
        assert report.received == change.received[rank] == model - mine
        assert report.sent == change.sent[rank]
        assert metrics["weight_sync/received_mb"] * 2**20 == report.received
        assert report.allocated == 0, "slices are written where the rollout reads them"
        assert report.staged <= BUCKET
        held = sum(tensor.nbytes for tensor in engine.bridge.local.values())
        assert report.peak <= held + BUCKET + model
        check_tokens(rollout, path, expected, 10 * rank + version)
        step(engine)
    assert sync.sync(2)["weight_sync/changed_tensors"] > 0.9 * len(expected)


def to_halves(path: str, *, tp: int, **sizes: Any) -> None:
    """Two ranks generate together, each with half of the model."""
    engine = trained(path, tp=tp, **sizes)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = sharing_ranks(world, shards=tp, parallel=2)
    assert groups is not None
    part = {member: number for group in groups for number, member in enumerate(group)}
    parts = torch.tensor([part[member] for member in range(world)]).numpy()
    grid = RankGrid(torch.arange(world).numpy(), {"tp": 2}, {"tp": parts})
    infos = {name: TensorInfo(tuple(tensor.shape), torch.float32) for name, tensor in whole(engine).items()}
    layout = parallel_layout(infos, grid, splits=dense_splits(kv_heads=2))
    sink = SplitSink(layout, rank)
    sync = ShardedSync(engine, sink, bucket_bytes=BUCKET, on_unchanged="error")
    for version in (0, 1):
        sync.sync(version)
        expected = layout.shard(whole(engine), rank)
        assert all(torch.equal(sink.memory_of[name], value) for name, value in expected.items())
        assert sync.resharder is not None
        report, change = sync.resharder.report, sync.resharder.plan
        assert report.received == change.received[rank]
        assert report.allocated == 0
        step(engine)
    # of the layers' matrices (M) each of four shards receives (4 - 2) / (4 * 2) * M, of the vocabulary, which training
    # cuts elsewhere, the tokens that are not here; vectors come whole
    matrices = sum(info.nbytes for name, info in infos.items() if "layers" in name and len(info.shape) == 2)
    vectors = sum(info.nbytes for info in infos.values() if len(info.shape) == 1)
    tables = [info.shape for name, info in infos.items() if "embed" in name or "lm_head" in name]
    rows = 56 if tp == 2 else 32  # 104 tokens, padded to 112 or 128
    mine, wanted = engine.layout.tp_rank * rows, part[rank] * 52
    lacking = 52 - max(0, min(mine + rows, wanted + 52) - max(mine, wanted))
    here = matrices * 2 // 8 + sum(lacking * width * 4 for _, width in tables)
    assert here <= change.received[rank] <= here + vectors


def four_ranks(rank: int, dense: str, work: str) -> None:
    to_whole_models(dense, tp=2, pp=2)
    to_halves(dense, tp=2, pp=2)
    to_whole_models(f"{work}/untied", pp=2, vpp=2)  # and two data-parallel ranks
    to_halves(f"{work}/untied", tp=4)  # more ranks than key-value heads
    for family in ("qwen3_moe", "deepseek_v3"):
        to_whole_models(f"{work}/{family}", pp=2, ep=2)
        to_whole_models(f"{work}/{family}", tp=2, ep=2, etp=1, sequence_parallel=True)
    to_whole_models(f"{work}/qwen3_moe", tp=2, ep=2, etp=2, sequence_parallel=True)


@pytest.mark.slow
def test_what_moves_is_what_was_planned_and_generates_alike(tmp_path: Path) -> None:
    dense = make_tiny_model_dir(tmp_path / "dense", layers=4)
    make_tiny_model_dir(tmp_path / "untied", layers=4, tie_word_embeddings=False)
    for family in ("qwen3_moe", "deepseek_v3"):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(make_config(family)).save_pretrained(tmp_path / family)
    run_ranks(4, four_ranks, dense, str(tmp_path))


def adapters_are_merged_on_the_way(path: str) -> None:
    """What is synced is not what is trained, so whole tensors are made of it."""
    engine = trained(path, tp=2, model={"lora_rank": 2, "lora_alpha": 8.0})
    rollout = hf_rollout(path)
    sync = make_sharding_manager("megatron", "hf", engine, rollout, bucket_bytes=BUCKET, on_unchanged="error")
    for version in (0, 1):
        assert "weight_sync/received_mb" not in sync.sync(version)
        check_tokens(rollout, path, whole(engine), version)
        step(engine)


def two_ranks(rank: int, dense: str) -> None:
    to_whole_models(dense, tp=2)
    to_whole_models(dense, pp=2)
    adapters_are_merged_on_the_way(dense)


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(2, two_ranks, make_tiny_model_dir(tmp_path / "dense"))


# ---- vLLM -------------------------------------------------------------------------------------------------------


def _vllm(rank: int, path: str, parallel: int) -> None:
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    engine = trained(path, tp=2, pp=2)
    groups = sharing_ranks(dist.get_world_size(), shards=2, parallel=parallel)
    rollout: Any = VLLMRolloutEngine(
        ModelConfig(path=path),
        RolloutConfig(
            name="vllm",
            dtype="float32",
            prompt_length=28,
            response_length=36,
            max_num_seqs=8,
            tensor_model_parallel_size=parallel,
        ),
        device="cpu",
        groups=groups,
    )
    sync = make_sharding_manager("megatron", "vllm", engine, rollout, bucket_bytes=BUCKET, on_unchanged="error")
    assert isinstance(sync, ShardedSync)
    plain = WeightSync(engine, rollout, bucket_bytes=BUCKET)
    for version in (0, 2):
        metrics = sync.sync(version)
        expected = whole(engine)
        model = sum(tensor.nbytes for tensor in expected.values())
        assert sync.resharder is not None
        report = sync.resharder.report
        assert report.received == sync.resharder.plan.received[rank]
        assert metrics["weight_sync/received_mb"] * 2**20 == report.received
        assert report.received < model * (0.3 if parallel == 2 else 0.75)
        check_tokens(rollout, path, expected, 10 * rank + version)
        mine = asyncio.run(rollout.checksums())
        plain.sync(version + 1)
        assert asyncio.run(rollout.checksums()) == mine, "as vLLM's own loaders would have it"
        step(engine)
    dist.barrier()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(bool(missing_package("vllm")), reason=missing_package("vllm") or "")
@pytest.mark.parametrize("parallel", [1, 2])
def test_vllm_generates_like_the_merged_model(parallel: int, tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path / "served", hidden=64, heads=2, kv_heads=2)
    run_ranks(4, _vllm, path, parallel)


# ---- SGLang -----------------------------------------------------------------------------------------------------


def _sglang(rank: int, path: str, parallel: int) -> None:
    from verl.workers.rollout.sglang.engine import SGLangRolloutEngine

    # SGLang's own rule for its ranks on CPUs is one for each NUMA node
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1" if parallel == 2 else "0"
    engine = trained(path, tp=2)
    config = RolloutConfig(
        name="sglang",
        dtype="float32",
        prompt_length=28,
        response_length=36,
        max_num_seqs=8,
        tensor_model_parallel_size=parallel,
    )
    rollout = SGLangRolloutEngine(ModelConfig(path=path), config, device="cpu")
    sync = make_sharding_manager("megatron", "sglang", engine, rollout, bucket_bytes=BUCKET, on_unchanged="error")
    for version in (0, 1):
        sync.sync(version)
        check_tokens(rollout, path, whole(engine), 10 * rank + version)
        step(engine)
    dist.barrier()
    rollout.close()


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.skipif(bool(missing_package("sglang")), reason=missing_package("sglang") or "")
@pytest.mark.parametrize("parallel", [1, 2])  # a server for each rank, or one for both
def test_sglang_generates_like_the_merged_model(parallel: int, tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path / "served", hidden=64, heads=2, kv_heads=2)
    run_ranks(2, _sglang, path, parallel)
