"""Rewards: scoring rules, the pool that runs users' functions, and the managers that score a batch.

Importing the package is cheap; ``load_reward_manager`` and the managers load torch when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.rewards.outcome import OutcomeKind, RewardOutcome

if TYPE_CHECKING:
    from verl.rewards.loading import load_reward_function, load_reward_manager
    from verl.rewards.manager import (
        REWARD_MANAGERS,
        RewardFunction,
        RewardManager,
        ScoringOptions,
        get_reward_manager_cls,
        register,
    )

__all__ = [
    "REWARD_MANAGERS",
    "OutcomeKind",
    "RewardFunction",
    "RewardManager",
    "RewardOutcome",
    "ScoringOptions",
    "get_reward_manager_cls",
    "load_reward_function",
    "load_reward_manager",
    "register",
]

_LOADING = ("load_reward_function", "load_reward_manager")


def __getattr__(name: str) -> Any:
    # worker processes import this package for every start; they need no torch
    if name not in __all__:
        raise AttributeError(f"module 'verl.rewards' has no attribute {name!r}")
    if name in _LOADING:
        from verl.rewards import loading

        return getattr(loading, name)
    from verl.rewards import manager

    return getattr(manager, name)
