"""Files of tensors, arrays and plain Python values, which can be read without running anything from them.

``torch.load(weights_only=True)`` reads tensors, numbers, text and containers of them. :func:`encode` turns the other
things that a batch has into these, so that :func:`decode` gives back what was written, types included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from verl.errors import DataError
from verl.utils.fs import atomic_open
from verl.utils.plain_pickle import describe_damage

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
#: what follows the tag in an encoded value is a list of encoded values
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_TAGS = {kind: tag for tag, kind in _CONTAINERS.items()}
_ZIP = b"PK"  # how torch's files begin


def save(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Write encoded values; the file appears only when complete.

    Args:
        path: of the file.
        kind: what it is, which :func:`load` asks for.
        content: by name, each from :func:`encode`.
    """
    with atomic_open(path, "wb") as file:
        torch.save({"kind": kind, "content": content}, file)


def load(path: Path, kind: str) -> dict[str, Any]:
    """Read what :func:`save` wrote; the values are for :func:`decode`. Tensors arrive on the CPU.

    Raises:
        DataError: the file is something else, or damaged, or holds anything that is not plain.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise whatever the bytes lead them to
        raise DataError(
            f"{path} is damaged, or holds more than tensors and plain values: {describe_damage(error)}"
        ) from error
    found, content = (stored.get("kind"), stored.get("content")) if isinstance(stored, dict) else (None, None)
    if found != kind or not isinstance(content, dict):
        raise DataError(f"{path} holds {found or f'a {type(stored).__name__}'}, expected a {kind}")
    return content


def is_plain_file(path: Path) -> bool:
    """Whether a file begins like one that :func:`save` wrote; says nothing of what it holds."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def encode(value: Any) -> Any:
    """The value in tensors, atoms and lists that begin with a tag.

    Takes numbers, text, bytes, ``None``; lists, tuples, sets and dicts; tensors, tensor dicts, arrays and scalars of
    NumPy. What occurs twice in it is stored once and comes back as one object.

    Raises:
        TypeError: the name of a type that has no place in such a file; or of one that contains itself.
    """
    return _encode(value, {})


def decode(stored: Any) -> Any:
    """Inverse of :func:`encode`.

    Raises:
        DataError: this is nothing that :func:`encode` made.
    """
    try:
        return _decode(stored, {})
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise DataError(f"a stored value is damaged: {error}") from error


def _encode(value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:
        done = memo[id(value)][1]
        if done is None:
            raise TypeError(f"{kind.__name__} that contains itself")
        return done
    memo[id(value)] = (value, None)  # keeps it alive: the id of a freed temporary could be given out again
    done = _encode_new(value, kind, memo)
    memo[id(value)] = (value, done)
    return done


def _encode_new(value: Any, kind: type, memo: dict[int, tuple[Any, Any]]) -> Any:
    if kind in _TAGS:
        return [_TAGS[kind], [_encode(item, memo) for item in value]]
    if kind is dict:
        return ["dict", [[_encode(key, memo), _encode(item, memo)] for key, item in value.items()]]
    if kind is Tensor or kind is torch.nn.Parameter:
        return _alone(value)
    if kind is np.ndarray and value.dtype == object:
        return ["objects", list(value.shape), [_encode(item, memo) for item in value.reshape(-1)]]
    if isinstance(value, np.generic) or kind is np.ndarray:
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise TypeError(f"{kind.__name__} of {value.dtype}")
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        # a copy, because an array may be read-only and a tensor never is
        return ["array" if kind is np.ndarray else "scalar", value.dtype.str, list(value.shape), torch.tensor(content)]
    if isinstance(value, TensorDictBase):
        return ["tensors", list(value.batch_size), [[name, _encode(item, memo)] for name, item in value.items()]]
    raise TypeError(kind.__name__)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor on the host, without the rest of the storage that it was cut from, which torch would write too."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        raise TypeError(f"tensor that is not dense ({tensor.layout}, {tensor.dtype}, {tensor.device.type})")
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


def _decode(stored: Any, memo: dict[int, Any]) -> Any:
    if type(stored) in _ATOMS or isinstance(stored, Tensor):
        return stored
    if id(stored) not in memo:
        memo[id(stored)] = _decode_new(stored, memo)
    return memo[id(stored)]


def _decode_new(stored: Any, memo: dict[int, Any]) -> Any:
    if type(stored) is not list:
        raise TypeError(f"a {type(stored).__name__} where a value is expected")
    tag, *rest = stored
    if tag in _CONTAINERS:
        (items,) = rest
        return _CONTAINERS[tag](_decode(item, memo) for item in items)
    if tag == "dict":
        (pairs,) = rest
        return {_decode(key, memo): _decode(item, memo) for key, item in pairs}
    if tag == "objects":
        shape, items = rest
        objects = np.empty(len(items), dtype=object)
        for place, item in enumerate(items):
            objects[place] = _decode(item, memo)
        return objects.reshape(shape)
    if tag in ("array", "scalar"):
        name, shape, content = rest
        dtype = np.dtype(name)
        if dtype.hasobject:
            raise TypeError("objects in an array of numbers")
        array = content.numpy().view(dtype).reshape(shape) if content.numel() else np.zeros(shape, dtype)
        return array if tag == "array" else array[()]
    if tag == "tensors":
        size, pairs = rest
        return TensorDict({name: _decode(item, memo) for name, item in pairs}, batch_size=size)
    raise ValueError(f"an unknown kind of value, {tag!r}")
