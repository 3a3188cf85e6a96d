"""Settings of rollout engines under their own names, and of the sandbox."""

from __future__ import annotations

from tests.e2e.misuse.case import Case

ROLLOUT = "actor_rollout_ref.rollout"


def of_engine(name: str, key: str, value: str, *words: str, more: tuple[str, ...] = ()) -> Case:
    """A setting that an engine must not be given."""
    return Case(
        f"{name} {key}",
        "train",
        [f"{ROLLOUT}.name={name}", f"+{ROLLOUT}.engine_kwargs.{name}.{key}={value}", *more],
        words=[f"engine_kwargs.{name}.{key.split('.')[0]}", *words],
    )


CASES = [
    of_engine("vllm", "speculative_config.method", "ngram", "speculative decoding", "leave it out"),
    of_engine("vllm", "data_parallel_size", "2", "tensor_model_parallel_size", "leave it out"),
    of_engine("vllm", "pipeline_parallel_size", "2", "tensor_model_parallel_size", "leave it out"),
    of_engine("vllm", "enable_expert_parallel", "True", "experts"),
    of_engine("vllm", "quantization", "fp8", "rollout.dtype"),
    of_engine("vllm", "kv_cache_dtype", "fp8", "algorithm.rollout_correction.rollout_is=token"),
    of_engine("vllm", "override_generation_config.top_k", "3", "rollout's own keys"),
    of_engine("vllm", "logprobs_mode", "raw_logprobs", "leave it out"),
    of_engine("sglang", "dp_size", "2", "tensor_model_parallel_size", "leave it out"),
    of_engine("sglang", "speculative_algorithm", "NGRAM", "speculative decoding"),
    of_engine("sglang", "enable_hierarchical_cache", "True", "older weights"),
    Case(
        "settings of an engine that is not chosen",
        "train",
        [f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32"],
        words=["engine_kwargs.vllm", "rollout.name=vllm"],
    ),
    Case(
        "unknown isolation",
        "train",
        ["reward.sandbox.isolation=jail", "custom_reward_function.path=None!"],
        words=["reward.sandbox.isolation", "jail", "landlock"],
    ),
]
