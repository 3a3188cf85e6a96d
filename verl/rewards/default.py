"""The built-in reward function: picks the scorer by ``data_source``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import ConfigError
from verl.rewards import gsm8k, math

SCORERS: dict[str, Callable[[str, str], float]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "gsm8k": gsm8k.compute_score,
    "lighteval/MATH": math.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math.compute_score,
    "HuggingFaceH4/MATH-500": math.compute_score,
    "math": math.compute_score,
    "math_dapo": math.compute_score,
    "math_verify": math.compute_score_symbolic,
}
"""Scorer of each known ``data_source``; each takes (solution_str, ground_truth)."""

PREFIXES: dict[str, Callable[[str, str], float]] = {
    "final_answer/": gsm8k.compute_score,
    "aime": math.compute_score,
}
"""Scorers of whole families of sources: of every ``data_source`` that starts so, in lower case."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Score a response with the rule that its data source is known for.

    Args:
        data_source: name of the data set. Names that start with ``final_answer/`` are scored by the number after
            ``####``, names that start with ``aime`` as mathematics.
        solution_str: the response's text.
        ground_truth: the right answer.
        extra_info: not used by the built-in rules.

    Raises:
        ConfigError: no rule is known for the data source.
    """
    scorer = SCORERS.get(data_source)
    if scorer is None:
        name = str(data_source).lower()
        scorer = next((by_family for prefix, by_family in PREFIXES.items() if name.startswith(prefix)), None)
    if scorer is None:
        known = ", ".join([*SCORERS, *(f"{prefix}*" for prefix in PREFIXES)])
        raise ConfigError(
            f"no built-in scorer for data_source={data_source!r} (known: {known}); set "
            "custom_reward_function.path to a Python file with a function compute_score(data_source, solution_str, "
            "ground_truth, extra_info)"
        )
    return scorer(solution_str, ground_truth)
