"""The base of every configuration section: fields with help text, checks, and read-only objects after start-up."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from verl.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", bound="Config")

#: What the value of a key affects, and with it what a change means when a run resumes from a checkpoint.
AFFECTS: Mapping[str, str] = {
    "numbers": "what is trained; a run does not resume under another value",
    "rows": "what is trained: files of rows, compared by their rows; the files may be elsewhere",
    "file": "what is trained: a file of code or settings, compared by its content; it may be elsewhere",
    "model": "what is trained: a model directory, compared by its files; it may be elsewhere",
    "length": "how long the run is",
    "place": "where output goes, what is kept of it, and where a run resumes",
    "report": "what is measured and reported",
    "limit": "time limits, and what a failure means",
    "speed": "how the work is divided; results are the same up to rounding",
}
#: a change of these is refused when a run resumes
DECISIVE = frozenset({"numbers", "rows", "file", "model"})


def opt(
    default: T,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    inherits: str | None = None,
    spellings: Mapping[str, str] | None = None,
    affects: str | None = None,
) -> T:
    """Declare one key of a section.

    Args:
        default: value when the key is not given. Lists and dicts are copied for every object.
        help: one sentence for the reference page, with the unit where there is one.
        choices: the allowed strings.
        ge, gt, le: bounds of a number (``None`` values are not checked).
        inherits: dotted path of the key whose value is the default when a whole configuration is loaded. A section made
            directly in Python uses ``default``.
        spellings: other spellings of a value, mapped to ours while loading, for example ``{"bf16": "bfloat16"}``.
        affects: one of :data:`AFFECTS`; not given = that of the section, or else ``numbers``.
    """
    _check_affects(affects)
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "ge": ge,
        "gt": gt,
        "le": le,
        "inherits": inherits,
        "spellings": dict(spellings or {}),
        "affects": affects,
    }
    if isinstance(default, list | dict):
        factory = cast(Callable[[], Any], default.copy)
        return cast(T, dataclasses.field(default_factory=factory, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def section(
    cls: type[C],
    help: str,
    *,
    inherits: str | None = None,
    inherit_only: Sequence[str] | None = None,
    affects: str | None = None,
    **changes: Any,
) -> C:
    """Declare a nested section.

    Args:
        cls: the dataclass of the section.
        help: one sentence for the reference page.
        inherits: dotted path of a section; each key defaults to the key of the same name there.
        inherit_only: names of the keys that inherit; the others keep their own default. ``None`` means all.
        affects: one of :data:`AFFECTS`, for the keys of the section that do not declare it themselves.
        **changes: defaults that differ from those of ``cls``, for example ``lr=1e-5``.
    """
    _check_affects(affects)
    metadata = {
        "help": help,
        "inherits": inherits,
        "inherit_only": tuple(inherit_only) if inherit_only is not None else None,
        "affects": affects,
    }
    return dataclasses.field(default_factory=lambda: cls(**changes), metadata=metadata)


def _check_affects(affects: str | None) -> None:
    if affects is not None and affects not in AFFECTS:
        raise ValueError(f"affects={affects!r}: expected one of {', '.join(AFFECTS)}")


@dataclass
class Config:
    """Base of all sections. Mutable while it is built; after :func:`seal` an assignment raises ``ConfigError``."""

    def problems(self) -> Iterator[str]:
        """Yield one sentence per wrong combination of this section's values, starting with the key.

        Choices and bounds of single keys are declared in :func:`opt` and checked for all sections by
        :func:`find_problems`.
        """
        return iter(())

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if this section has no such key (what plug-ins expect)."""
        return getattr(self, name, default)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_sealed", False):
            raise ConfigError(
                f"{type(self).__name__}.{name} is read-only after start-up; "
                "make a changed copy with dataclasses.replace(...)"
            )
        object.__setattr__(self, name, value)


class MicroBatch(NamedTuple):
    """How a role splits its batch: by samples or by tokens per rank; both ``None`` = the whole batch at once."""

    size: int | None
    max_tokens: int | None


def seal(config: C) -> C:
    """Make ``config`` and its sections read-only and return it."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Config):
            seal(value)
    object.__setattr__(config, "_sealed", True)
    return config


def suggestion(value: object, options: Sequence[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest option, or an empty string."""
    near = difflib.get_close_matches(str(value).lower(), [o.lower() for o in options], 1, 0.6)
    match = [o for o in options if near and o.lower() == near[0]]
    return f"; did you mean {match[0]!r}?" if match else ""


def find_problems(config: Config, prefix: str = "") -> Iterator[str]:
    """Yield every problem of ``config`` and its sections, each starting with the dotted path and the value."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Config):
            yield from find_problems(value, f"{prefix}{f.name}.")
        else:
            yield from _field_problems(f, value, prefix)
    yield from (prefix + p for p in config.problems())


def _field_problems(f: dataclasses.Field[Any], value: Any, prefix: str) -> Iterator[str]:
    choices = f.metadata.get("choices")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if choices:
        for v in values:
            if v not in choices:
                yield f"{prefix}{f.name}={v!r}: expected one of {', '.join(choices)}{suggestion(v, choices)}"
        return
    for v in values:
        if isinstance(v, bool) or not isinstance(v, int | float):
            continue
        low, above, high = (f.metadata.get(name) for name in ("ge", "gt", "le"))
        # Written as "not in bounds", so that NaN is out of bounds.
        if low is not None and not v >= low:
            yield f"{prefix}{f.name}={value!r}: must be >= {low}"
        if above is not None and not v > above:
            yield f"{prefix}{f.name}={value!r}: must be > {above}"
        if high is not None and not v <= high:
            yield f"{prefix}{f.name}={value!r}: must be <= {high}"


def to_dict(config: Config) -> dict[str, Any]:
    """Return ``config`` as plain nested dicts and lists (a copy)."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Return ``config`` as YAML, which :func:`verl.config.load_config` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
