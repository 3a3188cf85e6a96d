"""Well-known path of :mod:`verl.rewards.countdown`."""

from verl.rewards.countdown import compute_score

__all__ = ["compute_score"]
