"""The roles bound to the FSDP2 engine."""

from __future__ import annotations

from functools import partial

from verl.config import CheckpointConfig, ModelConfig, OptimConfig
from verl.utils.distributed import get_world_size
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.roles import actor_rollout_ref, critic, implicit_reward, reward_model
from verl.workers.roles.base import EngineSection, RoleWorker
from verl.workers.sharding_manager.reshard.layout import dense_splits, shard_placement_fn

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "ImplicitRewardWorker", "RewardModelWorker"]


class _OnFSDP(RoleWorker):
    """Makes FSDP2 engines."""

    def make_engine(
        self,
        model: ModelConfig,
        section: EngineSection,
        optim: OptimConfig | None,
        *,
        head: str,
        checkpoint: CheckpointConfig | None = None,
    ) -> FSDPEngine:
        return FSDPEngine(
            model,
            section.fsdp_config,
            optim,
            head=head,
            device=self.device,
            checkpoint_config=checkpoint,
            seed=self.seed,
        )


class ActorRolloutRefWorker(_OnFSDP, actor_rollout_ref.ActorRolloutRefWorker):
    """Actor, rollout and reference on FSDP2.

    Where ranks generate together with one split model, the actor's parameters are sharded along the same dimensions,
    and ranks are grouped so that each trains a part of what it generates with.
    """

    def make_engine(
        self,
        model: ModelConfig,
        section: EngineSection,
        optim: OptimConfig | None,
        *,
        head: str,
        checkpoint: CheckpointConfig | None = None,
    ) -> FSDPEngine:
        engine = super().make_engine(model, section, optim, head=head, checkpoint=checkpoint)
        if optim is not None and "rollout" in self.parts and self.config.rollout.tensor_model_parallel_size > 1:
            engine.shard_placement = partial(shard_placement_fn, splits=dense_splits())
        return engine

    def ranks_of_a_weight(self) -> int:
        shards, world = self.config.actor.fsdp_config.fsdp_size, get_world_size()
        return shards if 0 < shards < world else world


class CriticWorker(_OnFSDP, critic.CriticWorker):
    """Critic on FSDP2."""


class RewardModelWorker(_OnFSDP, reward_model.RewardModelWorker):
    """Reward model on FSDP2."""


class ImplicitRewardWorker(_OnFSDP, implicit_reward.ImplicitRewardWorker):
    """Implicit process reward model on FSDP2."""
