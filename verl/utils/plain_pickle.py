"""Pickles that may hold data and nothing else: reading one calls only what the reader has named."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection
from typing import IO, Any

import torch


class PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function that is not named; torch's dtypes are always known.

    Args:
        file: to read.
        known: what may be referred to, as ``"module.name"``.
    """

    def __init__(self, file: IO[bytes], known: Collection[str]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name.

        Raises:
            UnpicklingError: it is not one of those that were named.
        """
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if f"{module}.{name}" not in self._known:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which has no place in such data")
        return super().find_class(module, name)


def describe_damage(error: BaseException) -> str:
    """What is wrong with a file that was read as data, in one sentence and without the advice to read it otherwise."""
    text = str(error)
    if named := re.search(r"(?:GLOBAL|global:?) (?:GLOBAL )?([\w.]+\.[\w.]+)", text):
        return f"it refers to {named[1]}, which has no place in such a file"
    if isinstance(error, OSError):
        return text
    if isinstance(error, EOFError) or not text:
        return "it is empty or ends too early"
    if isinstance(error, pickle.UnpicklingError | RuntimeError) and ("weights_only" in text or "Reader" in text):
        return "it is damaged, or no file that torch.save wrote"
    return text.split("\n")[0]


def loads(data: bytes, known: Collection[str]) -> Any:
    """Inverse of ``pickle.dumps`` for data that refers to nothing but ``known``.

    Raises:
        UnpicklingError: it refers to something else, or is no pickle.
    """
    return PlainUnpickler(io.BytesIO(data), known).load()
