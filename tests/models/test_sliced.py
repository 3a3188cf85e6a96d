"""Models whose parameters get memory late are those that ``from_pretrained`` gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.families import FAMILIES, make_config
from verl.config import ModelConfig
from verl.errors import ConfigError
from verl.models.loading import language_model_class, load_causal_lm, load_value_model
from verl.models.sliced import DeferredWeights


def save(family: str, directory: Path, **options: Any) -> ModelConfig:
    torch.manual_seed(0)
    config = make_config(family)
    model = language_model_class(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(directory, **options)
    return ModelConfig(path=str(directory))


def late(config: ModelConfig, loader: Any = load_causal_lm, dtype: torch.dtype = torch.float32) -> Any:
    deferred = DeferredWeights()
    model = loader(config, dtype=dtype, deferred=deferred)
    if deferred:
        assert all(parameter.is_meta for parameter in model.parameters())
        deferred.materialise(model, lambda: dict(model.named_parameters()), torch.device("cpu"))
    return model, bool(deferred)


def assert_same(got: torch.nn.Module, want: torch.nn.Module) -> None:
    for mine, other in (
        (dict(got.named_parameters()), dict(want.named_parameters())),  # tied ones once: they must be tied in both
        (dict(got.named_buffers()), dict(want.named_buffers())),  # those that no file has, too
    ):
        assert mine.keys() == other.keys()
        for name, tensor in other.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name
    assert got.training == want.training
    assert [p.requires_grad for p in got.parameters()] == [p.requires_grad for p in want.parameters()]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_loaded_the_same(family: str, tmp_path: Path) -> None:
    config = save(family, tmp_path)
    model, _ = late(config)
    assert_same(model, load_causal_lm(config))


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_get_memory_late(tied: bool, tmp_path: Path) -> None:
    family = make_config("qwen2")
    family.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(family).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    config = ModelConfig(path=str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        model, deferred = late(config, dtype=dtype)
        assert deferred
        assert_same(model, load_causal_lm(config, dtype=dtype))
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_a_missing_value_head_begins_at_zero(tmp_path: Path) -> None:
    config = save("qwen2", tmp_path)
    model, deferred = late(config, load_value_model)
    assert deferred
    assert not model.score.weight.any()
    assert_same(model, load_value_model(config))


def test_other_files_are_read_at_once(tmp_path: Path) -> None:
    config = save("qwen2", tmp_path)
    plain = load_causal_lm(config)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model, deferred = late(config)
    assert not deferred
    assert_same(model, plain)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    config = save("llama", tmp_path / "one")
    other = make_config("llama")
    other.num_hidden_layers += 1
    other.save_pretrained(tmp_path / "two")
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "two")
    with pytest.raises(ConfigError, match=r"lacks \d+ of the parameters"):
        late(ModelConfig(path=str(tmp_path / "two")))
    (tmp_path / "one" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot load a model from"):
        late(config)
