"""Well-known path of :mod:`verl.rewards.math`."""

from verl.rewards.math import compute_score, is_equivalent, last_boxed

__all__ = ["compute_score", "is_equivalent", "last_boxed"]
