"""A process that has imported everything once and forks for each command.

It reads requests from a socket: one JSON line each, with the three standard descriptors of the command. It answers with
the process id at once, and with the exit status when the command is over. The command runs in the child as
``verl.cli.main`` in a session of its own and leaves through the interpreter's normal end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
from typing import Any

#: imported before the first fork
MODULES = (
    "torch",
    "transformers",
    "ray",
    "pyarrow.parquet",
    "verl.cli",
    "verl.model_merger",
    "verl.selftest.main",
    "verl.trainer.main_eval",
    "verl.trainer.main_explain",
    "verl.trainer.main_generation",
    "verl.trainer.main_ppo",
    "verl.trainer.main_preference",
    "verl.trainer.main_sft",
    "verl.trainer.sft_trainer",
    "verl.trainer.preference_trainer",
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.placement",
    "verl.workers.fsdp_workers",
    "verl.agent_loop.runner",
    "verl.rewards.loading",
    "verl.rewards.managers",
    "verl.single_controller.local",
    "verl.trainer.ppo.sources.group_filter",
    "verl.trainer.ppo.sources.over_sampling",
    "verl.workers.megatron_workers",
    "verl.workers.rollout.hf.engine",
    "hydra._internal.core_plugins.basic_sweeper",
    "pyarrow.dataset",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)


def waited_for_a_core(pid: int) -> float:
    """Seconds that the main thread of a process was ready to run and had no core."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as handle:
            return int(handle.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def reap(pid: int) -> tuple[int, float]:
    """Wait for a child; returns its exit code as ``subprocess`` has it, and the seconds that it waited for a core."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is still there as a zombie, and so are its figures
    waited = waited_for_a_core(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), waited


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this fork look like a fresh start of the command."""
    os.setsid()
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
        os.close(fd)
    for name in ("stdin", "stdout", "stderr"):
        number = ("stdin", "stdout", "stderr").index(name)
        stream = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        if number == 2:
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
        elif number == 1 and stream.isatty():
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if request["closed"]:
        os.close(1)
        sys.stdout = sys.__stdout__ = None  # type: ignore[assignment,misc]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["verl", *request["argv"]]


def serve(channel: socket.socket) -> int | None:
    """Answer requests until the other end closes; in a child, return the exit code of the command."""
    import importlib

    for module in MODULES:
        importlib.import_module(module)
    from verl.cli import main

    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every page
    channel.sendall(b"{}\n")
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            return None
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            channel.close()
            become(request, list(descriptors))
            return main()
        for fd in descriptors:
            os.close(fd)
        channel.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        started = time.perf_counter()
        code, waited = reap(pid)
        with contextlib.suppress(BrokenPipeError):
            answer = {"code": code, "wall": time.perf_counter() - started, "waited": waited}
            channel.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
