"""The built-in scoring rules."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError
from verl.rewards import math
from verl.utils.reward_score import default_compute_score, gsm8k


@pytest.mark.parametrize(
    ("solution", "strict", "flexible"),
    [
        ("3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,234,567", "1234567", "1234567"),
        ("#### $18", "18", "18"),
        ("#### -5.50 dollars", "-5.50", "-5.50"),
        ("#### 1 then #### 2", "2", "2"),
        ("the answer is 7.", None, "7"),
        ("#### seven", None, None),
        ("####7 and 8", "7", "8"),
        ("", None, None),
    ],
)
def test_gsm8k_extraction(solution: str, strict: str | None, flexible: str | None) -> None:
    assert gsm8k.extract_solution(solution, "strict") == strict
    assert gsm8k.extract_solution(solution, "flexible") == flexible


def test_gsm8k_scores() -> None:
    assert gsm8k.compute_score("#### 72", "72") == 1.0
    assert gsm8k.compute_score("#### 1,000", "1000") == 1.0
    assert gsm8k.compute_score("#### 73", "72") == 0.0
    assert gsm8k.compute_score("#### 73", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("72", "72", format_score=0.1) == 0.0
    assert gsm8k.compute_score("it is 72", "72", method="flexible", score=2.0) == 2.0
    assert gsm8k.compute_score("#### 00123", "00123") == 1.0
    assert gsm8k.compute_score("#### 123", "00123") == 0.0  # compared as text
    with pytest.raises(ValueError, match="method='loose'"):
        gsm8k.compute_score("#### 1", "1", method="loose")


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a {nested} one}}", r"\text{a {nested} one}"),
        (r"\boxed 7 is it", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{unfinished", None),
        (r"\boxed{good} \boxed{unfinished", "good"),
        ("nothing", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert math.last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("42", "42"),
        (r"\frac12", r"\dfrac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", ".5"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\frac{-3}{4}", r"-\frac34"),
        (r"1\frac{1}{2}", "1.5"),
        ("1,000,000", "1000000"),
        (r"10\%", "10"),
        (r"\$5", "5"),
        (r"90^\circ", "90"),
        ("x = 3", "3"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"(0.5, 3]", r"(\frac12,3]"),
        (r"\{1, 2\}", r"\{1,2\}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("2 x + 1", "2x+1"),
        ("7.", "7"),
        ("3.0", "3"),
    ],
)
def test_equivalent_answers(answer: str, reference: str) -> None:
    assert math.is_equivalent(answer, reference)
    assert math.is_equivalent(reference, answer)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("41", "42"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(1,2,3)"),
        ("-1", "1"),
        (r"\frac{1}{0}", "0"),
        ("", ""),
        ("x", "y"),
        ("1,2", "12"),
    ],
)
def test_different_answers(answer: str, reference: str) -> None:
    assert not math.is_equivalent(answer, reference)


def test_math_scores() -> None:
    assert math.compute_score(r"hence \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert math.compute_score(r"hence \boxed{2}", r"thus \boxed{2}") == 1.0
    assert math.compute_score("hence 2", "2") == 0.0


def test_symbolic_scores() -> None:
    pytest.importorskip("math_verify")
    assert math.compute_score_symbolic(r"\boxed{(x+1)^2}", "x^2+2x+1") == 1.0
    assert math.compute_score_symbolic(r"\boxed{(x+1)^2}", "x^2+1") == 0.0


def test_dispatch_by_data_source() -> None:
    assert default_compute_score("openai/gsm8k", "#### 4", "4") == 1.0
    assert default_compute_score("final_answer/sort_digits", "#### 00123", "00123", {}) == 1.0
    assert default_compute_score("HuggingFaceH4/MATH-500", r"\boxed{4}", "4") == 1.0
    assert default_compute_score("AIME2024", r"\boxed{4}", "4") == {"score": 1.0, "acc": True, "pred": "4"}
    assert default_compute_score("math_dapo", "Answer: 5", "4")["score"] == -1.0
    assert default_compute_score("numina_olympiads", r"\boxed{4}", "4") == 1.0
    assert default_compute_score("hiyouga/geometry3k", r"\boxed{4}", "4")["score"] == 0.9
    assert default_compute_score("searchR1_nq", "<answer>The Seine</answer>", {"target": ["seine"]})["score"] == 1.0
    countdown_truth = {"target": 6, "numbers": [1, 2, 3]}
    assert default_compute_score("countdown", "<answer>1+2+3</answer>", countdown_truth)["score"] == 1.0
    assert default_compute_score("cais/mmlu", "Answer: C", 2)["score"] == 1.0
    rules = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert default_compute_score("google/IFEval", "no commas", rules)["score"] == 1.0
    assert default_compute_score("taco", "no program", {"inputs": ["1"], "outputs": ["1"]})["code_status"] == "no_code"
    with pytest.raises(ConfigError, match=r"no built-in scorer for data_source='mine'.*custom_reward_function.*gsm8k"):
        default_compute_score("mine", "", "")
