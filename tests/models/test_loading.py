"""Loading, overriding and the heads of critics and reward models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.models.families import make_batch, make_config
from verl.config import ModelConfig
from verl.errors import ConfigError
from verl.models.attention import IMPLEMENTATION
from verl.models.heads import ClassifierModel, PolicyModel, ValueModel
from verl.models.loading import (
    load_causal_lm,
    load_classifier,
    load_hf_config,
    load_value_model,
    supports_packing,
)
from verl.models.noise import noise_of
from verl.models.packing import build_layout


def save_family(family: str, path: Path) -> str:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(make_config(family)).save_pretrained(path)
    return str(path)


def test_causal_lm_loads_with_its_ties_and_type(tiny_model_dir: str) -> None:
    model = load_causal_lm(ModelConfig(path=tiny_model_dir), dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == IMPLEMENTATION
    names = [name for name, _ in PolicyModel(model).hf_named_tensors()]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names


def test_override_config_reaches_nested_values(tiny_model_dir: str) -> None:
    overrides = {
        "attention_dropout": 0.25,
        "rope_parameters": {"rope_theta": 5000.0},
        "model_config": {"max_position_embeddings": 77},
    }
    config = load_hf_config(ModelConfig(path=tiny_model_dir, override_config=overrides))
    assert config.attention_dropout == 0.25
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.rope_parameters["rope_type"] == "default"
    assert config.max_position_embeddings == 77
    assert noise_of(config) == {"attention_dropout": 0.25}
    assert not noise_of(load_hf_config(ModelConfig(path=tiny_model_dir)))


def test_unknown_override_names_the_nearest_key(tiny_model_dir: str) -> None:
    with pytest.raises(ConfigError, match="'rms_norm_eps'"):
        load_hf_config(ModelConfig(path=tiny_model_dir, override_config={"rms_norm_epz": 1e-5}))
    # switching off a dropout that the family does not have asks for nothing
    load_hf_config(ModelConfig(path=tiny_model_dir, override_config={"embd_pdrop": 0.0}))
    with pytest.raises(ConfigError, match="embd_pdrop"):
        load_hf_config(ModelConfig(path=tiny_model_dir, override_config={"embd_pdrop": 0.1}))


def test_another_attention_switches_packing_off(tiny_model_dir: str) -> None:
    config = load_hf_config(ModelConfig(path=tiny_model_dir, override_config={"attn_implementation": "eager"}))
    assert config._attn_implementation == "eager"
    assert not supports_packing(config)
    assert supports_packing(load_hf_config(ModelConfig(path=tiny_model_dir)))


def test_wrong_paths_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.path is not set"):
        load_hf_config(ModelConfig())
    with pytest.raises(ConfigError, match="neither a directory nor a model"):
        load_hf_config(ModelConfig(path="no-such-org/no-such-model"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_hf_config(ModelConfig(path=str(tmp_path)))


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    path = save_family("qwen2", tmp_path)
    with pytest.raises(ConfigError, match="lacks"):
        load_causal_lm(
            ModelConfig(path=path, override_config={"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
        )


def test_weights_of_another_size_are_refused_by_name(tmp_path: Path) -> None:
    path = save_family("qwen2", tmp_path)
    vocabulary = make_config("qwen2").vocab_size
    with pytest.raises(ConfigError, match=rf"1 parameters .*'model.embed_tokens.weight' with \[{vocabulary}, .*\[50, "):
        load_causal_lm(ModelConfig(path=path, override_config={"vocab_size": 50}))


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])  # the second has no token classifier in Transformers
def test_critic_starts_at_zero_and_survives_a_round_trip(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path / "lm")
    model = load_value_model(ModelConfig(path=path))
    critic = ValueModel(model)
    batch = make_batch([3, 5], [4, 2])
    args = [batch[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    out = critic(build_layout(*args, packed=True), frozenset({"values"}))["values"]
    assert out.shape == (2, 4)
    assert torch.equal(out, torch.zeros(2, 4))
    out.sum().backward()
    assert float(model.score.weight.grad.abs().sum()) > 0

    with torch.no_grad():
        model.score.weight.normal_()
        model.score.bias.fill_(0.5)
    model.save_pretrained(tmp_path / "critic")
    again = load_value_model(ModelConfig(path=str(tmp_path / "critic")))
    assert torch.equal(again.score.weight, model.score.weight)
    # the value of the state before each token, from the model's own forward pass
    first = batch["input_ids"][1][batch["attention_mask"][1].bool()]
    hidden = again.base_model(input_ids=first[None], use_cache=False).last_hidden_state[0, 4:6]
    expected = (hidden @ again.score.weight.T + again.score.bias)[:, 0]
    for packed in (True, False):
        values = ValueModel(again)(build_layout(*args, packed=packed), frozenset({"values"}))["values"]
        torch.testing.assert_close(values[1, :2], expected, rtol=1e-5, atol=1e-5)
        assert values[1, 2:].tolist() == [0.0, 0.0]
    if family == "qwen2":
        plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
        assert plain.config.num_labels == 1
        assert torch.equal(plain.score.weight, model.score.weight)


def test_classifier_scores_the_last_token(tmp_path: Path) -> None:
    config = make_config("qwen3")
    config.num_labels = 1
    torch.manual_seed(2)
    reference = AutoModelForSequenceClassification.from_config(config)
    reference.save_pretrained(tmp_path)
    model = load_classifier(ModelConfig(path=str(tmp_path)))
    batch = make_batch([3, 5, 3], [4, 2, 1], equal_prompts_of=1)
    args = [batch[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    expected = []
    for i in range(3):
        ids = batch["input_ids"][i][batch["attention_mask"][i].bool()][None]
        expected.append(reference(input_ids=ids, use_cache=False).logits[0, 0])
    for packed in (True, False):
        got = ClassifierModel(model)(build_layout(*args, packed=packed), frozenset({"scores"}))["scores"]
        torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_untrained_score_head_is_zero_and_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_family("llama", tmp_path)
    model = load_classifier(ModelConfig(path=path))
    assert model.score.out_features == 1
    assert not model.score.weight.any()
    assert "no trained score head" in caplog.text


def test_heads_name_the_field_they_cannot_compute(tiny_model_dir: str) -> None:
    policy = PolicyModel(load_causal_lm(ModelConfig(path=tiny_model_dir)))
    batch = make_batch([2], [2], vocab=50)
    args = [batch[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    with pytest.raises(ConfigError, match="'values'"):
        policy(build_layout(*args, packed=True), frozenset({"values"}))


def test_memory_backed_copy_is_made_once(tiny_model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.models import loading
    from verl.utils import owned_dirs

    monkeypatch.setattr(owned_dirs, "SHARED_COPIES", tmp_path / "shm")
    first = loading.resolve_model_dir(tiny_model_dir, use_shm=True)
    assert first.is_relative_to(tmp_path / "shm")
    assert (first / "config.json").read_text() == (Path(tiny_model_dir) / "config.json").read_text()
    assert loading.resolve_model_dir(tiny_model_dir, use_shm=True) == first
