"""The worker process of :class:`~verl.rewards.process_scorer.ProcessScorer`: ``-m verl.rewards.process_worker FD``."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection

from verl.rewards.outcome import RewardOutcome
from verl.rewards.scoring import call_function, error_outcome


def main(file_descriptor: int) -> None:
    """Receive the function, then score one call after the other until the other side hangs up."""
    conn = Connection(file_descriptor)
    paths, payload = conn.recv()
    sys.path[:] = paths
    try:
        function = pickle.loads(payload)
    except Exception:  # noqa: BLE001  importing a user's module may raise anything, and the parent has to know
        conn.send(traceback.format_exc())
        return
    conn.send("ready")
    while True:
        try:
            delay, call = conn.recv()
        except (EOFError, OSError):
            return
        time.sleep(delay)
        _answer(conn, call_function(function, call))


def _answer(conn: Connection, outcome: RewardOutcome) -> None:
    try:
        conn.send(outcome)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        conn.send(error_outcome(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # threads that the user's function left behind must not keep the process alive
