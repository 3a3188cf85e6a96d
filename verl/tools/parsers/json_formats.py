"""Formats whose calls are JSON: Hermes (Qwen), Llama 3, DeepSeek, Kimi."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import ClassVar

from verl.tools.parsers.base import (
    BracketedParser,
    BrokenCall,
    ParsedTurn,
    ToolCall,
    ToolParser,
    call_from_json,
    call_from_value,
    call_of,
    register_parser,
)


@register_parser("hermes")
class HermesParser(BracketedParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several if need be; Hermes, Qwen2.5, Qwen3."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    openings = (OPEN,)
    marks = (OPEN, CLOSE)

    def call(self, body: str) -> ToolCall | BrokenCall:
        return call_from_json(body)


@register_parser("llama3_json")
class Llama3JsonParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole turn, several separated by ``;``, commas or line breaks, or
    in a list; ``<|python_tag|>`` may come first. A turn that does not begin like this is text.
    """

    TAG = "<|python_tag|>"
    marks = (TAG,)

    def parse(self, text: str) -> ParsedTurn:
        before, tagged, rest = text.partition(self.TAG)
        body = (rest if tagged else text).strip()
        if not tagged and not body.startswith(('{"', "{ ", "{\n", "[{")):
            return ParsedTurn(text.strip())
        calls = _json_values(body)
        if not tagged and not any(_is_meant_as_call(body, call) for call in calls):
            return ParsedTurn(text.strip())  # an answer that is JSON
        return ParsedTurn(before.strip() if tagged else "", calls)


def _is_meant_as_call(body: str, call: ToolCall | BrokenCall) -> bool:
    return isinstance(call, ToolCall) or '"name"' in body


def _json_values(text: str) -> list[ToolCall | BrokenCall]:
    """Calls one after the other."""
    calls: list[ToolCall | BrokenCall] = []
    decoder = json.JSONDecoder(strict=False)
    place = 0
    while place < len(text):
        if text[place] in " \t\r\n;,":
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            calls.append(BrokenCall(f"the call is not valid JSON ({error})"))
            break
        calls += [call_from_value(item) for item in (value if isinstance(value, list) else [value])]
    return calls or [BrokenCall("there is no call behind the tag")]


class _SeparatedParser(BracketedParser):
    """For formats with a mark between a call's name and its arguments, and marks around all calls."""

    SEPARATOR: ClassVar[str]

    def call(self, body: str) -> ToolCall | BrokenCall:
        head, found, rest = body.partition(self.SEPARATOR)
        if not found:
            return BrokenCall(f"a call needs {self.SEPARATOR} between the name and the arguments")
        return self.parts(head, rest)

    @abstractmethod
    def parts(self, head: str, rest: str) -> ToolCall | BrokenCall:
        """The call of what stands before and behind the mark."""


@register_parser("deepseek")
class DeepSeekParser(_SeparatedParser):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` (V3.1), or ``function<｜tool▁sep｜>name``
    and a fenced JSON block (V3, R1), within ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``.
    """

    BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    OPEN, CLOSE, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    openings = (BEGIN, OPEN)
    marks = (BEGIN, END, OPEN, CLOSE, SEPARATOR)

    def parts(self, head: str, rest: str) -> ToolCall | BrokenCall:
        name, fence, fenced = rest.partition("```")
        fenced = fenced.rstrip()
        if head.strip() == "function" and len(name.split()) == 1 and fence and fenced.endswith("```"):
            return call_of(name, fenced.removesuffix("```").removeprefix("json"))
        return call_of(head, rest)


@register_parser("kimi")
class KimiParser(_SeparatedParser):
    """``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` within
    ``<|tool_calls_section_begin|>`` and ``<|tool_calls_section_end|>``; of Kimi K2.
    """

    BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    OPEN, CLOSE, SEPARATOR = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
    openings = (BEGIN, OPEN)
    marks = (BEGIN, END, OPEN, CLOSE, SEPARATOR)

    def parts(self, head: str, rest: str) -> ToolCall | BrokenCall:
        return call_of(re.sub(r":\d+$", "", head.strip()).removeprefix("functions."), rest)
