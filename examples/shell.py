"""Run one command of an example: shown, streamed and kept."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path


def run(command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
    """Run a command, show its output and keep it in ``log``; a failing command ends the script with its code."""
    print(f"\n$ {shlex.join(['python', *command])}\n", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            file.write(line)
    if process.wait():
        sys.exit(f"this command failed with exit code {process.returncode}; its output is in {log}")
