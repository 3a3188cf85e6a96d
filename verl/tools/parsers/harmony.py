"""The Harmony format of gpt-oss: messages in channels, of which some go to functions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from verl.data.chat import Message
from verl.tools.parsers.base import BrokenCall, ParsedTurn, Piece, ToolCall, ToolParser, call_of, register_parser

_MESSAGE = "<|message|>"


@register_parser("gpt-oss")
class HarmonyParser(ToolParser):
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}`` for a call; the recipient may also
    stand before the channel. Messages of the channel ``final`` are the content.
    """

    marks = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "<|end|>", "<|call|>", "<|return|>")

    def parse(self, text: str) -> ParsedTurn:
        content: list[str] = []
        calls: list[ToolCall | BrokenCall] = []
        for message in re.split(r"<\|start\|>|<\|end\|>|<\|call\|>|<\|return\|>", text):
            header, found, body = message.partition(_MESSAGE)
            to = re.search(r"to=functions\.([^\s<]+)", header)
            if to:
                calls.append(call_of(to[1], body) if found else BrokenCall(f"a call needs {_MESSAGE}", to[1]))
            elif found and re.search(r"<\|channel\|>\s*final", header):
                content.append(body)
            elif not found and "<|channel|>" not in header and header.strip() not in ("", "assistant"):
                content.append(header)
        return ParsedTurn("\n".join(part.strip() for part in content), calls)

    def render_answers(self, messages: Sequence[Message]) -> list[Piece]:
        """A message from each function to the assistant, then the assistant's next one is opened."""
        pieces: list[Piece] = []
        for message in messages:
            header = f"<|start|>functions.{message['name']} to=assistant<|channel|>commentary{_MESSAGE}"
            words = json.dumps(message["content"], ensure_ascii=False)
            pieces += [Piece(header), Piece(words, literal=True), Piece("<|end|>")]
        return [*pieces, Piece("<|start|>assistant")]
