"""Which role runs where: from the configuration to worker groups with their models loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.config import OptimConfig, PPOConfig
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.utils.device import cpu_count

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class WorkerGroups:
    """The worker groups of a run; an absent role is None. All roles live in the same processes."""

    actor_rollout: WorkerGroup
    ref: WorkerGroup | None
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    process_reward: WorkerGroup | None

    def shutdown(self) -> None:
        """End the processes."""
        self.actor_rollout.shutdown()


def worker_env(config: PPOConfig, device: str) -> dict[str, str]:
    """Environment of the worker processes, in force before they import torch.

    OpenMP threads that spin while another process wants the core cost more than any second thread gains, so each
    worker gets its share of the cores and waits passively.
    """
    workers = config.trainer.n_gpus_per_node
    threads = config.trainer.cpu_threads_per_worker
    if threads is None:
        threads = max(1, cpu_count() // workers // (1 if workers > 1 else 2)) if device == "cpu" else None
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        env |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    return env


def role_classes(config: PPOConfig, device: str, total_steps: int, wrap: Any) -> dict[str, ClassWithInitArgs]:
    """The worker class of every role with its arguments.

    Args:
        wrap: makes the controller's class-with-arguments from a class: ``wrap(cls, *args, **kwargs)``.
    """
    from verl.agent_loop.role import with_agent_loops
    from verl.workers.fsdp_workers import (
        ActorRolloutRefWorker,
        CriticWorker,
        ImplicitRewardWorker,
        RewardModelWorker,
    )

    section = config.actor_rollout_ref
    runtime = {"device": device, "seed": config.trainer.seed, "timeout_s": section.nccl_timeout}
    # the schedule moves with the updates of the role, and during the warm-up of the critic the actor has none
    actor_steps = max(1, total_steps - config.trainer.critic_warmup)
    actor = replace(section.actor, optim=_with_horizon(section.actor.optim, actor_steps))
    trains = not config.trainer.val_only
    role = "actor_rollout_ref" if config.use_reference_policy and trains else "actor_rollout"
    worker: type = ActorRolloutRefWorker
    extra: dict[str, Any] = {}
    if section.rollout.agent_loop is not None:
        worker = with_agent_loops(worker)
        extra["template_kwargs"] = config.data.apply_chat_template_kwargs
    policy = {"config": replace(section, actor=actor), "role": role, **extra}
    classes = {"actor_rollout": wrap(worker, **policy, **runtime)}
    if config.use_critic and trains:
        critic = replace(config.critic, optim=_with_horizon(config.critic.optim, total_steps))
        classes["critic"] = wrap(CriticWorker, config=critic, rollout_n=section.rollout.n, **runtime)
    if config.reward_model.implicit and trains:
        model = replace(config.reward_model, optim=_with_horizon(config.reward_model.optim, total_steps))
        classes["process_reward"] = wrap(ImplicitRewardWorker, config=model, rollout_n=section.rollout.n, **runtime)
    elif config.reward_model.enable and not config.reward_model.implicit:
        classes["reward_model"] = wrap(
            RewardModelWorker,
            config=config.reward_model,
            policy_model=section.model,
            max_length=config.data.max_prompt_length + config.data.max_response_length,
            **runtime,
        )
    return classes


def build_worker_groups(config: PPOConfig, device: str, total_steps: int) -> WorkerGroups:
    """Start the workers, all roles in the same processes, and load their models.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        total_steps: steps of the run, the horizon of the learning-rate schedules.
    """
    if config.trainer.controller == "local":
        groups = _local_groups(config, device, total_steps)
    else:
        groups = _ray_groups(config, device, total_steps)
    # memory of the last model built is what rollout may use: the actor comes last
    for name in ("critic", "reward_model", "process_reward", "actor_rollout"):
        if name in groups:
            groups[name].init_model()
    actor_rollout = groups["actor_rollout"]
    return WorkerGroups(
        actor_rollout=actor_rollout,
        ref=actor_rollout if config.use_reference_policy and not config.trainer.val_only else None,
        critic=groups.get("critic"),
        reward_model=groups.get("reward_model"),
        process_reward=groups.get("process_reward"),
    )


def _local_groups(config: PPOConfig, device: str, total_steps: int) -> Mapping[str, WorkerGroup]:
    from verl.single_controller.local import LocalWorkerGroup

    for name, value in worker_env(config, device).items():
        os.environ.setdefault(name, value)
    classes = role_classes(config, device, total_steps, ClassWithInitArgs)
    return {name: LocalWorkerGroup(cls, role=name) for name, cls in classes.items()}


def _ray_groups(config: PPOConfig, device: str, total_steps: int) -> Mapping[str, WorkerGroup]:
    import ray

    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    def wrap(cls: type, **kwargs: Any) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(ray.remote(cls), **kwargs)

    classes = role_classes(config, device, total_steps, wrap)
    pool = RayResourcePool(
        process_on_nodes=[config.trainer.n_gpus_per_node] * config.trainer.nnodes,
        use_gpu=device == "cuda",
        max_colocate_count=1,
    )
    together = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=create_colocated_worker_cls(classes),
        worker_env=worker_env(config, device),
    )
    return together.spawn(prefix_set=classes.keys())


def _with_horizon(optim: OptimConfig, total_steps: int) -> OptimConfig:
    """The learning-rate schedule of a run spans the run, unless it was given a length of its own."""
    return (
        optim
        if optim.total_training_steps and optim.total_training_steps > 0
        else replace(optim, total_training_steps=total_steps)
    )
