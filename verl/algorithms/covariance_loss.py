"""Policy losses that restrain the few tokens which drive the entropy down: Clip-Cov and KL-Cov (arXiv:2505.22617).

How a policy-gradient step changes the entropy is given by the covariance between a token's log-prob and its
advantage. A handful of tokens with a very large one make the entropy collapse. Both losses treat such tokens apart.

**Which tokens these are is decided once per step, over the whole batch**, from the log-probs at its start
(:func:`covariance`), and travels with the batch as the field ``selected_tokens``. A choice made inside each
micro-batch would depend on how the batch is split. Without that field, in a direct call, the tensors given are taken
for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_mean
from verl.algorithms.registry import MetricValue, register_policy_loss
from verl.algorithms.surrogate import (
    clip_widths,
    loss_inputs,
    loss_setting,
    pessimistic,
    reduce_losses,
    token_means,
)
from verl.errors import ConfigError

SELECTED = "selected_tokens"


def covariance(old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    r"""Covariance term of each token, :math:`(\log\pi - \overline{\log\pi})(A - \overline{A})`: ``(B, R)`` float64.

    The means run over all response tokens given.
    """
    mask = response_mask.bool()
    log_prob, advantage = keep_masked(old_log_prob.double(), mask), keep_masked(advantages.double(), mask)
    term = (log_prob - masked_mean(log_prob, mask)) * (advantage - masked_mean(advantage, mask))
    return keep_masked(term, mask)


def _share(ratio: float, mask: Tensor, name: str) -> int:
    if not 0 < ratio <= 1:
        raise ConfigError(f"policy_loss.{name} is {ratio}; it is a share of the tokens, above 0 and at most 1")
    # At least one token, so that small batches are not left alone entirely.
    return max(1, int(ratio * int(mask.sum())))


def _lottery(old_log_prob: Tensor, responses: Tensor | None, mask: Tensor) -> Tensor:
    """A pseudo-random whole number for each token, ``(B, R)`` int64, made from what the token *is*.

    A random generator would tie the draw to the order of the rows and to their split. Token ids and positions do not.
    """
    if responses is None:
        content = keep_masked(old_log_prob, mask).float().contiguous().view(torch.int32).long()
    else:
        content = torch.where(mask, responses.long(), 0)
    position = torch.arange(content.shape[1], device=content.device)
    # 64-bit finaliser of splitmix64; products wrap around.
    mixed = content * 0x9E3779B1 + position * 0x85EBCA77
    mixed = mixed + torch.where(mask, mixed, 0).sum(-1, keepdim=True) * 0xC2B2AE3D
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed ^ ((mixed >> 31) & ((1 << 33) - 1))


def select_clip_cov(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    responses: Tensor | None = None,
) -> Tensor:
    """Tokens that Clip-Cov drops: a share ``ratio`` of all, drawn from those with ``low < covariance < high``.

    Args:
        old_log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        ratio: tokens to draw as a share of all response tokens; at least one is drawn if any is eligible.
        low: least covariance.
        high: largest covariance.
        responses: ``(B, R)`` token ids, from which the draw is made; by default from the log-probs.

    Returns:
        ``(B, R)`` bool.

    Raises:
        ConfigError: ``ratio`` is not a share, or the bounds are in the wrong order.
    """
    if not low < high:
        raise ConfigError(f"policy_loss.clip_cov_lb={low} must be below clip_cov_ub={high}")
    mask = response_mask.bool()
    wanted = _share(ratio, mask, "clip_cov_ratio")
    term = covariance(old_log_prob, advantages, mask)
    eligible = mask & (term > low) & (term < high)
    ticket = torch.where(eligible, _lottery(old_log_prob, responses, mask), torch.iinfo(torch.int64).max).flatten()
    drawn = ticket.topk(min(wanted, int(eligible.sum())), largest=False).indices
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[drawn] = True
    return chosen.view_as(mask)


def select_kl_cov(old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, ratio: float = 2e-4) -> Tensor:
    """Tokens that KL-Cov penalises: the share ``ratio`` with the largest covariance, ``(B, R)`` bool.

    Raises:
        ConfigError: ``ratio`` is not a share.
    """
    mask = response_mask.bool()
    wanted = _share(ratio, mask, "kl_cov_ratio")
    term = torch.where(mask, covariance(old_log_prob, advantages, mask), -torch.inf).flatten()
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[term.topk(min(wanted, int(mask.sum()))).indices] = True
    return chosen.view_as(mask)


def _clip_cov_tokens(old: Tensor, adv: Tensor, mask: Tensor, config: Any, responses: Tensor | None) -> Tensor:
    return select_clip_cov(
        old,
        adv,
        mask,
        ratio=loss_setting(config, "clip_cov_ratio", 2e-4),
        low=loss_setting(config, "clip_cov_lb", 1.0),
        high=loss_setting(config, "clip_cov_ub", 5.0),
        responses=responses,
    )


def prepare_clip_cov(fields: Mapping[str, Any], config: Any) -> dict[str, Tensor]:
    """The field ``selected_tokens`` ``(B, R)`` bool of the whole batch for Clip-Cov."""
    old, adv, mask = fields["old_log_probs"], fields["advantages"], fields["response_mask"]
    return {SELECTED: _clip_cov_tokens(old, adv, mask, config, fields.get("responses"))}


def prepare_kl_cov(fields: Mapping[str, Any], config: Any) -> dict[str, Tensor]:
    """The field ``selected_tokens`` ``(B, R)`` bool of the whole batch for KL-Cov."""
    ratio = loss_setting(config, "kl_cov_ratio", 2e-4)
    return {
        SELECTED: select_kl_cov(fields["old_log_probs"], fields["advantages"], fields["response_mask"], ratio=ratio)
    }


@register_policy_loss("clip_cov", prepare=prepare_clip_cov)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    selected_tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""Clip-Cov: PPO's clipped loss without a few tokens of high covariance (Cui et al., arXiv:2505.22617).

    .. math:: l = -A \text{ for drawn tokens}, \qquad l = \max\bigl(-A\rho, -A\operatorname{clip}(\rho,
        1-\epsilon_{low}, 1+\epsilon_{high})\bigr) \text{ else}

    A drawn token has no gradient: its ratio is held at 1. The paper writes 0 for its loss, which is the same but for
    a constant; with this one the first loss on policy is minus the mean advantage, as for other losses.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`. Dropped tokens still count.
        config: actor section; gives ``policy_loss.clip_cov_ratio`` (2e-4), ``clip_cov_lb`` (1.0) and ``clip_cov_ub``
            (5.0), the clip widths, and ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.
        selected_tokens: ``(B, R)``, above 0 for dropped tokens; by default drawn from these tensors.

    Returns:
        ``(loss, metrics)``: ``actor/pg_clipfrac`` (clipped or dropped), ``actor/ppo_kl`` and
        ``actor/cov_selected`` (share of dropped tokens).
    """
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    if selected_tokens is None:
        selected_tokens = _clip_cov_tokens(x.old_log_prob, x.advantages, x.mask, config, None)
    dropped = selected_tokens > 0
    losses, clipped = pessimistic(x.advantages, x.ratio, *clip_widths(config))
    losses = torch.where(dropped, -x.advantages, losses)
    metrics = token_means(x.mask, pg_clipfrac=clipped | dropped, ppo_kl=-x.log_ratio, cov_selected=dropped)
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics


@register_policy_loss("kl_cov", prepare=prepare_kl_cov)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    selected_tokens: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricValue]]:
    r"""KL-Cov: policy gradient with a KL penalty on the tokens of highest covariance (Cui et al., arXiv:2505.22617).

    .. math:: l = -A\rho + \beta\,\bigl|\log\pi(y_t) - \log\pi_{old}(y_t)\bigr| \text{ for selected tokens}, \qquad
        l = -A\rho \text{ else}

    There is no clipping. The paper writes the penalty as a KL divergence; the absolute log ratio pulls a token back
    from either side, and is 0 with gradient 0 on policy.

    Args:
        old_log_prob: ``(B, R)``.
        log_prob: ``(B, R)``.
        advantages: ``(B, R)``.
        response_mask: ``(B, R)``.
        loss_agg_mode: see :func:`verl.algorithms.aggregate.agg_loss`.
        config: actor section; gives ``policy_loss.kl_cov_ratio`` (2e-4), ``policy_loss.ppo_kl_coef``
            (:math:`\beta`, 0.1) and ``global_batch_info``.
        rollout_is_weights: ``(B, R)`` factors for sampling from a stale or different policy.
        selected_tokens: ``(B, R)``, above 0 for penalised tokens; by default chosen from these tensors.

    Returns:
        ``(loss, metrics)``: ``actor/ppo_kl`` and ``actor/cov_selected`` (share of penalised tokens).
    """
    x = loss_inputs(old_log_prob, log_prob, advantages, response_mask)
    if selected_tokens is None:
        ratio = loss_setting(config, "kl_cov_ratio", 2e-4)
        selected_tokens = select_kl_cov(x.old_log_prob, x.advantages, x.mask, ratio=ratio)
    selected = (selected_tokens > 0) & x.mask
    penalty = torch.where(selected, loss_setting(config, "ppo_kl_coef", 0.1) * x.log_ratio.abs(), 0.0)
    losses = -x.advantages * x.ratio + penalty
    metrics = token_means(x.mask, ppo_kl=-x.log_ratio, cov_selected=selected)
    return reduce_losses(losses, response_mask, loss_agg_mode, config, rollout_is_weights), metrics
