"""Images of requests in the form of vLLM's own processors.

The trainer's processor has cut the images already. vLLM is given those patches, so both sides see the same numbers, and
an image that many requests share is prepared once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from verl.errors import ConfigError
from verl.models.vision import ImageTokens, PromptImages
from verl.workers.rollout.types import GenerationRequest


def image_arguments() -> dict[str, Any]:
    """Arguments of ``EngineArgs`` for a model that reads images; the user's own come on top.

    Raises:
        ConfigError: torchvision, without which vLLM has no such models, is missing.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "vLLM has models that read images only beside torchvision, which is not installed; install the one that "
            "fits your torch, or set actor_rollout_ref.rollout.name=hf"
        )
    return {
        "skip_tokenizer_init": False,  # vLLM's registry makes the model's processor, and that needs it
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,  # requests bring processed images,
        "mm_device_do_normalize": False,  # whose numbers are normalised already
        "skip_mm_profiling": True,
    }


def engine_input(request: GenerationRequest, tokens: ImageTokens | None, version: int) -> dict[str, Any]:
    """The prompt of a request as vLLM's engine takes it.

    Args:
        request: what is asked.
        tokens: how the model reads images.
        version: of the weights; features of images that were computed with others are not those of this one.
    """
    context = request.context_ids
    if request.images is None or tokens is None:
        return {"type": "token", "prompt_token_ids": context}
    return {
        "type": "multimodal",
        "prompt_token_ids": context,
        "mm_kwargs": _items(request.images, tokens),
        "mm_hashes": {"image": [f"{key}-{version}" for key in request.images.keys]},
        "mm_placeholders": {"image": _places(context, request.images, tokens)},
    }


def _items(images: PromptImages, tokens: ImageTokens) -> Any:
    from transformers import BatchFeature
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems

    inputs = BatchFeature({"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw})
    return MultiModalKwargsItems.from_hf_inputs(inputs, _create_qwen2vl_field_factory(tokens.merge)(inputs))


def _places(context: list[int], images: PromptImages, tokens: ImageTokens) -> list[Any]:
    """Where the features of each image go."""
    from vllm.multimodal.inputs import PlaceholderRange

    grid = images.grid_thw.numpy()
    _, places, _ = tokens.positions(np.array(context), grid, images.starts)
    ends = tokens.counts(grid).cumsum()
    return [
        PlaceholderRange(offset=int(places[end - count]), length=int(count))
        for end, count in zip(ends.tolist(), tokens.counts(grid).tolist(), strict=True)
    ]
