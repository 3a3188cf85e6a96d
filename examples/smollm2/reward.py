"""Reward of the SmolLM2 example: the last integer of the answer is the solution."""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1.0 if the last integer in the response equals the solution, else 0.0."""
    integers = re.findall(r"-?\d+", solution_str)
    return float(bool(integers) and int(integers[-1]) == int(ground_truth))
