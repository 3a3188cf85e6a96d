"""Well-known path of :mod:`verl.rewards.dapo_math`."""

from verl.rewards.dapo_math import compute_score

__all__ = ["compute_score"]
