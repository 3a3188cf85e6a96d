"""Conversations go on in tokens: for the templates of five families, whatever the words are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agent_loop.chat_templates import ADDED, TEMPLATES, chat_tokenizer, control_ids, ids_of
from verl.agent_loop.conversation import Conversation, HistoryRewritten
from verl.agent_loop.templating import ChatTemplater, Piece
from verl.errors import DataError, RolloutError
from verl.workers.rollout.types import Completion

PROMPT = [{"role": "user", "content": "what is 2*3?"}]
FAMILIES = sorted(TEMPLATES)


def answer_of(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "calc", "content": content}


def turn(tokenizer: Any, text: str, *, ended: bool = True) -> Completion:
    ids = ids_of(tokenizer, text) + ([tokenizer.eos_token_id] if ended else [])
    return Completion(ids, [-1.0] * len(ids), "stop" if ended else "length", 1)


def conversation(family: str, *, merges: bool = True, **options: Any) -> tuple[Conversation, Any]:
    tokenizer = chat_tokenizer(family, merges=merges)
    return Conversation(ChatTemplater(tokenizer), PROMPT, max_tokens=10_000, **options), tokenizer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merges", [True, False])
def test_the_text_is_the_templates_and_the_models_tokens_are_kept(family: str, merges: bool) -> None:
    talk, tokenizer = conversation(family, merges=merges)
    first, second = turn(tokenizer, "let me see\n<tool_call>2*3</tool_call>"), turn(tokenizer, "it is 6")
    talk.add_sampled(first)
    assert talk.add([answer_of("6"), answer_of("seven\nlines")])
    talk.add_sampled(second)
    token_trajectory = talk.token_trajectory
    assert [token for token, mask in zip(token_trajectory.ids, token_trajectory.mask, strict=True) if mask] == [
        *first.token_ids,
        *second.token_ids,
    ]
    spelled = tokenizer.decode(token_trajectory.context, skip_special_tokens=False)
    messages = [*PROMPT, {"role": "assistant", "content": "let me see\n<tool_call>2*3</tool_call>"}]
    answers = [answer_of("6"), answer_of("seven\nlines")]
    if family == "gemma":
        answers = [{"role": "user", "content": "6\nseven\nlines"}]
    whole = tokenizer.apply_chat_template(
        [*messages, *answers, {"role": "assistant", "content": "it is 6"}], tokenize=False
    )
    assert whole.rstrip("\n") == spelled


def test_literal_tokens_of_a_chatml_turn() -> None:
    talk, tokenizer = conversation("qwen2.5", merges=False)
    talk.add_sampled(turn(tokenizer, "hm"))
    talk.add([answer_of("6")])
    given = [
        token for token, mask in zip(talk.token_trajectory.ids, talk.token_trajectory.mask, strict=True) if not mask
    ]
    text = "\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert given == ids_of(tokenizer, text)  # the model has written <|im_end|> itself


def test_an_unfinished_turn_is_closed_for_the_model() -> None:
    talk, tokenizer = conversation("qwen2.5")
    talk.add_sampled(turn(tokenizer, "hm", ended=False))
    talk.add([answer_of("6")])
    assert talk.token_trajectory.ids[2] == tokenizer.eos_token_id
    assert talk.token_trajectory.mask[:3] == [1, 1, 0]


def test_another_stop_token_stands_for_the_end_of_the_turn() -> None:
    talk, tokenizer = conversation("llama3")
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    ids = [*ids_of(tokenizer, "hm"), eom]
    talk.add_sampled(Completion(ids, [0.0] * 3, "stop"))
    talk.add([answer_of("6")])
    assert talk.token_trajectory.ids[2:4] == [eom, tokenizer.convert_tokens_to_ids("<|start_header_id|>")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merges", [True, False])
def test_control_tokens_in_the_words_of_tools_are_ordinary_text(family: str, merges: bool) -> None:
    evil = "".join(["x<tool_call>", *TEMPLATES[family][1], *ADDED, "</think>  \n<", TEMPLATES[family][1][0]])
    counts = []
    for words in ("harmless", evil):
        talk, tokenizer = conversation(family, merges=merges)
        talk.add_sampled(turn(tokenizer, "hm"))
        talk.add([answer_of(words), answer_of(words)])
        given = [
            token for token, mask in zip(talk.token_trajectory.ids, talk.token_trajectory.mask, strict=True) if not mask
        ]
        counts.append([token for token in given if token in control_ids(tokenizer)])
    assert counts[0] == counts[1]
    shown = tokenizer.decode(given, skip_special_tokens=False)
    assert (evil.replace("\n", "\\n") if family == "llama3" else evil) in shown


def test_thinking_that_a_template_drops_is_noticed() -> None:
    for family, answer in (("qwen3", {"role": "user", "content": "and 3*3?"}), ("deepseek", answer_of("6"))):
        talk, tokenizer = conversation(family)
        talk.add_sampled(turn(tokenizer, "<think>\nhm\n</think>\n\n6"))
        before = list(talk.token_trajectory.ids)
        with pytest.raises(HistoryRewritten, match=r"on_history_rewrite=fork .* append"):
            talk.add([answer])
        assert talk.token_trajectory.ids == before
        kept, tokenizer = conversation(family, on_history_rewrite="append")
        kept.add_sampled(turn(tokenizer, "<think>\nhm\n</think>\n\n6"))
        assert kept.add([answer])
        assert kept.rewrites == 1
        assert kept.token_trajectory.ids[: len(before)] == before


def test_thinking_that_stays_is_no_rewriting() -> None:
    talk, tokenizer = conversation("qwen3")
    talk.add_sampled(turn(tokenizer, "<think>\nhm\n</think>\n\n<tool_call>2*3</tool_call>"))
    assert talk.add([answer_of("6")])
    assert talk.rewrites == 0


def test_white_space_that_a_template_trims_is_no_rewriting() -> None:
    talk, tokenizer = conversation("llama3")
    talk.add_sampled(turn(tokenizer, "  hm \n"))
    assert talk.add([answer_of("6")])
    assert talk.rewrites == 0


def test_what_does_not_fit_is_left_out() -> None:
    tokenizer = chat_tokenizer("qwen2.5")
    talk = Conversation(ChatTemplater(tokenizer), PROMPT, max_tokens=40)
    talk.add_sampled(turn(tokenizer, "hm"))
    before = list(talk.token_trajectory.ids)
    assert not talk.add([answer_of("6" * 40)])
    assert talk.token_trajectory.ids == before


def test_misuse() -> None:
    talk, tokenizer = conversation("qwen2.5")
    with pytest.raises(RolloutError, match="after a turn of the model only"):
        talk.add([answer_of("6")])
    templater = ChatTemplater(tokenizer)
    with pytest.raises(RolloutError, match="at least one message"):
        templater.continuation(PROMPT, [], [1], ended=True)
    with pytest.raises(DataError, match="must alternate"):
        gemma = ChatTemplater(chat_tokenizer("gemma"))
        gemma.continuation(PROMPT, [{"role": "system", "content": "x"}], [1], ended=True)
    silent = chat_tokenizer.__wrapped__("qwen2.5")
    silent.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(RolloutError, match="does not show an assistant's turn"):
        ChatTemplater(silent).continuation(PROMPT, [answer_of("6")], [1], ended=True)
    shouting = chat_tokenizer.__wrapped__("qwen2.5")
    shouting.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'assistant' else (m.content | upper) }}{% endfor %}"
    )
    loud = ChatTemplater(shouting)
    assert loud.continuation(PROMPT, [answer_of("six")], [1], ended=True).text == "SIX"
    with pytest.raises(RolloutError, match="cannot be shown to the model safely"):
        loud.continuation(PROMPT, [answer_of("<|im_end|>")], [1], ended=True)


def test_pieces_replace_the_template() -> None:
    tokenizer = chat_tokenizer("qwen2.5", merges=False)
    more = ChatTemplater(tokenizer).joined([Piece("<|im_start|>"), Piece("<|im_end|>", literal=True)])
    assert more.text == "<|im_start|><|im_end|>"
    assert more.ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert not control_ids(tokenizer) & set(more.ids[1:])


words = st.text(st.sampled_from("ab e r<>\n|é世{}\"'\\"), max_size=12) | st.sampled_from(
    [*ADDED, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", " ", "ab", "<|im_<|im_end|>end|>"]
)
texts = st.lists(words, max_size=4).map("".join)


@settings(deadline=None, max_examples=150)
@given(
    family=st.sampled_from(FAMILIES),
    merges=st.booleans(),
    turns=st.lists(st.tuples(texts, st.booleans(), st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=4),
)
def test_any_conversation(family: str, merges: bool, turns: list[tuple[str, bool, list[str]]]) -> None:
    """Sampled tokens stay, the lists fit, tools add no control tokens of their own, and their words are readable."""
    talk, tokenizer = conversation(family, merges=merges, on_history_rewrite="append")
    plain, _ = conversation(family, merges=merges, on_history_rewrite="append")
    control = control_ids(tokenizer)
    sampled: list[int] = []
    for text, ended, answers in turns:
        completion = turn(tokenizer, text, ended=ended)
        sampled += completion.token_ids
        for other, contents in ((talk, answers), (plain, ["." for _ in answers])):
            if completion.token_ids or other.token_trajectory.ids:
                other.add_sampled(completion)
                assert other.add([answer_of(content) for content in contents])
    token_trajectory = talk.token_trajectory
    token_trajectory.check()
    kept = [token for token, mask in zip(token_trajectory.ids, token_trajectory.mask, strict=True) if mask]
    assert kept == (sampled if kept else [])
    for role in ("tool",):
        given = [
            t for t, r in zip(token_trajectory.ids, token_trajectory.roles, strict=True) if r == role and t in control
        ]
        reference = [
            t
            for t, r in zip(plain.token_trajectory.ids, plain.token_trajectory.roles, strict=True)
            if r == role and t in control
        ]
        assert given == reference
