"""The ``verl`` command."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

import verl
from verl import cli, model_merger
from verl.selftest import main as selftest


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


def example_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The command line, without ``verl``, that the help of a command shows first."""
    try:
        code = cli.main([name, "--help"])
    except SystemExit as end:  # argparse and the configuration end the process themselves
        code = int(end.code or 0)
    text = capsys.readouterr().out
    assert code == 0
    found = re.search(r"^example:\s+verl (\S.*)$", text, re.MULTILINE)
    assert found is not None, text[:1000]
    return found[1]


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_the_help_of_every_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example_of(name, capsys).startswith(f"{name} ")


@pytest.mark.parametrize("name", ["train", "sft", "preference", "explain", "generate", "eval"])
def test_the_example_of_the_help_is_a_valid_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(example_of(name, capsys))
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--cfg", "job"])
    shown = capsys.readouterr()
    assert end.value.code == 0, shown.err


@pytest.mark.parametrize(("name", "parser"), [("merge", model_merger.parser), ("selftest", selftest.parser)])
def test_the_example_of_the_help_has_valid_options(
    name: str, parser: Callable[[], argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    parser().parse_args(shlex.split(example_of(name, capsys))[1:])
