"""What the policy losses share: masked log ratios, sequence means, and the last step from token losses to a scalar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.aggregate import agg_loss, keep_masked, masked_mean
from verl.algorithms.registry import MetricValue
from verl.algorithms.settings import setting
from verl.errors import ConfigError

# exp(20) is about 5e8: far outside every trust region, far inside float32. Beyond it the ratio carries no gradient.
LOG_RATIO_LIMIT = 20.0


class Inputs(NamedTuple):
    """Inputs of a policy loss, all ``(B, R)``, with harmless values outside the mask.

    Attributes:
        log_ratio: log-prob under the trained policy less that under the old one, clamped to ±20.
        log_prob: under the trained policy.
        old_log_prob: under the policy that the ratio is taken against.
        advantages: the advantages.
        mask: bool.
    """

    log_ratio: Tensor
    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        """Importance ratio of each token; 1 outside the mask."""
        return self.log_ratio.exp()


def loss_inputs(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Inputs:
    """Mask the inputs, not only the result: the gradient of ``exp`` at NaN is NaN even if masked afterwards."""
    mask = response_mask.bool()
    new, old = keep_masked(log_prob, mask), keep_masked(old_log_prob.detach(), mask)
    log_ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return Inputs(log_ratio, new, old, keep_masked(advantages.detach(), mask), mask)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's masked tokens, ``(B, R)`` to ``(B, 1)``; 0 for an empty one."""
    return masked_mean(values, mask, dim=-1).unsqueeze(-1)


def clip_widths(config: Any) -> tuple[float, float]:
    """``(low, high)`` from ``clip_ratio_low`` and ``clip_ratio_high``, which default to ``clip_ratio`` (0.2).

    Raises:
        ConfigError: a width is negative.
    """
    both = setting(config, "clip_ratio", 0.2)
    low, high = setting(config, "clip_ratio_low", both), setting(config, "clip_ratio_high", both)
    if low < 0 or high < 0:
        raise ConfigError(f"clip widths are {low} and {high}; they must not be negative")
    return low, high


def loss_setting(config: Any, name: str, default: Any) -> Any:
    """A key of ``actor.policy_loss``, or ``default``."""
    return setting(setting(config, "policy_loss", None), name, default)


def token_means(mask: Tensor, **values: Tensor) -> dict[str, MetricValue]:
    """Metrics ``actor/<name>``: means over the response tokens, in float64, without gradients."""
    return {f"actor/{name}": masked_mean(value.detach().double(), mask) for name, value in values.items()}


def reduce_losses(
    losses: Tensor, response_mask: Tensor, loss_agg_mode: str, config: Any, rollout_is_weights: Tensor | None
) -> Tensor:
    """Weight the token losses ``(B, R)`` and aggregate them with the counts in ``config.global_batch_info``.

    Weights carry no gradient. Where a loss was clipped, they multiply what clipping left.
    """
    if rollout_is_weights is not None:
        losses = losses * keep_masked(rollout_is_weights.detach(), response_mask)
    counts: Mapping[str, Any] = setting(config, "global_batch_info", {})
    return agg_loss(losses, response_mask, loss_agg_mode, **counts)


def pessimistic(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    r"""PPO's clipped loss :math:`\max(-A\rho, -A\operatorname{clip}(\rho, 1-low, 1+high))`.

    Returns:
        The losses, and a bool tensor that says where the clipped term was the larger one.
    """
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), (bounded > plain).detach()
