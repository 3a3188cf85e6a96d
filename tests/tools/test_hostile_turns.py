"""Parsers of tool calls read any turn of a model, in time linear in its length."""

from __future__ import annotations

import pytest

from tests.fixtures.hostile_texts import examples, slowest
from verl.tools.parsers import PARSERS, BrokenCall, ToolCall, ToolParser

FORMATS = ("hermes", "llama3_json", "deepseek", "kimi", "qwen3_coder", "glm", "gpt-oss")


def _parser(name: str) -> ToolParser:
    parser: ToolParser = PARSERS[name]({"f": {"properties": {"a": {"type": "integer"}}}})
    return parser


@pytest.mark.parametrize("name", FORMATS)
def test_any_turn_can_be_read(name: str) -> None:
    parser = _parser(name)
    for text in examples():
        turn = parser.parse(text)
        assert isinstance(turn.content, str)
        assert all(isinstance(call, ToolCall | BrokenCall) for call in turn.calls), text
        assert 0 <= parser.plain_length(text) <= len(text)


@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear(name: str) -> None:
    parser = _parser(name)
    seconds, text = slowest(lambda turn: (parser.parse(turn), parser.plain_length(turn)))
    assert seconds < 0.5, text


def test_values_of_calls_between_noise() -> None:
    """Calls are found as before where nothing is wrong with them."""
    noise = "<tool_call>" * 5
    assert _parser("hermes").parse('a <tool_call>{"name": "f"}</tool_call> b').calls == [ToolCall("f", {})]
    assert isinstance(_parser("hermes").parse(noise).calls[-1], BrokenCall)
    qwen = "<tool_call> <function= f >\n<parameter=a>\n1\n</parameter> \n</function> </tool_call>"
    assert _parser("qwen3_coder").parse(qwen).calls == [ToolCall("f", {"a": 1})]
    glm = "<tool_call>f\n<arg_key> a </arg_key> <arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>x"
    assert _parser("glm").parse(f"{glm}</arg_value></tool_call>").calls == [ToolCall("f", {"a": 1, "b": "x"})]
    assert isinstance(_parser("glm").parse(f"{glm}</tool_call>").calls[0], BrokenCall)
    begin, mark, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    fenced = f'{begin}function{mark}f\n```json\n{{"a": 1}}\n```{end}'
    assert _parser("deepseek").parse(fenced).calls == [ToolCall("f", {"a": 1})]
