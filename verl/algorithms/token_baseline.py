"""The optimal token baseline: one for each position, weighted by gradient energy (Li et al., arXiv:2602.07078)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import keep_masked
from verl.algorithms.baseline import discounted_returns
from verl.algorithms.group import Groups, Index
from verl.algorithms.registry import register_adv_est
from verl.algorithms.turns import Turns
from verl.errors import SchemaError


def token_energy(
    old_log_probs: Tensor,
    response_mask: Tensor,
    sum_pi_squared: Tensor | None = None,
    entropys: Tensor | None = None,
) -> Tensor:
    r"""Squared norm of a token's gradient with respect to the logits, ``(B, R)`` float64, 0 outside the mask.

    .. math:: \lVert e_y - \pi \rVert^2 = 1 - 2\pi(y) + \sum_v \pi(v)^2

    It stands for the squared norm of the whole gradient and needs no backward pass. Without the sum, the entropy
    gives a lower bound of it, :math:`\sum_v \pi(v)^2 \ge e^{-H}`, exact for distributions that are even over some
    tokens.

    Args:
        old_log_probs: ``(B, R)``, of the sampled tokens.
        response_mask: ``(B, R)``.
        sum_pi_squared: ``(B, R)``, sum of the squared probabilities of all tokens.
        entropys: ``(B, R)`` in nats; read when the sum is not given.

    Raises:
        SchemaError: neither is given.
    """
    probability = keep_masked(old_log_probs.double(), response_mask).exp()
    if sum_pi_squared is not None:
        squares = keep_masked(sum_pi_squared.double(), response_mask)
    elif entropys is not None:
        squares = (-keep_masked(entropys.double(), response_mask)).exp()
    else:
        raise SchemaError(
            "the optimal token baseline needs sum_pi_squared or entropys of the sampled tokens, and the batch has "
            "neither; they come with the old log-probs, which algorithm.rollout_correction.bypass_mode leaves out"
        )
    # Never less than what the sampled token alone contributes; rounding and the bound may go below.
    energy = torch.maximum(1 - 2 * probability + squares, (1 - probability).square())
    return keep_masked(energy, response_mask)


def _baseline(returns: Tensor, weights: Tensor, cells: Tensor) -> Tensor:
    """Weighted mean of ``returns`` in each cell, for each entry, all ``(K,)``.

    A cell with one entry has baseline 0. In a cell of equal returns the baseline is that return exactly.
    """
    _, ids, counts = torch.unique(cells, return_inverse=True, return_counts=True)
    groups = Groups(ids, counts.double())
    mean = groups.sum(returns * weights) / groups.sum(weights)
    baseline = torch.where(groups.tied(returns), returns, mean[ids])
    return torch.where(groups.lone(), 0.0, baseline)


def _weighted_energy(
    old_log_probs: Tensor,
    response_mask: Tensor,
    sum_pi_squared: Tensor | None,
    entropys: Tensor | None,
    rollout_is_weights: Tensor | None,
) -> Tensor:
    energy = token_energy(old_log_probs, response_mask, sum_pi_squared, entropys)
    if rollout_is_weights is not None:
        # The gradient is multiplied by the weight, its squared norm by the square.
        energy = energy * keep_masked(rollout_is_weights.double(), response_mask).square()
    return energy.cumsum(-1)


@register_adv_est("optimal_token_baseline")
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor | None = None,
    entropys: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""OTB: the rewards to come, less their mean over the group weighted by the energy spent so far.

    .. math::
        A_{it} = G_{it} - \frac{\sum_j W_{jt} G_{jt}}{\sum_j W_{jt}}, \qquad
        G_{it} = \sum_{k \ge t} \gamma^{k-t} r_{ik}, \qquad W_{it} = \sum_{k \le t} w_{ik}

    *w* is the gradient energy of a token (:func:`token_energy`): noisy responses count more in the baseline, which
    minimises the variance of the gradient (Li et al., arXiv:2602.07078). The sums run over the group's responses that
    have a *t*-th sampled token; tool output is not counted in *t*. Where only one response is left, and where all
    returns are equal, the rules of :mod:`verl.algorithms.group` hold for that position: baseline 0, and advantage 0.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        old_log_probs: ``(B, R)``.
        sum_pi_squared: ``(B, R)``; without it, the bound from ``entropys`` stands in.
        entropys: ``(B, R)``.
        rollout_is_weights: ``(B, R)``, if the loss will be weighted; energies then carry its square.
        gamma: discount per token.
        epsilon: added to every weight, so that a group of certain tokens has a baseline.
        config: not used; ``gamma`` comes from the ``algorithm`` section.

    Returns:
        ``(advantages, returns)``, both ``(B, R)`` float32, 0 outside the mask; returns are *G*.
    """
    with torch.no_grad():
        mask = response_mask.bool()
        returns = discounted_returns(token_level_rewards, mask, gamma, torch.float64)
        weights = _weighted_energy(old_log_probs, mask, sum_pi_squared, entropys, rollout_is_weights) + epsilon
        groups = Groups.from_index(index, mask.shape[0], mask.device)
        place = mask.long().cumsum(-1)
        cells = groups.ids.unsqueeze(-1) * (mask.shape[1] + 1) + place
        advantages = torch.zeros_like(returns)
        advantages[mask] = returns[mask] - _baseline(returns[mask], weights[mask], cells[mask])
        return advantages.float(), returns.float()


@register_adv_est("tir_optimal_token_baseline")
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor | None = None,
    entropys: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    gamma: float = 1.0,
    epsilon: float = 1e-8,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""OTB for several turns: responses are compared turn by turn instead of token by token.

    Turns differ in length, so after the first one the *t*-th tokens of two responses may stand in different turns.
    The baseline of turn *m* therefore compares the group's *m*-th turns: *G* as of their first tokens, *W* as of their
    last, and one baseline for all tokens of the turn.

    .. math:: A_{it} = G_{it} - \frac{\sum_j W_{jm} G_{jm}}{\sum_j W_{jm}}, \qquad t \in \text{turn } m

    Args, returns: as :func:`compute_optimal_token_baseline_advantage`. With one turn and an outcome reward it differs
    from it only in the weights, which are those of the whole response.
    """
    with torch.no_grad():
        mask = response_mask.bool()
        returns = discounted_returns(token_level_rewards, mask, gamma, torch.float64)
        turns = Turns.from_mask(mask)
        spent = _weighted_energy(old_log_probs, mask, sum_pi_squared, entropys, rollout_is_weights)
        # Energy only grows, so its value at the end of a turn is the largest of the turn.
        weights = spent.new_zeros(len(turns)).scatter_reduce_(0, turns.of_token[mask], spent[mask], "amax") + epsilon
        groups = Groups.from_index(index, mask.shape[0], mask.device)
        cells = groups.ids[turns.row] * (mask.shape[1] + 1) + turns.number
        baseline = _baseline(returns[turns.row, turns.first], weights, cells)
        advantages = keep_masked(returns - turns.spread(baseline), mask)
        return advantages.float(), returns.float()
