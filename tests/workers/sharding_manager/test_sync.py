"""Handing weights over: without a copy where possible, complete, in order, and checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.workers.rollout.helpers import (
    generate,
    make_engine,
    make_model,
    random_prompts,
    reference_logits,
    weights_of,
)
from verl.errors import RolloutError, WeightSyncError
from verl.workers.rollout.types import SamplingParams
from verl.workers.sharding_manager import WeightSync


class WholeSource:
    """A training side that holds whole parameters, as one process does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        return weights_of(self.model)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("whole parameters need no stream")


class ShardedSource(WholeSource):
    """A training side that has to gather each tensor, as several processes do."""

    def local_tensors(self) -> dict[str, torch.Tensor] | None:
        return None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(self.model).items():
            yield name, tensor.detach().clone()


@pytest.fixture
def model() -> torch.nn.Module:
    return make_model("llama")


def total_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_whole_parameters_are_shared_not_copied(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    sync = WeightSync(WholeSource(model), engine)
    metrics = sync.sync(1)
    assert metrics["weight_sync/copied_mb"] == 0
    assert metrics["weight_sync/shared_mb"] == total_bytes(model) / 2**20
    assert metrics["weight_sync/version"] == 1
    assert metrics["weight_sync/buckets"] == 1
    assert metrics["weight_sync/seconds"] > 0
    assert engine.module.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_another_dtype_costs_one_copy_of_the_rollout(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path, dtype="bfloat16")
    metrics = WeightSync(WholeSource(model), engine).sync(1)
    assert metrics["weight_sync/copied_mb"] == total_bytes(model) / 2 / 2**20
    assert metrics["weight_sync/shared_mb"] == 0


def test_sharded_parameters_stream_in_buckets(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    largest = max(parameter.nbytes for parameter in model.parameters())
    sync = WeightSync(ShardedSource(model), engine, bucket_bytes=largest)
    seen: list[int] = []
    load = engine.load

    async def watch(bucket: list[tuple[str, torch.Tensor]], *, live: bool = True) -> None:
        assert not live
        seen.append(sum(tensor.nbytes for _, tensor in bucket))
        await load(bucket, live=live)

    engine.load = watch  # type: ignore[method-assign]
    metrics = sync.sync(1)
    assert max(seen) <= largest
    assert sum(seen) == total_bytes(model)
    assert metrics["weight_sync/buckets"] == len(seen) > 3
    assert metrics["weight_sync/copied_mb"] == total_bytes(model) / 2**20
    prompt = random_prompts([7])[0]
    completion = generate(engine, [prompt], SamplingParams(5, seed=1, ignore_eos=True))[0]
    logits = reference_logits(model, prompt, completion.token_ids)
    expected = logits.log_softmax(-1)[torch.arange(5), torch.tensor(completion.token_ids)]
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_streamed_tensors_are_given_up_bucket_by_bucket(model: torch.nn.Module, tmp_path: Path) -> None:
    """Otherwise a second model would pile up while weights are synced."""
    drawn: list[StorageWeakRef] = []
    alive: list[int] = []

    class Watched(ShardedSource):
        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().named_tensors():
                drawn.append(StorageWeakRef(tensor.untyped_storage()))
                yield name, tensor
                del tensor
                alive.append(sum(not ref.expired() for ref in drawn))

    WeightSync(Watched(model), make_engine(model, tmp_path), bucket_bytes=1).sync(1)
    assert len(alive) == 21
    assert max(alive) <= 2  # the bucket being filled and its only predecessor


def test_versions_must_increase(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    sync = WeightSync(WholeSource(model), engine)
    sync.sync(0)
    sync.sync(5)
    for version in (5, 4):
        with pytest.raises(WeightSyncError, match=f"version {version} were offered.*already has version 5"):
            sync.sync(version)
    assert generate(engine, [[3]], SamplingParams(1))[0].policy_version == 5


def test_a_source_that_fails_half_way_leaves_no_usable_half(model: torch.nn.Module, tmp_path: Path) -> None:
    class Failing(ShardedSource):
        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(super().named_tensors()):
                if number == 3:
                    raise ConnectionError("a peer is gone")
                yield item

    engine = make_engine(model, tmp_path)
    with pytest.raises(ConnectionError, match="a peer is gone"):
        WeightSync(Failing(model), engine, bucket_bytes=1).sync(1)
    with pytest.raises(RolloutError, match="no complete weights"):
        generate(engine, [[3]], SamplingParams(1))
    WeightSync(ShardedSource(model), engine).sync(1)  # the next one repairs it
    assert engine.policy_version == 1


@pytest.mark.parametrize("source", [WholeSource, ShardedSource])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checksums_pass_when_both_sides_agree(
    source: type[WholeSource], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    tied = make_model("qwen2")
    WeightSync(source(tied), make_engine(tied, tmp_path, dtype=dtype)).sync(1)


def test_checksums_find_a_weight_that_changed_on_the_way(
    model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")

    class Stale(ShardedSource):
        streams = 0

        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.streams += 1
            for name, tensor in super().named_tensors():
                if name == "model.layers.1.mlp.up_proj.weight" and self.streams == 1:
                    tensor[0, 0] += 1e-3
                yield name, tensor

    with pytest.raises(WeightSyncError, match=r"1 of 21 weights differ .*model.layers.1.mlp.up_proj.weight"):
        WeightSync(Stale(model), make_engine(model, tmp_path)).sync(1)


def test_sync_works_inside_a_running_event_loop(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    sync = WeightSync(WholeSource(model), engine)

    async def run() -> None:
        sync.sync(1)
        assert (await sync.sync_async(2)).version == 2

    asyncio.run(run())
    assert engine.policy_version == 2


def test_the_fsdp_engine_shares_its_parameters_and_its_updates(tmp_path: Path) -> None:
    from tensordict import TensorDict

    from tests.models.families import make_batch
    from verl.config import FSDPConfig, ModelConfig, OptimConfig
    from verl.utils.metrics import MetricSet
    from verl.workers.engine.base import MicroBatching
    from verl.workers.engine.fsdp.engine import FSDPEngine

    model = make_model("qwen2", spread=2.0)
    rollout = make_engine(model, tmp_path)
    model.save_pretrained(tmp_path)
    trained = FSDPEngine(
        ModelConfig(path=str(tmp_path)), FSDPConfig(), OptimConfig(lr=0.01), head="lm", device="cpu", seed=1
    )
    trained.build()
    sync = WeightSync(trained, rollout)
    assert sync.sync(0)["weight_sync/copied_mb"] == 0

    prompt = random_prompts([6])[0]
    settings = SamplingParams(5, seed=1, ignore_eos=True)

    def training_log_probs(tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + tokens])
        batch = TensorDict(
            {
                "prompts": ids[:, :6],
                "responses": ids[:, 6:],
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "position_ids": torch.arange(11).unsqueeze(0),
                "response_mask": torch.ones(1, 5, dtype=torch.long),
            },
            batch_size=[1],
        )
        return trained.forward(batch, frozenset({"log_probs"}), micro=MicroBatching())["log_probs"][0]

    before = generate(rollout, [prompt], settings)[0]
    torch.testing.assert_close(torch.tensor(before.log_probs), training_log_probs(before.token_ids), atol=1e-5, rtol=0)

    def loss(outputs, micro, info):  # type: ignore[no-untyped-def]
        return -outputs["log_probs"].sum() / info.batch_num_tokens, MetricSet()

    batch = TensorDict(make_batch([5, 4], [6, 3]), batch_size=[2])
    trained.train_batch(batch, loss, want=frozenset({"log_probs"}), micro=MicroBatching())
    assert sync.sync(1)["weight_sync/copied_mb"] == 0
    after = generate(rollout, [prompt], settings)[0]
    torch.testing.assert_close(torch.tensor(after.log_probs), training_log_probs(after.token_ids), atol=1e-5, rtol=0)
    assert after.log_probs != before.log_probs
