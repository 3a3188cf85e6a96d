"""Scorers of single families of tasks, on values worked out by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from verl.errors import ConfigError, DataError
from verl.rewards import countdown, dapo_math, geometry3k, math, multiple_choice, reasoning_gym, search_qa, symbolic

# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so\nAnswer: 34", "34"),
        ("answer : $34$", "$34$"),
        (r"Answer: \boxed{12}", "12"),
        ("**Answer: 7**", "7"),
        ("Answer: 1\nwait\nAnswer: 2", "2"),
        (r"it is \boxed{9}", "9"),
        ("it is 9", None),
        ("Answer: 5" + " " * 300, None),  # only the end counts
    ],
)
def test_dapo_answers(solution: str, answer: str | None) -> None:
    assert dapo_math.extract_answer(solution) == answer


def test_dapo_scores() -> None:
    assert dapo_math.compute_score("Answer: $34$", "34") == {"score": 1.0, "acc": True, "pred": "$34$"}
    assert dapo_math.compute_score("Answer: 35", "34") == {"score": -1.0, "acc": False, "pred": "35"}
    assert dapo_math.compute_score("no idea", "34") == {"score": -1.0, "acc": False, "pred": ""}
    assert dapo_math.compute_score("Answer: 0.5", r"\frac{1}{2}")["acc"]
    assert dapo_math.compute_score("Answer: 35", 34, wrong_score=0.0)["score"] == 0.0


def test_algebra_decides_where_text_rules_do_not() -> None:
    pytest.importorskip("math_verify")
    assert not math.is_equivalent("(x+1)^2", "x^2+2x+1")
    assert math.compute_score(r"\boxed{(x+1)^2}", "x^2+2x+1") == 1.0
    assert math.compute_score(r"\boxed{(x+1)^2}", "x^2+2x+2") == 0.0
    assert math.compute_score(r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}") == 1.0


def test_without_algebra_the_text_rules_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "installed", lambda: False)
    assert math.compute_score(r"\boxed{(x+1)^2}", "x^2+2x+1") == 0.0
    assert math.compute_score(r"\boxed{\frac12}", "0.5") == 1.0
    with pytest.raises(ConfigError, match=r"pip install 'verl\[math\]'"):
        math.compute_score_symbolic("1", "1")


def test_an_answer_that_keeps_algebra_busy_is_wrong_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    assert symbolic.equal(r"\boxed{2}", r"\boxed{2}")
    monkeypatch.setattr(symbolic.HELPER, "limit_s", 1.0)
    assert not symbolic.equal(r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1}")
    assert not symbolic.equal(r"\boxed{" + "1+" * 2000 + "1}", r"\boxed{1}")
    monkeypatch.setattr(symbolic.HELPER, "limit_s", 30.0)
    assert symbolic.equal(r"\boxed{1/2}", r"\boxed{0.5}")  # the helper is there again


def test_geometry3k() -> None:
    thought = "<think>the sides are equal</think> so "
    assert geometry3k.compute_score(thought + r"\boxed{60}", "60") == {"score": 1.0, "acc": True, "format": 1.0}
    assert geometry3k.compute_score(r"\boxed{60}", "60") == {"score": 0.9, "acc": True, "format": 0.0}
    assert geometry3k.compute_score(thought + r"\boxed{61}", "60") == {"score": 0.1, "acc": False, "format": 1.0}
    assert geometry3k.compute_score("60", "60") == {"score": 0.0, "acc": False, "format": 0.0}
    assert geometry3k.compute_score(r"\boxed{60}", "60", format_score=0.5)["score"] == 0.5


# --- countdown --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2*3", (Fraction(7), [1, 2, 3])),
        ("(1+2)/4", (Fraction(3, 4), [1, 2, 4])),
        ("-3 + 5", (Fraction(2), [3, 5])),
        ("6 ÷ 4 × 2", (Fraction(3), [6, 4, 2])),
        ("1/0", None),
        ("2**3", None),
        ("__import__('os')", None),
        ("1.5 + 1", None),
        ("(" * 150 + "1" + ")" * 150, None),
        ("1 2", None),
        ("", None),
    ],
)
def test_expressions(expression: str, value: Any) -> None:
    assert countdown.evaluate(expression) == value


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<answer>(25 - 1) * 4</answer>", 1.0),
        ("<answer> (25 - 1) * 4 = 96 </answer>", 1.0),
        ("<answer>25 * 4 - 4</answer>", 0.1),  # 4 used twice, 1 not at all
        ("<answer>25 * 4 - 1</answer>", 0.1),
        ("<answer>96</answer>", 0.1),
        ("<answer>nonsense</answer>", 0.1),
        ("(25 - 1) * 4", 0.0),
        ("<answer>1</answer> no, <answer>(25-1)*4</answer>", 1.0),
    ],
)
def test_countdown(answer: str, score: float) -> None:
    for truth in ({"target": 96, "numbers": [25, 4, 1]}, json.dumps({"target": 96, "nums": [1, 4, 25]})):
        result = countdown.compute_score(answer, truth)
        assert result["score"] == score
        assert result["acc"] is (score == 1.0)


def test_countdown_needs_target_and_numbers() -> None:
    with pytest.raises(DataError, match="needs 'target' and 'numbers'"):
        countdown.compute_score("<answer>1</answer>", {"target": 1})


# --- multiple choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("<answer>B</answer>", "B", "B"),
        ("<answer>(C) because</answer>", "C", "C"),
        (r"\boxed{D}", "D", "D"),
        (r"\boxed{\text{(A)}}", "A", "A"),
        ("The answer is (B).", "B", "B"),
        ("Answer: C", "C", "C"),
        ("**Answer: D**", "D", "D"),
        ("The correct choice is **A**", "A", "A"),
        ("First I thought the answer is A. But the answer is B.", "B", "B"),
        ("the answer is Apple", None, None),
        ("the answer is a matter of taste", None, None),
        ("B", None, "B"),
        ("Let me see.\n(C)\n", None, "C"),
        ("I like B very much", None, None),
        ("", None, None),
    ],
)
def test_choices(text: str, strict: str | None, flexible: str | None) -> None:
    assert multiple_choice.extract_choice(text, "strict") == strict
    assert multiple_choice.extract_choice(text, "flexible") == flexible


def test_multiple_choice() -> None:
    assert multiple_choice.compute_score("Answer: B", "B") == {"score": 1.0, "acc": True, "pred": "B"}
    assert multiple_choice.compute_score("Answer: B", 1)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: B", "(B)")["score"] == 1.0
    assert multiple_choice.compute_score("Answer: B", "B. blue")["score"] == 1.0
    assert multiple_choice.compute_score("Answer: A", "B") == {"score": 0.0, "acc": False, "pred": "A"}
    assert multiple_choice.compute_score("hm", "B") == {"score": 0.0, "acc": False, "pred": ""}
    with pytest.raises(ValueError, match="not a choice"):
        multiple_choice.compute_score("A", "blue")


# --- search -----------------------------------------------------------------------------------------------------------


def test_normalised_answers() -> None:
    assert search_qa.normalize_answer("The  Eiffel-Tower, (Paris)!") == "eiffeltower paris"
    assert search_qa.normalize_answer("An apple a day") == "apple day"


@pytest.mark.parametrize(
    "truth",
    [{"target": ["Barack Obama", "Obama"]}, ["Barack Obama", "Obama"], '{"target": ["Obama", "Barack Obama"]}'],
)
def test_search_answers(truth: Any) -> None:
    right = search_qa.compute_score("I found it. <answer> barack  obama. </answer>", truth)
    assert right == {"score": 1.0, "acc": True, "pred": "barack obama"}
    long = "<answer>It was Barack Obama</answer>"
    assert search_qa.compute_score(long, truth)["score"] == 0.0
    assert search_qa.compute_score(long, truth, method="contains")["score"] == 1.0
    assert search_qa.compute_score(long, truth, format_score=0.2)["score"] == 0.2
    assert search_qa.compute_score("Obama", truth)["score"] == 0.0


def test_search_reference_that_names_nothing() -> None:
    with pytest.raises(DataError, match="names no answer"):
        search_qa.compute_score("<answer>x</answer>", {"answer": "x"})


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


def test_reasoning_gym_tasks_by_name() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=1, min_terms=2, max_terms=2)[0]
    row = {"entry": json.dumps(entry)}
    right = f"I add: <answer>{entry['answer']}</answer>"
    assert reasoning_gym.compute_score(right, row, "reasoning_gym/chain_sum") == {
        "score": 1.0,
        "acc": True,
        "pred": entry["answer"],
    }
    assert reasoning_gym.compute_score(right, row)["score"] == 1.0  # the entry knows its task
    assert reasoning_gym.compute_score(right, {**row, "task": "chain_sum"}, "mine")["score"] == 1.0
    wrong = reasoning_gym.compute_score("<answer>no number</answer>", row, "reasoning_gym/chain_sum")
    assert wrong["score"] < 1.0
    assert wrong["acc"] is False
    assert reasoning_gym.compute_score(entry["answer"], row)["score"] == 0.0
    with pytest.raises(ConfigError, match="no task 'chain_summ'"):
        reasoning_gym.compute_score(right, row, "reasoning_gym/chain_summ")
    with pytest.raises(DataError, match="has no 'entry'"):
        reasoning_gym.compute_score(right, {}, "reasoning_gym/chain_sum")
