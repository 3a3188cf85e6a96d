"""How models write tool calls, by name of the format."""

from __future__ import annotations

from verl.agent_loop.parsers import harmony, json_formats, tag_formats  # noqa: F401  they register themselves
from verl.agent_loop.parsers.base import PARSERS, BrokenCall, ParsedTurn, ToolCall, ToolParser, register_parser

__all__ = ["PARSERS", "BrokenCall", "ParsedTurn", "ToolCall", "ToolParser", "register_parser"]
