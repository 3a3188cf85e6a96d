"""GDPO: groups are normalised for each component of the reward, not for their sum (Liu et al., arXiv:2601.05242)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.group import Index, against_baseline, scores_and_groups, sequence_scores, spread
from verl.algorithms.registry import register_adv_est
from verl.algorithms.settings import setting
from verl.errors import ConfigError, DataError


@register_adv_est("gdpo")
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""GDPO: standardise each reward component within its group, add them up, standardise over the batch.

    .. math::
        Z_i = \sum_k w_k \frac{r_{ik} - \operatorname{mean}_{group}(r_k)}{\operatorname{std}_{group}(r_k) + \epsilon},
        \qquad A_i = \frac{Z_i - \operatorname{mean}_{batch}(Z)}{\operatorname{std}_{batch}(Z) + \epsilon}

    Standardising the *sum* makes different combinations of components equal, such as (1, 0) among zeros and (1, 1)
    among zeros; here they stay apart. Standard deviations divide by n - 1. The batch statistics run over the samples
    that have a token. One-sample and tied groups, for each component: see :mod:`verl.algorithms.group`.

    Args:
        token_level_rewards: ``(B, R)``; the only component where no keys are configured.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        epsilon: keeps the divisions finite.
        norm_adv_by_std_in_grpo: divide by the group's standard deviation.
        config: gives ``gdpo_reward_keys``, names of values that the reward function reports, and
            ``gdpo_reward_weights`` (default: 1 each).
        non_tensor_batch: holds the components, ``(B,)`` each, under their name or ``reward_<name>``.
        batch: searched for them next, ``(B,)`` or token values ``(B, R)``.

    Raises:
        ConfigError: keys and weights differ in number.
        DataError: a component is not there, or not a number for each sample.
    """
    with torch.no_grad():
        scores, groups = scores_and_groups(token_level_rewards, response_mask, index)
        keys = list(setting(config, "gdpo_reward_keys", ()))
        weights = list(setting(config, "gdpo_reward_weights", ())) or [1.0] * max(len(keys), 1)
        if len(weights) != max(len(keys), 1):
            raise ConfigError(
                f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} gdpo_reward_keys; give one "
                "weight for each"
            )
        # A TensorDict has no truth value.
        found = {**({} if batch is None else dict(batch.items())), **(non_tensor_batch or {})}
        components = [_component(key, found, response_mask, scores) for key in keys] or [scores]
        total = torch.zeros_like(scores)
        for weight, component in zip(weights, components, strict=True):
            part = against_baseline(component, groups.mean(component)[groups.ids], groups)
            if norm_adv_by_std_in_grpo:
                part = torch.where(groups.lone(), part, part / (groups.std(component)[groups.ids] + epsilon))
            total = total + weight * part
        result = spread(_standardised(total, response_mask.bool().any(-1), epsilon), response_mask)
        return result, result.clone()


def _standardised(values: Tensor, present: Tensor, epsilon: float) -> Tensor:
    chosen = values[present]
    if chosen.numel() < 2:
        return values - (chosen.mean() if chosen.numel() else 0.0)
    return (values - chosen.mean()) / (chosen.std() + epsilon)


def _component(key: str, found: Mapping[str, Any], response_mask: Tensor, scores: Tensor) -> Tensor:
    name = next((n for n in (key, f"reward_{key}") if n in found), None)
    if name is None:
        raise DataError(
            f"algorithm.gdpo_reward_keys names {key!r}, which the batch lacks; it has {', '.join(sorted(found))}. A "
            f"reward function reports components by returning a dict with 'score' and {key!r}"
        )
    values = found[name]
    if isinstance(values, Tensor) and values.shape == response_mask.shape:
        return sequence_scores(values, response_mask)
    try:
        numbers = torch.as_tensor(np.asarray(values, dtype=np.float64), device=scores.device)
    except (TypeError, ValueError) as error:
        raise DataError(f"reward component {key!r} holds something that is not a number: {error}") from error
    if numbers.shape != scores.shape or not bool(torch.isfinite(numbers).all()):
        raise DataError(
            f"reward component {key!r} must be one finite number for each of {scores.shape[0]} samples; it has shape "
            f"{tuple(numbers.shape)} and {int((~torch.isfinite(numbers)).sum())} other values. Report it for every "
            "sample"
        )
    return numbers
