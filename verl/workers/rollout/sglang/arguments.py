"""From the configuration to SGLang's arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from verl.errors import ConfigError
from verl.models.shape import cached_token_bytes
from verl.workers.rollout.settings import SGLANG_SPARE_POSITIONS, cache_itemsize, max_model_len, sglang_cpu_cache_tokens
from verl.workers.rollout.sglang.lora import SLOTS
from verl.workers.rollout.sglang.sampler import BACKEND

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig


def server_arguments(
    model: ModelConfig,
    rollout: RolloutConfig,
    *,
    directory: Path,
    text_config: Any,
    architecture: str | None,
    device: torch.device,
    dtype: torch.dtype,
    local_world_size: int,
    adapter: Mapping[str, torch.Size] | None = None,
) -> dict[str, Any]:
    """Arguments of SGLang's ``ServerArgs`` for the server of one worker, without its address.

    Args:
        model, rollout: sections of the configuration.
        directory: the model's files.
        text_config: the language model's Transformers configuration.
        architecture: name of the class that Transformers trains, where the model's files do not say it.
        device, dtype: of the weights.
        local_world_size: ranks of the training on this machine.
        adapter: shapes of the matrices of an adapter that comes beside the weights, by name; empty without one.

    Raises:
        ConfigError: the cache of one sequence does not fit into this worker's share of the memory.
    """
    cpu = device.type == "cpu"
    length = max_model_len(rollout, text_config)
    chunked = rollout.enable_chunked_prefill is not False
    arguments: dict[str, Any] = {
        "model_path": str(directory),
        **({"tokenizer_path": model.tokenizer_path} if model.tokenizer_path else {}),
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "random_seed": 0,
        "load_format": "dummy",  # the first update brings the weights
        "sampling_backend": BACKEND,
        "context_length": length + SGLANG_SPARE_POSITIONS,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens if chunked else -1,
        "max_prefill_tokens": max(rollout.max_num_batched_tokens, 1 if chunked else length),
        "disable_radix_cache": rollout.enable_prefix_caching is False,
        "disable_cuda_graph": cpu if rollout.enforce_eager is None else rollout.enforce_eager,
        # the penalty of a token must be known before the next one is drawn
        "disable_overlap_schedule": cpu or {rollout.repetition_penalty, rollout.val_kwargs.repetition_penalty} != {1.0},
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "tp_size": rollout.tensor_model_parallel_size,
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if cpu:
        arguments["attention_backend"] = "torch_native"  # SGLang's own choice needs a processor with AMX
        arguments["max_total_tokens"] = _cpu_cache_tokens(rollout, text_config, dtype, length, local_world_size)
    else:
        arguments["enable_memory_saver"] = rollout.free_cache_engine
        arguments["enable_weights_cpu_backup"] = rollout.free_cache_engine
    if adapter:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(shape[0] for name, shape in adapter.items() if name.endswith("lora_A")),
            "lora_target_modules": sorted(layers_of(adapter)),
            "max_loras_per_batch": SLOTS,
        }
        if cpu:
            arguments["lora_backend"] = "torch_native"  # the others are Triton kernels
    overrides = dict(model.override_config or {})
    overrides.update(overrides.pop("model_config", None) or {})
    overrides.pop("attn_implementation", None)
    if architecture is not None:
        overrides["architectures"] = [architecture]
    arguments["json_model_override_args"] = json.dumps(overrides)
    extra = {key: value for key, value in rollout.engine_kwargs.sglang.items() if value is not None}
    return {**arguments, **copy.deepcopy(extra)}


def layers_of(adapter: Mapping[str, torch.Size]) -> set[str]:
    """Last parts of the names of the layers that have adapters."""
    return {name.split(".")[-2] for name in adapter}


def _cpu_cache_tokens(
    rollout: RolloutConfig, config: Any, dtype: torch.dtype, length: int, local_world_size: int
) -> int:
    """Tokens of cache for ``max_num_seqs`` sequences, at most this rank's share of the free memory."""
    itemsize = cache_itemsize(rollout, dtype)
    per_token = cached_token_bytes(config, itemsize, parallel=rollout.tensor_model_parallel_size)
    share = int(psutil.virtual_memory().available * rollout.gpu_memory_utilization / local_world_size) // per_token
    if share < length + SGLANG_SPARE_POSITIONS:
        raise ConfigError(
            f"the cache of one sequence of {length} tokens needs {length * per_token / 2**20:.0f} MB, this rank's "
            f"share of the free memory is {share * per_token / 2**20:.0f} MB; raise actor_rollout_ref.rollout."
            "gpu_memory_utilization, or lower prompt_length, response_length or the number of ranks on this machine"
        )
    return int(min(sglang_cpu_cache_tokens(rollout.max_num_seqs, length), share))
