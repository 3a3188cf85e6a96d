"""Formats whose arguments stand in tags: Qwen3-Coder and GLM."""

from __future__ import annotations

import re
from typing import ClassVar

from verl.tools.parsers.base import BracketedParser, BrokenCall, ToolCall, register_parser, skip_spaces

_FUNCTION = re.compile(r"<function=([^<>\n]++)>")
_PARAMETER = "<parameter="
_PAIR = (("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))


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
        body = body.strip()
        found = _FUNCTION.match(body)
        if not found:
            return BrokenCall("a call needs <function=name>")
        name = found[1].strip()
        if not body.endswith("</function>"):
            return BrokenCall("<function=...> without </function>", name)
        end = len(body) - len("</function>")
        arguments = {}
        place = found.end()
        while (opened := body.find(_PARAMETER, place, end)) >= 0:
            if body[place:opened].strip():
                return BrokenCall("there is text between the parameters", name)
            begin = opened + len(_PARAMETER)
            key_end = body.find(">", begin, end)
            closed = body.find("</parameter>", key_end + 1, end) if key_end >= 0 else -1
            key = body[begin:key_end].strip()
            if closed < 0 or not key:
                return BrokenCall("<parameter=...> without </parameter>", name)
            arguments[key] = self.typed(name, key, _unwrapped(body[key_end + 1 : closed]))
            place = closed + len("</parameter>")
        if body[place:end].strip():
            return BrokenCall("there is text between the parameters", name)
        return ToolCall(name, arguments)


@register_parser("glm")
class GLMParser(_Tagged):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>``; of GLM-4.5 and later."""

    marks = (*_Tagged.marks, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def call(self, body: str) -> ToolCall | BrokenCall:
        place = body.find("<arg_key>")
        place = len(body) if place < 0 else place
        name = body[:place].strip()
        if not name or "<" in name:
            return BrokenCall("the call has no name")
        arguments = {}
        while (place := skip_spaces(body, place)) < len(body):
            parts = []
            for opening, closing in _PAIR:
                place = skip_spaces(body, place)
                closed = body.find(closing, place)
                if not body.startswith(opening, place) or closed < 0:
                    return BrokenCall("arguments are pairs of <arg_key> and <arg_value>", name)
                parts.append(body[place + len(opening) : closed])
                place = closed + len(closing)
            key = parts[0].strip()
            arguments[key] = self.typed(name, key, parts[1])
        return ToolCall(name, arguments)


def _unwrapped(value: str) -> str:
    value = value.removeprefix("\n")
    return value.removesuffix("\n")
