"""What every engine reads from the model's directory and from the configuration in the same way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import ConfigError
from verl.utils.device import default_compute_dtype

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
}


_VLLM_CPU_BLOCK = 128  # tokens in a block of vLLM's cache on CPUs
#: positions that SGLang keeps free behind the longest sequence
SGLANG_SPARE_POSITIONS = 8


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The type that ``rollout.dtype`` stands for on a device.

    Raises:
        ConfigError: the name is unknown.
    """
    if name in (None, "auto"):
        return default_compute_dtype(device)
    if name not in _DTYPES:
        raise ConfigError(f"rollout.dtype={name!r}: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[str(name)]


def cache_itemsize(rollout: RolloutConfig, dtype: torch.dtype) -> int:
    """Bytes of a number in the key-value cache: those of the weights' type unless the engine's settings say another."""
    given = getattr(rollout.engine_kwargs, rollout.name, {})  # hf has none
    name = str(given.get("kv_cache_dtype") or "auto")
    if name == "auto":
        return dtype.itemsize
    if name in _DTYPES:
        return _DTYPES[name].itemsize
    return 1  # both engines know types of eight bits and fewer besides


def vllm_cpu_cache_bytes(sequences: int, token_bytes: int, length: int) -> int:
    """Bytes of vLLM's cache on a CPU for a number of sequences; one block is never used.

    Args:
        sequences: that it holds.
        token_bytes: of a cached token on one rank.
        length: tokens of the longest sequence.
    """
    return (sequences * -(-length // _VLLM_CPU_BLOCK) + 1) * token_bytes * _VLLM_CPU_BLOCK


def sglang_cpu_cache_tokens(sequences: int, length: int) -> int:
    """Tokens of SGLang's cache on a CPU for a number of sequences of a length."""
    return sequences * (length + SGLANG_SPARE_POSITIONS)


def max_model_len(rollout: RolloutConfig, text_config: Any) -> int:
    """Prompt and response tokens of the longest sequence: as configured, and no more than the model has positions for.

    Args:
        rollout: the ``rollout`` section.
        text_config: the language model's Transformers configuration.

    Raises:
        ConfigError: ``max_model_len`` was given and the model has fewer positions.
    """
    wanted = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    positions = getattr(text_config, "max_position_embeddings", None) or wanted
    if wanted <= positions:
        return int(wanted)
    if rollout.max_model_len:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={wanted}: the model has {positions} positions; lower it, or set "
            "model.override_config.max_position_embeddings"
        )
    logger.warning(
        "prompt_length + response_length = %d, but the model has %d positions; longer requests will be refused",
        wanted,
        positions,
    )
    return int(positions)


def special_tokens(
    model_config: ModelConfig, directory: Path, config: Any, tokenizer: Any | None
) -> tuple[frozenset[int], int]:
    """End-of-sequence tokens from the generation config, the model config and the tokenizer; and the padding token.

    Args:
        model_config: the ``model`` section.
        directory: the model's files.
        config: its Transformers configuration.
        tokenizer: the policy's tokenizer; loaded from the directory when None and there is one.
    """
    from transformers import GenerationConfig

    text_config = config.get_text_config()  # where a vision-language model says it
    eos: set[int] = {*_as_ids(getattr(config, "eos_token_id", None)), *_as_ids(text_config.eos_token_id)}
    pad = getattr(config, "pad_token_id", None)
    pad = text_config.pad_token_id if pad is None else pad
    try:
        generation = GenerationConfig.from_pretrained(directory)
    except OSError:
        logger.debug("%s has no generation config", directory)
    else:
        eos.update(_as_ids(generation.eos_token_id))
        pad = generation.pad_token_id if pad is None else pad
    if tokenizer is None and (model_config.tokenizer_path or any(directory.glob("tokenizer*"))):
        from verl.utils.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(
            model_config.tokenizer_path or str(directory), trust_remote_code=model_config.trust_remote_code
        )
    if tokenizer is not None:
        eos.update(_as_ids(tokenizer.eos_token_id))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else pad
    if pad is None:
        pad = min(eos) if eos else 0
    return frozenset(eos), int(pad)


def unsampled_of(model_config: ModelConfig, size: int, tokenizer: Any | None) -> tuple[int, ...]:
    """Tokens without text, which no engine samples.

    Args:
        model_config: the ``model`` section.
        size: rows of the model's embedding.
        tokenizer: the policy's tokenizer; None: that of the model's directory, if there is one.
    """
    from verl.utils.tokenizer import textless_tokens, unsampled_tokens

    if tokenizer is not None:
        return textless_tokens(tokenizer, size)
    return unsampled_tokens(model_config.path, model_config.tokenizer_path, model_config.trust_remote_code, size)


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]
