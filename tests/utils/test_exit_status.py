"""How the programs of the command line end."""

from __future__ import annotations

import pytest

from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.utils.exit_status import exit_code


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("c"), 2), (DataError("d"), 2), (CheckpointError("e"), 1), (VerlError("f"), 1)]
)
def test_errors_are_one_message_and_a_code(error: VerlError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> bool:
        raise error

    assert exit_code(work) == code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


def test_done_and_to_be_started_again() -> None:
    assert exit_code(lambda: True) == 0
    assert exit_code(lambda: False) == 75


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> bool:
        raise KeyboardInterrupt

    assert exit_code(work) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_messages_hold_no_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "abcdef0123456789")

    def work() -> bool:
        raise ConfigError("the judge refused abcdef0123456789")

    assert exit_code(work) == 2
    assert capsys.readouterr().err == "ConfigError: the judge refused ***\n"


def test_other_errors_are_defects_and_pass() -> None:
    def work() -> bool:
        raise KeyError("x")

    with pytest.raises(KeyError):
        exit_code(work)
