"""Every environment variable that ``verl`` reads for its own purposes: name, type, default and meaning.

A variable is read at the moment of the call, so that a worker sees what its runtime environment set. The table is
the only place that knows a default; the reference page is generated from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class EnvVar:
    """One variable.

    Attributes:
        name: its name.
        kind: its type as documented.
        default: the value when the variable is unset.
        doc: what it does, one sentence.
        parse: text to value; raises ``ValueError`` with what is allowed.
    """

    name: str
    kind: str
    default: Any
    doc: str
    parse: Callable[[str], Any]


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("use 1 or 0")


def _parse_level(text: str) -> str:
    level = text.strip().upper()
    if level == "WARN":
        return "WARNING"
    if level not in _LEVELS:
        raise ValueError(f"use one of {', '.join(_LEVELS)}")
    return level


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("use an integer") from None


def _parse_time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("use seconds since 1970") from None


def _parse_text(text: str) -> str | None:
    return text or None


_TABLE = (
    EnvVar(
        "VERL_LOGGING_LEVEL", "str", "INFO", f"Level of the library's log lines: {', '.join(_LEVELS)}.", _parse_level
    ),
    EnvVar(
        "VERL_FILE_LOGGER_PATH",
        "path",
        None,
        "File that the `file` tracker appends one JSON object per step to; "
        "by default `metrics.jsonl` in `trainer.default_local_dir`.",
        _parse_text,
    ),
    EnvVar(
        "TENSORBOARD_DIR",
        "path",
        None,
        "Directory of the `tensorboard` tracker; by default `tensorboard` in `trainer.default_local_dir`.",
        _parse_text,
    ),
    EnvVar(
        "VERL_SYNC_CHECK",
        "bool",
        False,
        "Compare checksums of all weights on both sides of every weight sync, and fail when they differ. Slow.",
        _parse_bool,
    ),
    EnvVar(
        "VERL_AUTO_PADDING",
        "bool",
        True,
        "Let dispatch pad a batch that does not divide over the ranks with copies of rows, which collect removes; "
        "0 makes such a batch an error.",
        _parse_bool,
    ),
    EnvVar(
        "VERL_SERVER_API_KEY",
        "text",
        None,
        "Key that the OpenAI-compatible endpoints of rollout servers ask for, and that servers of "
        "`rollout.server_urls` are sent; without one, whoever reaches an endpoint may generate.",
        _parse_text,
    ),
    EnvVar(
        "SLURM_JOB_END_TIME",
        "float",
        None,
        "When the batch system will end the job, in seconds since 1970; the run saves and ends before.",
        _parse_time,
    ),
    EnvVar(
        "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
        "float",
        None,
        "When the rented machine will be taken back, in seconds since 1970; the run saves and ends before.",
        _parse_time,
    ),
    EnvVar(
        "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
        "float",
        None,
        "The same, as SageMaker calls it.",
        _parse_time,
    ),
)

ENV_VARS: Mapping[str, EnvVar] = {var.name: var for var in _TABLE}


def get(name: str) -> Any:
    """The parsed value of a variable of the table, or its default when unset.

    Raises:
        KeyError: the variable is not in the table.
        ConfigError: its value cannot be parsed.
    """
    var = ENV_VARS[name]
    raw = os.environ.get(name)
    if raw is None:
        return var.default
    try:
        return var.parse(raw)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={raw!r} is not a valid {var.kind}: {error}") from None


def set_in_environment() -> dict[str, str]:
    """The variables of the table that are set, as text; what a worker process should inherit."""
    return {name: os.environ[name] for name in ENV_VARS if name in os.environ}
