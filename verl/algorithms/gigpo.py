"""GiGPO: groups of whole episodes, and groups of single steps that started from the same state (arXiv:2505.10978)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.group import Groups, Index, against_baseline, scores_and_groups
from verl.algorithms.registry import register_adv_est
from verl.algorithms.settings import setting
from verl.algorithms.turns import Turns
from verl.errors import ConfigError, DataError

GIGPO_MODES = ("mean_norm", "mean_std_norm")


@register_adv_est("gigpo")
def compute_gigpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    state_hashes: Tensor | Sequence[Any],
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""GiGPO: episode advantage plus step advantage (Feng et al., arXiv:2505.10978).

    A row is an episode; each run of sampled tokens in it is a step, taken in the state that the text before it shows.

    .. math::
        A_{it} = \frac{s_i - \operatorname{mean}(s)}{F} + \omega\,\frac{R_{it} - \operatorname{mean}(R)}{F}, \qquad
        R_{it} = \sum_{k \ge t} \gamma^{k-t} r_{ik}

    The first group are the episodes of one prompt; the second are all steps of these episodes *that started in the
    same state*, in whichever episode and at whichever time. *R* is the discounted sum of rewards over steps. *F* is 1
    (``mean_norm``) or the group's standard deviation with n - 1 plus epsilon (``mean_std_norm``).

    A state that only one step visited gives that step no step advantage. One-sample and tied episode groups: see
    :mod:`verl.algorithms.group`.

    Args:
        token_level_rewards: ``(B, R)``; the reward of a step lies on its tokens.
        response_mask: ``(B, R)``.
        index: ``(B,)`` uid of each sample's prompt.
        state_hashes: the state in which each step was taken: ``(B,)`` sequences with one hashable a step, or a tensor
            ``(B, R)`` that is read at the first token of each step.
        gamma: discount per step.
        epsilon: keeps the division finite.
        config: gives ``gigpo.step_advantage_w`` (:math:`\omega`, 1.0) and ``gigpo.mode`` (``mean_norm``).

    Returns:
        ``(advantages, returns)``, both ``(B, R)`` float32, constant within a step, 0 outside the mask; returns are
        :math:`R_{it}`.

    Raises:
        ConfigError: unknown mode.
        DataError: a row does not have one state for each step.
    """
    section = setting(config, "gigpo", None)
    mode, weight = setting(section, "mode", "mean_norm"), setting(section, "step_advantage_w", 1.0)
    if mode not in GIGPO_MODES:
        raise ConfigError(f"algorithm.gigpo.mode={mode!r}: choose one of {', '.join(GIGPO_MODES)}")
    with torch.no_grad():
        scores, episodes = scores_and_groups(token_level_rewards, response_mask, index)
        episode = against_baseline(scores, episodes.mean(scores)[episodes.ids], episodes)
        turns = Turns.from_mask(response_mask)
        returns = turns.discounted(turns.sum(token_level_rewards), gamma)
        prompt = episodes.ids.tolist()
        labels = [
            (prompt[row], state) for row, state in zip(turns.row.tolist(), _states(state_hashes, turns), strict=True)
        ]
        visits = Groups.from_index(labels, len(turns), scores.device)
        step = torch.where(visits.lone() | visits.tied(returns), 0.0, returns - visits.mean(returns)[visits.ids])
        if mode == "mean_std_norm":
            episode = torch.where(episodes.lone(), episode, episode / (episodes.std(scores)[episodes.ids] + epsilon))
            step = step / (visits.std(returns)[visits.ids] + epsilon)
        return turns.spread(episode[turns.row] + weight * step).float(), turns.spread(returns).float()


def _states(state_hashes: Tensor | Sequence[Any], turns: Turns) -> list[Hashable]:
    """The state of each turn, row by row."""
    if isinstance(state_hashes, Tensor):
        if state_hashes.shape != turns.mask.shape:
            raise DataError(
                f"state_hashes has shape {tuple(state_hashes.shape)}; a tensor must be (B, R) = "
                f"{tuple(turns.mask.shape)}, read at the first token of each step"
            )
        return state_hashes[turns.row, turns.first].tolist()
    rows = turns.mask.shape[0]
    if len(state_hashes) != rows:
        raise DataError(f"state_hashes has {len(state_hashes)} rows for {rows} samples; give one sequence per sample")
    steps = torch.bincount(turns.row, minlength=rows).tolist()
    wrong = [(row, len(s), n) for row, (s, n) in enumerate(zip(state_hashes, steps, strict=True)) if len(s) != n]
    if wrong:
        row, have, need = wrong[0]
        raise DataError(
            f"state_hashes of row {row} has {have} states for {need} steps (runs of sampled tokens in response_mask); "
            f"{len(wrong)} row(s) differ. Record one state for each turn of the policy"
        )
    return [state for row in state_hashes for state in row]
