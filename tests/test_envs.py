"""The table of environment variables: every read goes through it, every entry parses as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl import envs
from verl.errors import ConfigError


def test_defaults_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_SYNC_CHECK", raising=False)
    assert envs.get("VERL_SYNC_CHECK") is False
    for text, value in {"1": True, "true": True, "ON": True, "0": False, "no": False, "": False}.items():
        monkeypatch.setenv("VERL_SYNC_CHECK", text)
        assert envs.get("VERL_SYNC_CHECK") is value
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "")
    assert envs.get("VERL_FILE_LOGGER_PATH") is None
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "debug")
    assert envs.get("VERL_LOGGING_LEVEL") == "DEBUG"


def test_a_bad_value_names_the_variable_and_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SYNC_CHECK", "maybe")
    with pytest.raises(ConfigError, match="VERL_SYNC_CHECK='maybe' is not a valid bool: use 1 or 0"):
        envs.get("VERL_SYNC_CHECK")


def test_an_unlisted_variable_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        envs.get("VERL_NO_SUCH_THING")


def test_what_is_set_is_what_workers_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.ENV_VARS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERL_SYNC_CHECK", "1")
    assert envs.set_in_environment() == {"VERL_SYNC_CHECK": "1"}


def test_every_variable_that_the_library_names_is_in_the_table_and_read(repo_root: Path) -> None:
    named: set[str] = set()
    for path in (repo_root / "verl").rglob("*.py"):
        if path.name != "envs.py":
            named |= set(re.findall(r"""["'`](VERL_[A-Z_]+)["'`]""", path.read_text("utf-8")))
    assert named <= set(envs.ENV_VARS)
    unread = {name for name in envs.ENV_VARS if name.startswith("VERL_")} - named
    assert not unread
