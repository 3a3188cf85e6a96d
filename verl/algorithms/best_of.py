"""Group estimators for objectives other than the mean score: pass@k, and the log-likelihood of success."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.group import Index, against_baseline, scores_and_groups, spread
from verl.algorithms.registry import register_adv_est
from verl.errors import DataError


@register_adv_est("grpo_passk")
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""Pass@k: a response gets what it adds to the best score of its group (Tang et al., arXiv:2503.19595).

    .. math:: A_i = \max_j s_j - \max_{j \ne i} s_j

    The group's best score is the objective, and leaving a response out its baseline: only a single best response has
    an advantage, its lead over the second. *k* is the group size. With ``norm_adv_by_std_in_grpo`` the lead is divided
    by the group's standard deviation (n - 1) plus epsilon. One-sample groups: see :mod:`verl.algorithms.group`.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: keeps the division finite.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.
        config: not used; the flag above comes from the ``algorithm`` section.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        best = groups.extreme(scores, "amax")
        leads = scores == best[groups.ids]
        alone = leads & (groups.sum(leads.double())[groups.ids] == 1)
        second = groups.extreme(torch.where(alone, -torch.inf, scores), "amax")
        advantage = torch.where(alone, best[groups.ids] - second[groups.ids], 0.0)
        if norm_adv_by_std_in_grpo:
            advantage = advantage / (groups.std(scores)[groups.ids] + epsilon)
        result = spread(torch.where(groups.lone(), scores, advantage), response_mask)
        return result, result.clone()


@register_adv_est("maxrl")
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""MaxRL: the score relative to the group's success rate (Tajwar et al., arXiv:2602.02710).

    .. math:: A_i = \frac{s_i - \operatorname{mean}(s)}{\operatorname{mean}(s) + \epsilon}

    Where GRPO climbs the success rate *p*, this climbs a truncated series of :math:`\log p`, the maximum-likelihood
    objective: a rare success weighs :math:`1/p`. The more samples a prompt has, the longer the series. Meant for
    scores of 0 and 1. One-sample and tied groups: see :mod:`verl.algorithms.group`.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: keeps the division finite.
        config: not used.

    Raises:
        DataError: a score is negative, so that it is no success rate.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        if bool((scores < 0).any()):
            raise DataError(
                f"maxrl divides by the mean score of a group, but a score is {float(scores.min())}; use scores of at "
                "least 0 and put a KL penalty into the loss (actor.use_kl_loss) instead of the reward"
            )
        mean = groups.mean(scores)[groups.ids]
        advantage = against_baseline(scores, mean, groups)
        relative = torch.where(mean > 0, advantage / (mean + epsilon), 0.0)
        result = spread(torch.where(groups.lone(), advantage, relative), response_mask)
        return result, result.clone()
