"""Start-up checks: does this configuration produce every field that the estimator and the policy loss need?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Subset

from verl.agent_loop.base import find_loop, read_agent_loops
from verl.algorithms.registry import fields_needed, get_adv_estimator_fn, is_prepared
from verl.config import ModelConfig, PPOConfig, RolloutConfig
from verl.data.files import Row
from verl.data.row_gate import RowGate
from verl.errors import ConfigError, DataError
from verl.models.directory import check_model
from verl.models.loading import import_external_lib, load_hf_config, resolve_model_dir
from verl.models.sliced import weight_files
from verl.rewards.references import row_problem
from verl.schema import STAGES
from verl.trainer.image_checks import engine_problems, model_problems
from verl.workers.losses import actor_loss
from verl.workers.rollout.hf.weights import require_served_layers

#: fields that every batch has when advantages are estimated
_ALWAYS = frozenset(
    {*STAGES["rollout"], "rollout_log_probs", "old_log_probs", "uid", "token_level_scores", "token_level_rewards"}
)
#: seconds for the check of references at start-up
_CHECK_S = 60.0
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


def image_problems(config: PPOConfig) -> list[str]:
    """A sentence for each thing that does not work with images in prompts."""
    section, reward_model = config.actor_rollout_ref, config.reward_model
    trained: dict[str, Any] = {"actor_rollout_ref.actor": section.actor}
    models: dict[str, ModelConfig] = {"actor_rollout_ref.model.path": section.model}
    problems: list[str] = []
    if config.use_reference_policy:
        trained["actor_rollout_ref.ref"] = section.ref
    if config.use_critic:
        trained["critic"] = config.critic
        models["critic.model.path"] = config.critic.model
    if reward_model.enable:
        trained["reward_model"] = reward_model
        models["reward_model.model.path"] = reward_model.model
    if reward_model.implicit and reward_model.ref_path:
        models["reward_model.ref_path"] = replace(reward_model.model, path=reward_model.ref_path)
    for path, part in trained.items():
        problems += engine_problems(path, part)
    problems += model_problems(models)
    rollout = section.rollout
    if rollout.name not in _IMAGE_ROLLOUTS:
        problems.append(
            f"actor_rollout_ref.rollout.name={rollout.name}: is not given images; use {' or '.join(_IMAGE_ROLLOUTS)}"
        )
    if rollout.agent_loop is not None:
        problems += _agent_problems(rollout)
    return problems


def check_data_sources(config: PPOConfig, reward_fn: Any, datasets: Iterable[Any]) -> None:
    """Refuse rows whose ``data_source`` or reference the reward function cannot use.

    Reward models, agent loops and functions of users know better, and data sets of users need not have rows. A row that
    is not reached within a minute is checked when it is scored.

    Raises:
        DataError: naming the first such rows.
    """
    check = getattr(reward_fn, "check_reference", None)
    agents = config.actor_rollout_ref.rollout.agent_loop not in (None, "single_turn_agent")
    if check is None or config.reward_model.enable or agents:
        return
    deadline = time.monotonic() + _CHECK_S
    seen: set[tuple[str, ...]] = set()
    for dataset in datasets:
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        gate = getattr(dataset, "gate", None)
        if not isinstance(gate, RowGate) or (paths := tuple(file.path for file in gate.rows.files)) in seen:
            continue
        seen.add(paths)
        key, others = config.data.reward_fn_key, ("reward_model", "extra_info")

        def look(row: Row, key: str = key, check: Any = check) -> None:
            if problem := row_problem(check, row[key], row.get("reward_model"), row.get("extra_info")):
                raise DataError(f"columns {key!r} and 'reward_model': {problem}")

        gate.check(look, only=[key, *others], within_s=max(0.0, deadline - time.monotonic()))


def check_models(config: PPOConfig) -> None:
    """Refuse model directories that are not whole, or of models that are not supported.

    Raises:
        ConfigError: naming the key and what is wrong.
    """
    section = config.actor_rollout_ref
    models = {"actor_rollout_ref.model": section.model}
    if config.use_critic:
        models["critic.model"] = config.critic.model
    if config.reward_model.enable:
        models["reward_model.model"] = config.reward_model.model
    seen: set[str] = set()
    for key, model in models.items():
        import_external_lib(model.external_lib)
        if str(model.path) not in seen:
            seen.add(str(model.path))
            check_model(model, key, rollout=section.rollout.name if model is section.model else None)
    if section.rollout.name == "hf":
        require_served_layers(load_hf_config(replace(section.model, use_shm=False)))


def check_reward_model(config: PPOConfig) -> None:
    """Refuse a language model where a trained reward model is to score: all its scores would be 0.

    Raises:
        ConfigError: the model's files have no score head.
    """
    reward = config.reward_model
    if not reward.enable or reward.implicit:
        return
    files = weight_files(resolve_model_dir(reward.model.path))
    if files is not None and "score.weight" not in files:
        raise ConfigError(
            f"reward_model.model.path={reward.model.path}: has no trained score head (score.weight), so it is no "
            "reward model and every score would be 0; train one with `verl preference objective=reward_model`, or "
            "set reward_model.kind=implicit for a language model that learns to judge"
        )


def _agent_problems(rollout: RolloutConfig) -> Iterator[str]:
    """The same for agent loops."""
    name = rollout.agent_loop or ""
    loop = find_loop(name, read_agent_loops(rollout.agent.agent_loop_config_path)).cls
    if not getattr(loop, "reads_images", False):
        yield (
            f"actor_rollout_ref.rollout.agent: agent loop {name!r} reads text alone; use single_turn_agent, "
            "tool_agent, or one of your own with reads_images = True"
        )
    if rollout.multi_turn.on_history_rewrite == "fork":
        yield (
            "actor_rollout_ref.rollout.multi_turn.on_history_rewrite=fork: conversations with images are not forked; "
            "use append or refuse"
        )


def _check_fields(key: str, missing: frozenset[str]) -> None:
    if missing:
        remedies = [_REMEDIES[field] for field in sorted(missing) if field in _REMEDIES]
        raise ConfigError(
            f"{key}: needs {', '.join(sorted(missing))}, which nothing in this run makes"
            + "".join(f"; {remedy}" for remedy in remedies)
        )
