"""Each instruction with a response that follows it and one that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl.errors import DataError
from verl.rewards.ifeval import RULES, compute_score, follows
from verl.rewards.languages import is_language

PARAGRAPHS = "one\n***\ntwo\n***\nthree"

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "moon"]}, "The Sun and the moon.", "The sunny moon."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"}, "Tea, tea!", "Tea for a team."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}, "Tea.", "tea tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "A badge.", "So BAD."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "Zzap", "zap"),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "zap", "zz"),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Weg", "This is not the way"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Dr. No! Yes.", "Dr. No."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "It is 3.5 m.", "A. B? c!"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one don't three", "one two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one, two", "a b c"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}, PARAGRAPHS, "one\n\ntwo\n\nthree"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\n**Then** go.",
        "Then.\n\nFirst.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name] at []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Eat.", "Bye. Tops."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", "Bye.\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n- c"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a b* and **c**", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na\nSections two",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, 2]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<My day>>\nIt rained.", "<< >>\nIt rained."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:two_responses", {}, "one******two", "one\n******\ntwo\n******\nthree"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why is it so?"}, "why is it so? Because.", "Because."),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'So it is. That is all."', "That is all. Bye."),
    ("startend:quotation", {}, '"quoted"', '"quoted'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO WAY",
        "No WAY",
    ),
    ("change_case:english_capital", {}, "THIS IS THE END.", "THIS IS the END."),
    ("change_case:english_lowercase", {}, "this is the end.", "This is the end."),
    ("punctuation:no_comma", {}, "none here", "one, here"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_instruction(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(good, name, arguments)
    assert not follows(bad, name, arguments)
    assert not follows("  \n", name, arguments)


def test_all_25_instructions_have_a_case() -> None:
    assert len(RULES) == 25
    assert {name for name, *_ in CASES} == set(RULES)


def test_score_needs_every_instruction() -> None:
    names = ["punctuation:no_comma", "length_constraints:number_words"]
    # the data set fills what an instruction does not take with None
    arguments = [{"num_words": None}, {"num_words": 3, "relation": "at least", "keyword": None}]
    truth = {"instruction_id_list": names, "kwargs": arguments}
    assert compute_score("one two three", truth) == {"score": 1.0, "acc": True, "instruction_acc": 1.0}
    assert compute_score("one two", truth) == {"score": 0.0, "acc": False, "instruction_acc": 0.5}
    assert compute_score("one two three", json.dumps(truth))["score"] == 1.0
    assert compute_score("one two three", "", truth)["score"] == 1.0


def test_loose_reading_ignores_what_surrounds_the_answer() -> None:
    truth = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    text = 'Sure, here it is:\n"quoted"'
    assert compute_score(text, truth)["score"] == 0.0
    assert compute_score(text, truth, loose=True)["score"] == 1.0


def test_mistakes_in_the_data_are_named() -> None:
    with pytest.raises(DataError, match="no rule for the instruction 'keywords:none'"):
        follows("a", "keywords:none")
    with pytest.raises(DataError, match="'keywords:existence' with the arguments {}: .*keywords"):
        follows("a", "keywords:existence", {"keywords": None})
    with pytest.raises(DataError, match="relation='more than'"):
        follows("a", "length_constraints:number_words", {"num_words": 1, "relation": "more than"})
    with pytest.raises(DataError, match="no 'instruction_id_list'"):
        compute_score("a", {})
    with pytest.raises(DataError, match="1 instructions with 2 kwargs"):
        compute_score("a", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]})


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is on the table and it is not mine", "en"),
        ("Le chat est sur la table et il n'est pas à moi", "fr"),
        ("El gato está en la mesa y no es mío", "es"),
        ("Il gatto è sul tavolo e non è di mia sorella", "it"),
        ("O gato não está em cima da mesa e não é meu", "pt"),
        ("Кошка лежит на столе, и это не моя кошка, а твоя", "ru"),
        ("猫在桌子上，不是我的", "zh"),
        ("猫はテーブルの上にいます", "ja"),
        ("고양이는 탁자 위에 있습니다", "ko"),
        ("القطة على الطاولة", "ar"),
        ("بلی میز پر ہے اور یہ میری نہیں ہے", "ur"),
        ("बिल्ली मेज पर है और यह मेरी नहीं है", "hi"),
        ("แมวอยู่บนโต๊ะ", "th"),
        ("Con mèo ở trên bàn và không phải là của tôi", "vi"),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert is_language(text, language)
    others = {"en", "fr", "ru", "zh", "ja", "ar", "hi", "th", "vi"} - {language}
    assert [other for other in others if is_language(text, other)] == []


def test_language_that_cannot_be_told() -> None:
    with pytest.raises(ValueError, match="language='tlh' cannot be recognised"):
        is_language("nuqneH", "tlh")
