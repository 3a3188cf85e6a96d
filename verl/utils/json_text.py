"""One writer of JSON for everything that the library writes down: metrics, samples, traces, reports, markers.

The rules, for values of any type:

- Scalars and arrays of NumPy and torch are numbers and lists; neither package is imported for it.
- JSON has no NaN: non-finite numbers are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
- Dataclasses and mappings are objects, sequences lists, sets lists in sorted order, enumerations their value, dates
  ISO 8601 text, paths text, bytes an address ``data:application/octet-stream;base64,...``.
- Text is valid UTF-8. Halves of a character (surrogates) are joined, or replaced by U+FFFD where the other half lacks.
- A record is one line by every definition: U+0085, U+2028 and U+2029 are escaped.
- Keys are text. Keys that have the same text are told apart: ``a``, ``a (2)``.

A value that has no form in JSON becomes a short text, and so does what is nested too deeply or contains itself. Each
such loss is reported, by default in the log, once for each kind.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import json
import logging
import math
import numbers
import os
import uuid
from collections.abc import Callable, Mapping, MappingView, Sequence, Set
from pathlib import Path
from typing import Any

from verl.utils.fs import atomic_write_text

__all__ = ["distinct_name", "dumps_json", "to_plain", "valid_text", "write_json"]

logger = logging.getLogger(__name__)

#: Called with one sentence for each value that was replaced.
Lost = Callable[[str], None]

_MAX_DEPTH = 100
_MAX_DIGITS = 4300  # of an int that Python turns into text without being asked to, see sys.set_int_max_str_digits
_MAX_SHOWN = 200
_MAX_REPORTED = 1000  # kinds of losses that the default remembers
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

_reported: set[str] = set()


def dumps_json(
    value: Any,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    ascii_only: bool = False,
    lost: Lost | None = None,
) -> str:
    """The JSON text of a value of any type, see the rules of this module. It never raises for what the value is.

    Args:
        value: to write.
        indent: spaces for each level; None writes one line.
        sort_keys: order keys by their text.
        ascii_only: escape every character beyond ASCII.
        lost: is called for each value that was replaced, by default a warning in the log, once for each kind.
    """
    text = json.dumps(
        to_plain(value, lost), allow_nan=False, ensure_ascii=ascii_only, indent=indent, sort_keys=sort_keys
    )
    return text if text.isascii() else text.translate(_LINE_ENDS)


def write_json(path: str | Path, value: Any, *, indent: int | None = 1, sort_keys: bool = False) -> None:
    """Write a value as a JSON file that appears whole or not at all."""
    atomic_write_text(path, dumps_json(value, indent=indent, sort_keys=sort_keys) + "\n")


def to_plain(value: Any, lost: Lost | None = None) -> Any:
    """The value as the plain objects that :mod:`json` writes, after the rules of this module."""
    return _Writer(lost or _warn_once).plain(value, ())


def valid_text(text: str) -> str:
    """The text without surrogates, which UTF-8 cannot hold: pairs are joined, a lone one becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str(text)


def distinct_name(name: str, taken: Mapping[str, Any] | Set[str]) -> str:
    """``name``, or ``name (2)`` and so on where it is taken."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name} ({number})"
    return found


def _warn_once(sentence: str) -> None:
    kind = sentence.partition(": ")[2] or sentence  # without the place, which differs from row to row
    if kind not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(kind)
        logger.warning("%s; further ones of this kind are not reported", sentence)


class _Writer:
    """Turns one value into plain objects.

    Args:
        lost: is called for each value that was replaced.
    """

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._open: set[int] = set()  # containers around the value at hand

    def plain(self, value: Any, path: tuple[str, ...]) -> Any:
        """The value in plain objects; ``path`` is its place in the record."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, enum.Enum):
            return self.plain(value.value, path)
        if isinstance(value, str):
            return valid_text(value)
        if isinstance(value, int):
            return self._int(int(value), path)
        if isinstance(value, float):
            return _float(float(value))
        if isinstance(value, bytes | bytearray | memoryview):
            return f"data:application/octet-stream;base64,{base64.b64encode(value).decode('ascii')}"
        try:
            return self._other(value, path)
        except Exception as error:  # noqa: BLE001 - an object's own methods may raise anything
            return self._replaced(value, path, f"which raises {type(error).__name__} when it is read")

    def _other(self, value: Any, path: tuple[str, ...]) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return self._inside(
                value, path, lambda: self._object([(name, getattr(value, name)) for name in names], path)
            )
        if isinstance(value, Mapping):
            return self._inside(value, path, lambda: self._object(list(value.items()), path))
        if isinstance(value, MappingView):
            return self._inside(value, path, lambda: self._list(value, path))
        if isinstance(value, Set):
            return self._inside(value, path, lambda: _in_order(self._list(value, path)))
        tolist = getattr(value, "tolist", None)
        if tolist is not None and not isinstance(value, type):
            listed = tolist()
            if type(listed) is not type(value):
                return self.plain(listed, path)
        elif isinstance(value, Sequence):
            return self._inside(value, path, lambda: self._list(value, path))
        if isinstance(value, numbers.Real | decimal.Decimal):
            return _float(float(value))
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, os.PathLike):
            return valid_text(os.fsdecode(value))
        if isinstance(value, uuid.UUID):
            return str(value)
        return self._replaced(value, path, "which has no form in JSON")

    def _inside(self, value: Any, path: tuple[str, ...], make: Callable[[], Any]) -> Any:
        if id(value) in self._open:
            return self._replaced(value, path, "which contains itself")
        if len(path) >= _MAX_DEPTH:
            return self._replaced(value, path, f"which lies more than {_MAX_DEPTH} levels deep")
        self._open.add(id(value))
        try:
            return make()
        finally:
            self._open.discard(id(value))

    def _list(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.plain(item, (*path, str(number))) for number, item in enumerate(values)]

    def _object(self, items: list[tuple[Any, Any]], path: tuple[str, ...]) -> dict[str, Any]:
        done: dict[str, Any] = {}
        for key, item in items:
            name = self._key(key, path)
            if name in done:
                told, name = name, distinct_name(name, done)
                self._lost(f"{_place(path)}: two keys have the text {told!r}, the second one is written as {name!r}")
            done[name] = self.plain(item, (*path, name))
        return done

    def _key(self, key: Any, path: tuple[str, ...]) -> str:
        """Texts and numbers are themselves; other keys are shown as a list or an object would be."""
        if isinstance(key, str) and not isinstance(key, enum.Enum):
            return valid_text(key)
        plain = self.plain(key, path)
        if isinstance(plain, str):
            return plain
        return str(plain) if plain is None or isinstance(plain, bool | int | float) else json.dumps(plain)

    def _int(self, value: int, path: tuple[str, ...]) -> int | str:
        if value.bit_length() > _MAX_DIGITS * 3:  # 3 bits are less than a digit: surely below the limit
            return self._replaced(value, path, f"of {value.bit_length()} bits")
        return value

    def _replaced(self, value: Any, path: tuple[str, ...], why: str) -> str:
        kind = type(value).__name__
        self._lost(f"{_place(path)}: a value of type {kind}, {why}, is written as a short text")
        return _shown(value, kind)


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _in_order(values: list[Any]) -> list[Any]:
    """A set's elements in an order that does not depend on the process: numbers, then the others by their text."""

    def key(value: Any) -> tuple[bool, float, str]:
        return (False, value, "") if isinstance(value, int | float) else (True, 0.0, json.dumps(value))

    return sorted(values, key=key)


def _place(path: tuple[str, ...]) -> str:
    shown = ".".join(path[:6]) + ("..." if len(path) > 6 else "")
    return valid_text(shown) or "record"


def _shown(value: Any, kind: str) -> str:
    if isinstance(value, int | Mapping | Sequence | Set):  # long, or endless
        return f"<{kind}>"
    try:
        text = valid_text(str(value))
    except Exception:  # noqa: BLE001 - an object's own method may raise anything
        return f"<{kind}>"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
