"""Well-known path of the ``math-verify`` scorer in :mod:`verl.rewards.math`."""

from verl.rewards.math import compute_score_symbolic as compute_score

__all__ = ["compute_score"]
