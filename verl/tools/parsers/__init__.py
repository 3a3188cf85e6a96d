"""How models write tool calls, by name of the format."""

from __future__ import annotations

from verl.tools.parsers import harmony, json_formats, tag_formats  # noqa: F401  they register themselves
from verl.tools.parsers.base import (
    PARSERS,
    BrokenCall,
    ParsedTurn,
    Piece,
    ToolCall,
    ToolParser,
    length_before,
    register_parser,
)

__all__ = ["PARSERS", "BrokenCall", "ParsedTurn", "Piece", "ToolCall", "ToolParser", "length_before", "register_parser"]
