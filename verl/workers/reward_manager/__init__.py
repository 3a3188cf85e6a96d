"""Well-known path of the reward managers; the code lives in :mod:`verl.rewards.managers`."""

from verl.rewards.manager import get_reward_manager_cls, register
from verl.rewards.managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    StreamingRewardManager,
)

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "StreamingRewardManager",
    "get_reward_manager_cls",
    "register",
]
