"""Well-known path of :mod:`verl.rewards.loading`."""

from verl.rewards.loading import load_reward_manager

__all__ = ["load_reward_manager"]
