"""The root of a reinforcement-learning configuration and the rules between its sections."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.actor import ActorConfig, ActorRolloutRefConfig, RefConfig
from verl.config.algorithm import (
    ADV_ESTIMATORS,
    NEEDS_GROUPS,
    NEEDS_PROCESS_REWARDS,
    NEEDS_VALUES,
    POLICY_LOSSES,
    USES_SUM_PI_SQUARED,
    AlgorithmConfig,
)
from verl.config.base import Config, opt, section, suggestion
from verl.config.batching import batch_problems, sequence_problems, sizes_per_gpu, token_problems
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.engine_keys import rough_engine_keys
from verl.config.files import missing_file, missing_model, raise_problems
from verl.config.fsdp import FSDPConfig
from verl.config.megatron import PARALLEL_SIZES
from verl.config.model import ModelConfig
from verl.config.reward import RewardConfig, RewardModelConfig
from verl.config.trainer import TrainerConfig

# Old key over all ranks, and the key per rank that its own one falls back to.
_OVER_ALL_RANKS = (
    ("actor_rollout_ref.actor.ppo_micro_batch_size", None),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    (
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    ),
    ("critic.ppo_micro_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("critic.forward_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
    ("reward_model.micro_batch_size", None),
)


@dataclass
class RayKwargsConfig(Config):
    """How Ray is started."""

    ray_init: dict[str, Any] = opt({}, "Keyword arguments of ray.init, for example num_cpus, address or runtime_env.")


@dataclass
class PPOConfig(Config):
    """Everything that ``python -m verl.trainer.main_ppo`` reads."""

    EXAMPLE: ClassVar[str] = (
        "verl train data.train_files=train.parquet data.train_batch_size=256 actor_rollout_ref.model.path=model "
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=1"
    )

    data: DataConfig = section(DataConfig, "Prompts for training and validation.")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "Policy, generation and reference.")
    critic: CriticConfig = section(CriticConfig, "The value function.")
    reward_model: RewardModelConfig = section(RewardModelConfig, "A model that scores responses.")
    reward: RewardConfig = section(RewardConfig, "Functions that score responses.")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Advantages and KL control.")
    trainer: TrainerConfig = section(TrainerConfig, "The training run.")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "How Ray is started.", affects="speed")

    @property
    def use_critic(self) -> bool:
        """Whether the run trains a critic: ``critic.enable``, or else whether the estimator needs values."""
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator in NEEDS_VALUES

    @property
    def use_reference_policy(self) -> bool:
        """Whether the run needs the reference policy's log-probabilities."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def groups_per_batch(self) -> int:
        """Prompts whose samples a source gives at once; with dynamic sampling a step may ask several times."""
        return self.data.gen_batch_size or self.data.train_batch_size

    @property
    def groups_in_progress(self) -> int:
        """Prompts that are generated for at once: more than ``groups_per_batch`` with ``rollout.over_sample_rate``.

        Engines inside the training workers get the same number each.
        """
        rollout = self.actor_rollout_ref.rollout
        wanted = math.ceil(round(self.groups_per_batch / (1 - rollout.over_sample_rate), 6))
        workers = self.trainer.world_size if rollout.mode == "sync" and rollout.over_sample_rate else 1
        return -(-wanted // workers) * workers

    @property
    def saves_in_background(self) -> bool:
        """Whether a role that the run trains writes its checkpoints while the training goes on."""
        roles = [self.actor_rollout_ref.actor.checkpoint]
        if self.use_critic:
            roles.append(self.critic.checkpoint)
        if self.reward_model.implicit:
            roles.append(self.reward_model.checkpoint)
        return any(role.async_save for role in roles)

    def idle_sections(self) -> Iterator[str]:
        """Dotted paths of the sections that this run does not read."""
        arr = self.actor_rollout_ref
        roles: list[tuple[str, str, bool]] = [
            ("actor_rollout_ref.actor", arr.actor.strategy, True),
            ("actor_rollout_ref.ref", arr.ref.strategy, self.use_reference_policy),
            ("critic", self.critic.strategy, self.use_critic),
            ("reward_model", self.reward_model.strategy, self.reward_model.enable),
        ]
        for path, strategy, used in roles:
            yield f"{path}.{'fsdp_config' if strategy == 'megatron' else 'megatron'}" if used else path
        if not self.algorithm.use_kl_in_reward:
            yield "algorithm.kl_ctrl"

    def derive(self) -> Iterator[str]:
        """Turn micro-batch sizes over all ranks into sizes per rank; yield those that do not divide.

        Bypass mode chooses its own policy loss where PPO's plain one would not do what is asked.
        """
        if self.actor_rollout_ref.actor.calculate_sum_pi_squared is None:
            uses_squares = self.algorithm.adv_estimator in USES_SUM_PI_SQUARED
            self.actor_rollout_ref.actor.calculate_sum_pi_squared = uses_squares
        correction, loss = self.algorithm.rollout_correction, self.actor_rollout_ref.actor.policy_loss
        if loss.loss_mode == "vanilla" and correction.bypass_mode and (correction.corrects or not correction.clips):
            loss.loss_mode = "bypass_mode"
        actor, ref = self.actor_rollout_ref.actor.megatron, self.actor_rollout_ref.ref.megatron
        if not ref.override_transformer_config:  # the same model; a free section does not inherit by itself
            ref.override_transformer_config = dict(actor.override_transformer_config)
        return sizes_per_gpu(self, _OVER_ALL_RANKS, self.trainer.world_size, self._ranks_per_row)

    def _role(self, section: str) -> ActorConfig | RefConfig | CriticConfig | RewardModelConfig:
        """The section that says how the model of a dotted section is divided over ranks."""
        arr = self.actor_rollout_ref
        roles: dict[str, RefConfig | CriticConfig | RewardModelConfig] = {
            "actor_rollout_ref.ref": arr.ref,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        return roles.get(section, arr.actor)

    def _sequence_size(self, section: str) -> int:
        """Ranks that share the tokens of a sequence when the model of a dotted section runs."""
        role = self._role(section)
        if role.strategy == "megatron":
            return max(1, role.megatron.context_parallel_size)
        return max(1, role.fsdp_config.ulysses_sequence_parallel_size)

    def _ranks_per_row(self, section: str) -> int:
        """Ranks that work on the same rows when the model of a dotted section runs."""
        role = self._role(section)
        if role.strategy == "megatron":
            return max(1, role.megatron.model_parallel_size)
        return self._sequence_size(section)

    def problems(self) -> Iterator[str]:
        yield from self._data_problems()
        yield from self._algorithm_problems()
        yield from self._length_problems()
        yield from self._batch_problems()
        yield from self._device_problems()
        yield from self._megatron_problems()

    def check_files(self) -> None:
        """Check that the files which the run reads exist.

        Raises:
            ConfigError: naming every file that is missing.
        """
        bad: list[str | None] = []
        bad += [missing_file(f"data.train_files={f}", f) for f in self.data.train_files]
        bad += [missing_file(f"data.val_files={f}", f) for f in self.data.val_files]
        models = [("actor_rollout_ref.model", self.actor_rollout_ref.model)]
        if self.use_critic:
            models.append(("critic.model", self.critic.model))
        if self.reward_model.enable:
            models.append(("reward_model.model", self.reward_model.model))
        for where, model in models:
            bad.append(missing_model(f"{where}.path", model.path))
            bad.append(missing_model(f"{where}.tokenizer_path", model.tokenizer_path, needs_config=False))
        if self.reward_model.implicit:
            bad.append(missing_model("reward_model.ref_path", self.reward_model.ref_path))
        for key, path in (
            ("reward.custom_reward_function.path", self.reward.custom_reward_function.path),
            ("data.custom_cls.path", self.data.custom_cls.path),
            *self._agent_files(),
            ("trainer.resume_from_path", self.trainer.resume_from_path),
        ):
            bad.append(missing_file(f"{key}={path}", path, directory=key.startswith("trainer")))
        raise_problems("files that the configuration names are missing", bad)

    def _agent_files(self) -> Iterator[tuple[str, str | None]]:
        rollout, where = self.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
        yield f"{where}.agent.agent_loop_config_path", rollout.agent.agent_loop_config_path
        yield f"{where}.multi_turn.tool_config_path", rollout.multi_turn.tool_config_path
        yield f"{where}.multi_turn.interaction_config_path", rollout.multi_turn.interaction_config_path

    def _data_problems(self) -> Iterator[str]:
        data, trainer = self.data, self.trainer
        if not data.train_files and not trainer.val_only:
            yield "data.train_files=[]: give the training data, data.train_files=train.parquet or a list of files"
        if not data.val_files and (trainer.val_only or trainer.test_freq > 0):
            why = "trainer.val_only=True" if trainer.val_only else f"trainer.test_freq={trainer.test_freq}"
            yield f"data.val_files=[]: {why} needs validation data, data.val_files=test.parquet or a list of files"
        if not self.actor_rollout_ref.model.path:
            yield "actor_rollout_ref.model.path=None: give the model to train, a directory or a Hugging Face id"
        if self.actor_rollout_ref.rollout.agent_loop not in (None, "single_turn_agent") and not data.return_raw_chat:
            yield (
                "data.return_raw_chat=False: agent loops begin with the chat messages of a prompt; use "
                "data.return_raw_chat=True"
            )
        if self.reward_model.enable and not self.reward_model.implicit and not data.return_raw_chat:
            yield (
                "data.return_raw_chat=False: the reward model applies its own chat template, so it needs the chat "
                "messages; use data.return_raw_chat=True"
            )

    def _algorithm_problems(self) -> Iterator[str]:
        algorithm, actor, rollout = self.algorithm, self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout
        plug_in = bool(self.actor_rollout_ref.model.external_lib)
        for key, name, known in (
            ("algorithm.adv_estimator", algorithm.adv_estimator, ADV_ESTIMATORS),
            ("actor_rollout_ref.actor.policy_loss.loss_mode", actor.policy_loss.loss_mode, POLICY_LOSSES),
        ):
            if name not in known and not plug_in:
                yield (
                    f"{key}={name!r}: expected one of {', '.join(known)}{suggestion(name, known)} (a plug-in's name "
                    "needs its module in actor_rollout_ref.model.external_lib)"
                )
        estimator = algorithm.adv_estimator
        if estimator in NEEDS_VALUES and self.critic.enable is False:
            yield (
                f"critic.enable=False: algorithm.adv_estimator={estimator!r} needs values; leave critic.enable out, or "
                "choose an estimator without a critic, for example grpo"
            )
        if self.critic.enable and estimator in ADV_ESTIMATORS and estimator not in NEEDS_VALUES:
            yield (
                f"critic.enable=True: algorithm.adv_estimator={estimator!r} uses no values, so the critic would train "
                "for nothing; leave critic.enable out"
            )
        if estimator in NEEDS_PROCESS_REWARDS and not self.reward_model.implicit:
            yield (
                f"algorithm.adv_estimator={estimator!r}: needs rewards of tokens; give reward_model.enable=True, "
                "reward_model.kind=implicit and reward_model.model.path"
            )
        if self.reward_model.implicit and estimator in ADV_ESTIMATORS and estimator not in NEEDS_PROCESS_REWARDS:
            yield (
                f"reward_model.kind='implicit': algorithm.adv_estimator={estimator!r} uses no rewards of tokens, so "
                "the model would train for nothing; use prime"
            )
        if self.trainer.critic_warmup > 0 and not self.use_critic:
            yield (
                f"trainer.critic_warmup={self.trainer.critic_warmup}: there is no critic to warm up with "
                f"algorithm.adv_estimator={estimator!r}; use 0"
            )
        if estimator in NEEDS_GROUPS and rollout.n == 1:
            yield (
                f"actor_rollout_ref.rollout.n=1: algorithm.adv_estimator={estimator!r} compares the samples of one "
                "prompt, so it needs at least 2; 5 to 16 are usual"
            )
        correction, loss_mode = algorithm.rollout_correction, actor.policy_loss.loss_mode
        if correction.bypass_mode and loss_mode != "bypass_mode" and (correction.corrects or not correction.clips):
            yield (
                f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode!r}: rejection, weights and "
                "loss_type=reinforce with algorithm.rollout_correction.bypass_mode=True are the policy loss "
                "bypass_mode's; leave loss_mode out"
            )
        if actor.skip_old_log_prob:
            yield from self._skip_problems()
        corrected = correction.bypass_mode or correction.rollout_is is not None or correction.rollout_rs is not None
        if rollout.repetition_penalty != 1.0 and not corrected:
            yield (
                f"actor_rollout_ref.rollout.repetition_penalty={rollout.repetition_penalty}: responses are then not "
                "samples of the policy that is trained, whose log-probabilities know no penalty; set algorithm."
                "rollout_correction.rollout_is=token (or bypass_mode=True), or leave the penalty out (for validation "
                "alone there is val_kwargs.repetition_penalty)"
            )
        rough = rough_engine_keys(rollout.name, getattr(rollout.engine_kwargs, rollout.name, {}), rollout.dtype)
        if rough and not corrected and not self.trainer.val_only:
            yield (
                f"actor_rollout_ref.rollout.engine_kwargs.{rollout.name}.{', '.join(rough)}: responses are then not "
                "samples of the policy that is trained, by more than rounding; set algorithm.rollout_correction."
                "rollout_is=token (or bypass_mode=True), or leave it out"
            )
        if algorithm.filter_overlong_responses and rollout.ignore_eos:
            yield (
                "algorithm.filter_overlong_responses=True: with actor_rollout_ref.rollout.ignore_eos=True every "
                "response is cut off and nothing would be trained on; leave one of them out"
            )
        if rollout.multi_turn.on_history_rewrite == "fork":
            for key, given in (
                ("algorithm.use_pf_ppo=True", algorithm.use_pf_ppo),
                ("reward_model.kind='implicit'", self.reward_model.implicit),
            ):
                if given:
                    yield (
                        f"{key}: works on single responses, and with actor_rollout_ref.rollout.multi_turn."
                        "on_history_rewrite='fork' a trajectory may have several rows; use refuse or append"
                    )
        if rollout.over_sample_rate and estimator == "remax":
            yield (
                f"actor_rollout_ref.rollout.over_sample_rate={rollout.over_sample_rate}: the greedy answers of "
                "algorithm.adv_estimator='remax' must all be complete; use 0, or another estimator"
            )
        if algorithm.filter_groups.enable and rollout.n == 1:
            yield (
                "actor_rollout_ref.rollout.n=1: algorithm.filter_groups compares the samples of one prompt, so it "
                "needs at least 2"
            )
        if rollout.n > 1 and not rollout.do_sample:
            yield (
                f"actor_rollout_ref.rollout.do_sample=False: the {rollout.n} samples of a prompt would be equal; "
                "use do_sample=True or n=1"
            )
        if algorithm.use_kl_in_reward and actor.use_kl_loss:
            yield (
                "algorithm.use_kl_in_reward=True: actor_rollout_ref.actor.use_kl_loss is True too, which would "
                "penalise the KL divergence twice; keep one of them"
            )

    def _skip_problems(self) -> Iterator[str]:
        """Yield what needs old log-probabilities that the update does not give."""
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        correction = algorithm.rollout_correction
        key = "actor_rollout_ref.actor.skip_old_log_prob=True"
        if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size != self.data.train_batch_size:
            yield (
                f"{key}: only the first update of a step runs on the policy that sampled; with ppo_epochs="
                f"{actor.ppo_epochs} and ppo_mini_batch_size={actor.ppo_mini_batch_size} of data.train_batch_size="
                f"{self.data.train_batch_size} there are more, so leave it out"
            )
        needs = [
            ("algorithm.use_kl_in_reward=True", algorithm.use_kl_in_reward),
            ("algorithm.rollout_correction.bypass_mode=True", correction.bypass_mode),
            ("rejection or weights of algorithm.rollout_correction", correction.corrects),
            (f"algorithm.adv_estimator={algorithm.adv_estimator!r}", algorithm.adv_estimator in USES_SUM_PI_SQUARED),
            ("actor_rollout_ref.rollout.partial_rollout=True", self.actor_rollout_ref.rollout.partial_rollout),
        ]
        for what, present in needs:
            if present:
                yield f"{key}: {what} needs or replaces them before the update; leave one of the two out"

    def _length_problems(self) -> Iterator[str]:
        data, rollout = self.data, self.actor_rollout_ref.rollout
        for key, here, there in (
            ("prompt_length", rollout.prompt_length, data.max_prompt_length),
            ("response_length", rollout.response_length, data.max_response_length),
        ):
            if here != there:
                yield (
                    f"actor_rollout_ref.rollout.{key}={here}: differs from data.max_{key}={there}; "
                    f"give data.max_{key} alone"
                )
        if data.gen_batch_size not in (None, data.train_batch_size) and not self.algorithm.filter_groups.enable:
            yield (
                f"data.gen_batch_size={data.gen_batch_size}: differs from data.train_batch_size="
                f"{data.train_batch_size}, which is for algorithm.filter_groups.enable=True; leave it out"
            )

    def _batch_problems(self) -> Iterator[str]:
        arr, critic, data, world = self.actor_rollout_ref, self.critic, self.data, self.trainer.world_size
        tokens = data.max_prompt_length + data.max_response_length
        trained: list[tuple[str, ActorConfig | CriticConfig]] = [("actor_rollout_ref.actor", arr.actor)]
        if self.use_critic:
            trained.append(("critic", critic))
        if self.reward_model.implicit:
            yield from batch_problems(
                "reward_model.mini_batch_size",
                self.reward_model.mini_batch_size,
                "reward_model.micro_batch_size_per_gpu",
                self.reward_model.micro_batch().size,
                total_key="data.train_batch_size",
                total=data.train_batch_size,
                samples=arr.rollout.rows_per_prompt,
                world=max(1, world // self._ranks_per_row("reward_model")),
            )
        reported: set[str] = set()
        for where, role in trained:
            found = batch_problems(
                f"{where}.ppo_mini_batch_size",
                role.ppo_mini_batch_size,
                f"{where}.ppo_micro_batch_size_per_gpu",
                role.micro_batch().size,
                total_key="data.train_batch_size",
                total=data.train_batch_size,
                samples=arr.rollout.rows_per_prompt,
                world=max(1, world // self._ranks_per_row(where)),
            )
            for problem in found:
                path = problem.split("=", 1)[0]
                if path not in reported:
                    reported.add(path)
                    yield problem
        budgets = [
            ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", arr.actor.micro_batch().max_tokens),
            ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", arr.rollout.log_prob_micro_batch().max_tokens),
        ]
        if self.use_reference_policy:
            budgets.append(
                ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", arr.ref.log_prob_micro_batch().max_tokens)
            )
        if self.use_critic:
            budgets.append(("critic.ppo_max_token_len_per_gpu", critic.micro_batch().max_tokens))
            budgets.append(("critic.forward_max_token_len_per_gpu", critic.forward_micro_batch().max_tokens))
        budgets = [
            (key, None if budget is None else budget * self._sequence_size(key.rsplit(".", 1)[0]))
            for key, budget in budgets
        ]
        yield from token_problems(budgets, tokens, "data.max_prompt_length + data.max_response_length")

    def _device_problems(self) -> Iterator[str]:
        trainer, world = self.trainer, self.trainer.world_size
        if trainer.controller == "local" and world != 1:
            yield (
                f"trainer.controller='local': runs one worker, but trainer.nnodes * trainer.n_gpus_per_node = "
                f"{trainer.nnodes} * {trainer.n_gpus_per_node} = {world}; set both to 1, or use trainer.controller=ray"
            )
        if trainer.controller == "local" and self.actor_rollout_ref.rollout.mode == "async":
            yield (
                "trainer.controller='local': actor_rollout_ref.rollout.mode='async' runs servers as Ray actors; "
                "use trainer.controller=ray, or mode=sync"
            )
        rollout = self.actor_rollout_ref.rollout
        served = rollout.agent_loop is not None or rollout.name == "sglang"
        if trainer.deterministic and served and (rollout.name != "hf" or rollout.max_num_seqs > 1):
            which = "agent loops" if rollout.agent_loop is not None else "requests to rollout.name='sglang'"
            yield (
                f"trainer.deterministic=True: {which} are batched as they arrive, and what a batch rounds depends on "
                "who is in it; generate with rollout.name=hf and rollout.max_num_seqs=1, which computes one sequence "
                "at a time, or leave it off"
            )
        if trainer.deterministic and rollout.over_sample_rate > 0 and rollout.mode == "async":
            yield (
                "trainer.deterministic=True: with actor_rollout_ref.rollout.over_sample_rate="
                f"{rollout.over_sample_rate:g} and mode='async' the moments at which requests reach the servers decide "
                "which samples a step takes; "
                "use mode=sync, or leave one of them off"
            )
        parallel = rollout.tensor_model_parallel_size
        if trainer.n_gpus_per_node % parallel:
            yield (
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}: must divide trainer.n_gpus_per_node "
                f"= {trainer.n_gpus_per_node}"
            )
        arr = self.actor_rollout_ref
        shards: list[tuple[str, FSDPConfig, str, ModelConfig]] = [
            ("actor_rollout_ref.actor", arr.actor.fsdp_config, "actor_rollout_ref.model", arr.model),
            ("actor_rollout_ref.ref", arr.ref.fsdp_config, "actor_rollout_ref.model", arr.model),
        ]
        if self.use_critic:
            shards.append(("critic", self.critic.fsdp_config, "critic.model", self.critic.model))
        if self.reward_model.enable:
            reward = self.reward_model
            shards.append(("reward_model", reward.fsdp_config, "reward_model.model", reward.model))
        for where, fsdp, model_key, model in shards:
            yield from sequence_problems(
                f"{where}.fsdp_config",
                fsdp.ulysses_sequence_parallel_size,
                world,
                model_key,
                model.use_remove_padding,
            )
            if fsdp.fsdp_size > 0 and world % fsdp.fsdp_size and fsdp.fsdp_size < world:
                yield (
                    f"{where}.fsdp_config.fsdp_size={fsdp.fsdp_size}: must divide trainer.nnodes * "
                    f"trainer.n_gpus_per_node = {world}"
                )

    def _megatron_problems(self) -> Iterator[str]:
        world = self.trainer.world_size
        roles: dict[str, ActorConfig | RefConfig | CriticConfig | RewardModelConfig] = {
            "actor_rollout_ref.actor": self.actor_rollout_ref.actor
        }
        if self.use_reference_policy:
            roles["actor_rollout_ref.ref"] = self.actor_rollout_ref.ref
        if self.use_critic:
            roles["critic"] = self.critic
        if self.reward_model.enable:
            roles["reward_model"] = self.reward_model
        models = {"critic": self.critic.model, "reward_model": self.reward_model.model}
        actor, ref = self.actor_rollout_ref.actor, self.actor_rollout_ref.ref
        if self.use_reference_policy and (actor.strategy == "megatron") != (ref.strategy == "megatron"):
            yield (
                f"actor_rollout_ref.ref.strategy={ref.strategy!r}: the reference shares the workers of the actor, "
                f"whose strategy is {actor.strategy!r}; leave it out"
            )
        for where, role in roles.items():
            if not isinstance(role, RefConfig):
                yield from role.checkpoint.engine_problems(f"{where}.checkpoint", role.strategy)
        on_megatron = {where: role.megatron for where, role in roles.items() if role.strategy == "megatron"}
        first = next(iter(on_megatron.items()), None)
        if first is not None:
            yield from first[1].world_problems(f"{first[0]}.megatron", world)
        for where, sizes in on_megatron.items():
            assert first is not None
            for name in PARALLEL_SIZES:
                here, there = getattr(sizes, name), getattr(first[1], name)
                if here != there:
                    yield (
                        f"{where}.megatron.{name}={here}: differs from {first[0]}.megatron.{name}={there}; the "
                        "Megatron models of one process share their parallel sizes"
                    )
            model_key = f"{where if where in models else 'actor_rollout_ref'}.model"
            model = models.get(where, self.actor_rollout_ref.model)
            yield from sizes.model_problems(model_key, model)
