"""Values of rows as plain Python objects, equal for every file format, and their digest.

A file format shapes what it stores. Parquet gives all mappings of a column the keys of all of them and fills the gaps
with nulls; maps are lists of pairs; numbers of a column with a fraction are all floats. Three rules undo that:

- A key of a nested mapping whose value is null is absent. This holds in every format, because a filled-in null and a
  written one look the same. Nulls in lists stay, and so do nulls inside JSON text, which nothing fills in.
- An Arrow map is a mapping.
- The digest of a row depends neither on the order of keys nor on the form of a whole number (``5.0`` is ``5``).

What a format has lost stays lost: Parquet has one order of the keys of a column's mappings, and one type of its
numbers. Values whose text depends on these (arguments of tool calls, schemas of tools) are safest as JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

Convert = Callable[[Any], Any]

#: floats above are not compared with integers: not every integer has a float of its own there
_EXACT = 2**53


def without_nulls(value: Any) -> Any:
    """A copy whose nested mappings have no key with a null; arrays are lists."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    if isinstance(value, np.ndarray):
        return without_nulls(value.tolist())
    return value


def row_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row by the rules of this module; a column that is null stays, as ``None``."""
    return {column: without_nulls(value) for column, value in row.items()}


def arrow_converter(kind: pa.DataType) -> Convert | None:
    """What turns the Python value of an Arrow type into a plain one; None where it is plain already."""
    if isinstance(kind, pa.BaseExtensionType):
        return arrow_converter(kind.storage_type)
    if pa.types.is_map(kind):
        item = arrow_converter(kind.item_type)
        return lambda value: None if value is None else _pairs(value, item)
    if pa.types.is_struct(kind):
        fields = {kind.field(i).name: arrow_converter(kind.field(i).type) for i in range(kind.num_fields)}
        return lambda value: None if value is None else _struct(value, fields)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = arrow_converter(kind.value_type)
        if inner is None:
            return None
        return lambda value: None if value is None else [inner(item) for item in value]
    if pa.types.is_dictionary(kind):
        return arrow_converter(kind.value_type)
    return None


def _struct(value: Mapping[str, Any], fields: Mapping[str, Convert | None]) -> dict[str, Any]:
    out = {}
    for key, item in value.items():
        if item is not None:
            convert = fields[key]
            out[key] = item if convert is None else convert(item)
    return out


def _pairs(value: Any, convert: Convert | None) -> dict[Any, Any]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return {key: item if convert is None else convert(item) for key, item in pairs if item is not None}


def digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of the values of rows, in order, as hexadecimal digits.

    Rows with equal values have equal digests, whatever file and format they came from. Bytes count by their content,
    paths (of images, for example) by their text.
    """
    state = hashlib.sha256()
    for row in rows:
        # escapes, so that text that is no valid Unicode has bytes too
        state.update(_ENCODER.encode(_canonical(row)).encode("ascii"))
        state.update(b"\n")
    return state.hexdigest()


def _canonical(value: Any) -> Any:
    """The value with one form for what is equal."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        return {
            key if type(key) is str else str(key): _canonical(item) for key, item in value.items() if item is not None
        }
    if kind is list:
        return [_canonical(item) for item in value]
    if kind is float:
        return int(value) if value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, Mapping):
        return _canonical(dict(value))
    if isinstance(value, tuple):
        return _canonical(list(value))
    if isinstance(value, np.ndarray | np.generic):
        return _canonical(value.tolist())
    return value


def _as_text(value: Any) -> str:
    """What JSON has no form for: bytes by their digest, and everything else (dates, decimals) by its text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"sha256:{hashlib.sha256(value).hexdigest()}"
    return str(value)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_as_text)
