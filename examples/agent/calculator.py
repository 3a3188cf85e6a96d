"""The tool of the agent quick start, and the way in which its tiny model writes a call."""

from __future__ import annotations

import re

from verl.tools import function_tool
from verl.tools.parsers import BrokenCall, ParsedTurn, ToolCall, ToolParser, register_parser
from verl.tools.parsers.base import between


@function_tool(timeout_s=5)
def calculator(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: for example 17*23.
    """
    found = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression)
    if found is None:
        raise ValueError("write two numbers with * between them")
    return str(int(found[1]) * int(found[2]))


@register_parser("calculator")
class CalculatorParser(ToolParser):
    """``<tool_call>17*23</tool_call>``: JSON would be most of what so small a model has to learn."""

    def parse(self, text: str) -> ParsedTurn:
        outside, bodies, unclosed = between(text, "<tool_call>", "</tool_call>")
        calls: list[ToolCall | BrokenCall] = [ToolCall("calculator", {"expression": body}) for body in bodies]
        if unclosed is not None:
            calls.append(BrokenCall("<tool_call> without </tool_call>"))
        return ParsedTurn(outside, calls)
