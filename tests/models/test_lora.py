"""Low-rank adapters: the arithmetic, the choice of layers, the file format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.config import ModelConfig
from verl.errors import CheckpointError, ConfigError
from verl.models.lora import (
    LoraLinear,
    LoraSettings,
    adapter_layers,
    adapters_off,
    add_adapters,
    is_adapter_name,
    load_adapter,
    merged,
    save_adapter,
)

IDS = torch.tensor([[5, 9, 30, 2, 77, 41]])


def load(model_dir: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def settings(**changes: object) -> LoraSettings:
    return LoraSettings(**{"rank": 4, "alpha": 8.0, "targets": ("all-linear",), **changes})  # type: ignore[arg-type]


def disturbed(model: torch.nn.Module) -> torch.nn.Module:
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) * 0.1)
    return model


def test_a_layer_computes_the_formula() -> None:
    model = torch.nn.Module()
    model.proj = torch.nn.Linear(2, 2, bias=False)
    model.proj.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    add_adapters(model, settings(rank=1, alpha=3.0, targets=("proj",)), seed=1)
    model.proj.lora_A.data = torch.tensor([[1.0, 2.0]])
    model.proj.lora_B.data = torch.tensor([[10.0], [0.0]])
    # x = (1, 1): W x = (1, 1); A x = 3; B A x = (30, 0); times alpha / r = 3
    assert model.proj(torch.ones(1, 2)).tolist() == [[91.0, 1.0]]
    with adapters_off(model):
        assert model.proj(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    whole = merged(model.proj.weight, model.proj.lora_A, model.proj.lora_B, 3.0)
    assert whole.tolist() == [[31.0, 60.0], [0.0, 1.0]]


def test_fresh_adapters_change_nothing_and_off_is_the_base(tiny_model_dir: str) -> None:
    base = logits(load(tiny_model_dir))
    model = load(tiny_model_dir)
    add_adapters(model, settings(), seed=1)
    assert torch.equal(logits(model), base)
    disturbed(model)
    assert not torch.allclose(logits(model), base, atol=1e-3)
    with adapters_off(model):
        assert torch.equal(logits(model), base)


def test_only_the_adapters_train_and_start_alike_for_a_seed(tiny_model_dir: str) -> None:
    first, second, third = (load(tiny_model_dir) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (third, 2)):
        add_adapters(model, settings(), seed=seed)
    trained = {name for name, p in first.named_parameters() if p.requires_grad}
    assert trained
    assert all(is_adapter_name(name) for name in trained)
    a, b, c = (dict(model.named_parameters())["model.layers.1.mlp.up_proj.lora_A"] for model in (first, second, third))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        (("all-linear",), (), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (("all-linear",), ("down_proj", "o_proj"), {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        (("q_proj", "v_proj"), (), {"q_proj", "v_proj"}),
        ((r".*layers\.1\.self_attn\.[qk]_proj",), (), {"q_proj", "k_proj"}),
    ],
)
def test_layers_are_chosen(
    tiny_model_dir: str, targets: tuple[str, ...], exclude: tuple[str, ...], expected: set[str]
) -> None:
    model = load(tiny_model_dir)
    names = add_adapters(model, settings(targets=targets, exclude=exclude), seed=1)
    assert {name.rpartition(".")[2] for name in names} == expected
    assert isinstance(model.get_submodule(names[0]), LoraLinear)
    assert len(names) == len(expected) * (1 if "layers" in targets[0] else 2)


def test_a_choice_of_nothing_and_of_the_output_is_refused(tiny_model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"chooses no linear layer .*it has .*q_proj"):
        add_adapters(load(tiny_model_dir), settings(targets=("query",)), seed=1)
    with pytest.raises(ConfigError, match="lm_head is the output"):
        add_adapters(load(tiny_model_dir), settings(targets=("lm_head", "q_proj")), seed=1)


def test_files_are_read_back_and_by_peft(tiny_model_dir: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = load(tiny_model_dir)
    add_adapters(model, settings(), seed=1)
    disturbed(model)
    tensors = {name: p.detach() for name, p in model.named_parameters() if is_adapter_name(name)}
    save_adapter(tensors, settings(), tiny_model_dir, tmp_path / "adapter")
    again = load(tiny_model_dir)
    add_adapters(again, settings(adapter_path=str(tmp_path / "adapter")), seed=9)
    assert torch.equal(logits(again), logits(model))
    theirs = peft.PeftModel.from_pretrained(load(tiny_model_dir), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=1e-5)
    # and the other way round
    fresh = peft.get_peft_model(
        load(tiny_model_dir),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    ).eval()
    fresh.save_pretrained(tmp_path / "theirs")
    ours = load(tiny_model_dir)
    add_adapters(ours, settings(targets=("q_proj", "v_proj"), adapter_path=str(tmp_path / "theirs")), seed=1)
    torch.testing.assert_close(logits(ours), logits(fresh), rtol=0, atol=1e-5)


def test_an_adapter_that_does_not_fit_is_explained(tiny_model_dir: str, tmp_path: Path) -> None:
    model = load(tiny_model_dir)
    add_adapters(model, settings(), seed=1)
    tensors = {name: p.detach() for name, p in model.named_parameters() if is_adapter_name(name)}
    save_adapter(tensors, settings(), tiny_model_dir, tmp_path / "adapter")
    other = load(tiny_model_dir)
    add_adapters(other, settings(rank=2), seed=1)
    with pytest.raises(CheckpointError, match=r"has r=4, lora_alpha=8\.0; set model\.lora_rank"):
        load_adapter(other, settings(rank=2), tmp_path / "adapter")
    fewer = load(tiny_model_dir)
    add_adapters(fewer, settings(targets=("q_proj",)), seed=1)
    with pytest.raises(CheckpointError, match="target_modules differ"):
        load_adapter(fewer, settings(targets=("q_proj",)), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="there is no adapter in"):
        load_adapter(model, settings(), tmp_path)


def test_settings_come_from_the_model_section() -> None:
    assert LoraSettings.of(ModelConfig()) is None
    lora = LoraSettings.of(ModelConfig(lora_rank=8, lora_alpha=32, target_modules=["q_proj"]))
    assert lora is not None
    assert (lora.rank, lora.scaling, lora.targets) == (8, 4.0, ("q_proj",))
