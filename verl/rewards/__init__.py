"""Rewards: scoring rules, the pool that runs users' functions, and the managers that score a batch.

Importing the package is cheap; ``load_reward_manager`` and the managers load torch when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from verl.rewards.missing_scores import Action, ScoringOptions
from verl.rewards.outcome import OutcomeKind, RewardOutcome

if TYPE_CHECKING:
    from verl.rewards.loading import load_reward_function, load_reward_manager
    from verl.rewards.manager import (
        REWARD_MANAGERS,
        RewardFunction,
        RewardManager,
        get_reward_manager_cls,
        register,
    )
    from verl.rewards.managers import StreamingRewardManager
    from verl.rewards.samples import Sample, make_sample

_HOME = {
    "REWARD_MANAGERS": "manager",
    "RewardFunction": "manager",
    "RewardManager": "manager",
    "Sample": "samples",
    "StreamingRewardManager": "managers",
    "get_reward_manager_cls": "manager",
    "load_reward_function": "loading",
    "load_reward_manager": "loading",
    "make_sample": "samples",
    "register": "manager",
}

__all__ = [
    "REWARD_MANAGERS",
    "Action",
    "OutcomeKind",
    "RewardFunction",
    "RewardManager",
    "RewardOutcome",
    "Sample",
    "ScoringOptions",
    "StreamingRewardManager",
    "get_reward_manager_cls",
    "load_reward_function",
    "load_reward_manager",
    "make_sample",
    "register",
]


def __getattr__(name: str) -> Any:
    # worker processes import this package for every start; they need no torch
    if name not in _HOME:
        raise AttributeError(f"module 'verl.rewards' has no attribute {name!r}")
    import_module("verl.rewards.managers")  # registers the built-in managers
    return getattr(import_module(f"verl.rewards.{_HOME[name]}"), name)
