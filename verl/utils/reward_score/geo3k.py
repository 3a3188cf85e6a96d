"""Well-known path of :mod:`verl.rewards.geometry3k`."""

from verl.rewards.geometry3k import acc_reward, compute_score, format_reward

__all__ = ["acc_reward", "compute_score", "format_reward"]
