"""The comparison of a model with plain Transformers when it is built."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.models.families import FAMILIES, SPARSE, make_config
from tests.models.family_checks import save_model, transformers_model
from tests.workers.engine.reference import make_engine
from tests.workers.rollout.helpers import generate, hand_over, make_model, random_prompts
from verl.config import ModelConfig, RolloutConfig
from verl.errors import ConfigError
from verl.models.attention import PackedMask
from verl.models.families import TESTED_FAMILIES, must_verify
from verl.models.heads import HeadModel
from verl.models.loading import supports_packing
from verl.workers.engine.base import MicroBatching
from verl.workers.rollout.hf import attention
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import SamplingParams

WHOLE = MicroBatching()


def test_the_tested_table_is_that_of_the_tests() -> None:
    assert {make_config(family).model_type for family in FAMILIES} == TESTED_FAMILIES


@pytest.mark.parametrize(
    ("model_type", "verify", "expected"),
    [("qwen2", "auto", False), ("qwen2", "always", True), ("olmoe", "auto", True), ("olmoe", "never", False)],
)
def test_when_a_model_is_compared(model_type: str, verify: str, expected: bool) -> None:
    assert must_verify(ModelConfig(path="x", verify=verify), make_config(model_type)) is expected


def sparse_model(model_type: str, directory: Path, **changes: Any) -> str:
    config = make_config(model_type, **{**SPARSE, **changes})
    make_model(config, spread=3.0).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_that_padding_changes_is_refused(model_type: str, head: str, tmp_path: Path) -> None:
    """Few index heads often agree on a score of 0, and which of equal scores is chosen then depends on padding."""
    path = sparse_model(model_type, tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"{model_type}.*padded training rows differ.*padding token inside.*verify"):
        make_engine(path, head=head, trained=False)
    make_engine(path, head=head, trained=False, model={"verify": "never"})


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_applied(model_type: str, tmp_path: Path) -> None:
    """With many index heads no scores are equal: the numbers are those of plain Transformers, and top-k matters."""
    outputs = []
    for index_topk in (4, 64):
        path = sparse_model(model_type, tmp_path / str(index_topk), index_n_heads=32, index_topk=index_topk)
        engine = make_engine(path, trained=False)  # is compared
        assert not engine.packed
        probe = engine.probe()
        outputs.append(
            torch.cat(probe.split(engine.forward(probe.batch(), frozenset({"log_probs"}), micro=WHOLE)["log_probs"]))
        )
    assert outputs[0].shape != outputs[1].shape or not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("head", ["lm", "value", "classifier"])
def test_a_family_outside_of_the_table_that_agrees_is_taken(head: str, tmp_path: Path) -> None:
    config = make_config("olmoe", num_experts=4, num_experts_per_tok=2)
    make_model(config, spread=3.0).save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path), head=head, trained=False)
    assert engine.packed


@pytest.mark.parametrize("head", ["lm", "value", "classifier"])
def test_a_wrong_mask_is_found_and_the_remedy_is_named(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model("qwen2_sliding", tmp_path / "model")
    make_engine(path, head=head, trained=False, model={"verify": "always"})
    original = PackedMask.block_mask

    def one_more(self: PackedMask, *args: Any, **kwargs: Any) -> Any:
        if self.window is not None or self.function is not None:
            self = PackedMask(self.plan, None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PackedMask, "block_mask", one_more)  # windows are forgotten where rows are packed
    make_engine(path, head=head, trained=False)  # not compared: the family is tested
    with pytest.raises(ConfigError, match=r"packed training rows differ .* set model.use_remove_padding=false"):
        make_engine(path, head=head, trained=False, model={"verify": "always"})


def test_a_pad_token_that_is_taken_for_padding_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model("llama", tmp_path / "model")
    original = HeadModel._run_backbone

    def by_token(self: HeadModel, layout: Any) -> Any:
        layout.attention_mask.copy_((layout.input_ids != 0).long())
        return original(self, layout)

    monkeypatch.setattr(HeadModel, "_run_backbone", by_token)
    with pytest.raises(ConfigError, match="padding token inside"):
        make_engine(path, packed=False, trained=False, model={"verify": "always"})


@pytest.mark.parametrize("model_type", ["jamba", "qwen3_next", "bamba", "falcon_h1", "zamba2", "lfm2"])
def test_models_with_state_are_not_packed(model_type: str) -> None:
    config = make_config(model_type) if model_type in FAMILIES else AutoConfig.for_model(model_type)
    config._attn_implementation = "verl_varlen"
    assert not supports_packing(config)


def sampled(path: str, **model: Any) -> HFRolloutEngine:
    """A rollout engine that has got the weights."""
    engine = HFRolloutEngine(ModelConfig(path=path, **model), RolloutConfig(dtype="float32"), device="cpu")
    asyncio.run(hand_over(engine, transformers_model(path)))
    return engine


@pytest.mark.parametrize("family", ["qwen2_sliding", "gemma2", "deepseek_v3", "gpt_oss"])
def test_generation_is_compared_too(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model(family, tmp_path / "model")
    engine = sampled(path, verify="always")
    prompts = random_prompts([3, 9])
    assert generate(engine, prompts, SamplingParams(4, seed=1)) == generate(
        sampled(path), prompts, SamplingParams(4, seed=1)
    )

    original = attention._decode

    def forgetful(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return original(query, key.roll(1, 2), value, *rest)

    monkeypatch.setattr(attention, "_decode", forgetful)
    sampled(path)  # not compared: the family is tested
    with pytest.raises(ConfigError, match=r"log-probabilities of rollout.name=hf differ .* rollout.name=vllm"):
        sampled(path, verify="always")


def test_what_a_family_raises_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(make_config("olmoe", num_experts=4, num_experts_per_tok=2)).save_pretrained(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AttributeError("no attribute 'layers_of_it'\nand more")

    monkeypatch.setattr("transformers.models.olmoe.modeling_olmoe.OlmoeModel.forward", fail)
    with pytest.raises(ConfigError, match=r"'olmoe' is not supported: a forward pass .* AttributeError: no"):
        make_engine(str(tmp_path), trained=False)
