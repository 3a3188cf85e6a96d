"""Scores of ordinary answers are what they were before the scorers became total: literal results, row by row.

``ordinary.jsonl`` has three kinds of lines: ``["rule", name, arguments]`` numbers the rules of IFEval,
``["follows", text, bits]`` says of each whether a text follows it, and all others are
``[scorer, text, reference, settings, result]``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.rewards import countdown, dapo_math, geometry3k, gsm8k, ifeval, math, multiple_choice, search_qa
from verl.rewards.code import extract_code
from verl.rewards.judge import parse_score
from verl.rewards.tags import last_answer

LINES = [json.loads(line) for line in (Path(__file__).parent / "ordinary.jsonl").read_text("utf-8").split("\n") if line]
SCORERS: dict[str, Callable[..., Any]] = {
    "gsm8k": gsm8k.compute_score,
    "math": math.compute_score,
    "dapo": dapo_math.compute_score,
    "geometry3k": geometry3k.compute_score,
    "multiple_choice": multiple_choice.compute_score,
    "countdown": countdown.compute_score,
    "search_qa": search_qa.compute_score,
    "ifeval": ifeval.compute_score,
}
READERS: dict[str, Callable[[str], Any]] = {
    "extract_code": extract_code,
    "judge": parse_score,
    "last_answer": last_answer,
    "last_boxed": math.last_boxed,
}


def _cases(name: str) -> list[list[Any]]:
    return [line for line in LINES if line[0] == name]


@pytest.mark.parametrize("name", SCORERS)
def test_scores(name: str) -> None:
    cases = _cases(name)
    assert len(cases) >= 50
    if name in ("math", "dapo", "geometry3k"):
        pytest.importorskip("math_verify")  # the results are those with computer algebra
    for _, text, reference, settings, result in cases:
        assert SCORERS[name](text, reference, **settings) == result, (text, reference)


@pytest.mark.parametrize("name", READERS)
def test_answers_found(name: str) -> None:
    for _, text, _, _, result in _cases(name):
        found = READERS[name](text)
        assert (list(found) if isinstance(found, tuple) else found) == result, text


def test_instructions_followed() -> None:
    rules = _cases("rule")
    texts = _cases("follows")
    assert len(rules) * len(texts) > 1500
    for _, text, bits in texts:
        followed = "".join(str(int(ifeval.follows(text, name, arguments))) for _, name, arguments in rules)
        assert followed == bits, text
