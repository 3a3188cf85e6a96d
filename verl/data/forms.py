"""The forms that values of columns have, and how each is read.

Data sets hold the same thing in several forms: a mapping may be a struct, an Arrow map, or JSON text. Each function
takes what a column holds and returns it in the one form that the programs work with.

Raises:
    DataError: the value has none of the accepted forms; whoever knows the row and the column adds them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from verl.data.chat import Message, as_messages
from verl.errors import DataError

#: entries of ``extra_info`` that are mappings themselves
NESTED = ("tools_kwargs", "interaction_kwargs")

_NAMES = (str, int, np.integer)
_SURROGATE = re.compile("[\ud800-\udfff]")


def short(value: Any) -> str:
    """A value and its type for a message, on one line and not too long."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def invalid_text(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where text inside a value is no valid Unicode, and that text."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            place = f"{path}[{key!r}]"
            yield from invalid_text(key, f"{place} (the key)")
            yield from invalid_text(item, place)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from invalid_text(item, f"{path}[{number}]")


def from_json(text: str, wanted: str) -> Any:
    """The value of JSON text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"is {short(text)}, which is not {wanted} as JSON text: {why}") from None
    for place, part in invalid_text(value):
        raise DataError(f"is JSON text with invalid Unicode (a lone surrogate) at {place or 'its top'}: {short(part)}")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """A mapping; JSON text of one and a list of pairs, which is how an Arrow map is read, are mappings too."""
    if isinstance(value, str):
        value = from_json(value, "a mapping")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return dict(value)
    raise DataError(f"is {short(value)}; expected a mapping, or JSON text of one")


def optional_mapping(value: Any) -> dict[str, Any] | None:
    """A mapping, or None where there is none; ``null`` as JSON text is none."""
    return None if value is None or (isinstance(value, str) and value.strip() == "null") else mapping(value)


def extra_info(value: Any) -> dict[str, Any]:
    """The ``extra_info`` of a row, with the mappings inside it read; empty where there is none."""
    extra = optional_mapping(value) or {}
    for name in NESTED:
        if extra.get(name) is not None:
            try:
                extra[name] = mapping(extra[name])
            except DataError as error:
                raise DataError(f"has a wrong {name!r}: {error}") from None
    tools = extra.get("tools_kwargs")
    if tools:
        extra["tools_kwargs"] = {name: _tool_arguments(name, arguments) for name, arguments in tools.items()}
    return extra


def _tool_arguments(name: str, value: Any) -> Any:
    try:
        return value if value is None else mapping(value)
    except DataError as error:
        raise DataError(f"has a wrong entry {name!r} in 'tools_kwargs': {error}") from None


def source(value: Any) -> Any:
    """What names the data source: text, or a number; None is for the reward function to judge."""
    if value is not None and type(value) is not str and (type(value) is bool or not isinstance(value, _NAMES)):
        raise DataError(f"is {short(value)}; expected the name of a data source, which selects the scorer")
    return value


def messages(value: Any, *, parts: bool = False) -> list[Message]:
    """Chat messages, or JSON text of them; see :func:`~verl.data.chat.as_messages`."""
    if isinstance(value, str):
        value = from_json(value, "a list of chat messages")
    return as_messages(value, parts=parts)


def prompt(value: Any, *, parts: bool = False) -> str | list[Message]:
    """Text, or chat messages; JSON text of a list of messages is messages."""
    if not isinstance(value, str):
        return as_messages(value, parts=parts)
    return messages(value, parts=parts) if _is_messages(value) else value


def _is_messages(text: str) -> bool:
    """Whether text is JSON of chat messages; other text that begins with a bracket is a prompt as it stands."""
    if not text.lstrip().startswith("["):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(value) and all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)


def tools(value: Any) -> list[dict[str, Any]] | None:
    """Schemas of tools: a list of mappings, each or all of them also as JSON text; None where there are none."""
    if isinstance(value, str):
        value = from_json(value, "a list of tool schemas") if value.strip() else None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise DataError(f"is {short(value)}; expected a list of tool schemas, or JSON text of one")
    out = []
    for number, item in enumerate(value):
        try:
            out.append(mapping(item))
        except DataError as error:
            raise DataError(f"has a wrong schema {number}: {error}") from None
    return out or None


def text(value: Any) -> str:
    """Text."""
    if not isinstance(value, str):
        raise DataError(f"is {short(value)}; expected text")
    return value


def texts(value: Any) -> list[str]:
    """A text, or several."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not several or not all(isinstance(item, str) for item in several):
        raise DataError(f"is {short(value)}; expected a text, or a list of at least one text")
    return list(several)


def optional(value: Any, *, form: Callable[[Any], Any]) -> Any:
    """A value in its form, or None where there is none."""
    return None if value is None else form(value)


def number(value: Any) -> float:
    """A finite number."""
    plain = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not plain or not math.isfinite(float(value)):
        raise DataError(f"is {value!r}; expected a finite number")
    return float(value)


def inside(value: Any, *, keys: Sequence[str], form: Callable[[Any], Any]) -> Any:
    """The value under keys inside a mapping, one inside the other, in its own form."""
    for key in keys:
        value = mapping(value)
        if key not in value:
            raise DataError(f"has no {key!r} inside (following {list(keys)}); it has {', '.join(map(repr, value))}")
        value = value[key]
    return form(value)
