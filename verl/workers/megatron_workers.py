"""The roles bound to the Megatron engine."""

from __future__ import annotations

from verl.config import CheckpointConfig, ModelConfig, OptimConfig
from verl.workers import roles
from verl.workers.engine.megatron import MegatronEngine

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
    """Actor, rollout and reference on Megatron."""


class CriticWorker(_OnMegatron, roles.CriticWorker):
    """Critic on Megatron."""


class RewardModelWorker(_OnMegatron, roles.RewardModelWorker):
    """Reward model on Megatron."""


class ImplicitRewardWorker(_OnMegatron, roles.ImplicitRewardWorker):
    """Implicit process reward model on Megatron."""
