"""The FSDP engine on one rank against plain Transformers and torch."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.workers.engine.reference import (
    CLIP,
    LOG_PROBS,
    POLICY,
    TEMPERATURE,
    VALUES,
    make_engine,
    policy_batch,
    policy_loss,
    run_reference,
    value_loss,
)
from verl.checkpoint.staged_shards import StagedShard
from verl.errors import CheckpointError, ConfigError
from verl.models.decoder import decoder_layers
from verl.utils.metrics import MetricSet
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.fsdp import checkpoint
from verl.workers.engine.fsdp.engine import FSDPEngine

WHOLE = MicroBatching()
TRAINED = frozenset({"model", "optimizer", "extra"})


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    return policy_batch()


@pytest.fixture(scope="module")
def reference(tiny_model_dir: str, batch: dict[str, Tensor]) -> dict[str, Any]:
    return run_reference(tiny_model_dir, batch)


def parameters(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], atol: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "micro",
    [WHOLE, MicroBatching(size=1), MicroBatching(size=3), MicroBatching(size=8), MicroBatching(max_tokens=24)],
    ids=str,
)
def test_two_steps_equal_plain_transformers_and_adamw(
    tiny_model_dir: str, batch: dict[str, Tensor], reference: dict[str, Any], packed: bool, micro: MicroBatching
) -> None:
    engine = make_engine(tiny_model_dir, packed=packed, checkpointing=micro.size == 3)
    out = engine.forward(batch, POLICY, micro=micro, temperature=TEMPERATURE)
    assert out.keys() == POLICY
    for name in POLICY:
        torch.testing.assert_close(out[name], reference[name], rtol=1e-6, atol=2e-6)
        assert not out[name][batch["response_mask"] == 0].any()
    for step in range(2):
        metrics = engine.train_batch(
            batch, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE
        ).values_by_name()
        assert metrics["loss"] == pytest.approx(reference["loss"][step], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"][step], rel=1e-5)
        assert metrics["grad_norm"] > CLIP  # so that clipping is tested
        assert metrics["skipped_steps"] == 0
        assert metrics["lr"] == 0.01
        # AdamW divides by the gradient's own size, so rounding of tiny gradients shows; steps are 1e-2 long.
        assert_same(parameters(engine), reference["params"][step], atol=2e-4)


def test_choices_without_effect_agree_closely(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    results = []
    for packed in (True, False):
        for micro in (WHOLE, MicroBatching(size=1), MicroBatching(size=3), MicroBatching(max_tokens=20)):
            engine = make_engine(tiny_model_dir, packed=packed)
            values = engine.train_batch(
                batch, policy_loss, want=POLICY, micro=micro, temperature=TEMPERATURE
            ).values_by_name()
            results.append(values)
    for name, first in results[0].items():
        for other in results[1:]:
            assert other[name] == pytest.approx(first, rel=1e-6, abs=1e-7), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compilation_changes_rounding_only(
    tiny_model_dir: str, batch: dict[str, Tensor], reference: dict[str, Any]
) -> None:
    engine = make_engine(tiny_model_dir, fsdp={"use_torch_compile": True})
    out = engine.forward(batch, POLICY, micro=WHOLE, temperature=TEMPERATURE)
    for name in POLICY:
        torch.testing.assert_close(out[name], reference[name], rtol=1e-5, atol=1e-5)
    values = engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE).values_by_name()
    assert values["loss"] == pytest.approx(reference["loss"][0], rel=1e-5, abs=1e-6)
    assert values["grad_norm"] == pytest.approx(reference["grad_norm"][0], rel=1e-4)


def test_gradient_checkpointing_changes_no_bit(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    plain, saving = (make_engine(tiny_model_dir, checkpointing=flag) for flag in (False, True))
    for engine in (plain, saving):
        engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=2))
    assert_same(parameters(plain), parameters(saving), atol=0)


def test_a_batch_without_response_tokens_changes_nothing(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    nothing = {**batch, "response_mask": torch.zeros_like(batch["response_mask"])}
    engine = make_engine(tiny_model_dir, optim={"weight_decay": 0.0})
    before = parameters(engine)

    def loss(outputs: Any, rows: Any, info: Any) -> tuple[Tensor, MetricSet]:
        assert (info.batch_num_tokens, info.global_batch_size) == (0, 0)
        return outputs["log_probs"].sum(), MetricSet()

    metrics = engine.train_batch(nothing, loss, want=LOG_PROBS, micro=WHOLE).values_by_name()
    assert metrics["grad_norm"] == 0.0
    assert_same(parameters(engine), before, atol=0)
    empty = {name: tensor[:0] for name, tensor in batch.items()}
    assert engine.forward(empty, LOG_PROBS, micro=WHOLE)["log_probs"].shape == (0, 10)


def test_non_finite_gradient_skips_the_step(
    tiny_model_dir: str, batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tiny_model_dir)
    before = parameters(engine)

    def broken(outputs: Any, rows: Any, info: Any) -> tuple[Tensor, MetricSet]:
        return outputs["log_probs"].sum() * float("nan"), MetricSet()

    metrics = engine.train_batch(batch, broken, want=LOG_PROBS, micro=WHOLE).values_by_name()
    assert metrics["skipped_steps"] == 1
    assert np.isnan(metrics["grad_norm"])
    assert "parameters stay as they are" in caplog.text
    assert_same(parameters(engine), before, atol=0)
    good = engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE).values_by_name()
    assert good["skipped_steps"] == 0
    assert np.isfinite(good["grad_norm"])


def test_schedule_moves_only_when_told(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    engine = make_engine(tiny_model_dir, optim={"lr": 1.0e-3, "lr_warmup_steps": 2})
    lrs = [
        engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, advance_lr=advance).values_by_name()["lr"]
        for advance in (False, True, True, True)
    ]
    assert lrs == [0.5e-3, 0.5e-3, 1.0e-3, 1.0e-3]


def test_weights_are_aliases_on_one_rank(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    engine = make_engine(tiny_model_dir)
    aliases = engine.local_tensors()
    assert aliases is not None
    expected = dict(AutoModelForCausalLM.from_pretrained(tiny_model_dir).named_parameters())
    assert list(aliases) == list(expected)
    assert_same(aliases, {n: p.detach() for n, p in expected.items()}, atol=0)
    before = aliases["model.norm.weight"].clone()
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    assert not torch.equal(aliases["model.norm.weight"], before)
    assert not any(tensor.requires_grad for _, tensor in engine.named_tensors())


def test_resume_is_bit_exact(tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path) -> None:
    optim = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_training_steps": 6}
    engine = make_engine(tiny_model_dir, optim=optim)
    for _ in range(3):
        engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    engine.save(tmp_path / "a", TRAINED)
    draws = (torch.rand(3), random.random(), np.random.rand())
    expected = [engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE).values_by_name() for _ in range(2)]

    torch.manual_seed(99)
    again = make_engine(tiny_model_dir, optim=optim)
    again.load(tmp_path / "a", TRAINED)
    assert torch.equal(torch.rand(3), draws[0])
    assert (random.random(), np.random.rand()) == draws[1:]
    assert again.step == 3
    got = [again.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE).values_by_name() for _ in range(2)]
    assert got == expected
    assert_same(parameters(again), parameters(engine), atol=0)
    hf = again.module.model
    assert hf.lm_head.weight is hf.model.embed_tokens.weight


def test_a_background_save_holds_the_state_of_its_moment(
    tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    """The training goes on beside it; the second one reuses the memory of the first, and only when that is written."""
    engine = make_engine(tiny_model_dir)
    expected = {}
    for name in ("a", "b"):
        engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
        engine.save(tmp_path / f"{name}-at-once", TRAINED)
        expected[name] = parameters(engine)
        task = engine.start_save(tmp_path / name, TRAINED)
        for _ in range(2):
            engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
        task.wait()
        held = engine.state_bytes()["copies for saving"]
        assert held == pytest.approx(3 * engine.state_bytes()["parameters"], rel=0.5)
    for name in ("a", "b"):
        results = []
        for directory in (name, f"{name}-at-once"):
            again = make_engine(tiny_model_dir)
            again.load(tmp_path / directory, TRAINED)
            assert_same(parameters(again), expected[name], atol=0)
            again.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)  # the optimizer's state is right too
            results.append(parameters(again))
        assert_same(*results, atol=0)


def test_the_call_of_a_background_save_only_copies(tiny_model_dir: str, tmp_path: Path) -> None:
    """From the second on; in processor time of the calling thread, which other processes do not change."""
    engine = make_engine(tiny_model_dir)
    engine.start_save(tmp_path / "first", TRAINED).wait()
    at_once, call = [], []
    for number in range(3):
        started = time.thread_time()
        engine.save(tmp_path / f"at-once{number}", TRAINED)
        at_once.append(time.thread_time() - started)
        started = time.thread_time()
        task = engine.start_save(tmp_path / f"beside{number}", TRAINED)
        call.append(time.thread_time() - started)
        task.wait()
    assert min(call) < 0.5 * min(at_once)


@pytest.mark.parametrize("change", ["step", "load"])
def test_a_copy_that_takes_long_has_the_state_of_the_call(
    tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Whatever changes the weights waits for the copy, which goes on beside passes that read them."""
    engine, fill = make_engine(tiny_model_dir), StagedShard.fill
    engine.save(tmp_path / "start", TRAINED)
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    expected, copying = parameters(engine), threading.Event()

    def slowly(self: StagedShard, tensors: dict[str, Tensor]) -> None:
        copying.set()
        time.sleep(0.5)
        fill(self, tensors)

    monkeypatch.setattr(StagedShard, "fill", slowly)
    task = engine.start_save(tmp_path / "a", TRAINED)
    assert copying.wait(60)
    if change == "step":
        engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    else:
        engine.load(tmp_path / "start", TRAINED)
    task.wait()
    again = make_engine(tiny_model_dir)
    again.load(tmp_path / "a", TRAINED)
    assert_same(parameters(again), expected, atol=0)


def test_a_copy_that_fails_fails_the_save_and_not_the_training(
    tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_model_dir)

    def fail(self: StagedShard, tensors: dict[str, Tensor]) -> None:
        raise RuntimeError("no copy")

    monkeypatch.setattr(StagedShard, "fill", fail)
    task = engine.start_save(tmp_path / "a", TRAINED)
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    with pytest.raises(RuntimeError, match="no copy"):
        task.wait()


def test_two_background_saves_at_a_time_are_refused(
    tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, may_go_on, write = make_engine(tiny_model_dir), threading.Event(), checkpoint.write

    def slowly(*arguments: Any) -> None:
        assert may_go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write", slowly)
    task = engine.start_save(tmp_path / "a", TRAINED)
    with pytest.raises(CheckpointError, match="an earlier background save is still being written"):
        engine.start_save(tmp_path / "b", TRAINED)
    may_go_on.set()
    task.wait()
    engine.start_save(tmp_path / "b", TRAINED).wait()
    make_engine(tiny_model_dir).load(tmp_path / "b", TRAINED)


def test_saving_before_the_first_step_resumes_like_a_fresh_start(
    tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = make_engine(tiny_model_dir)
    engine.save(tmp_path / "a", TRAINED)
    fresh, again = make_engine(tiny_model_dir), make_engine(tiny_model_dir)
    again.load(tmp_path / "a", TRAINED)
    for one in (engine, fresh, again):
        one.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    assert_same(parameters(engine), parameters(fresh), atol=0)
    assert_same(parameters(again), parameters(fresh), atol=0)


def test_hf_export_is_an_ordinary_model_directory(
    tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = make_engine(tiny_model_dir)
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    engine.save(tmp_path / "a", frozenset({"model", "hf_model"}))
    exported = tmp_path / "a" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same({n: p.detach() for n, p in model.named_parameters()}, parameters(engine), atol=0)
    text = "1+2=3"
    assert (
        AutoTokenizer.from_pretrained(exported)(text).input_ids
        == AutoTokenizer.from_pretrained(tiny_model_dir)(text).input_ids
    )
    config = json.loads((exported / "config.json").read_text())
    assert "verl" not in json.dumps(config)
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (exported / "generation_config.json").is_file()


def test_checkpoint_errors_say_what_is_wrong(tiny_model_dir: str, tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir)
    with pytest.raises(CheckpointError, match="no checkpoint directory"):
        engine.load(tmp_path / "missing", TRAINED)
    (tmp_path / "partial").mkdir()
    with pytest.raises(CheckpointError, match=r"engine\.json"):
        engine.load(tmp_path / "partial", TRAINED)
    engine.save(tmp_path / "model-only", frozenset({"model"}))
    with pytest.raises(CheckpointError, match=r"not \['extra', 'optimizer'\]"):
        engine.load(tmp_path / "model-only", TRAINED)
    engine.load(tmp_path / "model-only", frozenset({"model"}))
    with pytest.raises(CheckpointError, match="head"):
        make_engine(tiny_model_dir, head="value").load(tmp_path / "model-only", frozenset({"model"}))
    with pytest.raises(CheckpointError, match="unknown checkpoint contents"):
        engine.save(tmp_path / "x", frozenset({"weights"}))
    for shard in (tmp_path / "model-only" / "model").glob("*.distcp"):
        shard.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        engine.load(tmp_path / "model-only", frozenset({"model"}))
    with pytest.raises(CheckpointError, match="only evaluates"):
        make_engine(tiny_model_dir, trained=False).save(tmp_path / "y", TRAINED)


def test_another_model_is_refused_or_loaded_in_part(
    tiny_model_dir: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tests.fixtures.tiny import make_tiny_model_dir

    deeper = make_tiny_model_dir(tmp_path_factory.mktemp("deeper"), layers=3, seed=4)
    make_engine(tiny_model_dir).save(tmp_path / "a", frozenset({"model"}))
    with pytest.raises(CheckpointError, match=r"lacks 12 parameters"):
        make_engine(deeper).load(tmp_path / "a", frozenset({"model"}))
    lenient = make_engine(deeper, strict=False)
    lenient.load(tmp_path / "a", frozenset({"model"}))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(parameters(lenient)[name], parameters(make_engine(tiny_model_dir))[name])


def test_critic_learns_and_resumes(tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir, head="value")
    assert not engine.forward(batch, VALUES, micro=MicroBatching(size=3))["values"].any()
    losses = [
        engine.train_batch(batch, value_loss, want=VALUES, micro=MicroBatching(size=3)).values_by_name()["loss"]
        for _ in range(10)
    ]
    targets = batch["advantages"][batch["response_mask"].bool()]
    assert losses[0] == pytest.approx(float(targets.square().mean()), rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]
    engine.save(tmp_path / "a", TRAINED | {"hf_model"})
    again = make_engine(tiny_model_dir, head="value")
    again.load(tmp_path / "a", TRAINED)
    values = engine.forward(batch, VALUES, micro=WHOLE)["values"]
    assert torch.equal(values, again.forward(batch, VALUES, micro=WHOLE)["values"])
    exported = make_engine(str(tmp_path / "a" / "huggingface"), head="value")
    weights, stored = dict(engine.named_tensors()), dict(exported.named_tensors())
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in weights)
    # where weights lie in memory decides about kernels of some processors, and with them about the last bit
    torch.testing.assert_close(values, exported.forward(batch, VALUES, micro=WHOLE)["values"], rtol=1e-5, atol=1e-6)


def test_reward_model_scores_rows(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    engine = make_engine(tiny_model_dir, head="classifier")

    def loss(outputs: Any, rows: Any, info: Any) -> tuple[Tensor, MetricSet]:
        return (outputs["scores"] - 1.0).square().sum() / info.global_batch_size, MetricSet()

    scores = frozenset({"scores"})
    assert engine.forward(batch, scores, micro=MicroBatching(size=3))["scores"].tolist() == [0.0] * 8
    for _ in range(20):
        engine.train_batch(batch, loss, want=scores, micro=MicroBatching(max_tokens=24))
    packed = engine.forward(batch, scores, micro=MicroBatching(size=3))["scores"]
    assert float((packed - 1.0).abs().mean()) < 0.3


def test_bfloat16_computing_keeps_float32_weights(
    tiny_model_dir: str, batch: dict[str, Tensor], reference: dict[str, Any]
) -> None:
    engine = make_engine(tiny_model_dir, compute="bfloat16", checkpointing=True)
    out = engine.forward(batch, POLICY, micro=MicroBatching(size=3), temperature=TEMPERATURE)
    assert out["log_probs"].dtype == torch.float32
    torch.testing.assert_close(out["log_probs"], reference["log_probs"], rtol=0.02, atol=0.05)
    metrics = engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=3), temperature=TEMPERATURE)
    assert metrics["grad_norm"].value == pytest.approx(reference["grad_norm"][0], rel=0.05)
    aliases = engine.local_tensors()
    assert aliases is not None
    assert {t.dtype for t in aliases.values()} == {torch.float32}
    before = aliases["model.norm.weight"].clone()
    engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE, temperature=TEMPERATURE)
    assert not torch.equal(aliases["model.norm.weight"], before)


def test_offloading_changes_no_number(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    plain = make_engine(tiny_model_dir)
    moved = make_engine(tiny_model_dir, fsdp={"param_offload": True, "optimizer_offload": True})
    policy = make_engine(tiny_model_dir, fsdp={"offload_policy": True})
    for engine in (plain, moved, policy):
        for _ in range(2):
            engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=3))
    assert_same(parameters(moved), parameters(plain), atol=0)
    assert_same(parameters(policy), parameters(plain), atol=0)
    half = make_engine(tiny_model_dir, compute="bfloat16")
    half_moved = make_engine(
        tiny_model_dir, compute="bfloat16", fsdp={"param_offload": True, "optimizer_offload": True}
    )
    for engine in (half, half_moved):
        for _ in range(2):
            engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=3))
            engine.forward(batch, POLICY, micro=WHOLE)
    assert_same(parameters(half_moved), parameters(half), atol=0)
    with moved.resident(optimizer=True), moved.resident(optimizer=False):
        assert next(moved.module.parameters()).device.type == "cpu"


def test_layers_kept_gathered_in_training_are_given_back_after_evaluation(
    tiny_model_dir: str, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    """``reshard_after_forward=False``: an evaluation has no backward pass that would give the layers back."""
    kept = make_engine(tiny_model_dir, compute="bfloat16", fsdp={"reshard_after_forward": False})
    freed = make_engine(tiny_model_dir, compute="bfloat16")
    for engine in (kept, freed):
        engine.forward(batch, LOG_PROBS, micro=WHOLE)
        engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)
    kept.forward(batch, LOG_PROBS, micro=WHOLE)
    kept.save(tmp_path / "step", TRAINED)
    with torch.no_grad():
        for engine in (kept, freed):
            for tensor in (engine.local_tensors() or {}).values():
                tensor.mul_(1.5)
    outputs = [engine.forward(batch, LOG_PROBS, micro=WHOLE)["log_probs"] for engine in (kept, freed)]
    assert torch.equal(*outputs)


def test_an_evaluation_engine_does_not_train(tiny_model_dir: str, batch: dict[str, Tensor]) -> None:
    engine = make_engine(tiny_model_dir, trained=False)
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(ConfigError, match="without an optimizer"):
        engine.train_batch(batch, policy_loss, want=POLICY, micro=WHOLE)


def test_dropout_switches_prompt_sharing_off(tiny_model_dir: str) -> None:
    dropout: dict[str, Any] = {"override_config": {"attention_dropout": 0.1}}
    assert make_engine(tiny_model_dir).share_prompts
    assert make_engine(tiny_model_dir, model=dropout).share_prompts  # which is off
    assert not make_engine(tiny_model_dir, model={**dropout, "training_noise": True}).share_prompts


def test_options_that_do_not_exist_are_refused(tiny_model_dir: str) -> None:
    with pytest.raises(ConfigError, match="unknown head 'policy'"):
        make_engine(tiny_model_dir, head="policy")
    with pytest.raises(ConfigError, match="NoSuchLayer"):
        decoder_layers(make_engine(tiny_model_dir).module.model, ["NoSuchLayer"])


def test_a_family_without_replaceable_attention_runs_padded(
    tmp_path: Path, batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=104)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path))
    assert not engine.packed
    assert "rows are padded instead" in caplog.text
    reference = run_reference(str(tmp_path), batch, steps=1)
    out = engine.forward(batch, POLICY, micro=MicroBatching(size=3), temperature=TEMPERATURE)
    torch.testing.assert_close(out["log_probs"], reference["log_probs"], rtol=1e-6, atol=2e-6)


@pytest.mark.slow
def test_compiled_layers_give_the_same_numbers(
    tiny_model_dir: str, batch: dict[str, Tensor], reference: dict[str, Any]
) -> None:
    engine = make_engine(tiny_model_dir, fsdp={"use_torch_compile": True})
    metrics = engine.train_batch(batch, policy_loss, want=POLICY, micro=MicroBatching(size=3), temperature=TEMPERATURE)
    assert metrics["grad_norm"].value == pytest.approx(reference["grad_norm"][0], rel=1e-4)
    assert_same(parameters(engine), reference["params"][0], atol=5e-4)
    assert list(parameters(engine)) == list(reference["params"][0])
