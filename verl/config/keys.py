"""Keys under other names, and keys that belong to parts which this version does not have.

Scripts written for other frameworks of this ecosystem set these keys. None is ignored: an alias is mapped to our key,
and an unsupported key is refused with a sentence that says what to do, unless its value means "off".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl.config.megatron import PARALLEL_SIZES

# Other spelling -> our key. An entry also maps the keys below it.
PPO_ALIASES: Mapping[str, str] = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.max_concurrent": "reward.max_concurrent",
    "reward_model.max_rpm": "reward.max_rpm",
    "reward_model.sandbox_fusion": "reward.sandbox",
    "reward.sandbox_fusion": "reward.sandbox",
    "reward_model.model.fsdp_config": "reward_model.fsdp_config",
    "reward_model.model.optim": "reward_model.optim",
    "reward_model.model.ref_path": "reward_model.ref_path",
    "reward_model.model.beta_train": "reward_model.beta",
    "reward_model.model.update": "reward_model.update",
    "algorithm.reward_dpo_coef": "algorithm.process_reward_coef",
    "algorithm.reward_gt_coef": "algorithm.outcome_reward_coef",
    "reward_model.micro_batch_size_per_device": "reward_model.micro_batch_size_per_gpu",
    "reward_model.ulysses_sequence_parallel_size": "reward_model.fsdp_config.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.entropy_checkpointing": "actor_rollout_ref.actor.fsdp_config.entropy_checkpointing",
    "actor_rollout_ref.ref.entropy_checkpointing": "actor_rollout_ref.ref.fsdp_config.entropy_checkpointing",
    "actor_rollout_ref.actor.use_torch_compile": "actor_rollout_ref.actor.fsdp_config.use_torch_compile",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.ref.use_torch_compile": "actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.model.override_config.model_config": "actor_rollout_ref.model.override_config",
    "critic.model.override_config.model_config": "critic.model.override_config",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
    ),
    "actor_rollout_ref.model.lora.merge": "actor_rollout_ref.rollout.lora_merge",
    "ray_init": "ray_kwargs.ray_init",
}

SFT_ALIASES: Mapping[str, str] = {
    "model.partial_pretrain": "model.path",
    "engine.strategy": "model.strategy",
    **{f"engine.{size}": f"model.megatron.{size}" for size in PARALLEL_SIZES},
    "engine": "model.fsdp_config",
    "checkpoint": "trainer.checkpoint",
    "trainer.nccl_timeout_s": "trainer.nccl_timeout",
    "use_remove_padding": "model.use_remove_padding",
    "ulysses_sequence_parallel_size": "model.fsdp_config.ulysses_sequence_parallel_size",
    "data.messages_key": "data.multiturn.messages_key",
}

PREFERENCE_ALIASES: Mapping[str, str] = {
    **{other: ours for other, ours in SFT_ALIASES.items() if not ours.startswith("data.multiturn.")},
    "beta": "loss.beta",
}

# Other spellings of the keys of low-rank adapters, in every section of a model.
LORA_ALIASES: Mapping[str, str] = {
    "lora.rank": "lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.lora_A_init_method": "lora_init",
    "lora.target_modules": "target_modules",
    "lora.exclude_modules": "exclude_modules",
    "lora.adapter_path": "lora_adapter_path",
}

_MODEL_LORA_ALIASES = {f"model.{other}": f"model.{ours}" for other, ours in LORA_ALIASES.items()}

# Spellings of the last part(s) of a key, wherever our key exists.
OPTIM_ALIASES: Mapping[str, str] = {
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.lr_decay_style": "optim.lr_scheduler_type",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.grad_clip": "optim.clip_grad",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
}

ALIASES: Mapping[str, Mapping[str, str]] = {
    "PPOConfig": {
        **PPO_ALIASES,
        **{
            f"{role}.{other}": f"{role}.{ours}"
            for role in ("actor_rollout_ref.actor", "critic", "reward_model")
            for other, ours in OPTIM_ALIASES.items()
        },
        **{
            f"{role}.model.{other}": f"{role}.model.{ours}"
            for role in ("actor_rollout_ref", "critic", "reward_model")
            for other, ours in LORA_ALIASES.items()
        },
    },
    "SFTConfig": {
        **SFT_ALIASES,
        **OPTIM_ALIASES,
        **_MODEL_LORA_ALIASES,
    },
    "GenerationConfig": {
        "rollout.n": "data.n_samples",
        "rollout.prompt_length": "data.max_prompt_length",
        "rollout.response_length": "data.max_response_length",
        **_MODEL_LORA_ALIASES,
    },
    "EvalConfig": {"custom_reward_function": "reward.custom_reward_function"},
    "PreferenceConfig": {**PREFERENCE_ALIASES, **OPTIM_ALIASES, **_MODEL_LORA_ALIASES},
}


class AnyValue:
    """Stands for every value in :attr:`Unsupported.off`."""

    def __repr__(self) -> str:
        return "any value"


ANY = AnyValue()


@dataclass(frozen=True)
class Unsupported:
    """Keys that this version does not have.

    Args:
        pattern: dotted path; ``*`` stands for one part, ``**`` for any number of parts.
        reason: what the keys are for, that they are not there, and what to use instead.
        off: values that mean what this version does anyway, so that they are accepted.
        switch: dotted path of a key; if it is given with an off value, these keys have nothing to act on and are
            accepted.
    """

    pattern: str
    reason: str
    off: Sequence[object] = ()
    switch: str | None = None

    def accepts(self, value: object) -> bool:
        """Return whether ``value`` means "off"."""
        return any(option is ANY or (option == value and type(option) is type(value)) for option in self.off)


_R = "actor_rollout_ref.rollout"
_PARALLEL = (
    "splits the rollout engine over ranks in a way that is not in this version; use 1 or leave it out "
    "(rollout.tensor_model_parallel_size splits vLLM's and SGLang's weights)"
)
_PROFILER = "is for the profilers, which are not in this version; leave it out (timing_s/* metrics give phase times)"
_MEGATRON_BRIDGE = (
    "chooses a package that converts weights for Megatron; here the engine converts them itself, so leave it out"
)
_GENERATIVE_RM = (
    "is for a generative reward model behind a rollout engine, which is not in this version; use a "
    "sequence-classification model in reward_model.model.path, or a reward function that calls your own server"
)
_CHUNKS = (
    "chooses how log-probabilities and entropy are computed; here that is always piece by piece from hidden states, so "
    "leave it out (model.use_fused_kernels=True keeps no logits for the backward pass)"
)

UNSUPPORTED: Sequence[Unsupported] = (
    Unsupported("**._target_", "names the class of a section; sections here have one class each, so leave it out"),
    # engines
    Unsupported("**.megatron.use_mbridge", _MEGATRON_BRIDGE, (True, False)),
    Unsupported("**.megatron.vanilla_mbridge", _MEGATRON_BRIDGE, (True, False)),
    Unsupported(
        "**.megatron.use_remove_padding",
        "keeps padding in the batches of the Megatron engine, which always removes it here; leave it out",
        (True,),
    ),
    Unsupported(
        "**.megatron.override_ddp_config.**",
        "sets how Megatron-core keeps and reduces gradients, which this version chooses itself (float32, one buffer); "
        "leave it out",
    ),
    Unsupported(
        "**.optim.optimizer_impl", "names a package of optimizers; leave it out, AdamW is torch's", ("torch.optim",)
    ),
    Unsupported(
        "**.fsdp_config.use_orig_params",
        "is an option of FSDP1; FSDP2 always keeps the original parameters, so leave it out",
        (True, False),
    ),
    Unsupported(
        "**.wrap_policy.min_num_params",
        "is an option of FSDP1; name the classes to shard in wrap_policy.transformer_layer_cls_to_wrap",
        (0,),
    ),
    Unsupported("**.entropy_from_logits_with_chunking", _CHUNKS, (True, False)),
    # vLLM and SGLang
    Unsupported(
        f"{_R}.disable_log_stats",
        "makes the rollout engine log its own statistics; leave it out, the step's metrics have what it did",
        (True,),
    ),
    Unsupported(
        f"{_R}.quantization", "is for a quantised rollout, which is not in this version; use rollout.dtype", (None,)
    ),
    Unsupported(
        f"{_R}.load_format",
        "says where the rollout engine finds its first weights; here they are always the policy's, so leave it out",
        ("auto", "dummy", "dummy_hf", "safetensors"),
    ),
    Unsupported(
        f"{_R}.calculate_log_probs",
        "leaves the log-probabilities of sampled tokens out; here they always come with the tokens, so leave it out",
        (True,),
    ),
    Unsupported(
        f"{_R}.skip_tokenizer_init",
        "makes the engine decode text; here engines work on token ids, so leave it out",
        (True,),
    ),
    Unsupported(f"{_R}.data_parallel_size", _PARALLEL, (1,)),
    Unsupported(f"{_R}.expert_parallel_size", _PARALLEL, (1,)),
    Unsupported(f"{_R}.pipeline_model_parallel_size", _PARALLEL, (1,)),
    Unsupported(
        f"{_R}.layered_summon",
        "gathers the weights layer by layer; here they are always synced piece by piece, so leave it out",
        (True, False),
    ),
    Unsupported(
        f"{_R}.multi_stage_wake_up",
        "wakes the rollout engine in steps; here weights always come back before the cache does, so leave it out",
        (True, False),
    ),
    # agents
    Unsupported(
        f"{_R}.multi_turn.tokenization_sanity_check_mode",
        "compares turns with a tokenisation of the whole text; here sampled tokens are never encoded again, and "
        "rollout.multi_turn.on_history_rewrite says what a template that rewrites earlier turns means; leave it out",
        ("disable", "strict", "ignore_strippable"),
    ),
    Unsupported(
        f"{_R}.multi_turn.use_inference_chat_template",
        "chooses between two renderings of a conversation; here the chat template is applied turn by turn, so leave "
        "it out",
        (True, False),
    ),
    Unsupported(
        f"{_R}.agent.custom_async_server.**",
        "names a server class of another framework; leave it out, or use an agent loop of your own "
        "(rollout.agent.agent_loop_config_path)",
        (None,),
    ),
    Unsupported(
        f"{_R}.trace.**",
        "is for tracing services; rollout.agent.trace_dir writes trajectories as JSONL, and "
        "rollout.agent.opentelemetry sends them as spans",
        (None, False),
    ),
    # algorithms
    # rewards
    Unsupported("reward_model.rollout.**", _GENERATIVE_RM),
    Unsupported("reward_model.enable_resource_pool", _GENERATIVE_RM, (False,)),
    Unsupported(
        "reward_model.use_reward_loop",
        "chooses between two ways of calling reward functions; they always run in reward.num_workers processes here, "
        "so leave it out",
        (False,),
    ),
    Unsupported(
        "reward_model.launch_reward_fn_async",
        "scores while the log-probabilities are computed, which is not in this version; leave it out",
        (False,),
    ),
    # data
    Unsupported(
        "data.video_key",
        "names a column of videos, which this version does not read; use frames of them as images (data.image_key)",
        ("videos",),
    ),
    # profilers
    Unsupported("global_profiler.tool", _PROFILER, (None,)),
    Unsupported("global_profiler.steps", _PROFILER, (None,)),
    Unsupported("global_profiler.**", _PROFILER, switch="steps"),
    Unsupported("**.profiler.enable", _PROFILER, (False,)),
    Unsupported("**.profiler.all_ranks", _PROFILER, (False,)),
    Unsupported("**.profiler.ranks", _PROFILER, ([], None)),
    Unsupported("**.profiler.**", _PROFILER, switch="enable"),
    Unsupported("trainer.profile_steps", _PROFILER, (None,)),
    # trainer
    Unsupported(
        "trainer.ray_wait_register_center_timeout",
        "is a time limit for workers that look for each other; here they are told at once, so leave it out",
        (300,),
    ),
    Unsupported(
        "trainer.default_hdfs_dir",
        "copies checkpoints to HDFS, which is not in this version; copy trainer.default_local_dir",
        (None,),
    ),
)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = []
    for part in pattern.split("."):
        if part == "**":
            parts.append("**")
        else:
            parts.append(re.escape(part).replace(r"\*", "[^.]*"))
    text = r"\.".join(parts)
    if text.startswith(r"**\."):
        text = r"(?:.*\.)?" + text[len(r"**\.") :]
    if text.endswith(r"\.**"):
        text = text[: -len(r"\.**")] + r"(?:\..*)?"
    return re.compile(text)


def find_unsupported(path: str) -> Unsupported | None:
    """Return the first entry whose pattern matches the dotted ``path``."""
    return next((u for u in UNSUPPORTED if _compiled(u.pattern).fullmatch(path)), None)


def switch_of(entry: Unsupported, path: str) -> str | None:
    """Return the dotted path of the switch of ``path``: the key of that name in the same section."""
    if entry.switch is None:
        return None
    parent = path.rsplit(".", 1)[0] if "." in path else ""
    return f"{parent}.{entry.switch}" if parent else entry.switch


def is_off(path: str, value: Any) -> bool:
    """Return whether ``path`` is an unsupported key with a value that means "off"."""
    entry = find_unsupported(path)
    return entry is not None and entry.accepts(value)


def resolve_alias(root: str, path: str) -> str:
    """Return our name of ``path``, which may be an alias or lie below one (the longest alias wins)."""
    table = ALIASES.get(root, {})
    for _ in range(4):  # an alias may lead to a section that has aliases itself
        matches = [a for a in table if path == a or path.startswith(a + ".")]
        if not matches:
            break
        other = max(matches, key=len)
        path = table[other] + path[len(other) :]
    return path
