"""From a value of the command line or YAML to the type of its key."""

from __future__ import annotations

import typing
from typing import Any

from verl.config.schema import Key

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def coerce(value: Any, key: Key) -> Any:
    """Return ``value`` as the type of ``key``.

    A single string becomes a list where the key is a list of strings, and other spellings of a value
    (``bf16``) become ours.

    Raises:
        TypeError: the value has another type; the message says which one is expected.
    """
    if value is None:
        if key.optional:
            return None
        if key.kind == "free":
            return {}
        if typing.get_origin(key.type) is list:
            return []
        raise TypeError(f"expected {_words(key.type)}, got null")
    if typing.get_origin(key.type) is list:
        (item,) = typing.get_args(key.type)
        if isinstance(value, str) and item is str:
            value = [value]
        if not isinstance(value, list):
            raise TypeError(f"expected {_words(key.type)}")
        return [_scalar(v, item, key) for v in value]
    return _scalar(value, key.type, key)


def _scalar(value: Any, kind: Any, key: Key) -> Any:
    converted = _convert(value, kind)
    spellings = key.metadata.get("spellings")
    return spellings.get(converted.lower(), converted) if spellings and isinstance(converted, str) else converted


def _convert(value: Any, kind: Any) -> Any:
    if kind is Any:
        return value
    if typing.get_origin(kind) is dict:
        if isinstance(value, dict):
            return value
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)  # 1e3 is a float to the parser
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                pass
    elif kind is float:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif kind is str and not isinstance(value, list | dict):
        return str(value)
    raise TypeError(f"expected {_words(kind)}")


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return f"a list of {_plural(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(kind, str(kind))


def _plural(kind: Any) -> str:
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(kind, str(kind))
