"""Calls of tools in a model's text: one parser per way to write them."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Protocol

from verl.errors import ConfigError
from verl.utils.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallParser(Protocol):
    """Finds calls in the text of a message.

    Attributes:
        marker: text with which a call begins.
    """

    marker: str

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls. What is no well-formed call stays in the text."""
        ...


TOOL_CALL_PARSERS: Registry[type] = Registry("format of tool calls")


def get_tool_call_parser(name: str) -> ToolCallParser:
    """The parser of a format.

    Raises:
        ConfigError: there is none.
    """
    if name not in TOOL_CALL_PARSERS:
        raise ConfigError(f"tool-call format {name!r} is unknown; known: {', '.join(sorted(TOOL_CALL_PARSERS))}")
    parser: ToolCallParser = TOOL_CALL_PARSERS[name]()
    return parser


@TOOL_CALL_PARSERS.register("hermes")
class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen models write."""

    marker = "<tool_call>"
    _CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls: list[ToolCall] = []

        def take(match: re.Match[str]) -> str:
            try:
                found = json.loads(match.group(1))
                call = ToolCall(str(found["name"]), json.dumps(found.get("arguments", {}), ensure_ascii=False))
            except (ValueError, KeyError, TypeError, AttributeError):
                logger.debug("not a well-formed tool call: %s", match.group(0))
                return match.group(0)
            calls.append(call)
            return ""

        content = self._CALL.sub(take, text)
        return (content.rstrip() if calls else content), calls
