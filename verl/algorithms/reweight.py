"""PF-PPO: train on the samples whose rewards can be trusted (Zhang et al., arXiv:2409.06957)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.group import Groups, Index
from verl.errors import ConfigError

REWEIGHT_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(
    scores: Tensor, index: Index | None = None, *, reweight_method: str = "pow", weight_pow: float = 2.0
) -> Tensor:
    r"""How likely PF-PPO is to draw each sample, relative to the others.

    A reward model is most reliable where its score is extreme, so the middle is filtered out:

    ===============  =====================================================
    ``pow``          :math:`|s|^{p}`
    ``max_min``      1 for the best and the worst sample of a group, else 0
    ``max_random``   0.4 for the best of a group, 0.1 for the others
    ===============  =====================================================

    ``max_min`` and ``max_random`` are the paper's best-worst and best-random. Groups are the samples of a prompt; if
    every prompt has one sample, the whole batch is one group.

    Args:
        scores: ``(B,)``.
        index: ``(B,)`` uid of each sample's prompt; without it the whole batch is one group.
        reweight_method: one of the above.
        weight_pow: *p*.

    Returns:
        ``(B,)`` float64, not negative; all 1 where a method would give every sample 0.

    Raises:
        ConfigError: unknown method or a negative power.
    """
    scores = scores.double()
    if reweight_method == "pow":
        if weight_pow < 0:
            raise ConfigError(f"algorithm.pf_ppo.weight_pow is {weight_pow}; it must not be negative")
        weights = scores.abs().pow(weight_pow)
    elif reweight_method in REWEIGHT_METHODS:
        groups = Groups.from_index(index if index is not None else [0] * len(scores), len(scores), scores.device)
        if bool(groups.lone().all()):
            groups = Groups.from_index([0] * len(scores), len(scores), scores.device)
        best = scores == groups.extreme(scores, "amax")[groups.ids]
        if reweight_method == "max_min":
            weights = (best | (scores == groups.extreme(scores, "amin")[groups.ids])).double()
        else:
            weights = torch.where(best, 0.4, 0.1).double()
    else:
        raise ConfigError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r}: choose one of {', '.join(REWEIGHT_METHODS)}"
        )
    return weights if bool((weights > 0).any()) else torch.ones_like(weights)


def draw(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw as many samples as there are, with replacement, ``(B,)`` int64 in ascending order.

    Args:
        weights: ``(B,)``, not negative, at least one above 0.
        generator: source of randomness; by default one with seed 0, never the global one.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return torch.multinomial(weights.cpu(), len(weights), replacement=True, generator=generator).sort().values
