"""Estimators that compare a response with the other responses to the same prompt.

A group is the set of samples with the same ``uid``. Its statistics are taken in float64 over the samples' scores, the
sums of their token rewards inside the mask. Two cases have a rule of their own, the same for every estimator here:

* **A group with one sample** has nothing to compare with: its baseline is 0 and its scale 1, so the advantage is the
  score (plain REINFORCE for that sample).
* **A group whose scores are all equal** carries no signal: its advantages are exactly 0, not rounding noise divided
  by a tiny standard deviation.

An empty (aborted) response counts in its group with score 0 and has no token to carry an advantage. Unless said
otherwise ``returns`` equal ``advantages``; both are ``(B, R)`` float32, constant along a response, 0 outside the
mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.algorithms.aggregate import keep_masked, masked_sum, masked_whiten
from verl.algorithms.registry import register_adv_est
from verl.errors import DataError

Index: TypeAlias = NDArray[Any] | Tensor | Sequence[Any]


@dataclass(frozen=True)
class Groups:
    """Which sample belongs to which group.

    Attributes:
        ids: ``(B,)`` int64, group number of each sample, numbered by first appearance.
        size: ``(G,)`` float64, samples in each group.
    """

    ids: Tensor
    size: Tensor

    @classmethod
    def from_index(cls, index: Index, batch_size: int, device: torch.device) -> Groups:
        """Build from the uid of each sample: any hashable, equal within a group.

        Raises:
            DataError: ``index`` does not have one entry per sample.
        """
        labels = index.tolist() if isinstance(index, np.ndarray | Tensor) else list(index)
        if len(labels) != batch_size:
            raise DataError(f"index (uid) has {len(labels)} entries for {batch_size} samples; give one per sample")
        numbers: dict[Any, int] = {}
        ids = torch.tensor(
            [numbers.setdefault(label, len(numbers)) for label in labels], dtype=torch.int64, device=device
        )
        return cls(ids, torch.bincount(ids, minlength=len(numbers)).double())

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` ``(B,)`` in each group, ``(G,)``."""
        return torch.zeros_like(self.size).index_add_(0, self.ids, values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of ``values`` ``(B,)`` in each group, ``(G,)``."""
        return self.sum(values) / self.size

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation (n - 1) of ``values`` ``(B,)`` in each group, ``(G,)``; 0 for one sample."""
        deviation = values - self.mean(values)[self.ids]
        return (self.sum(deviation.square()) / (self.size - 1).clamp(min=1)).sqrt()

    def extreme(self, values: Tensor, reduction: str) -> Tensor:
        """Smallest (``amin``) or largest (``amax``) of ``values`` ``(B,)`` in each group, ``(G,)``."""
        start = torch.full_like(self.size, torch.inf if reduction == "amin" else -torch.inf)
        return start.scatter_reduce_(0, self.ids, values, reduction)

    def lone(self) -> Tensor:
        """``(B,)`` bool: the sample is the only one of its group."""
        return (self.size == 1)[self.ids]

    def tied(self, values: Tensor) -> Tensor:
        """``(B,)`` bool: the sample's group has several samples, all with the same value."""
        equal = self.extreme(values, "amin") == self.extreme(values, "amax")
        return (equal & (self.size > 1))[self.ids]


def sequence_scores(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Score of each sample: the sum of its masked token rewards, ``(B,)`` float64."""
    return masked_sum(token_level_rewards.double(), response_mask, dim=-1)


def spread(advantage: Tensor, response_mask: Tensor) -> Tensor:
    """Give each masked token its sample's advantage: ``(B,)`` to ``(B, R)`` float32."""
    return keep_masked(advantage.float().unsqueeze(-1), response_mask)


def scores_and_groups(token_level_rewards: Tensor, response_mask: Tensor, index: Index) -> tuple[Tensor, Groups]:
    """What every estimator here starts from: the score of each sample ``(B,)`` float64, and the groups."""
    scores = sequence_scores(token_level_rewards, response_mask)
    return scores, Groups.from_index(index, scores.shape[0], scores.device)


def against_baseline(scores: Tensor, baseline: Tensor, groups: Groups) -> Tensor:
    """``scores - baseline`` (both ``(B,)``) under the rules for lone samples and tied groups."""
    advantage = torch.where(groups.lone(), scores, scores - baseline)
    return torch.where(groups.tied(scores), 0.0, advantage)


@register_adv_est("grpo_vectorized")
@register_adv_est("grpo")
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""GRPO: the score standardised within its group (Shao et al., arXiv:2402.03300).

    .. math:: A_i = \frac{s_i - \operatorname{mean}(s)}{\operatorname{std}(s) + \epsilon}

    The standard deviation divides by n - 1. Without it (``norm_adv_by_std_in_grpo=False``) this is the advantage of
    Dr. GRPO (Liu et al., arXiv:2503.20783). One-sample and tied groups: see the module.

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
        advantage = against_baseline(scores, groups.mean(scores)[groups.ids], groups)
        if norm_adv_by_std_in_grpo:
            std = groups.std(scores)[groups.ids]
            advantage = torch.where(groups.lone(), advantage, advantage / (std + epsilon))
        result = spread(advantage, response_mask)
        return result, result.clone()


@register_adv_est("rloo_vectorized")
@register_adv_est("rloo")
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""RLOO: the score against the mean of the *other* samples of its group (Ahmadian et al., arXiv:2402.14740).

    .. math:: A_i = s_i - \frac{1}{n-1}\sum_{j \ne i} s_j

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: not used; part of the common signature of group estimators.
        config: not used.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        others = (groups.sum(scores)[groups.ids] - scores) / (groups.size - 1).clamp(min=1)[groups.ids]
        result = spread(against_baseline(scores, others, groups), response_mask)
        return result, result.clone()


@register_adv_est("opo")
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""OPO: the score against the length-weighted mean of its group (Hao et al., arXiv:2505.23585).

    .. math:: A_i = s_i - \frac{\sum_j l_j s_j}{\sum_j l_j}

    *l* is the number of masked tokens. The weighted mean is the baseline of least variance when the squared norm of a
    response's gradient grows with its length.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: not used; part of the common signature of group estimators.
        config: not used.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        length = response_mask.bool().sum(-1).double()
        baseline = groups.sum(length * scores) / groups.sum(length).clamp(min=1)
        result = spread(against_baseline(scores, baseline[groups.ids], groups), response_mask)
        return result, result.clone()


@register_adv_est("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""REINFORCE++ with the group mean as baseline (Hu et al., arXiv:2501.03262).

    .. math:: A = \operatorname{whiten}\bigl(s_i - \operatorname{mean}(s)\bigr)

    The group only gives the mean; the scale comes from whitening over all masked tokens of the batch (variance with n
    - 1, epsilon 1e-8), where a long response weighs more than a short one.

    Args:
        token_level_rewards: ``(B, R)``.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: not used; part of the common signature of group estimators.
        config: not used.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        centred = against_baseline(scores, groups.mean(scores)[groups.ids], groups)
        result = masked_whiten(spread(centred, response_mask), response_mask)
        return result, result.clone()
