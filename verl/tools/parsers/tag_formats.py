"""Formats whose arguments stand in tags: Qwen3-Coder and GLM."""

from __future__ import annotations

import re
from typing import ClassVar

from verl.tools.parsers.base import BracketedParser, BrokenCall, ToolCall, register_parser


class _Tagged(BracketedParser):
    """``<tool_call>...</tool_call>`` around each call."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    openings = (OPEN,)
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)


@register_parser("qwen3_coder")
class Qwen3CoderParser(_Tagged):
    """``<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>``.

    A line break after the opening and before the closing tag of a parameter belongs to the tags.
    """

    def call(self, body: str) -> ToolCall | BrokenCall:
        found = re.fullmatch(r"\s*<function=([^<>\n]+)>(.*?)(</function>)?\s*", body, re.DOTALL)
        if not found:
            return BrokenCall("a call needs <function=name>")
        name = found[1].strip()
        if not found[3]:
            return BrokenCall("<function=...> without </function>", name)
        arguments = {}
        rest = found[2]
        while "<parameter=" in rest:
            before, _, rest = rest.partition("<parameter=")
            if before.strip():
                break
            key, closed, value = rest.partition(">")
            value, ended, rest = value.partition("</parameter>")
            if not closed or not ended or not key.strip():
                return BrokenCall("<parameter=...> without </parameter>", name)
            arguments[key.strip()] = self.typed(name, key.strip(), _unwrapped(value))
        else:
            if not rest.strip():
                return ToolCall(name, arguments)
        return BrokenCall("there is text between the parameters", name)


@register_parser("glm")
class GLMParser(_Tagged):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>``; of GLM-4.5 and later."""

    marks = (*_Tagged.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def call(self, body: str) -> ToolCall | BrokenCall:
        name, found, rest = body.partition("<arg_key>")
        name = name.strip()
        if not name or "<" in name:
            return BrokenCall("the call has no name")
        arguments = {}
        rest = found + rest
        while rest.strip():
            pair = re.match(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", rest, re.DOTALL)
            if not pair:
                return BrokenCall("arguments are pairs of <arg_key> and <arg_value>", name)
            arguments[pair[1].strip()] = self.typed(name, pair[1].strip(), pair[2])
            rest = rest[pair.end() :]
        return ToolCall(name, arguments)


def _unwrapped(value: str) -> str:
    value = value.removeprefix("\n")
    return value.removesuffix("\n")
