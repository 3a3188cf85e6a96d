"""Log lines say who speaks and keep secrets."""

from __future__ import annotations

import io
import logging
import re

import pytest

from verl.errors import ConfigError
from verl.utils.logging import redact, setup_logging


def test_a_line_has_time_level_role_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    out = io.StringIO()
    setup_logging("actor", stream=out)
    logging.getLogger("verl.workers.roles").info("loaded %d tensors", 3)
    line = out.getvalue()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO \[actor 1/4\] verl\.workers\.roles: loaded 3 tensors\n", line)


def test_alone_there_is_no_bracket_and_a_second_setup_does_not_double_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    out = io.StringIO()
    setup_logging(stream=out)
    setup_logging(stream=out)
    logging.getLogger("verl.x").warning("once")
    assert re.fullmatch(r"\S+ WARNING verl\.x: once\n", out.getvalue())


def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "warn")
    out = io.StringIO()
    setup_logging(stream=out)
    logging.getLogger("verl.x").info("quiet")
    assert out.getvalue() == ""
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"VERL_LOGGING_LEVEL='loud' .* DEBUG, INFO"):
        setup_logging(stream=out)


def test_values_of_secret_variables_never_reach_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdef0123456789")
    out = io.StringIO()
    setup_logging(stream=out)
    try:
        raise ValueError("refused abcdef0123456789")
    except ValueError:
        logging.getLogger("verl.x").exception("header: abcdef0123456789")
    assert "abcdef0123456789" not in out.getvalue()
    assert "header: ***" in out.getvalue()
    assert "ValueError: refused ***" in out.getvalue()


def test_redact_hides_by_name_at_any_depth_and_keeps_the_rest() -> None:
    config = {
        "lr": 0.1,
        "max_tokens": 5,
        "wandb": {"api_key": "abc", "project": "p"},
        "tools": [{"token": "t", "url": "u"}],
        "password": "",
        "access_keys": ("a", "b"),
    }
    assert redact(config) == {
        "lr": 0.1,
        "max_tokens": 5,
        "wandb": {"api_key": "***", "project": "p"},
        "tools": [{"token": "***", "url": "u"}],
        "password": "",
        "access_keys": ("***", "***"),
    }
    assert config["wandb"]["api_key"] == "abc"  # type: ignore[index]


def test_redact_hides_secrets_within_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdef0123456789")
    config = {
        "headers": {"Authorization": "Bearer x", "Accept": "json"},
        "command": "run --key abcdef0123456789",
        "url": "https://me:pass@host:8000/v1?x=a@b",
        "plain": "https://host/v1 a@b c:d@e",
    }
    assert redact(config) == {
        "headers": {"Authorization": "***", "Accept": "json"},
        "command": "run --key ***",
        "url": "https://***@host:8000/v1?x=a@b",
        "plain": "https://host/v1 a@b c:d@e",
    }
