"""What every training engine promises, checked on each implementation in one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.workers.engine.megatron.ranks import make_megatron_engine
from tests.workers.engine.reference import LOG_PROBS, POLICY, make_engine, policy_batch, policy_loss
from verl.errors import CheckpointError, ConfigError, SchemaError
from verl.utils.device import device_memory_stats
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import GlobalBatchInfo, MicroBatching, TrainEngine
from verl.workers.sharding_manager.reshard.held_weights import HeldWeights

WHOLE = MicroBatching()
MICRO = [MicroBatching(size=1), MicroBatching(size=3), MicroBatching(max_tokens=24)]
TRAINED = frozenset({"model", "optimizer", "extra"})

#: implementation -> maker(model directory, **options of tests.workers.engine.reference.make_engine)
ENGINES: dict[str, Callable[..., TrainEngine]] = {
    "fsdp": make_engine,
    "fsdp-sharded": lambda path, **options: make_engine(path, fsdp={"offload_policy": True}, **options),
    "fsdp-padded": lambda path, **options: make_engine(path, packed=False, **options),
    "megatron": make_megatron_engine,
}


@pytest.fixture(params=sorted(ENGINES))
def make(request: pytest.FixtureRequest, tiny_model_dir: str) -> Callable[..., TrainEngine]:
    """A maker of engines that hold the tiny model."""
    if request.param == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-core is not installed")
    return lambda **options: ENGINES[request.param](tiny_model_dir, **options)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return policy_batch()


def parameters(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def test_forward_fills_response_tokens_and_nothing_else(make: Any, batch: dict[str, Tensor]) -> None:
    engine = make()
    out = engine.forward(batch, LOG_PROBS, micro=WHOLE)
    assert set(out) == LOG_PROBS
    log_probs = out["log_probs"]
    mask = batch["response_mask"].bool()
    assert (log_probs.shape, log_probs.dtype) == (mask.shape, torch.float32)
    assert not log_probs.requires_grad
    assert bool((log_probs[mask] < 0).all())
    assert not log_probs[~mask].any()
    both = engine.forward(batch, POLICY, micro=WHOLE)
    assert torch.equal(both["log_probs"], log_probs)
    # no distribution over 104 tokens has more entropy
    assert 0 < float(both["entropys"].max()) <= float(torch.tensor(104.0).log()) + 1e-5
    with pytest.raises(ConfigError, match="values"):
        engine.forward(batch, frozenset({"values"}), micro=WHOLE)


def test_temperature_divides_the_logits(make: Any, batch: dict[str, Tensor]) -> None:
    engine = make()
    hot = engine.forward(batch, POLICY, micro=WHOLE, temperature=1e4)
    mask = batch["response_mask"].bool()
    uniform = -torch.tensor(104.0).log()
    torch.testing.assert_close(hot["log_probs"][mask], uniform.expand(int(mask.sum())), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("micro", MICRO, ids=str)
def test_micro_batches_change_nothing(make: Any, batch: dict[str, Tensor], micro: MicroBatching) -> None:
    whole, cut = make(), make()
    expected = whole.forward(batch, POLICY, micro=WHOLE)
    got = cut.forward(batch, POLICY, micro=micro)
    for name in POLICY:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=2e-6)
    one = whole.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE).values_by_name()
    other = cut.train_batch(batch, policy_loss, want=POLICY, micro=micro).values_by_name()
    assert one.keys() == other.keys() >= {"loss", "log_prob", "grad_norm", "lr", "skipped_steps"}
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_the_order_of_rows_changes_nothing(make: Any, batch: dict[str, Tensor]) -> None:
    order = torch.tensor([3, 0, 7, 5, 1, 6, 2, 4])
    shuffled = {name: value[order] for name, value in batch.items()}
    engine, other = make(), make()
    straight = engine.forward(batch, LOG_PROBS, micro=MicroBatching(size=3))["log_probs"]
    mixed = other.forward(shuffled, LOG_PROBS, micro=MicroBatching(size=3))["log_probs"]
    torch.testing.assert_close(mixed, straight[order], rtol=1e-6, atol=2e-6)
    one = engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=3)).values_by_name()
    two = other.train_batch(shuffled, policy_loss, want=POLICY, micro=MicroBatching(size=3)).values_by_name()
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_loss_sees_its_rows_and_the_counts_of_the_whole(make: Any, batch: dict[str, Tensor]) -> None:
    batch["tag"] = torch.arange(8)
    seen: list[int] = []

    def loss(outputs: Any, rows: TensorDict, info: GlobalBatchInfo) -> tuple[Tensor, MetricSet]:
        assert info == GlobalBatchInfo(
            dp_size=1, batch_num_tokens=int(batch["response_mask"].sum()), global_batch_size=8
        )
        assert outputs["log_probs"].shape == rows["response_mask"].shape
        seen.extend(rows["tag"].tolist())
        return outputs["log_probs"].sum() / info.batch_num_tokens, MetricSet()

    make().train_batch(batch, loss, want=LOG_PROBS, micro=MicroBatching(max_tokens=30))
    assert sorted(seen) == list(range(8))


def test_batches_may_be_tensordicts(make: Any, batch: dict[str, Tensor]) -> None:
    engine = make()
    as_td = TensorDict(batch, batch_size=[8])
    one = engine.forward(batch, LOG_PROBS, micro=MicroBatching(size=3))["log_probs"]
    assert torch.equal(one, engine.forward(as_td, LOG_PROBS, micro=MicroBatching(size=3))["log_probs"])
    with pytest.raises(SchemaError, match="attention_mask"):
        engine.forward({k: v for k, v in batch.items() if k != "attention_mask"}, LOG_PROBS, micro=WHOLE)


def test_training_repeats_bit_for_bit(make: Any, batch: dict[str, Tensor]) -> None:
    engines = [make(), make()]
    for engine in engines:
        for _ in range(2):
            engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=3))
    one, two = (parameters(engine) for engine in engines)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_tensors_have_the_names_and_values_of_the_source(make: Any, tiny_model_dir: str) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(tiny_model_dir).named_parameters())
    streamed = list(make().named_tensors())
    assert [name for name, _ in streamed] == list(expected)
    for name, tensor in streamed:
        assert torch.equal(tensor, expected[name])


def test_local_tensors_follow_training(make: Any, batch: dict[str, Tensor]) -> None:
    engine = make()
    aliases = engine.local_tensors()
    if aliases is None:
        pytest.skip("this engine stores weights in another form than Hugging Face's")
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    for name, tensor in engine.named_tensors():
        assert torch.equal(aliases[name], tensor)


def test_shards_say_where_the_whole_tensors_lie(make: Any) -> None:
    engine = make()
    with engine.resident(optimizer=False):
        expected = parameters(engine)
        held = HeldWeights(engine.shards())
        local = held.tensors()
        assert list(local) == list(expected)
        layout = held.layout([held.holdings()])
        for name, tensor in local.items():
            rebuilt = torch.full_like(expected[name], torch.nan)
            for there, here in layout.placements[name].boxes_of(0):
                rebuilt[there] = tensor[here]
            assert torch.equal(rebuilt, expected[name]), name


def test_save_and_load_restore_every_bit(make: Any, batch: dict[str, Tensor], tmp_path: Path) -> None:
    engine, other = make(), make()
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    engine.save(tmp_path / "c", TRAINED)
    other.load(tmp_path / "c", TRAINED)
    for one in (engine, other):
        one.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    want, got = parameters(engine), parameters(other)
    assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(CheckpointError):
        engine.load(tmp_path / "nothing", TRAINED)


def test_residence_nests_and_leaves_the_model_usable(make: Any, batch: dict[str, Tensor]) -> None:
    engine = make()
    expected = engine.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"]
    with engine.resident(optimizer=True), engine.resident(optimizer=False):
        assert torch.equal(engine.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"], expected)
    assert torch.equal(engine.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"], expected)


def test_layout_and_memory_of_one_rank(make: Any) -> None:
    engine = make()
    layout = engine.layout
    assert (layout.dp_rank, layout.dp_size, layout.world_size, layout.is_output_rank) == (0, 1, 1, True)
    stats = device_memory_stats(engine.device)
    assert stats.cpu_used > 0
    assert stats.max_allocated >= stats.allocated >= 0
