"""Whether an engine gets a policy's low-rank adapter beside the base model's weights, or added to them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from verl.errors import ConfigError
from verl.models.lora import LoraSettings

if TYPE_CHECKING:
    from verl.config import ModelConfig, RolloutConfig

logger = logging.getLogger(__name__)


def adapter_for(model: ModelConfig, rollout: RolloutConfig) -> LoraSettings | None:
    """The adapter that the engine is to get apart, if it can; None without one, or where it is to come merged."""
    return None if rollout.lora_merge else LoraSettings.of(model)


def merge_instead(rollout: RolloutConfig, reason: str) -> None:
    """Say that the adapter comes merged, and why.

    Args:
        rollout: the ``rollout`` section.
        reason: continues "rollout.name=... cannot hold the adapter apart: ".

    Raises:
        ConfigError: it was asked for apart.
    """
    text = f"rollout.name={rollout.name} cannot hold the adapter apart: {reason}"
    if rollout.lora_merge is False:
        raise ConfigError(
            f"actor_rollout_ref.rollout.lora_merge=False, but {text}; leave it out, or set it to True, and whole "
            "weights are synced"
        )
    logger.warning("%s. Every update sends whole weights with the adapter added to them.", text)
