"""The ``verl`` command."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import verl
from verl import cli


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "verl COMMAND" in text
    for name in cli.COMMANDS:
        assert f"  {name} " in text
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"verl {verl.__version__}\n"
    assert cli.main([]) == 2


def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_a_command_gets_the_rest_of_the_line_and_its_exit_code_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main() -> int:
        seen.append(sys.argv[:])
        return 3

    module = types.ModuleType("fake_program")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_program", module)
    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command("fake_program", "x"))
    before = sys.argv[:]
    assert cli.main(["train", "trainer.seed=2", "--cfg", "job"]) == 3
    assert seen == [["verl train", "trainer.seed=2", "--cfg", "job"]]
    assert sys.argv == before


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl.cli", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"verl {verl.__version__}\n"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_a_module_with_a_main(name: str) -> None:
    import importlib

    assert callable(importlib.import_module(cli.COMMANDS[name].module).main)
