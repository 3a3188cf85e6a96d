"""Questions answered with a search tool: exact match of the answer between tags, after normalisation."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import DataError
from verl.rewards.tags import last_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def targets_of(ground_truth: Any) -> list[str]:
    """The accepted answers: a text, a list of them, or a mapping with ``target``.

    Raises:
        DataError: none of these.
    """
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith(("{", "[")):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = ground_truth
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    if isinstance(truth, str):
        return [truth]
    if isinstance(truth, Sequence) or hasattr(truth, "tolist"):
        return [str(target) for target in truth]
    raise DataError(f"ground_truth={ground_truth!r} names no answer; give a text, a list, or {{'target': [...]}}")


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "exact",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Score the last ``<answer>...</answer>``.

    Args:
        solution_str: what the policy wrote; search results are not part of it.
        ground_truth: see :func:`targets_of`.
        method: ``"exact"``: equal to an accepted answer; ``"contains"``: has one of them in it.
        format_score: for a wrong answer.
        score: for a right one.

    Returns:
        ``score`` (0.0 without an answer), ``acc``, and the normalised answer as ``pred``.
    """
    if method not in ("exact", "contains"):
        raise ValueError(f"method={method!r}: choose 'exact' or 'contains'")
    answer = last_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": ""}
    said = normalize_answer(answer)
    targets = [normalize_answer(target) for target in targets_of(ground_truth)]
    right = any(said == target if method == "exact" else target in said for target in targets)
    return {"score": score if right else format_score, "acc": right, "pred": said}
