"""Built-in scorers give a score for any text, in time linear in its length."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.fixtures.hostile_texts import LONG, examples, slowest
from verl.rewards import code as programs
from verl.rewards import (
    countdown,
    dapo_math,
    geometry3k,
    gsm8k,
    ifeval,
    judge,
    multiple_choice,
    reasoning_gym,
    search_qa,
    symbolic,
)
from verl.rewards import math as mathematics
from verl.rewards.default import default_compute_score
from verl.rewards.outcome import OutcomeKind, as_outcome

COUNTDOWN = {"target": 24, "numbers": [4, 6, 1]}
_DIGITS = "12345678901234567890" * 210  # a reference beyond Python's limit of 4,300 digits


def _instruction(name: str, **arguments: Any) -> dict[str, Any]:
    return {"instruction_id_list": [name], "kwargs": [arguments]}


_WORDS = {"keyword": "the", "frequency": 2, "relation": "at least"}
INSTRUCTIONS = [
    _instruction("keywords:existence", keywords=["a", "the"]),
    _instruction("keywords:frequency", **_WORDS),
    _instruction("keywords:forbidden_words", forbidden_words=["a", "*"]),
    _instruction("keywords:letter_frequency", letter="a", let_frequency=2),
    *(_instruction("language:response_language", language=code) for code in ("en", "zh", "ar", "ru", "hi")),
    _instruction("length_constraints:number_sentences", num_sentences=3, relation="less than"),
    _instruction("length_constraints:number_words", num_words=3),
    _instruction("length_constraints:number_paragraphs", num_paragraphs=2),
    _instruction("length_constraints:nth_paragraph_first_word", num_paragraphs=2, nth_paragraph=1, first_word="a"),
    _instruction("detectable_content:number_placeholders", num_placeholders=2),
    *(_instruction("detectable_content:postscript", postscript_marker=mark) for mark in ("P.S.", "P.P.S", "*note")),
    _instruction("detectable_format:number_bullet_lists", num_bullets=2),
    _instruction("detectable_format:constrained_response"),
    _instruction("detectable_format:number_highlighted_sections", num_highlights=2),
    _instruction("detectable_format:multiple_sections", section_spliter="Section", num_sections=2),
    _instruction("detectable_format:json_format"),
    _instruction("detectable_format:title"),
    _instruction("combination:two_responses"),
    _instruction("combination:repeat_prompt", prompt_to_repeat="a a"),
    _instruction("startend:end_checker", end_phrase="a"),
    _instruction("startend:quotation"),
    _instruction("change_case:capital_word_frequency", capital_frequency=2),
    _instruction("change_case:english_capital"),
    _instruction("change_case:english_lowercase"),
    _instruction("punctuation:no_comma"),
]
ALL_INSTRUCTIONS = {
    "instruction_id_list": [one["instruction_id_list"][0] for one in INSTRUCTIONS],
    "kwargs": [one["kwargs"][0] for one in INSTRUCTIONS],
}


def _each_instruction(text: str) -> float:
    return sum(ifeval.compute_score(text, reference)["score"] for reference in INSTRUCTIONS)


def _judge(text: str) -> float:
    return judge.parse_score(text) or 0.0


def _program(text: str) -> dict[str, Any]:
    """The scorer of programs up to the sandbox, which has tests of its own."""
    found = programs.extract_code(text)
    if found is None:
        return {"score": 0.0}
    (check,) = programs.checks_of({"inputs": ["1"], "outputs": ["1 2.5"]})
    check.program(found[0])
    named = programs.checks_of({"inputs": [[1]], "outputs": [[1.5]], "fn_name": "f"})
    return {"score": float(check.right(text) or named[0].right(text))}  # a program may print anything too


SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "gsm8k": partial(gsm8k.compute_score, ground_truth="72"),
    "gsm8k flexible": partial(gsm8k.compute_score, ground_truth=72.0, method="flexible", format_score=0.1),
    "gsm8k of a long number": partial(gsm8k.compute_score, ground_truth=[_DIGITS, 5]),
    "math": partial(mathematics.compute_score, ground_truth="42"),
    "math of a fraction": partial(mathematics.compute_score, ground_truth=r"\frac{1}{2}"),
    "math of a tuple": partial(mathematics.compute_score, ground_truth="(1,(2,3),[4,5])"),
    "math of a set": partial(mathematics.compute_score, ground_truth=r"\{1, \sqrt2\}"),
    "math of a number": partial(mathematics.compute_score, ground_truth=1),
    "math of a long number": partial(mathematics.compute_score, ground_truth=_DIGITS),
    "math of several answers": partial(mathematics.compute_score, ground_truth=["x^2", 0.5, r"\boxed{7}"]),
    "dapo": partial(dapo_math.compute_score, ground_truth="34"),
    "dapo of a tuple": partial(dapo_math.compute_score, ground_truth=["(1,2)", 34.0]),
    "geometry3k": partial(geometry3k.compute_score, ground_truth="60"),
    "geometry3k of a root": partial(geometry3k.compute_score, ground_truth=r"2\sqrt{3}", format_score=0.5),
    "multiple choice": partial(multiple_choice.compute_score, ground_truth="B"),
    "multiple choice strict": partial(multiple_choice.compute_score, ground_truth=["A", 1], method="strict"),
    "countdown": partial(countdown.compute_score, ground_truth=COUNTDOWN),
    "countdown of a fraction": partial(countdown.compute_score, ground_truth={"target": "1/3", "nums": [1, 3]}),
    "search": partial(search_qa.compute_score, ground_truth={"target": ["the A", "b"]}),
    "search contains": partial(search_qa.compute_score, ground_truth="a", method="contains"),
    "search of an article": partial(search_qa.compute_score, ground_truth=["The", "!"], method="contains"),
    "each instruction": _each_instruction,
    "instructions": partial(ifeval.compute_score, ground_truth=ALL_INSTRUCTIONS),
    "program": _program,
    "judge": _judge,
    **{
        f"default: {source}": partial(default_compute_score, source, ground_truth=reference)
        for source, reference in {
            "openai/gsm8k": 5.0,
            "final_answer/sort": "00123",
            "HuggingFaceH4/MATH-500": r"x \in [1,2]",
            "aime24": 34,
            "amc23": "3",
            "hiyouga/geometry3k": 1.5,
            "cais/mmlu": 2,
            "countdown": '{"target": 24, "numbers": [4, 6, 1]}',
            "searchR1_nq": '{"target": "Seine"}',
            "ifeval": INSTRUCTIONS[0],
        }.items()
    },
}


@pytest.fixture(autouse=True)
def _text_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # computer algebra has a process with limits, and a test below
    monkeypatch.setattr(symbolic, "installed", lambda: False)


def _is_score(value: Any) -> bool:
    outcome = as_outcome(value)
    return outcome.kind is OutcomeKind.SCORE and outcome.score is not None and math.isfinite(outcome.score)


@pytest.mark.parametrize("name", SETTINGS)
def test_any_text_has_a_score(name: str) -> None:
    for text in examples():
        assert _is_score(SETTINGS[name](text)), text


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith(("default", "instr", "each"))])
def test_time_is_linear(name: str) -> None:
    seconds, text = slowest(SETTINGS[name])
    assert seconds < 0.5, text


@pytest.mark.parametrize("reference", INSTRUCTIONS, ids=lambda one: one["instruction_id_list"][0])
def test_time_of_one_instruction_is_linear(reference: dict[str, Any]) -> None:
    seconds, text = slowest(partial(ifeval.compute_score, ground_truth=reference), fewer=True)
    assert seconds < 0.5, text


def test_values_of_hostile_answers() -> None:
    """What was wrong once, with the right value."""
    assert mathematics.compute_score(r"\boxed{" + "9" * 4301 + "}", "9") == 0.0
    assert mathematics.compute_score(r"\boxed{" + "9" * 4301 + "}", "9" * 4301) == 1.0
    assert mathematics.compute_score(r"\boxed{\frac{" + "9" * 4301 + "}{3}}", "9") == 0.0
    assert mathematics.compute_score(r"\boxed{" * 12_000 + "7" + "}" * 12_000, "7") == 1.0
    assert gsm8k.compute_score("#### " + "1" * 5000, "1" * 5000) == 1.0
    assert multiple_choice.compute_score("answer" + "\n" * 90_000 + "B", "B")["score"] == 1.0
    assert multiple_choice.compute_score("\n" * 90_000 + "B", "B")["score"] == 1.0
    assert geometry3k.format_reward("<think>" + "</think>" * 9000) == 0.0
    assert geometry3k.format_reward("<think>" + "</think>" * 9000 + r"\boxed{}") == 1.0
    assert countdown.compute_score("<answer>" + "(" * 90_000 + "</answer>", COUNTDOWN)["score"] == 0.1
    assert search_qa.compute_score("<answer>" * 9000 + "a b</answer>", "b", method="contains")["score"] == 1.0
    assert ifeval.follows("[" * 90_000, "detectable_format:json_format") is False
    assert ifeval.follows("[" + "9" * 5000 + "]", "detectable_format:json_format") is True
    assert ifeval.follows("\n" * 90_000 + "- a", "detectable_format:number_bullet_lists", {"num_bullets": 1})
    assert programs.extract_code("```" * 30_000) is None
    assert programs.extract_code("```" * 30_000 + "\nx = 1\n```") == ("x = 1", "python")
    assert judge.parse_score('{"score": NaN}') is None
    assert judge.parse_score("Score: " + "9" * 5000) is None


def test_an_empty_answer_is_not_the_article_that_is_right() -> None:
    for method in ("exact", "contains"):
        assert search_qa.compute_score("<answer></answer>", "The", method=method)["score"] == 0.0
        assert search_qa.compute_score("<answer>anything</answer>", ["A", "!"], method=method)["score"] == 0.0
        assert search_qa.compute_score("<answer> the </answer>", "The", method=method)["score"] == 1.0


def test_computer_algebra_reads_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(symbolic, "installed", lambda: True)
    assert mathematics.compute_score(r"\boxed{1/2}", "0.50") == 1.0  # the helper has started
    monkeypatch.setattr(symbolic.HELPER, "limit_s", 1.0)
    answers = ["9^{9^{9^{9}}}", "9" * 1900, "(" * 900, r"\frac{" * 300, "\ud800", "\x00", "٣", "²", "1e999999", ""]
    for answer in answers:
        assert mathematics.compute_score(rf"\boxed{{{answer}}}", "x^2+1") == 0.0
        assert mathematics.compute_score_symbolic(answer, "x^2+1") == 0.0
    seconds, text = slowest(partial(mathematics.compute_score_symbolic, ground_truth="42"))
    assert seconds < 0.5, text


def test_the_end_of_a_long_solution_is_read() -> None:
    pytest.importorskip("math_verify")
    thought = "I think about it. " * 300
    symbolic_score = pytest.MonkeyPatch()
    with symbolic_score.context() as patch:
        patch.setattr(symbolic, "installed", lambda: True)
        assert mathematics.compute_score_symbolic(thought + r"so it is $\boxed{x^2+2x+1}$", "(x+1)^2") == 1.0
        assert mathematics.compute_score_symbolic(thought + "The final answer is $42$.", "42") == 1.0
        assert mathematics.compute_score_symbolic(thought + r"so it is \boxed{43}", "42") == 0.0


def test_tasks_of_reasoning_gym_read_any_text() -> None:
    gym = pytest.importorskip("reasoning_gym")
    for task in ("chain_sum", "polynomial_equations", "rubiks_cube", "sudoku", "countdown"):
        row = {"entry": gym.create_dataset(task, size=1, seed=1)[0]}
        for text in (*string.punctuation, "9**9**9", "\ud800", "9" * 5000, "(" * 900, LONG["boxed digits"]):
            score = reasoning_gym.compute_score(f"<answer>{text}</answer>", row, f"reasoning_gym/{task}")
            assert 0.0 <= score["score"] < 1.0
