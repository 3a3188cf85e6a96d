"""A policy loss for runs that take the rollout's log-probs as the old ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import masked_mean
from verl.algorithms.correction import acceptance, importance_weights, log_ratios, ratios_at
from verl.algorithms.policy_loss import compute_policy_loss_vanilla
from verl.algorithms.registry import MetricValue, register_policy_loss
from verl.algorithms.surrogate import loss_inputs, loss_setting, reduce_losses, token_means
from verl.errors import ConfigError

BYPASS_LOSSES = ("ppo_clip", "reinforce")


@register_policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""Two policies instead of three: the ratio is taken against the policy that sampled.

    ``old_log_prob`` must be the log-probs that came with the samples, so that no pass recomputes them. Then
    :math:`\rho = \pi/\pi_{rollout}` corrects for everything between sampling and now: updates, staleness, and
    numeric differences between the engines. ``policy_loss.bypass_loss_type`` chooses:

    * ``ppo_clip``: the clipped loss of :func:`verl.algorithms.policy_loss.compute_policy_loss`. Its ratio is the
      importance weight, so no other weight is needed.
    * ``reinforce``: :math:`l = -\operatorname{sg}[w]\,A\log\pi(y_t)` with the bounded importance weight of
      :func:`verl.algorithms.correction.importance_weights`, taken from the policy *as it is now*: for example
      :math:`w = \min(\prod_t \rho_t, C)` for the level ``sequence``. No trust region.

    Tokens that ``policy_loss.bypass_rs`` or ``bypass_veto_threshold`` reject, by the same ratio, get weight 0
    (:func:`verl.algorithms.correction.acceptance`). They stay in the loss's denominator, because which tokens they are
    is known only within the update.

    Args:
        old_log_prob: ``(B, R)``, of the policy that sampled.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``policy_loss.bypass_loss_type`` (``ppo_clip``), for ``reinforce``
            ``policy_loss.bypass_is`` (level of the weight; None for no weight), ``policy_loss.bypass_is_threshold``
            (*C*, 2.0) and ``policy_loss.bypass_is_threshold_lower``, for ``ppo_clip`` the clip widths, for both
            ``policy_loss.bypass_rs``, ``bypass_rs_threshold`` (*C*), ``bypass_rs_threshold_lower`` and
            ``bypass_veto_threshold``, and ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors on top. They must not contain :math:`\rho` once more.

    Returns:
        ``(loss, metrics)``: those of ``vanilla``, or for ``reinforce`` ``actor/ppo_kl``, ``actor/pg_clipfrac``
        (share of tokens whose weight was bounded) and ``actor/bypass_is_weight`` (mean weight); with rejection also
        ``rollout_corr/rollout_rs_masked_fraction`` (share of rejected tokens).

    Raises:
        ConfigError: unknown type or level, or a threshold that is not positive.
    """
    kind = loss_setting(config, "bypass_loss_type", "ppo_clip")
    if kind not in BYPASS_LOSSES:
        raise ConfigError(f"policy_loss.bypass_loss_type={kind!r}: choose one of {', '.join(BYPASS_LOSSES)}")
    log_ratio = log_ratios(log_prob, old_log_prob, response_mask)
    accepted = _accepted(log_ratio, response_mask, config)
    rejection: dict[str, MetricValue] = {}
    if accepted is not None:
        kept = accepted.to(log_prob.dtype)
        rollout_is_weights = kept if rollout_is_weights is None else kept * rollout_is_weights
        rejection["rollout_corr/rollout_rs_masked_fraction"] = masked_mean((~accepted).double(), response_mask)
    if kind == "ppo_clip":
        loss, metrics = compute_policy_loss_vanilla(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )
        return loss, metrics | rejection
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    raw, weight = _importance_weight(log_ratio, x.mask, config)
    metrics = token_means(x.mask, ppo_kl=-x.log_ratio, pg_clipfrac=raw != weight, bypass_is_weight=weight)
    losses = -weight.to(x.log_prob.dtype) * x.advantages * x.log_prob
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics | rejection


def _accepted(log_ratio: Tensor, response_mask: Tensor, config: Any) -> Tensor | None:
    """Tokens ``(B, R)`` that are not rejected; None where nothing is to be rejected."""
    level = loss_setting(config, "bypass_rs", None)
    veto = loss_setting(config, "bypass_veto_threshold", None)
    if level is None and veto is None:
        return None
    upper = loss_setting(config, "bypass_rs_threshold", loss_setting(config, "bypass_is_threshold", 2.0))
    lower = loss_setting(config, "bypass_rs_threshold_lower", None)
    return acceptance(log_ratio, response_mask, level, upper=upper, lower=lower, veto=veto)


def _importance_weight(log_ratio: Tensor, mask: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Raw and bounded weights, both ``(B, R)``."""
    level = loss_setting(config, "bypass_is", None)
    if level is None:
        return torch.ones_like(log_ratio), torch.ones_like(log_ratio)
    upper = loss_setting(config, "bypass_is_threshold", 2.0)
    lower = loss_setting(config, "bypass_is_threshold_lower", None)
    raw = ratios_at(log_ratio, mask, "token" if level == "icepop" else level)
    return raw, importance_weights(log_ratio, mask, level, upper=upper, lower=lower)
