"""Well-known path of :mod:`verl.rewards.gsm8k`."""

from verl.rewards.gsm8k import compute_score, extract_solution

__all__ = ["compute_score", "extract_solution"]
