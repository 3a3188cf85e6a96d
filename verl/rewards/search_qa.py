"""Questions answered with a search tool: exact match of the answer between tags, after normalisation."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from verl.errors import DataError
from verl.rewards.references import accepted, reads_reference, required, shown
from verl.rewards.tags import last_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces (Rajpurkar et al. 2016, arXiv:1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def targets_of(ground_truth: Any, *_: Any, **__: Any) -> list[str]:
    """The accepted answers: a text or a number, a list of them, a mapping with ``target``, or their JSON text.

    Raises:
        DataError: one is missing, or it is none of these.
    """
    truth = required(ground_truth)
    if isinstance(truth, str) and truth.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            truth = json.loads(truth)
    if isinstance(truth, Mapping):
        if "target" not in truth:
            raise DataError(
                f"ground_truth={shown(ground_truth)} names no answer; give a text, a list, or {{'target': [...]}}"
            )
        return accepted(truth["target"], "target")
    return accepted(truth)


def _forms(text: str) -> tuple[str, bool]:
    """A text as it is compared, and whether that is its normalised form; of ``The`` nothing would be left."""
    normalised = normalize_answer(text)
    return (normalised, True) if normalised else (" ".join(text.lower().split()), False)


@reads_reference(targets_of)
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
    targets = [_forms(target) for target in targets_of(ground_truth)]
    answer = last_answer(solution_str)
    if answer is None:
        return {"score": 0.0, "acc": False, "pred": ""}
    said = normalize_answer(answer)
    as_written = " ".join(answer.lower().split())
    right = False
    for target, normalised in targets:
        given = said if normalised else as_written
        right = right or (given == target if method == "exact" or not normalised else target in given)
    return {"score": score if right else format_score, "acc": right, "pred": said}
