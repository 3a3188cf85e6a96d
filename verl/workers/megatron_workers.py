"""The roles bound to the Megatron engine."""

from __future__ import annotations

from verl.config import CheckpointConfig, ModelConfig, OptimConfig
from verl.workers.engine.megatron.engine import MegatronEngine
from verl.workers.roles import actor_rollout_ref, critic, implicit_reward, reward_model
from verl.workers.roles.base import EngineSection, RoleWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "ImplicitRewardWorker", "RewardModelWorker"]


class _OnMegatron(RoleWorker):
    """Makes Megatron engines."""

    def make_engine(
        self,
        model: ModelConfig,
        section: EngineSection,
        optim: OptimConfig | None,
        *,
        head: str,
        checkpoint: CheckpointConfig | None = None,
    ) -> MegatronEngine:
        return MegatronEngine(
            model,
            section.megatron,
            optim,
            head=head,
            device=self.device,
            checkpoint_config=checkpoint,
            seed=self.seed,
        )


class ActorRolloutRefWorker(_OnMegatron, actor_rollout_ref.ActorRolloutRefWorker):
    """Actor, rollout and reference on Megatron.

    Where ranks generate together with one split model, they are ranks of one tensor-parallel group, grouped so that
    each trains a part of what it generates with.
    """

    def ranks_of_a_weight(self) -> int:
        return self.config.actor.megatron.tensor_model_parallel_size


class CriticWorker(_OnMegatron, critic.CriticWorker):
    """Critic on Megatron."""


class RewardModelWorker(_OnMegatron, reward_model.RewardModelWorker):
    """Reward model on Megatron."""


class ImplicitRewardWorker(_OnMegatron, implicit_reward.ImplicitRewardWorker):
    """Implicit process reward model on Megatron."""
