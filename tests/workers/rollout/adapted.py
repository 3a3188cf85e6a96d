"""Models with low-rank adapters, as sources of weights for the rollout tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.workers.rollout.helpers import generate, make_model, random_prompts, reference_logits, served_everywhere
from verl.models.lora import LoraSettings, adapter_shapes, add_adapters, is_adapter_name
from verl.workers.engine.base import WeightForm
from verl.workers.rollout.types import SamplingParams

#: a rank that is none of those that engines have room for
RANK, ALPHA = 6, 12.0
PROMPTS = random_prompts([5, 17, 9, 3])
SAMPLED = SamplingParams(16, seed=3, ignore_eos=True)


def make_adapted_model(
    *, targets: tuple[str, ...] = ("all-linear",), rank: int = RANK, **settings: Any
) -> torch.nn.Module:
    """A random model with an adapter that matters; ``settings`` of its configuration."""
    model = make_model(served_everywhere(**settings), spread=2.0)
    add_adapters(model, LoraSettings(rank, ALPHA, targets), seed=0)
    change_adapter(model, seed=1)
    return model


@torch.no_grad()
def change_adapter(model: torch.nn.Module, seed: int) -> None:
    """What an optimizer step does: other values in place, of the adapter alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter_name(name):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


class AdaptedModel:
    """A model with an adapter as a training engine gives it; ``streams`` keeps its tensors from being read in place."""

    def __init__(self, model: torch.nn.Module, *, streams: bool = False) -> None:
        self.model = model
        self.streams = streams

    def local_tensors(self, form: WeightForm = "merged") -> dict[str, torch.Tensor] | None:
        return None if self.streams else self._tensors(form)

    def named_tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors(form).items():
            yield name, tensor.clone()

    def _tensors(self, form: WeightForm) -> dict[str, torch.Tensor]:
        assert form != "merged"
        tensors = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        adapter = {name: tensor for name, tensor in tensors.items() if is_adapter_name(name)}
        base = {name: tensor for name, tensor in tensors.items() if name not in adapter}
        return base | adapter if form == "apart" else adapter


def adapter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all adapter matrices."""
    return sum(tensor.nbytes for name, tensor in model.named_parameters() if is_adapter_name(name))


def adapter_mb(model_dir: str, *, rank: int) -> float:
    """Size of adapters beside all linear layers of a model, in float32."""
    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = adapter_shapes(model, LoraSettings(rank, float(rank), ("all-linear",)))
    return sum(shape.numel() for shape in shapes.values()) * 4 / 2**20


def assert_served(model: torch.nn.Module, engine: Any, atol: float = 1e-5) -> None:
    """The engine generates with the model's weights and adapter as they are now."""
    greedy = SamplingParams(10, temperature=0.0, ignore_eos=True)
    for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, greedy), strict=True):
        assert completion.token_ids == reference_logits(model, prompt, completion.token_ids).argmax(-1).tolist()
    for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, SAMPLED), strict=True):
        table = reference_logits(model, prompt, completion.token_ids).log_softmax(-1)
        expected = table[torch.arange(len(completion.token_ids)), torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=atol, rtol=0)
