"""Leaf helpers. Nothing here knows about algorithms, models or workers."""

from __future__ import annotations

from typing import Any

_TOKENIZER_NAMES = ("hf_processor", "hf_tokenizer")  # scripts import them from here; see verl.compat


def __getattr__(name: str) -> Any:
    if name in _TOKENIZER_NAMES:
        from verl.utils import tokenizer

        return getattr(tokenizer, name)
    raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
