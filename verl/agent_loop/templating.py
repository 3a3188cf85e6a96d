"""From chat messages to the tokens that follow what the model has just written.

The chat template renders whole conversations. Rendering everything again after each turn and encoding it would replace
sampled tokens by others: decoding and encoding is not the identity, and templates change earlier turns. Here only what
comes *after* the model's turn is taken from the template: the conversation is rendered with a mark in place of the
turn, and the text behind the mark is encoded.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from verl.data.chat import Message, encode, render, texts_of, with_texts
from verl.errors import DataError, RolloutError
from verl.tools.parsers import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: letters alone: templates that trim, split or escape leave it as it is
_MARK = "qzvMARKvzq"
_TURN: Message = {"role": "assistant", "content": _MARK}

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Continuation:
    """What follows a turn of the model.

    Attributes:
        ids: tokens to append: up to the beginning of the model's next turn, less what the model wrote of its end.
        text: the template's text from the end of the model's turn on.
    """

    ids: list[int]
    text: str


class ChatTemplater:
    """Renders prompts and continuations in a tokenizer's chat template.

    Args:
        tokenizer: the policy's tokenizer.
        tools: schemas of the tools that the template shows.
        template_kwargs: further arguments of the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools)
        self.template_kwargs = dict(template_kwargs or {})
        # a one-letter token cannot be told from the letter
        self._control = tuple(token for token in tokenizer.get_added_vocab() if len(token) > 1)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation with an opened turn of the model."""
        return encode(self.tokenizer, self.text(messages))

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The template's text of a conversation."""
        return render(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
        )

    def turn_text(self, token_ids: Sequence[int], *, ended: bool) -> str:
        """The text of a turn of the model, special tokens shown; ``ended``: the last token only ended it."""
        ids = list(token_ids)[:-1] if ended else list(token_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def continuation(
        self, history: Sequence[Message], added: Sequence[Message], sampled: Sequence[int], *, ended: bool
    ) -> Continuation:
        """Tokens that follow a turn of the model.

        A template that knows no tools is given their answers as one message of the user.

        Args:
            history: the conversation before the turn.
            added: the messages after it, at least one.
            sampled: the turn's tokens.
            ended: whether the last of them ended the turn.

        Raises:
            RolloutError: the template does not show the turn, or changes the messages beyond recognition.
            DataError: the template rejects the conversation.
        """
        if not added:
            raise RolloutError("a continuation needs at least one message")
        try:
            text, literals = self._behind_turn(history, added)
        except DataError:
            if all(message["role"] != "tool" for message in added):
                raise
            history = _without_tools(history)
            text, literals = self._behind_turn(history, [as_user(added)])
        ids = self._encode(text, literals)
        if ended and ids and (ids[0] == sampled[-1] or self._closes_turn(history, ids[0])):
            ids = ids[1:]  # the model has ended its turn itself, be it with another token than the template's
        return Continuation(ids, text)

    def conversation(self, messages: Sequence[Message], *, ours: int) -> Continuation:
        """A conversation from its beginning, with an opened turn of the model, as the template writes it now.

        Args:
            messages: the conversation.
            ours: so many of the first messages, and all of the assistant's, may contain control tokens; in the words
                of the others they are ordinary text.

        Raises:
            RolloutError: the template changes messages with control tokens beyond recognition.
            DataError: the template rejects the conversation.
        """
        try:
            text = self.text(messages)
        except DataError:
            if all(message["role"] != "tool" for message in messages):
                raise
            messages = _without_tools(messages)
            text = self.text(messages)
        others = [n for n, message in enumerate(messages) if n >= ours and message["role"] != "assistant"]
        words = [text for n in others for text in texts_of(messages[n])]

        def with_marks(marks: Sequence[str]) -> str:
            left = iter(marks)
            return self.text([with_texts(m, left) if n in others else m for n, m in enumerate(messages)])

        return Continuation(self._encode(text, self._literals(words, text, with_marks)), text)

    def joined(self, pieces: Sequence[Piece]) -> Continuation:
        """A continuation that is made of pieces instead of by the template."""
        text, literals = "", []
        for piece in pieces:
            if piece.literal:
                literals.append((len(text), len(text) + len(piece.text)))
            text += piece.text
        return Continuation(self._encode(text, literals), text)

    def rewrites(self, messages: Sequence[Message], shown: str) -> bool:
        """Whether the template writes a conversation differently from what the model has been shown.

        White space does not count: templates trim it, and what was sampled stays as it is.

        Args:
            messages: the conversation, the model's turns as their text.
            shown: the prompt's text, and then by turns the model's and that of the continuations.
        """
        try:
            text = self.text(messages)
        except DataError:
            if all(message["role"] != "tool" for message in messages):
                raise
            text = self.text(_without_tools(messages))
        return _dense(text) != _dense(shown)

    def _behind_turn(self, history: Sequence[Message], added: Sequence[Message]) -> tuple[str, Spans]:
        """The text behind the model's turn, and the spans in it that hold the added messages' own words."""
        text = self._behind_mark([*history, _TURN, *added], add_generation_prompt=True)
        words = [text for message in added for text in texts_of(message)]

        def with_marks(marks: Sequence[str]) -> str:
            left = iter(marks)
            holes = [with_texts(message, left) for message in added]
            return self._behind_mark([*history, _TURN, *holes], add_generation_prompt=True)

        return text, self._literals(words, text, with_marks)

    def _literals(self, words: Sequence[str], text: str, with_marks: Callable[[Sequence[str]], str]) -> Spans:
        """Where the words of others stand in ``text``; nothing if none could be taken for a control token.

        Args:
            words: of each message.
            text: the template's text with them.
            with_marks: the template's text with marks in their places.
        """
        if not any(control in word for control in self._control for word in words):
            return []
        marks = [f"{_MARK}{number}x" for number in range(len(words))]
        pattern = with_marks(marks)
        for change in (_same, str.strip, _in_json, _in_ascii_json):
            spans = _filled(pattern, marks, [change(word) for word in words], text)
            if spans is not None:
                return spans
        raise RolloutError(
            "a message contains control tokens of the tokenizer, and the chat template changes messages in a way that "
            "does not tell where they stand in its text; such text cannot be shown to the model safely"
        )

    def _behind_mark(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        _, found, behind = text.partition(_MARK)
        if not found:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise RolloutError(
                f"the chat template does not show an assistant's turn in a conversation of {roles}, so the "
                "conversation cannot go on in tokens; use another chat template"
            )
        return behind

    def _closes_turn(self, history: Sequence[Message], token_id: int) -> bool:
        """Whether a token is how the template ends a turn of the model."""
        closing = encode(self.tokenizer, self._behind_mark([*history, _TURN], add_generation_prompt=False))
        return closing[:1] == [token_id]

    def _encode(self, text: str, literals: Spans) -> list[int]:
        """Encode text; within the spans of others' words, what looks like a control token is ordinary text."""
        cuts = sorted({place + 1 for start, end in literals for place in _places(text, start, end, self._control)})
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        return [token for piece in pieces for token in encode(self.tokenizer, piece)]


def as_user(messages: Sequence[Message]) -> Message:
    """One message of the user with the words, and images, of several others."""
    if all(isinstance(message.get("content"), str | None) for message in messages):
        return {"role": "user", "content": "\n".join(text for message in messages for text in texts_of(message))}
    parts: list[dict[str, str]] = []
    for message in messages:
        content = message.get("content")
        own = list(content) if isinstance(content, list | tuple) else [{"type": "text", "text": str(content or "")}]
        parts += [{"type": "text", "text": "\n"}, *own] if parts else own
    return {"role": "user", "content": parts}


def _without_tools(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the answers of tools as messages of the user."""
    out: list[Message] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            pending.append(message)
            continue
        if pending:
            out.append(as_user(pending))
            pending = []
        out.append(message)
    return [*out, as_user(pending)] if pending else out


def _dense(text: str) -> str:
    # bytes that are no text are shown as U+FFFD, how many depends on where decoding began
    return "".join(unicodedata.normalize("NFC", text).replace("\ufffd", "").split())


def _same(text: str) -> str:
    return text


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _filled(pattern: str, marks: Sequence[str], words: Sequence[str], text: str) -> Spans | None:
    """Where each word stands in ``text``, if filling the marks of ``pattern`` with the words gives it."""
    spans: Spans = []
    out, rest = "", pattern
    for mark, word in zip(marks, words, strict=True):
        before, found, rest = rest.partition(mark)
        if not found:
            return None
        out += before
        spans.append((len(out), len(out) + len(word)))
        out += word
    return spans if out + rest == text else None


def _places(text: str, start: int, end: int, control: Sequence[str]) -> set[int]:
    """Where control tokens begin that lie within ``text[start:end]``: cut behind these places, none is left whole."""
    places: set[int] = set()
    for token in control:
        place = text.find(token, start, end)
        while place >= 0:
            places.add(place)
            place = text.find(token, place + 1, end)
    return places
