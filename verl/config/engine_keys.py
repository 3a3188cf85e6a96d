"""Which settings of vLLM and SGLang may be passed on under their own names (``rollout.engine_kwargs``)."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from verl.config.base import suggestion

#: arguments of vLLM that other keys stand for, or that the exchange of weights and tokens depends on
VLLM_KEYS = {
    "model": "the model is model.path; leave it out",
    "tokenizer": "the engine works on token ids; leave it out",
    "skip_tokenizer_init": "the engine works on token ids; leave it out",
    "dtype": "use rollout.dtype",
    "seed": "every sample has its own seed, from trainer.seed; leave it out",
    "max_model_len": "use rollout.max_model_len",
    "max_num_seqs": "use rollout.max_num_seqs",
    "max_num_batched_tokens": "use rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "use rollout.gpu_memory_utilization",
    "tensor_parallel_size": "use rollout.tensor_model_parallel_size",
    "enforce_eager": "use rollout.enforce_eager",
    "enable_chunked_prefill": "use rollout.enable_chunked_prefill",
    "enable_prefix_caching": "use rollout.enable_prefix_caching",
    "load_format": "weights are always the policy's; leave it out",
    "logprobs_mode": "log-probabilities are always those of the distribution that is sampled from; leave it out",
    "enable_sleep_mode": "use rollout.free_cache_engine",
    "distributed_executor_backend": "the engine runs inside the training processes; leave it out",
    "enable_lora": "set by model.lora_rank and rollout.lora_merge; leave it out",
    "max_lora_rank": "set by model.lora_rank; leave it out",
    "max_loras": "there is one adapter, the policy's; leave it out",
    "max_cpu_loras": "there is one adapter, the policy's; leave it out",
    "lora_target_modules": "set by model.target_modules; leave it out",
    "worker_extension_cls": "weight sync needs its own; leave it out",
    "trust_remote_code": "use model.trust_remote_code",
    "hf_overrides": "use model.override_config",
    "hf_config_path": "the model is model.path; leave it out",
    "model_class_overrides": "the model's class is that of model.path; leave it out",
    "runner": "the engine generates; leave it out",
    "convert": "the engine generates; leave it out",
    "generation_config": "sampling is set by rollout's own keys; leave it out",
    "override_generation_config": "sampling is set by rollout's own keys; leave it out",
    "disable_sliding_window": "the model would be another one than is trained; leave it out",
    "return_sampling_mask": "its tokens are not read; leave it out",
}

#: the same for SGLang
SGLANG_KEYS = {
    "model_path": "the model is model.path; leave it out",
    "tokenizer_path": "the engine works on token ids; leave it out",
    "skip_tokenizer_init": "the engine works on token ids; leave it out",
    "trust_remote_code": "use model.trust_remote_code",
    "json_model_override_args": "use model.override_config",
    "device": "use trainer.device",
    "dtype": "use rollout.dtype",
    "random_seed": "every sample has its own seed, from trainer.seed; leave it out",
    "load_format": "weights are always the policy's; leave it out",
    "sampling_backend": "seeds and log-probabilities are those of the built-in sampler; leave it out",
    "context_length": "use rollout.max_model_len",
    "max_running_requests": "use rollout.max_num_seqs",
    "max_prefill_tokens": "use rollout.max_num_batched_tokens",
    "chunked_prefill_size": "use rollout.enable_chunked_prefill and rollout.max_num_batched_tokens",
    "disable_radix_cache": "use rollout.enable_prefix_caching",
    "disable_cuda_graph": "use rollout.enforce_eager",
    "mem_fraction_static": "use rollout.gpu_memory_utilization",
    "tp_size": "use rollout.tensor_model_parallel_size",
    "enable_lora": "set by model.lora_rank and rollout.lora_merge; leave it out",
    "max_lora_rank": "set by model.lora_rank; leave it out",
    "max_loras_per_batch": "there is one adapter, the policy's; leave it out",
    "lora_target_modules": "set by model.target_modules; leave it out",
    "lora_paths": "the adapter is the policy's; leave it out",
    "base_gpu_id": "the server runs on its worker's GPUs; leave it out",
    "enable_memory_saver": "use rollout.free_cache_engine",
    "enable_weights_cpu_backup": "use rollout.free_cache_engine",
    "host": "a worker's own server is for the worker alone; rollout.server_urls names servers that run elsewhere",
    "port": "a worker's own server is for the worker alone; rollout.server_urls names servers that run elsewhere",
    "api_key": "a worker's own server is for the worker alone; leave it out",
    "skip_server_warmup": "the server has no weights when it starts; leave it out",
    "preferred_sampling_params": "sampling is set by rollout's own keys; leave it out",
    "sampling_defaults": "sampling is set by rollout's own keys; leave it out",
    "allow_auto_truncate": "a prompt that is cut would not be the one that is trained; leave it out",
    "is_embedding": "the engine generates; leave it out",
    "weight_version": "versions are counted by updates; leave it out",
}

_RANKS = (
    "changes how ranks share the model, and weight sync and requests follow rollout.tensor_model_parallel_size; every "
    "group of ranks is a replica already, so leave it out"
)
_EXPERTS = "spreads experts over ranks, which weight sync does not support; leave it out"
_SPECULATION = (
    "speculative decoding is not verified to sample from the policy, and log-probabilities may be missing; leave it out"
)
_WEIGHTS = "the weights are the policy's in rollout.dtype, and updates write them in place; leave it out"
_SAMPLING = (
    "changes the distribution that is sampled from, so that log-probabilities are not the policy's; leave it out"
)
_OLD_KEYS = "keeps keys and values of older weights in places that updates do not empty; leave it out"
_APPROXIMATE = "computes attention approximately, so that samples are not the policy's; leave it out"

#: names that begin so, and why they are refused
_REFUSED: dict[str, tuple[tuple[str, str], ...]] = {
    "vllm": (
        (r"data_parallel_|_api_process|pipeline_parallel_|prefill_context_|decode_context_|nnodes|node_rank", _RANKS),
        (
            r"master_(addr|port)|device_ids|enable_dbo|ubatch_size|dcp_|cp_kv_cache|enable_hc_sp|fully_sharded_loras",
            _RANKS,
        ),
        (
            r"enable_expert_|enable_eplb|eplb_|expert_placement|enable_elastic_ep|elastic_ep|enable_ep_|all2all_",
            _EXPERTS,
        ),
        (r"speculative_|spec_(method|model|tokens)|diffusion_config", _SPECULATION),
        (r"quantization|allow_deprecated_quantization|cpu_offload_|offload_|model_weights|weight_transfer_", _WEIGHTS),
        (r"logits_processors|watermark_config|use_fp64_gumbel|reasoning_config", _SAMPLING),
        (r"kv_transfer_|kv_offloading_|ec_transfer_|ec_manager_|enable_mamba_shared_prefix", _OLD_KEYS),
        (r"kv_sharing_fast_prefill|swa_bounded_replay|video_pruning|sparse_indexer_", _APPROXIMATE),
        (
            r"worker_cls|scheduler_cls|async_scheduling|stream_interval",
            "the exchange of tokens depends on it; leave it out",
        ),
    ),
    "sglang": (
        (r"dp_size|pp_|dcp_|attn_dp_|attn_cp_|moe_dp_|dwdp_|enable_dp_|enable_prefill_cp|cp_strategy|nnodes", _RANKS),
        (r"node_rank|dist_init_addr|gpu_id_step|enable_attn_tp_|enable_kv_cache_sharding|shared_experts_tp", _RANKS),
        (r"disaggregation_|encoder_only|language_only|enable_pd|use_ray|decoupled_", _RANKS),
        (r"ep_|elastic_ep|enable_eplb|eplb_|init_expert_|moe_a2a_|max_ep_size|enable_elastic|moe_dense_tp", _EXPERTS),
        (r"kt_|enable_paged_experts|paged_experts", _EXPERTS),
        (r"speculative_|enable_multi_layer_eagle|uno_lora|dllm_", _SPECULATION),
        (r"quantiz|modelopt_|rl_quant_|torchao_|custom_weight_|remote_instance_|cpu_offload_|offload_|ple_", _WEIGHTS),
        (r"enable_quant_communications|enable_w4a4|enable_int8_mamba|weight_cache_|model_loader_extra", _WEIGHTS),
        (r"enable_custom_logit_processor|enable_watermark|watermark_|enable_mis|mlx_enable_sampling", _SAMPLING),
        (
            r"enable_hierarchical_|hicache_|enable_lmcache|lmcache_|enable_flexkv|flexkv_|enable_unified_cache",
            _OLD_KEYS,
        ),
        (r"radix_cache_backend|enable_session_radix|unified_cache_|enable_linker", _OLD_KEYS),
        (r"enable_double_sparsity|ds_|enable_hisparse|hisparse_|enable_(de|en)coder_swa|qsa_", _APPROXIMATE),
        (
            r"grpc|smg_|sidecar|ssl_|enable_http2|http2_|admin_api_key|tokenizer_worker_num",
            "calls go by plain HTTP; leave it out",
        ),
    ),
}

#: names that begin so make samples differ from the policy's by more than rounding, which a correction accounts for
_ROUGH: dict[str, str] = {
    "vllm": r"kv_cache_dtype|calculate_kv_scales|mamba_(ssm_)?cache_dtype|enable_mamba_cache_stoch|mm_encoder_attn_d",
    "sglang": r"kv_cache_dtype|mamba_ssm_dtype|enable_mamba_cache_stoch|fp8_gemm|fp4_gemm|prefill_kv_cache_dequant",
}
#: settings of a running SGLang server that are looked at when it is given by its address
SERVER_SETTINGS = (
    "speculative_algorithm", "quantization", "torchao_config", "enable_custom_logit_processor", "enable_watermark",
    "preferred_sampling_params", "enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_hisparse",
    "allow_auto_truncate", "dllm_algorithm",
)  # fmt: skip
_EXACT_VALUES = (None, False, "auto")


def engine_key_problems(engine: str, given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the settings for an engine, one sentence each.

    Args:
        engine: ``"vllm"`` or ``"sglang"``.
        given: its settings by name.
    """
    refused = VLLM_KEYS if engine == "vllm" else SGLANG_KEYS
    known = known_arguments(engine)
    for key, value in given.items():
        reason = refused.get(key) or next((why for names, why in _REFUSED[engine] if re.match(names, key)), None)
        if value is None and key not in refused:
            continue  # left out
        if reason is not None:
            yield f"engine_kwargs.{engine}.{key}={value!r}: {reason}"
        elif known is not None and key not in known:
            yield (
                f"engine_kwargs.{engine}.{key}={value!r}: the installed {_TITLES[engine]} has no such argument"
                f"{suggestion(key, tuple(known))}; correct or leave it out"
            )


def rough_engine_keys(engine: str, given: Mapping[str, Any], dtype: str) -> list[str]:
    """Settings under which samples are not the policy's to within rounding.

    Args:
        engine: ``rollout.name``.
        given: the engine's settings by name.
        dtype: ``rollout.dtype``, under which a cache of the same type is exact.
    """
    if engine not in _ROUGH:
        return []
    return [
        f"{key}={value!r}"
        for key, value in given.items()
        if re.match(_ROUGH[engine], key) and value not in (*_EXACT_VALUES, dtype)
    ]


_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_SOURCES = {
    "vllm": (("engine/arg_utils.py",), "EngineArgs"),
    "sglang": (("srt/server_args.py", "srt/arg_groups/fields/*.py"), None),
}


@cache
def known_arguments(engine: str) -> frozenset[str] | None:
    """Names that the installed engine takes, read from its source: importing it takes seconds and changes the process.

    ``None`` where it is not installed, or its source says it in another way.
    """
    try:
        spec = importlib.util.find_spec(engine)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    patterns, class_name = _SOURCES[engine]
    found: set[str] = set()
    for place in spec.submodule_search_locations:
        for pattern in patterns:
            for file in Path(place).glob(pattern):
                found |= _fields(file, class_name)
    return frozenset(found) if len(found) > 20 else None


def _fields(file: Path, class_name: str | None) -> set[str]:
    """Annotated names in the bodies of classes: of the one that is named, or of all."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    return {
        item.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and class_name in (None, node.name)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
