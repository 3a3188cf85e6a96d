"""Small models, engines and an independent reference for the rollout tests."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from tests.models.families import COMMON, make_config
from tests.models.images import IMAGE, model_arguments
from verl.config import ModelConfig, RolloutConfig
from verl.models.loading import language_model_class
from verl.models.vision import PromptImages
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams


def make_model(family: str | PreTrainedConfig, *, seed: int = 0, spread: float = 6.0) -> torch.nn.Module:
    """A random model, evaluated by Transformers' plain attention; ``spread`` makes its predictions less uniform."""
    torch.manual_seed(seed)
    config = make_config(family) if isinstance(family, str) else family
    model = language_model_class(config).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(0.0, 0.5)
    return model


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint has, as the live tensors."""
    return dict(model.state_dict(keep_vars=True))


def make_engine(model: torch.nn.Module, directory: Path, **rollout: Any) -> HFRolloutEngine:
    """An engine of the model's architecture, without weights."""
    model.config.save_pretrained(directory)
    return hf_rollout(str(directory), **rollout)


def hf_rollout(path: str, **rollout: Any) -> HFRolloutEngine:
    """An engine for the model directory's architecture, without weights."""
    rollout.setdefault("dtype", "float32")
    return HFRolloutEngine(ModelConfig(path=path), RolloutConfig(**rollout), device="cpu")


def served_everywhere(family: str = "qwen2", **settings: Any) -> PreTrainedConfig:
    """A configuration whose attention heads have a size that every engine serves."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return AutoConfig.for_model(family, **{**COMMON, **shape, **settings})


def missing_package(name: str) -> str | None:
    """Why the engine called ``name`` cannot be tested here; None when it can."""
    packages = {"vllm": ("vllm", "make install-vllm"), "sglang": ("sglang", "make install-sglang")}
    package, remedy = packages.get(name, (None, None))
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"the package {package} is not installed ({remedy})"


def make_vllm_engine(model: torch.nn.Module, directory: Path, **rollout: Any) -> RolloutEngine:
    """A vLLM engine of the model's architecture, without weights."""
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    model.config.save_pretrained(directory)
    settings = {"name": "vllm", "dtype": "float32", "prompt_length": 28, "response_length": 100, "max_num_seqs": 64}
    return VLLMRolloutEngine(ModelConfig(path=str(directory)), RolloutConfig(**{**settings, **rollout}), device="cpu")


def make_sglang_engine(model: torch.nn.Module, directory: Path, **rollout: Any) -> RolloutEngine:
    """An SGLang engine of the model's architecture, without weights."""
    from verl.workers.rollout.sglang.engine import SGLangRolloutEngine

    model.config.save_pretrained(directory)
    settings = {"name": "sglang", "dtype": "float32", "prompt_length": 28, "response_length": 100, "max_num_seqs": 64}
    return SGLangRolloutEngine(ModelConfig(path=str(directory)), RolloutConfig(**{**settings, **rollout}), device="cpu")


async def hand_over(engine: RolloutEngine, model: torch.nn.Module, version: int = 1, *, live: bool = True) -> None:
    """Give the engine the model's weights."""
    await engine.begin_update(version)
    await engine.load(weights_of(model).items(), live=live)
    await engine.end_update()


def loaded_engine(model: torch.nn.Module, directory: Path, **rollout: Any) -> HFRolloutEngine:
    """An engine that reads the model's weights in place."""
    engine = make_engine(model, directory, **rollout)
    asyncio.run(hand_over(engine, model))
    return engine


def generate(
    engine: RolloutEngine,
    prompts: Iterable[list[int]],
    params: SamplingParams | list[SamplingParams],
    images: Iterable[Mapping[str, Any] | None] | None = None,
) -> list[Completion]:
    """Serve prompts in one call, with the images that they have."""
    prompts = list(prompts)
    settings = params if isinstance(params, list) else [params] * len(prompts)
    shown = [None] * len(prompts) if images is None else [PromptImages.of(inputs) for inputs in images]
    requests = [
        GenerationRequest(prompt, one, f"request-{number}", images=image)
        for number, (prompt, one, image) in enumerate(zip(prompts, settings, shown, strict=True))
    ]
    return asyncio.run(engine.generate_many(requests))


def random_prompts(lengths: Iterable[int], vocab: int = 61, seed: int = 1) -> list[list[int]]:
    """Prompts of the given lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def reference_logits(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits (T,V) that Transformers gives before each of ``tokens``, from one forward of the whole sequence."""
    ids = torch.tensor([prompt + tokens])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()


def reference_greedy(
    model: torch.nn.Module,
    prompt: list[int],
    max_tokens: int,
    images: Mapping[str, Any] | None = None,
    image_token: int = IMAGE,
) -> list[int]:
    """What Transformers' ``generate`` gives for one prompt, up to and including an end-of-sequence token."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        use_cache=True,
        **model_arguments(ids, images, image_token),
    )
    return out[0, len(prompt) :].tolist()
