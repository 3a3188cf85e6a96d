"""Tool calls in the formats of model families, and everything that only resembles one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.tools.parsers import PARSERS, BrokenCall, ParsedTurn, ToolCall

SCHEMAS = {
    "find": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
}


#: the library's own: other tests register some too
OURS = sorted(name for name in PARSERS if PARSERS[name].__module__.startswith("verl."))


def parse(name: str, text: str) -> ParsedTurn:
    return PARSERS[name](SCHEMAS).parse(text)


FIND = ToolCall("find", {"text": "42", "count": 3, "exact": True})
DEEPSEEK_CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
WRITTEN = {
    "llama3_json": '<|python_tag|>{"name": "find", "parameters": {}}; {"name": "find", "parameters": {}}',
    "hermes": "<tool_call>\n{}\n</tool_call>\n<tool_call>{}</tool_call>",
    "deepseek": DEEPSEEK_CALLS,
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>functions.find:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.find "
        "<|constrain|>json<|message|>{}<|call|><|start|>assistant to=functions.find<|channel|>commentary json"
        "<|message|>{}"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=find>\n<parameter=text>\n42\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
        "<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>"
    )
    * 2,
    "glm": (
        "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>42</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
    )
    * 2,
}


def written(name: str) -> str:
    arguments = json.dumps(FIND.arguments)
    inner = json.dumps({"name": "find", "arguments": FIND.arguments}) if name == "hermes" else arguments
    return WRITTEN[name].replace("{}", inner)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_two_calls_with_typed_arguments(name: str) -> None:
    assert parse(name, written(name)).calls == [FIND, FIND]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm", "deepseek", "kimi"])
def test_text_beside_calls_is_content(name: str) -> None:
    assert parse(name, f"let me look\n\n{written(name)}").content == "let me look"


def test_every_format_leaves_plain_answers_alone() -> None:
    for name in OURS:
        assert parse(name, "the answer is {6}, isn't it?") == ParsedTurn("the answer is {6}, isn't it?")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "find", "parameters": {"text": "42", "count": 3, "exact": true}}',
        '<|python_tag|>{"name": "find", "arguments": {"text": "42", "count": 3, "exact": true}}',
        ' [{"function": {"name": "find", "parameters": {"text": "42", "count": 3, "exact": true}}}]',
    ],
)
def test_llama3_calls(text: str) -> None:
    assert parse("llama3_json", text).calls == [FIND]


def test_llama3_several_calls_and_json_that_is_an_answer() -> None:
    call = json.dumps({"name": "find", "parameters": {}})
    assert parse("llama3_json", f"{call}; {call}\n{call}").calls == [ToolCall("find", {})] * 3
    assert parse("llama3_json", '{"answer": 6}') == ParsedTurn('{"answer": 6}')
    assert parse("llama3_json", f"I call {call}").calls == []
    (broken,) = parse("llama3_json", "<|python_tag|>print(6)").calls
    assert isinstance(broken, BrokenCall)


def test_harmony_content_is_the_final_channel() -> None:
    turn = parse("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>six")
    assert turn == ParsedTurn("six")


def test_values_follow_the_schema() -> None:
    text = "<function=find><parameter=text>{x}</parameter><parameter=count>{x}</parameter>"
    text += "<parameter=maybe>null</parameter><parameter=other>[1, 2]</parameter></function>"
    (call,) = parse("qwen3_coder", f"<tool_call>{text.replace('{x}', '7')}</tool_call>").calls
    assert call == ToolCall("find", {"text": "7", "count": 7, "maybe": "null", "other": [1, 2]})


@pytest.mark.parametrize(
    ("name", "text", "problem", "tool"),
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {</tool_call>', "not valid JSON", ""),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name", ""),
        ("hermes", "<tool_call>[]</tool_call>", "the call is list", ""),
        ("hermes", '<tool_call>{"name": "find", "arguments": 3}</tool_call>', "are int", "find"),
        ("hermes", '<tool_call>{"name": "find", "arguments": "{"}</tool_call>', "arguments are not valid JSON", "find"),
        ("hermes", '<tool_call>{"name": "find"', "without </tool_call>", ""),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON", ""),
        ("qwen3_coder", "<tool_call>find()</tool_call>", "needs <function=name>", ""),
        ("qwen3_coder", "<tool_call><function=find></tool_call>", "without </function>", "find"),
        ("qwen3_coder", "<tool_call><function=find>x</function></tool_call>", "text between", "find"),
        ("qwen3_coder", "<tool_call><function=find><parameter=a>1</function></tool_call>", "</parameter>", "find"),
        ("glm", "<tool_call></tool_call>", "has no name", ""),
        ("glm", "<tool_call>find<arg_key>a</arg_key></tool_call>", "are pairs", "find"),
        ("deepseek", "<｜tool▁calls▁begin｜>", "without a call", ""),
        ("deepseek", "<｜tool▁call▁begin｜>find{}<｜tool▁call▁end｜>", "needs <｜tool▁sep｜>", ""),
        ("kimi", "<|tool_call_begin|>find", "without <|tool_call_end|>", ""),
        ("gpt-oss", "<|channel|>commentary to=functions.find<|message|>{", "not valid JSON", "find"),
        ("llama3_json", '{"name": "find", ', "not valid JSON", ""),
    ],
)
def test_broken_calls_say_what_is_wrong(name: str, text: str, problem: str, tool: str) -> None:
    (call,) = parse(name, text).calls
    assert isinstance(call, BrokenCall)
    assert problem in call.problem
    assert call.name == tool


def test_an_unknown_format_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown tool-call format 'herms'; did you mean 'hermes'"):
        PARSERS["herms"]


pieces = [
    *(part for text in WRITTEN.values() for part in text.replace("\n", "").split("{}")),
    *"<tool_call> </tool_call> <function=a> </function> <parameter=a> </parameter> <arg_key> </arg_value>".split(),
    *'<｜tool▁sep｜> <|python_tag|> <|message|> <|channel|> to=functions. { } [ ] " : , name NaN 1e999'.split(),
    '{"name": "a", "arguments": {}}',
    "\ud800",
    "\x00",
    "٣",
]


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(OURS), parts=st.lists(st.sampled_from(pieces) | st.text(max_size=5), max_size=8))
def test_no_text_breaks_a_parser(name: str, parts: list[str]) -> None:
    turn = parse(name, "".join(parts))
    assert isinstance(turn.content, str)
    for call in turn.calls:
        assert isinstance(call, ToolCall | BrokenCall)
        assert isinstance(call.name, str)
        if isinstance(call, ToolCall):
            assert call.name
            assert isinstance(call.arguments, dict)


calls = st.dictionaries(
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=100)
@given(arguments=calls)
def test_what_a_template_writes_is_read_back(arguments: dict) -> None:
    call = json.dumps({"name": "find", "arguments": arguments}, ensure_ascii=False)
    if "</tool_call>" not in call:
        assert parse("hermes", f"<tool_call>\n{call}\n</tool_call>").calls == [ToolCall("find", arguments)]
    llama = json.dumps({"name": "find", "parameters": arguments})
    assert parse("llama3_json", llama).calls == [ToolCall("find", arguments)]


@pytest.mark.parametrize(
    ("name", "text", "plain"),
    [
        ("hermes", "Let me see. <tool_", "Let me see. "),
        ("hermes", "Let me see. <tool_call>{", "Let me see. "),
        ("hermes", "a < b", "a < b"),
        ("kimi", "Yes<|tool_calls_sec", "Yes"),
        ("llama3_json", "It may become a call", ""),
    ],
)
def test_what_may_become_a_call_is_held_back(name: str, text: str, plain: str) -> None:
    assert text[: PARSERS[name]().plain_length(text)] == plain
