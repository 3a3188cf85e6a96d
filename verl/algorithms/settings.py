"""Reading a setting from whatever a caller has for a configuration: a dataclass, a mapping, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MISSING = object()


def setting(config: Any, name: str, default: Any) -> Any:
    """Return ``config.name`` or ``config[name]``; ``default`` when it is absent, ``None``, or there is no config."""
    if isinstance(config, Mapping):
        value = config.get(name, _MISSING)
    else:
        value = getattr(config, name, _MISSING)
    return default if value is _MISSING or value is None else value


def has_setting(config: Any, name: str) -> bool:
    """Whether ``config`` has the attribute or key ``name``, whatever its value."""
    return name in config if isinstance(config, Mapping) else hasattr(config, name)
