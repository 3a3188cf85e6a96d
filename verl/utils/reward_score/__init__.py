"""Well-known paths of the scoring rules; the code lives in :mod:`verl.rewards`."""

from verl.rewards.default import default_compute_score

__all__ = ["default_compute_score"]
