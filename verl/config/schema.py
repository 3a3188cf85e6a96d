"""The keys of a configuration, read from its dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.base import Config


@dataclass(frozen=True)
class Key:
    """One key or section.

    Attributes:
        path: dotted path.
        type: its type; ``X | None`` is given as ``X`` with ``optional``.
        optional: whether null is a value.
        default: value without configuration; an interpolation for keys that inherit. ``None`` for sections.
        kind: ``"section"``, ``"leaf"`` or ``"free"`` (a dict with any keys).
        metadata: what :func:`verl.config.base.opt` recorded.
        affects: one of :data:`verl.config.base.AFFECTS`.
    """

    path: str
    type: Any
    optional: bool
    default: Any
    kind: str
    metadata: Mapping[str, Any]
    affects: str = "numbers"

    @property
    def type_name(self) -> str:
        """The type as users would write it."""
        name = self.type.__name__ if isinstance(self.type, type) and not typing.get_args(self.type) else str(self.type)
        return name.replace("typing.", "")


_KEYS: dict[type[Config], dict[str, Key]] = {}


def keys_of(schema: type[Config]) -> dict[str, Key]:
    """Return every section and key of ``schema`` by dotted path, in the order of declaration."""
    if schema not in _KEYS:
        _KEYS[schema] = {key.path: key for key in _walk(schema(), "", {})}
    return _KEYS[schema]


def _walk(config: Config, prefix: str, inherited: Mapping[str, str], section: str | None = None) -> Iterator[Key]:
    """Yield the keys of ``config``.

    Args:
        config: a section.
        prefix: its dotted path, with a dot at the end.
        inherited: name of a key (or path below here) -> where it inherits from.
        section: what keys of the section affect that do not declare it themselves.
    """
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        path, value = prefix + f.name, getattr(config, f.name)
        affects = f.metadata.get("affects") or section
        if isinstance(value, Config):
            yield Key(path, type(value), False, None, "section", f.metadata, affects or "numbers")
            yield from _walk(value, path + ".", _inheritance(value, f, inherited), affects)
            continue
        source = inherited.get(f.name) or f.metadata.get("inherits")
        kind, optional = hints[f.name], False
        if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            options = [a for a in typing.get_args(kind) if a is not type(None)]
            optional, kind = len(options) < len(typing.get_args(kind)), options[0]
        free = typing.get_origin(kind) is dict
        default = f"${{{source}}}" if source else value
        yield Key(path, kind, optional, default, "free" if free else "leaf", f.metadata, affects or "numbers")


def _inheritance(value: Config, f: dataclasses.Field[Any], inherited: Mapping[str, str]) -> dict[str, str]:
    inner = {n[len(f.name) + 1 :]: p for n, p in inherited.items() if n.startswith(f.name + ".")}
    if source := f.metadata.get("inherits"):
        only = f.metadata.get("inherit_only")
        for name in _leaf_names(value):
            if only is None or name in only:
                inner.setdefault(name, f"{source}.{name}")
    return inner


def _leaf_names(config: Config, prefix: str = "") -> Iterator[str]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Config):
            yield from _leaf_names(value, f"{prefix}{f.name}.")
        elif not isinstance(value, dict):  # a dict with any keys is merged, so it has nothing to inherit
            yield prefix + f.name


def nearest(path: str, known: Mapping[str, Key]) -> list[str]:
    """Return up to three known keys that ``path`` probably means, best first."""
    leaves = [p for p, key in known.items() if key.kind != "section"]
    above = [p for p in leaves if path.startswith(p + ".")]
    if above:
        return above
    suffix = [p for p in leaves if p.endswith("." + path)]
    if suffix:  # a key deep inside a section is rarely meant by its last part alone
        return sorted(suffix, key=lambda p: p.count("."))[:3]
    parts = path.split(".")

    def score(candidate: str) -> float:
        """Compare part by part from the end, so that one typo in a long path weighs as much as in a short one."""
        other = candidate.split(".")
        pairs = zip(reversed(parts), reversed(other), strict=False)
        ratios = [difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs]
        whole = difflib.SequenceMatcher(None, path, candidate).ratio()
        return ratios[0] * 0.5 + whole * 0.5 if ratios else 0.0

    ranked = sorted(((score(p), p) for p in leaves), key=lambda item: -item[0])
    good = [(s, p) for s, p in ranked if s >= 0.8]
    return [p for s, p in good if s >= good[0][0] - 0.05][:3] if good else []
