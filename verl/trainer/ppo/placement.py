"""Which role runs where: from the configuration to worker groups with their models loaded."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from verl.config import OptimConfig, PPOConfig, RolloutConfig
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
from verl.utils.device import cpu_count
from verl.utils.seeding import DETERMINISTIC_ENVIRONMENT

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Rollout(Protocol):
    """What samples from the policy: a worker group, or a :class:`~verl.trainer.ppo.servers.ServerRollout`."""

    def generate_sequences(self, prompts: DataProto) -> DataProto: ...

    def sync_weights(self, version: int) -> Any: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class WorkerGroups:
    """The worker groups of a run; an absent role is None. All roles live in the same processes.

    ``rollout`` is what samples: the actor's workers, or servers beside them.
    """

    actor_rollout: WorkerGroup
    rollout: Rollout
    ref: WorkerGroup | None
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    process_reward: WorkerGroup | None

    def shutdown(self) -> None:
        """End the processes."""
        if self.rollout is not self.actor_rollout:
            self.rollout.shutdown()
        self.actor_rollout.shutdown()


def worker_env(config: PPOConfig, device: str) -> dict[str, str]:
    """Environment of the worker processes, in force before they import torch.

    OpenMP threads that spin while another process wants the core cost more than any second thread gains, so each
    worker gets its share of the cores and waits passively. Of a deterministic run each has one thread: sums over
    threads would depend on the machine.
    """
    workers = config.trainer.n_gpus_per_node
    threads = config.trainer.cpu_threads_per_worker
    if threads is None and config.trainer.deterministic and device == "cpu":
        threads = 1
    if threads is None:
        threads = max(1, cpu_count() // workers // (1 if workers > 1 else 2)) if device == "cpu" else None
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        env |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    if config.trainer.deterministic:
        env |= DETERMINISTIC_ENVIRONMENT
    return env


def process_env(config: PPOConfig, device: str) -> dict[str, str]:
    """The same for processes of their own: plug-ins are named by module, and what this one finds they must find too."""
    return {**worker_env(config, device), "PYTHONPATH": os.pathsep.join(user_import_paths())}


def user_import_paths() -> list[str]:
    """Where this process looks for modules before and beside the interpreter's own directories.

    Packages may add directories of their own to ``sys.path``, as setuptools does with older versions of other packages.
    Those stay out: in front of the installed packages they would hide them.
    """
    own = {name: os.path.realpath(path) for name, path in sysconfig.get_paths().items()}
    installed = tuple(f"{own[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    paths = (os.path.realpath(path) for path in sys.path if not path.endswith(".zip"))
    return [
        path
        for path in dict.fromkeys(paths)
        if path not in own.values() and os.path.dirname(path) not in own.values() and not path.startswith(installed)
    ]


def image_limits(config: PPOConfig) -> tuple[int | None, int | None] | None:
    """Fewest and most pixels of the images that tools show; None where something in the run reads text alone."""
    from verl.trainer.ppo.checks import image_problems

    return None if image_problems(config) else (config.data.image_min_pixels, config.data.image_max_pixels)


def role_classes(config: PPOConfig, device: str, total_steps: int, wrap: Any) -> dict[str, ClassWithInitArgs]:
    """The worker class of every role with its arguments.

    Args:
        wrap: makes the controller's class-with-arguments from a class: ``wrap(cls, *args, **kwargs)``.
    """
    from verl.agent_loop.role import with_agent_loops

    section = config.actor_rollout_ref
    runtime = {
        "device": device,
        "seed": config.trainer.seed,
        "timeout_s": section.nccl_timeout,
        "deterministic": config.trainer.deterministic,
    }
    # the schedule moves with the updates of the role, and during the warm-up of the critic the actor has none
    actor_steps = max(1, total_steps - config.trainer.critic_warmup)
    actor = replace(section.actor, optim=_with_horizon(section.actor.optim, actor_steps))
    trains = not config.trainer.val_only
    served = section.rollout.mode == "async"
    parts = ["actor"] if served else ["actor", "rollout"]
    role = "_".join([*parts, "ref"] if config.use_reference_policy and trains else parts)
    worker: type = _workers_of(section.actor.strategy).ActorRolloutRefWorker
    extra: dict[str, Any] = {}
    if section.rollout.agent_loop is not None and not served:
        worker = with_agent_loops(worker)
        extra["template_kwargs"] = config.data.apply_chat_template_kwargs
        extra["image_limits"] = image_limits(config)
    policy = {"config": replace(section, actor=actor), "role": role, **extra}
    classes = {"actor_rollout": wrap(worker, **policy, **runtime)}
    if config.use_critic and trains:
        critic = replace(config.critic, optim=_with_horizon(config.critic.optim, total_steps))
        classes["critic"] = wrap(
            _workers_of(critic.strategy).CriticWorker,
            config=critic,
            rollout_n=section.rollout.rows_per_prompt,
            **runtime,
        )
    if config.reward_model.implicit and trains:
        model = replace(config.reward_model, optim=_with_horizon(config.reward_model.optim, total_steps))
        classes["process_reward"] = wrap(
            _workers_of(model.strategy).ImplicitRewardWorker,
            config=model,
            rollout_n=section.rollout.rows_per_prompt,
            **runtime,
        )
    elif config.reward_model.enable and not config.reward_model.implicit:
        classes["reward_model"] = wrap(
            _workers_of(config.reward_model.strategy).RewardModelWorker,
            config=config.reward_model,
            policy_model=section.model,
            max_length=config.data.max_prompt_length + config.data.max_response_length,
            **runtime,
        )
    return classes


def _workers_of(strategy: str) -> Any:
    """The module that binds the roles to a training engine."""
    from verl.workers import fsdp_workers, megatron_workers

    return megatron_workers if strategy == "megatron" else fsdp_workers


def build_worker_groups(config: PPOConfig, device: str, total_steps: int) -> WorkerGroups:
    """Start the workers, all roles in the same processes, and load their models.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        total_steps: steps of the run, the horizon of the learning-rate schedules.
    """
    pool = None
    if config.trainer.controller == "local":
        groups = _local_groups(config, device, total_steps)
    else:
        groups, pool = _ray_groups(config, device, total_steps)
    # memory of the last model built is what rollout may use: the actor comes last
    for name in ("critic", "reward_model", "process_reward", "actor_rollout"):
        if name in groups:
            groups[name].init_model()
    actor_rollout = groups["actor_rollout"]
    rollout: Any = actor_rollout
    if config.actor_rollout_ref.rollout.mode == "async":
        try:
            rollout = _servers(config, device, actor_rollout, pool)
        except BaseException:
            actor_rollout.shutdown()
            raise
    return WorkerGroups(
        actor_rollout=actor_rollout,
        rollout=rollout,
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


def _ray_groups(config: PPOConfig, device: str, total_steps: int) -> tuple[Mapping[str, WorkerGroup], Any]:
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
    rollout, workers = config.actor_rollout_ref.rollout, config.trainer.world_size
    servers = processes_per_slot(rollout, workers) if rollout.mode == "async" else 0
    pool = RayResourcePool(
        process_on_nodes=[config.trainer.n_gpus_per_node] * config.trainer.nnodes,
        use_gpu=device == "cuda",
        max_colocate_count=1 + servers,
    )
    together = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=create_colocated_worker_cls(classes),
        worker_env=process_env(config, device),
        timeout_s=config.trainer.worker_timeout_s,
        timeout_key="trainer.worker_timeout_s",
    )
    return together.spawn(prefix_set=classes.keys()), pool


def _servers(config: PPOConfig, device: str, trainers: WorkerGroup, pool: Any) -> Rollout:
    """Rollout servers in the places of the training workers."""
    import ray

    from verl.trainer.ppo.servers import AgentLoopPool, ServerRollout
    from verl.workers.rollout.serving.replicas import ReplicaGroup
    from verl.workers.rollout.serving.server import ServerSpec

    section, workers = config.actor_rollout_ref, config.trainer.world_size
    rollout, limits = section.rollout, section.rollout.server
    ranks, replicas = rollout.tensor_model_parallel_size, replica_count(rollout, workers)
    # servers on one device share its memory; on CPUs that is the machine's
    sharers = processes_per_slot(rollout, workers) if device == "cuda" else -(-replicas // config.trainer.nnodes)
    places = slots_of_replicas(replicas, ranks, workers)
    slots = pool.slots()
    group = ReplicaGroup(
        ServerSpec(
            section.model,
            shared_config(rollout, sharers),
            device,
            quiet_timeout_s=limits.timeout,
            http_host=limits.host if limits.openai_api else None,
            deterministic=config.trainer.deterministic,
        ),
        [[slots[slot] for slot in place] for place in places],
        resources=pool.actor_resources(),
        environment=process_env(config, device),
        max_restarts=limits.max_restarts,
        start_timeout_s=limits.max_start_wait_time,
    )
    agents = None
    if rollout.agent_loop is not None:
        agents = AgentLoopPool(
            section.model,
            rollout,
            template_kwargs=config.data.apply_chat_template_kwargs,
            image_limits=image_limits(config),
            seed=config.trainer.seed,
            environment=process_env(config, device),
        )
    return ServerRollout(
        group,
        places,
        trainers,
        rollout,
        seed=config.trainer.seed,
        host=ray.util.get_node_ip_address(),
        device=device,
        timeout_s=section.nccl_timeout,
        agents=agents,
    )


def shared_config(rollout: RolloutConfig, servers: int) -> RolloutConfig:
    """The section for one of several servers that share a device's memory."""
    return replace(rollout, gpu_memory_utilization=rollout.gpu_memory_utilization / servers)


def processes_per_slot(rollout: RolloutConfig, workers: int) -> int:
    """How many server processes share a training worker's place."""
    return -(-replica_count(rollout, workers) * rollout.tensor_model_parallel_size // workers)


def replica_count(rollout: RolloutConfig, workers: int) -> int:
    """``rollout.num_replicas``, by default as many as there are places for."""
    return rollout.num_replicas or max(1, workers // rollout.tensor_model_parallel_size)


def slots_of_replicas(replicas: int, ranks: int, workers: int) -> list[list[int]]:
    """For each replica the training ranks in whose places its processes run; neighbours share the weights."""
    return [[(replica * ranks + rank) % workers for rank in range(ranks)] for replica in range(replicas)]


def _with_horizon(optim: OptimConfig, total_steps: int) -> OptimConfig:
    """The learning-rate schedule of a run spans the run, unless it was given a length of its own."""
    return (
        optim
        if optim.total_training_steps and optim.total_training_steps > 0
        else replace(optim, total_training_steps=total_steps)
    )
