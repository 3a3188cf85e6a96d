"""From the configuration to vLLM's arguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from verl.errors import ConfigError
from verl.models.shape import cached_token_bytes
from verl.workers.rollout.settings import cache_itemsize, max_model_len, vllm_cpu_cache_bytes
from verl.workers.rollout.vllm.images import image_arguments
from verl.workers.rollout.vllm.lora import MAX_RANKS
from verl.workers.rollout.vllm.worker import EXTENSION

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

#: arguments that :func:`engine_arguments` gives for an adapter
ADAPTER_ARGUMENTS = ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_target_modules")


def engine_arguments(
    model: ModelConfig,
    rollout: RolloutConfig,
    *,
    directory: Path,
    text_config: Any,
    architecture: str | None,
    device: torch.device,
    dtype: torch.dtype,
    world_size: int,
    local_world_size: int,
    reads_images: bool = False,
    adapter: Mapping[str, torch.Size] | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``.

    Args:
        model, rollout: sections of the configuration.
        directory: the model's files.
        text_config: the language model's Transformers configuration.
        architecture: name of the class that Transformers trains, where the model's files do not say it.
        device, dtype: of the weights.
        world_size: ranks of the training.
        local_world_size: of them, those on this machine.
        reads_images: whether requests may have images.
        adapter: shapes of the matrices of an adapter that comes beside the weights, by name; empty without one.

    Raises:
        ConfigError: a key has no meaning on this device or for this number of ranks.
    """
    cpu = device.type == "cpu"
    parallel = rollout.tensor_model_parallel_size
    if world_size % parallel or local_world_size % parallel:
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}: must divide the {local_world_size} "
            f"ranks of a machine ({world_size} in all), so that the ranks that share a model are neighbours"
        )
    if cpu and rollout.enable_chunked_prefill:
        raise ConfigError(
            "actor_rollout_ref.rollout.enable_chunked_prefill=True: on CPUs vLLM cannot rewind the random stream of a "
            "sample whose prompt is cut; leave it out"
        )
    length = max_model_len(rollout, text_config)
    chunked = not cpu if rollout.enable_chunked_prefill is None else rollout.enable_chunked_prefill
    arguments: dict[str, Any] = {
        "model": str(directory),
        "runner": "generate",
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "seed": 0,
        "load_format": "dummy",  # the first update brings the weights
        "generation_config": "vllm",  # sampling settings are the configuration's, not the model directory's
        "logprobs_mode": "processed_logprobs",
        "max_model_len": length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens
        if chunked
        else max(rollout.max_num_batched_tokens, length),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rollout.enable_prefix_caching is not False,
        "enforce_eager": cpu if rollout.enforce_eager is None else rollout.enforce_eager,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": parallel,
        "disable_custom_all_reduce": True,  # it expects to see the neighbours' GPUs
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
    }
    if reads_images:
        arguments |= image_arguments()
    if adapter:
        rank = next(shape[0] for name, shape in adapter.items() if name.endswith("lora_A"))
        room = next(size for size in MAX_RANKS if size >= rank)
        layers = sorted({name.split(".")[-2] for name in adapter})
        arguments |= dict(zip(ADAPTER_ARGUMENTS, (True, room, 1, 1, layers), strict=True))
    if world_size > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if cpu:
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(rollout, text_config, dtype, length, local_world_size)
    else:
        arguments["enable_sleep_mode"] = rollout.free_cache_engine
    overrides = dict(model.override_config or {})
    overrides.update(overrides.pop("model_config", None) or {})
    overrides.pop("attn_implementation", None)
    arguments["hf_overrides"] = _Overrides(overrides, architecture)
    extra = {key: value for key, value in rollout.engine_kwargs.vllm.items() if value is not None}
    if cpu and "kv_cache_memory_bytes" in extra:
        arguments.pop("kv_cache_memory_bytes")
    return {**arguments, **copy.deepcopy(extra)}


class _Overrides:
    """``model.override_config`` on the configuration that vLLM reads, and the class where the files name none."""

    def __init__(self, overrides: dict[str, Any], architecture: str | None) -> None:
        self.overrides = overrides
        self.architecture = architecture

    def __call__(self, config: Any) -> Any:
        from verl.models.loading import apply_overrides

        apply_overrides(config, self.overrides)
        if self.architecture is not None:
            config.architectures = [self.architecture]
        return config


def _cpu_cache_bytes(
    rollout: RolloutConfig, config: Any, dtype: torch.dtype, length: int, local_world_size: int
) -> int:
    """Bytes for the cache of ``max_num_seqs`` sequences, at most this rank's share of the free memory."""
    itemsize = cache_itemsize(rollout, dtype)
    token_bytes = cached_token_bytes(config, itemsize, parallel=rollout.tensor_model_parallel_size)
    one, wanted = (vllm_cpu_cache_bytes(sequences, token_bytes, length) for sequences in (1, rollout.max_num_seqs))
    share = int(psutil.virtual_memory().available * rollout.gpu_memory_utilization / local_world_size)
    if share < one:
        raise ConfigError(
            f"the cache of one sequence of {length} tokens needs {one / 2**20:.0f} MB, this "
            f"rank's share of the free memory is {share / 2**20:.0f} MB; raise actor_rollout_ref.rollout."
            "gpu_memory_utilization, or lower prompt_length, response_length or the number of ranks on this machine"
        )
    return min(wanted, share)
