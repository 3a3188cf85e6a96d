"""Model directories that are not whole, or of models that are not supported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tests.fixtures.tiny import make_tiny_model_dir
from tests.models.families import FAMILIES, make_config
from tests.models.family_checks import save_model
from tests.workers.rollout.helpers import make_model
from verl.config import ModelConfig
from verl.errors import ConfigError
from verl.models.directory import check_model
from verl.utils.tokenizer import load_tokenizer

WEIGHTS = "model.safetensors"


def change(path: Path, function: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / WEIGHTS)
    function(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def as_integers(path: Path) -> None:
    change(path, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].long()}))


def with_another(path: Path) -> None:
    change(path, lambda t: t.update({"model.layers.0.self_attn.q_extra.weight": torch.zeros(3)}))


def without_one(path: Path) -> None:
    change(path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def cut(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[:-100])


def no_safetensors(path: Path) -> None:
    (path / WEIGHTS).write_text("<html>Not found</html>")


def without_a_shard(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(tensors)
    table = {name: f"part-{1 + (number > 4)}.safetensors" for number, name in enumerate(names)}
    save_file({name: tensors[name] for name in names[:5]}, path / "part-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def shard_lacks_a_tensor(path: Path) -> None:
    without_a_shard(path)
    tensors = load_file(path / "part-1.safetensors")
    save_file(tensors, path / "part-2.safetensors")


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


def settings(**values: Any) -> Callable[[Path], None]:
    def function(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))

    return function


def other_model(path: Path) -> None:
    make_config("llama", num_hidden_layers=3, vocab_size=104).save_pretrained(path)


def only(name: str) -> Callable[[Path], None]:
    def function(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        (path / name).write_text("{}")

    return function


CASES: list[tuple[Callable[[Path], None], str]] = [
    (as_integers, r"'model.norm.weight' of type I64: weights are floating-point"),
    (with_another, r"'model.layers.0.self_attn.q_extra.weight': .*no such tensors"),
    (without_one, r"the files lack 'layers.1.mlp.up_proj.weight'"),
    (other_model, r"the files lack 'layers.2.*LlamaForCausalLM|no such tensors"),
    (cut, r"model.safetensors has \d+ bytes instead of \d+: it is cut"),
    (no_safetensors, r"model.safetensors is no safetensors file"),
    (without_a_shard, r"part-2.safetensors is missing, which model.safetensors.index.json names"),
    (shard_lacks_a_tensor, r"part-2.safetensors lacks '.*' and \d+ more, which"),
    (write("generation_config.json", ""), r"generation_config.json is empty"),
    (write("config.json", "{"), r"config.json is no JSON"),
    (write("config.json", "[]"), r"config.json holds no JSON object"),
    (write("model.safetensors.index.json", "{}"), r"index.json has no weight_map"),
    (settings(model_type="qwen99"), r"model type 'qwen99' is not known to the installed Transformers"),
    (
        settings(model_type="mine", auto_map={"AutoConfig": "x.Y"}),
        r"'mine' comes with code of its own; set trust_remote",
    ),
    (settings(quantization_config={"quant_method": "fp8"}), r"weights are quantised \(fp8\)"),
    (only("model.gguf"), r"holds GGUF files"),
    (only("adapter_config.json"), r"holds an adapter alone"),
    (only("notes.txt"), r"has no config.json"),
]


@pytest.mark.parametrize(("damage", "words"), CASES, ids=[words[:30] for _, words in CASES])
def test_what_is_wrong_is_said(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path)
    check_model(ModelConfig(path=path), "model")
    damage(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        check_model(ModelConfig(path=path), "critic.model")
    assert str(caught.value).startswith(f"critic.model.path={path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "t5", "bert", "whisper", "roberta", "idefics3"])
def test_models_that_do_not_work_here_are_named(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model type '{model_type}'.* supported .*models.md"):
        check_model(ModelConfig(path=str(tmp_path)), "model")


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text", "mllama"])
def test_models_whose_backbone_is_not_apart_are_named(model_type: str, tmp_path: Path) -> None:
    """The engine needs hidden states; such models give logits alone."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"model type '{model_type}' is not supported: .* no backbone .*models.md"):
        check_model(ModelConfig(path=str(tmp_path)), "model")
    check_model(ModelConfig(path=str(tmp_path)), "model", trained=False)


def test_a_cache_that_cannot_be_sized_is_named(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma4").save_pretrained(tmp_path)
    check_model(ModelConfig(path=str(tmp_path)), "model", rollout="vllm")
    with pytest.raises(ConfigError, match=r"'gemma4' is not supported: sizing its key-value cache .*models.md"):
        check_model(ModelConfig(path=str(tmp_path)), "model", rollout="hf")


def test_a_model_with_parts_besides_text_passes(tmp_path: Path) -> None:
    """Their text alone is trained, as with every other language model."""
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    check_model(ModelConfig(path=str(tmp_path)), "model")


def test_a_model_of_fewer_layers_than_its_files_passes(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path)
    check_model(ModelConfig(path=path, override_config={"num_hidden_layers": 1}), "model")


def test_a_causal_model_with_a_field_of_encoders_passes(tmp_path: Path) -> None:
    make_model(make_config("gpt_neox")).save_pretrained(tmp_path)
    check_model(ModelConfig(path=str(tmp_path)), "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_directories_pass(family: str, tmp_path: Path) -> None:
    check_model(ModelConfig(path=save_model(family, tmp_path)), "model")


def test_quantised_weights_may_be_generated_with(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path)
    settings(quantization_config={"quant_method": "fp8"})(tmp_path)
    check_model(ModelConfig(path=path), "model", trained=False)


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model_dir(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no vocabulary: none of .*tokenizer.json"):
        load_tokenizer(path)
