"""The roles bound to the FSDP2 engine."""

from __future__ import annotations

from verl.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.workers import roles
from verl.workers.engine.fsdp import FSDPEngine

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "ImplicitRewardWorker", "RewardModelWorker"]


class _OnFSDP(roles.RoleWorker):
    """Makes FSDP2 engines."""

    def make_engine(
        self,
        model: ModelConfig,
        fsdp: FSDPConfig,
        optim: OptimConfig | None,
        *,
        head: str,
        checkpoint: CheckpointConfig | None = None,
    ) -> FSDPEngine:
        return FSDPEngine(
            model, fsdp, optim, head=head, device=self.device, checkpoint_config=checkpoint, seed=self.seed
        )


class ActorRolloutRefWorker(_OnFSDP, roles.ActorRolloutRefWorker):
    """Actor, rollout and reference on FSDP2."""


class CriticWorker(_OnFSDP, roles.CriticWorker):
    """Critic on FSDP2."""


class RewardModelWorker(_OnFSDP, roles.RewardModelWorker):
    """Reward model on FSDP2."""


class ImplicitRewardWorker(_OnFSDP, roles.ImplicitRewardWorker):
    """Implicit process reward model on FSDP2."""
