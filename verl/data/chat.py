"""Chat messages: what counts as a conversation, and how the tokenizer's template renders it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def as_messages(value: Any, *, parts: bool = False) -> list[Message]:
    """Check a conversation and return it as plain dictionaries.

    Keys of messages that are ``None`` are dropped: a template would see ``tool_calls: None`` as present. What is nested
    deeper has lost its nulls where the file was read (:mod:`verl.data.values`). JSON text of ``tool_calls`` is read.

    Args:
        value: the conversation.
        parts: contents may be lists of parts, ``{"type": "text", "text": ...}`` and ``{"type": "image"}``.

    Raises:
        DataError: not a non-empty list of messages with a ``role`` and a ``content``; the caller adds the row.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"expected a non-empty list of chat messages, got {_short(value)}")
    messages: list[Message] = []
    for number, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise DataError(f"message {number} is {_short(item)}; expected a mapping with 'role' and 'content'")
        message = {key: entry for key, entry in item.items() if entry is not None}
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {number} has role {_short(message.get('role'))}; expected a string")
        if isinstance(message.get("tool_calls"), str):
            message["tool_calls"] = _tool_calls(message["tool_calls"], number)
        content = message.get("content")
        if content is None and "tool_calls" in message:
            content = message["content"] = ""
        if parts and isinstance(content, list | tuple | np.ndarray):
            message["content"] = [_part(item, number) for item in content]
        elif not isinstance(content, str):
            raise DataError(f"message {number} has content {_short(content)}; expected a string")
        messages.append(message)
    return messages


def _tool_calls(text: str, number: int) -> list[Any]:
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        calls = None
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(
            f"message {number} has tool_calls {_short(text)}; expected a list of calls, or JSON text of one"
        )
    return calls


def _part(value: Any, number: int) -> dict[str, str]:
    if isinstance(value, Mapping) and value.get("type") == "text" and isinstance(value.get("text"), str):
        return {"type": "text", "text": value["text"]}
    if isinstance(value, Mapping) and value.get("type") == "image" and value.get("image") is None:
        return {"type": "image"}
    raise DataError(
        f"message {number} has the part {_short(value)}; expected {{'type': 'text', 'text': ...}} or "
        "{'type': 'image'}, with the images themselves in their column"
    )


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts in a message: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return [part["text"] for part in content if part["type"] == "text"]
    return [str(content or "")]


def with_texts(message: Mapping[str, Any], texts: Iterator[str]) -> Message:
    """The message with the next texts in place of :func:`texts_of` it."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return {**message, "content": next(texts)}
    parts = [{**part, "text": next(texts)} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation in the tokenizer's chat template.

    Raises:
        DataError: the tokenizer has no template, or the template rejects the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template, so it cannot render chat messages; use an instruct model's "
            "tokenizer, add a chat_template to its tokenizer_config.json, or give prompts as plain strings"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **dict(template_kwargs or {}),
        )
    except Exception as error:  # templates are programs of others: anything may come out of them
        raise DataError(f"the chat template rejects the conversation: {type(error).__name__}: {error}") from error
    return str(text)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text that a chat template rendered, or of a part of a text: it has its special tokens already."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text that no chat template rendered, framed as the tokenizer does it (a token at its beginning)."""
    return [int(token) for token in tokenizer(text)["input_ids"]]


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
