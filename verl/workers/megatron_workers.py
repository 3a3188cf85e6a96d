"""The roles bound to the Megatron engine."""

from __future__ import annotations

from verl.config import CheckpointConfig, ModelConfig, OptimConfig
from verl.workers import roles
from verl.workers.engine.megatron.engine import MegatronEngine

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "ImplicitRewardWorker", "RewardModelWorker"]


class _OnMegatron(roles.RoleWorker):
    """Makes Megatron engines."""

    def make_engine(
        self,
        model: ModelConfig,
        section: roles.EngineSection,
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


class ActorRolloutRefWorker(_OnMegatron, roles.ActorRolloutRefWorker):
    """Actor, rollout and reference on Megatron.

    Where ranks generate together with one split model, they are ranks of one tensor-parallel group, grouped so that
    each trains a part of what it generates with.
    """

    def ranks_of_a_weight(self) -> int:
        return self.config.actor.megatron.tensor_model_parallel_size


class CriticWorker(_OnMegatron, roles.CriticWorker):
    """Critic on Megatron."""


class RewardModelWorker(_OnMegatron, roles.RewardModelWorker):
    """Reward model on Megatron."""


class ImplicitRewardWorker(_OnMegatron, roles.ImplicitRewardWorker):
    """Implicit process reward model on Megatron."""
