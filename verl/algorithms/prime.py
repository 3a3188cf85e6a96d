r"""PRIME: process rewards from a language model that learns them from outcomes alone (Cui et al., arXiv:2502.01456).

The reward of a token is how much more probable an outcome-trained model makes it than a frozen reference does:

.. math:: r_\phi(y_t) = \beta \log\frac{\pi_\phi(y_t \mid y_{<t})}{\pi_{ref}(y_t \mid y_{<t})}

Trained so that their sum predicts whether a response is right, these log-ratios are process rewards without a single
step label (Yuan et al., arXiv:2412.01981).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl.algorithms.aggregate import Count, keep_masked, masked_mean, masked_sum
from verl.algorithms.baseline import discounted_returns
from verl.algorithms.group import Groups, Index, against_baseline, scores_and_groups
from verl.algorithms.registry import register_adv_est

#: Summed rewards below this are zero up to rounding: float32 log-ratios of a thousand tokens, scaled by beta.
UNDECIDED = 1e-5


def implicit_rewards(log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    r"""Token rewards :math:`r_\phi(y_t)`, 0 outside the mask.

    Args:
        log_prob: ``(B, R)`` of the reward model.
        ref_log_prob: ``(B, R)`` of its frozen reference.
        response_mask: ``(B, R)``.
        beta: scale of the rewards.
    """
    return beta * (keep_masked(log_prob, response_mask) - keep_masked(ref_log_prob, response_mask))


def implicit_reward_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    outcomes: Tensor,
    beta: float,
    *,
    dp_size: int = 1,
    global_batch_size: Count | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Cross-entropy of the outcome under the summed rewards.

    .. math:: l = -o \log\sigma\Bigl(\sum_t r_\phi(y_t)\Bigr) - (1 - o)\log\Bigl(1 - \sigma\bigl(\sum_t
        r_\phi(y_t)\bigr)\Bigr)

    Args:
        log_prob: ``(B, R)`` of the reward model, with gradient.
        ref_log_prob: ``(B, R)`` of its frozen reference.
        response_mask: ``(B, R)``; a response without a token does not count.
        outcomes: ``(B,)`` in 0 to 1: whether, or how probably, the response is right.
        beta: scale of the rewards.
        dp_size: number of data-parallel ranks.
        global_batch_size: responses of the whole mini-batch; default: those of these tensors.

    Returns:
        ``(loss, accuracy)``: the mean over responses, and the share of these tensors' responses whose summed reward
        has the sign that the outcome says. A sum of zero predicts nothing and counts as half right. It is zero up to
        rounding (``UNDECIDED``), as for a model that is still equal to its reference.
    """
    rows = response_mask.bool().any(-1)
    rewards = implicit_rewards(log_prob, ref_log_prob, response_mask, beta)
    total = masked_sum(rewards, response_mask, dim=-1)
    target = keep_masked(outcomes.to(total.dtype), rows)
    losses = binary_cross_entropy_with_logits(total, target, reduction="none")
    count = rows.sum() if global_batch_size is None else global_batch_size
    count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    right = ((total > 0) == (target > 0.5)).double()
    accuracy = masked_mean(torch.where(total.abs() < UNDECIDED, 0.5, right), rows)
    return masked_sum(losses, rows) / count * dp_size, accuracy


@register_adv_est("prime")
def compute_prime_advantage(
    token_level_rewards: Tensor,
    process_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    gamma: float = 1.0,
    process_reward_coef: float = 1.0,
    outcome_reward_coef: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""PRIME's advantage: returns of process rewards and the outcome, each against the group's other samples.

    .. math:: A_t^i = c_p \sum_{s \ge t} \gamma^{s-t}\Bigl[r_\phi(y_s^i) - \frac{1}{K-1}\sum_{j \ne i} \bar r_\phi(y^j)
        \Bigr] + c_o \Bigl[r_o(y^i) - \frac{1}{K-1}\sum_{j \ne i} r_o(y^j)\Bigr]

    :math:`\bar r_\phi(y^j)` is the mean process reward of a token of response *j*, and *K* the size of the group. A
    response without a token has nothing to average and is not among the others. One-sample and tied groups: see
    :mod:`verl.algorithms.group`; here the rules hold for each of the two terms. The authors' code whitens the
    result over the batch; the paper's formula, which this is, does not.

    Args:
        token_level_rewards: ``(B, R)``; their sum is :math:`r_o`.
        process_rewards: ``(B, R)`` from :func:`implicit_rewards`.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        gamma: discount per token.
        process_reward_coef: :math:`c_p`.
        outcome_reward_coef: :math:`c_o`.
        config: not used; the other parameters may be set in the ``algorithm`` section.

    Returns:
        ``(advantages, returns)``, equal, ``(B, R)`` float32, 0 outside the mask.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        outcome = against_baseline(scores, leave_one_out(scores, groups, torch.ones_like(scores)), groups)

        present = response_mask.bool().any(-1).double()
        means = masked_mean(process_rewards.double(), response_mask, dim=-1)
        baseline = leave_one_out(means * present, groups, present)
        centred = process_rewards.double() - baseline.unsqueeze(-1)
        returns = discounted_returns(centred, response_mask, gamma)
        result = process_reward_coef * returns + outcome_reward_coef * outcome.float().unsqueeze(-1)
        result = keep_masked(result, response_mask).float()
        return result, result.clone()


def leave_one_out(values: Tensor, groups: Groups, present: Tensor) -> Tensor:
    """Mean of the *other* values of a sample's group, ``(B,)``; 0 where there is no other.

    Args:
        values: ``(B,)`` float64, 0 where ``present`` is 0.
        groups: the groups.
        present: ``(B,)`` float64, 1 for values that count.
    """
    total, count = groups.sum(values)[groups.ids], groups.sum(present)[groups.ids]
    return (total - values) / (count - present).clamp(min=1)
