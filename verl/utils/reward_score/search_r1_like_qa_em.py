"""Well-known path of :mod:`verl.rewards.search_qa`."""

from verl.rewards.search_qa import compute_score, normalize_answer

__all__ = ["compute_score", "normalize_answer"]
