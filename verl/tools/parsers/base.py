"""What a parser of tool calls gives, and helpers that several formats share.

The text comes from a model that is still learning: anything may be in it. A parser never raises; what is meant as a
call and is none becomes a :class:`BrokenCall`, which the model is told about.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from verl.data.chat import Message
from verl.utils.registry import Registry

_WORD = re.compile(r"\S")


@dataclass(frozen=True)
class Piece:
    """Text with the control tokens that are in it; with ``literal`` they are ordinary text."""

    text: str
    literal: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call that can be carried out."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BrokenCall:
    """Something that was meant as a call.

    Attributes:
        problem: what is wrong with it, as the model is told.
        name: the tool, as far as it can be told.
    """

    problem: str
    name: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the model.

    Attributes:
        content: its text outside of calls.
        calls: in the order of the text, those that are broken among them.
    """

    content: str
    calls: list[ToolCall | BrokenCall] = field(default_factory=list)


class ToolParser(ABC):
    """Finds tool calls in a turn's text, which has special tokens in it but not the one that ended the turn.

    Args:
        parameters: for each tool the JSON Schema of its parameters, for formats that do not show types.
    """

    #: what a call begins with, wherever it stands; empty where only the whole turn shows whether it has calls
    openings: ClassVar[tuple[str, ...]] = ()
    #: what calls are written with that may be special tokens of a tokenizer: text for the parser keeps them
    marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.parameters = dict(parameters or {})

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """The calls of a turn; never raises."""

    def plain_length(self, text: str) -> int:
        """How many characters at the beginning of an unfinished turn are certain to be no call, for streaming."""
        return length_before(text, self.openings) if self.openings else 0

    def render_answers(self, messages: Sequence[Message]) -> list[Piece] | None:
        """What follows the model's turn when tools have answered; None leaves it to the chat template.

        For formats whose template wants to know calls that it has not written itself.
        """
        return None

    def typed(self, tool: str, name: str, text: str) -> Any:
        """The value that ``text`` stands for: text where the schema asks for text, JSON where it can be read."""
        schema = (self.parameters.get(tool, {}).get("properties") or {}).get(name) or {}
        if "string" in _types(schema):
            return text
        try:
            return load_json(text)
        except ValueError:
            return {"True": True, "False": False, "None": None}.get(text.strip(), text)


class BracketedParser(ToolParser):
    """For formats with marks around each call, and maybe around all calls of a turn."""

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str]
    #: marks around all calls
    BEGIN: ClassVar[str | None] = None
    END: ClassVar[str | None] = None

    def parse(self, text: str) -> ParsedTurn:
        outside, bodies, unclosed = between(text, self.OPEN, self.CLOSE)
        calls = [self.call(body) for body in bodies]
        if unclosed is not None:
            calls.append(BrokenCall(f"{self.OPEN} without {self.CLOSE}"))
        elif self.BEGIN is not None and self.BEGIN in text and not calls:
            calls.append(BrokenCall(f"{self.BEGIN} without a call"))
        for mark in filter(None, (self.BEGIN, self.END)):
            outside = outside.replace(mark, "")
        return ParsedTurn(outside.strip(), calls)

    @abstractmethod
    def call(self, body: str) -> ToolCall | BrokenCall:
        """The call between the marks."""


P = TypeVar("P", bound=type)
PARSERS: Registry[Callable[..., ToolParser]] = Registry("tool-call format")


def register_parser(name: str) -> Callable[[P], P]:
    """Class decorator: make a parser known under a name, for ``rollout.multi_turn.format``."""
    return PARSERS.register(name)  # type: ignore[return-value]


def load_json(text: str) -> Any:
    """Read JSON; nesting too deep for the reader and numbers too long are a ``ValueError`` too."""
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def call_from_json(text: str) -> ToolCall | BrokenCall:
    """A call written as ``{"name": ..., "arguments": {...}}``; ``parameters`` is another word for arguments."""
    try:
        value = load_json(text)
    except ValueError as error:
        return BrokenCall(f"the call is not valid JSON ({error})")
    return call_from_value(value)


def call_from_value(value: Any) -> ToolCall | BrokenCall:
    """A call from its JSON value."""
    if not isinstance(value, dict):
        return BrokenCall(f"the call is {type(value).__name__}, expected an object with name and arguments")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BrokenCall("the call has no name")
    return call_of(name, value.get("arguments", value.get("parameters", {})))


def call_of(name: str, arguments: Any) -> ToolCall | BrokenCall:
    """A call of ``name``; arguments may be an object or its JSON text."""
    name = name.strip()
    if not name:
        return BrokenCall("the call has no name")
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return BrokenCall(f"the arguments are not valid JSON ({error})", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return BrokenCall(f"the arguments are {type(arguments).__name__}, expected an object", name)
    return ToolCall(name, arguments)


def length_before(text: str, markers: Sequence[str]) -> int:
    """Characters of ``text`` before the first of the markers, or before an end that could become one."""
    places = [place for marker in markers if (place := text.find(marker)) >= 0]
    if places:
        return min(places)
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return len(text) - size
    return len(text)


def between(text: str, opening: str, closing: str) -> tuple[str, list[str], str | None]:
    """Split text at pairs of tags.

    Returns:
        The text outside, the texts inside, and what stands behind an opening tag that is never closed (None: all are).
    """
    outside: list[str] = []
    inside: list[str] = []
    place = 0
    while (opened := text.find(opening, place)) >= 0:
        outside.append(text[place:opened])
        begin = opened + len(opening)
        closed = text.find(closing, begin)
        if closed < 0:
            return "".join(outside), inside, text[begin:]
        inside.append(text[begin:closed])
        place = closed + len(closing)
    outside.append(text[place:])
    return "".join(outside), inside, None


def skip_spaces(text: str, place: int) -> int:
    """The first place from ``place`` on that has no space."""
    found = _WORD.search(text, place)
    return len(text) if found is None else found.start()


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    for option in schema.get("anyOf") or ():
        if isinstance(option, Mapping):
            kinds |= _types(option)
    return kinds
