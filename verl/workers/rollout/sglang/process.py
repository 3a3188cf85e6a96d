"""The SGLang server that a worker starts for itself, as a child process.

SGLang changes much in the process that starts it (signal handlers that end the whole process tree, start method of
children, environment, Transformers' classes). In a process of its own none of that reaches the trainer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verl
from verl.errors import ConfigError
from verl.workers.rollout.sglang.server import OWNED

#: what a trainer's rank has in its environment and a server of its own must not see
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: how long a server may take to end by itself
_GRACE_S = 10.0


def require_sglang() -> None:
    """Check that SGLang is there; it is not imported into this process.

    Raises:
        ConfigError: the package is missing.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name='sglang': the package sglang is not installed; install verl[sglang] (GPU), "
            "name running servers in rollout.server_urls, or set actor_rollout_ref.rollout.name=hf"
        )


class ServerProcess:
    """A running server, or one that is starting.

    Args:
        settings: arguments of SGLang's ``ServerArgs``.
        environment: variables on top of this process's.
    """

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - without a name; closed in stop
        variables = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
        source = str(Path(verl.__file__).parents[1])
        paths = [source, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.workers.rollout.sglang.server", OWNED],
            env={**variables, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is for the trainer, which ends the server
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; death() says why
            self._process.stdin.write(json.dumps(dict(settings)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id of the server; its scheduler is a child of it."""
        return self._process.pid

    def death(self) -> str | None:
        """What became of the server and what it said last; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the SGLang server ended ({how}); its last words:\n{self.last_words()}"

    def last_words(self, lines: int = 15) -> str:
        """The end of its output."""
        if self._log.closed:
            return "(nothing)"
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), size, 0).decode("utf-8", errors="replace").rstrip()
        return "\n".join(text.splitlines()[-lines:]) or "(nothing)"

    def stop(self) -> None:
        """End the server and its children."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what is left of its session
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
