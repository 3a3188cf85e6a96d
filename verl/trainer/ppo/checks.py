"""Whether the chosen estimator and loss can run with what a run makes; asked before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from verl.algorithms.registry import fields_needed, get_adv_estimator_fn, is_prepared
from verl.config import ModelConfig, PPOConfig
from verl.errors import ConfigError
from verl.models.loading import load_hf_config
from verl.models.vision import FAMILIES, ImageTokens
from verl.schema import STAGES
from verl.workers.losses import actor_loss

#: fields that every batch has when advantages are estimated
_ALWAYS = frozenset(
    {*STAGES["rollout"], "rollout_log_probs", "old_log_probs", "uid", "token_level_scores", "token_level_rewards"}
)
_REMEDIES = {
    "values": "set critic.enable=True",
    "ref_log_prob": "set actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
    "process_rewards": "set reward_model.enable=True and reward_model.kind=implicit",
    "state_hashes": "set actor_rollout_ref.rollout.multi_turn.enable=True",
    "entropys": "set algorithm.rollout_correction.bypass_mode=False and actor.skip_old_log_prob=False",
    "old_log_probs": "set actor_rollout_ref.actor.skip_old_log_prob=False",
}


def fields_made(config: PPOConfig) -> frozenset[str]:
    """Fields that a batch has, as configured, when advantages are estimated."""
    correction = config.algorithm.rollout_correction
    made = set(_ALWAYS)
    if config.use_critic:
        made.add("values")
    if config.use_reference_policy:
        made.add("ref_log_prob")
    if config.reward_model.implicit:
        made.add("process_rewards")
    if config.actor_rollout_ref.rollout.agent_loop is not None:
        made.add("state_hashes")
    if config.actor_rollout_ref.actor.skip_old_log_prob:
        made.remove("old_log_probs")
    elif not correction.bypass_mode:
        made.add("entropys")
        made |= {"rollout_is_weights"} if correction.rollout_is is not None else set()
    return frozenset(made)


def check_algorithm(config: PPOConfig, source_fields: frozenset[str] = frozenset()) -> None:
    """Check estimator and policy loss: that they exist, that their fields are made, that they do what is asked.

    Args:
        config: the configuration.
        source_fields: what the source of batches adds.

    Raises:
        ConfigError: with the key to change.
    """
    name = config.algorithm.adv_estimator
    made = fields_made(config) | source_fields
    _check_fields(f"algorithm.adv_estimator={name}", fields_needed(get_adv_estimator_fn(name)) - made)
    actor = config.actor_rollout_ref.actor
    loss, key = actor_loss(actor), f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}"
    _check_fields(key, loss.fields - made - {"advantages", "returns"})
    if actor.skip_old_log_prob and is_prepared(loss.policy_loss):
        raise ConfigError(
            f"{key}: looks at the whole batch before the update, old log-probabilities included; set "
            "actor_rollout_ref.actor.skip_old_log_prob=False"
        )
    if "reward_baselines" in source_fields and config.actor_rollout_ref.rollout.rows_per_sample > 1:
        raise ConfigError(
            f"algorithm.adv_estimator={name}: a greedy answer is no baseline for the "
            f"{config.actor_rollout_ref.rollout.rows_per_sample} rows of an episode (rollout.agent); use another "
            "estimator, for example grpo"
        )
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is not None and not correction.bypass_mode and not loss.takes_weights:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is}: the loss of {key} has no parameter "
            "rollout_is_weights; add it to the loss, or leave rollout_is out"
        )


#: rollout engines that read images
_IMAGE_ROLLOUTS = ("hf", "vllm")


def check_images(config: PPOConfig) -> None:
    """Refuse what does not work with images in prompts.

    Raises:
        ConfigError: with every problem.
    """
    section = config.actor_rollout_ref
    problems: list[str] = []
    trained: dict[str, Any] = {"actor_rollout_ref.actor": section.actor}
    if config.use_reference_policy:
        trained["actor_rollout_ref.ref"] = section.ref
    models: dict[str, ModelConfig] = {"actor_rollout_ref.model.path": section.model}
    if config.use_critic:
        trained["critic"] = config.critic
        models["critic.model.path"] = config.critic.model
    if config.reward_model.implicit:
        trained["reward_model"] = config.reward_model
        models["reward_model.model.path"] = config.reward_model.model
        if config.reward_model.ref_path:
            models["reward_model.ref_path"] = replace(config.reward_model.model, path=config.reward_model.ref_path)
    elif config.reward_model.enable:
        problems.append("reward_model.enable=True: reward models read text alone; use a reward function")
    for path, part in trained.items():
        if part.strategy == "megatron":
            problems.append(f"{path}.strategy=megatron: trains on text alone; use fsdp2")
        elif part.fsdp_config.ulysses_sequence_parallel_size > 1:
            problems.append(
                f"{path}.fsdp_config.ulysses_sequence_parallel_size="
                f"{part.fsdp_config.ulysses_sequence_parallel_size}: does not cut sequences with images; use 1"
            )
    problems += _unread_images(models)
    rollout = section.rollout
    if rollout.name not in _IMAGE_ROLLOUTS:
        problems.append(
            f"actor_rollout_ref.rollout.name={rollout.name}: is not given images; use {' or '.join(_IMAGE_ROLLOUTS)}"
        )
    if rollout.agent_loop is not None:
        problems.append(
            "actor_rollout_ref.rollout.agent: agent loops read text alone; answer prompts with images in one turn"
        )
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the data has prompts with images, with which this does not work:\n{lines}")


def _unread_images(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """A sentence for each model that does not read the images of the first one, the policy."""
    policy: ImageTokens | None = None
    for key, model in models.items():
        tokens = ImageTokens.of(hf_config := load_hf_config(model))
        policy = policy or tokens
        if tokens is None:
            yield (
                f"{key}={model.path}: images of a {hf_config.model_type!r} model are not read here; use a model of the "
                f"kinds {', '.join(FAMILIES)}"
            )
        elif tokens != policy:
            yield f"{key}={model.path}: reads images as {tokens}, the policy as {policy}; use a model of its family"


def _check_fields(key: str, missing: frozenset[str]) -> None:
    if missing:
        remedies = [_REMEDIES[field] for field in sorted(missing) if field in _REMEDIES]
        raise ConfigError(
            f"{key}: needs {', '.join(sorted(missing))}, which nothing in this run makes"
            + "".join(f"; {remedy}" for remedy in remedies)
        )
