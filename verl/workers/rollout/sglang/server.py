"""SGLang's HTTP server with verl's parts in its scheduler, for generation while training.

    python -m verl.workers.rollout.sglang.server --model-path MODEL --host 0.0.0.0 --port 30000 --api-key KEY

takes every option of ``sglang.launch_server``. Its requests and answers are token ids. A trainer generates with such a
server when ``rollout.server_urls`` names it; without, every worker starts one of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from verl.workers.rollout.sglang.sampler import BACKEND
from verl.workers.rollout.sglang.scheduler import run_scheduler

#: the only argument of a server that a worker starts: settings come as one line of JSON on standard input, and the
#: server ends when that is closed
OWNED = "--owned"


def main(arguments: list[str] | None = None) -> None:
    """Run a server until it is stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    settings: dict[str, Any] = {}
    if arguments == [OWNED]:
        settings = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_owner, daemon=True).start()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if arguments == [OWNED]:
        server_args = ServerArgs(**settings)
    else:
        server_args = prepare_server_args(["--sampling-backend", BACKEND, "--skip-tokenizer-init", *arguments])
    try:
        launch_server(server_args, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _end_with_owner() -> None:
    sys.stdin.read()  # until the worker closes it, or is gone
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the worker gave this process a group of its own


if __name__ == "__main__":
    main()
