"""Run programs on a server that speaks the HTTP interface of Sandbox Fusion: ``POST <url>`` with code, language, input.

Facts of the interface: the request has ``code``, ``language``, ``stdin``, ``compile_timeout``, ``run_timeout`` and
``memory_limit_MB``; the answer has ``status`` (``Success``, ``Failed``, ``SandboxError``), ``message``,
``compile_result`` and ``run_result``, each with ``status`` (``Finished``, ``Error``, ``TimeLimitExceeded``),
``return_code``, ``execution_time``, ``stdout`` and ``stderr``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from verl.errors import RewardError
from verl.rewards.http import post_json
from verl.rewards.sandbox.spec import Limits, ProgramResult, Status

_ANSWER_GRACE_S = 30.0


class RemoteSandbox:
    """A server that runs programs.

    Args:
        url: where to post, for example ``http://host:8080/run_code``.
        limits: of each run; the server may have tighter ones.
        max_concurrent: requests at the same time from this process.
        max_retries: further requests after one that failed on the way or at the server.
    """

    def __init__(
        self, url: str, limits: Limits | None = None, *, max_concurrent: int = 64, max_retries: int = 3
    ) -> None:
        self.url = url
        self.limits = limits or Limits()
        self.max_retries = max_retries
        self._places = _shared_places(url, max_concurrent)

    def run(self, code: str, *, language: str = "python", stdin: str = "") -> ProgramResult:
        """Compile where the language needs it, and run.

        Raises:
            RewardError: the server did not answer or says that it failed itself; that says nothing about the program.
        """
        request = {
            "code": code,
            "language": language,
            "stdin": stdin,
            "compile_timeout": self.limits.wall_s,
            "run_timeout": self.limits.cpu_s,
            "memory_limit_MB": self.limits.memory_mb,
        }
        patience = 2 * self.limits.wall_s + _ANSWER_GRACE_S
        with self._places:
            answer = post_json(self.url, request, timeout_s=patience, max_retries=self.max_retries)
        return _result(answer, self.url)


def _result(answer: Any, url: str) -> ProgramResult:
    if not isinstance(answer, Mapping) or answer.get("status") not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, Mapping) else answer
        raise RewardError(f"the sandbox at {url} failed: {str(message)[:500]!r}")
    part = answer.get("compile_result")
    if part is None or (part.get("status") == "Finished" and not part.get("return_code")):
        part = answer.get("run_result")
    if not isinstance(part, Mapping):
        raise RewardError(f"the sandbox at {url} sent no run_result: {str(dict(answer))[:500]}")
    code = part.get("return_code")
    stderr = part.get("stderr") or ""
    status = Status.OK if part.get("status") == "Finished" and not code else Status.ERROR
    if part.get("status") == "TimeLimitExceeded":
        status = Status.TIMEOUT
    elif status is Status.ERROR and ("MemoryError" in stderr or "std::bad_alloc" in stderr):
        status = Status.MEMORY
    seconds = float(part.get("execution_time") or 0.0)
    return ProgramResult(status, code, part.get("stdout") or "", stderr, seconds, 0.0)


_places: dict[str, threading.BoundedSemaphore] = {}
_lock = threading.Lock()


def _shared_places(url: str, count: int) -> threading.BoundedSemaphore:
    with _lock:
        return _places.setdefault(f"{url} {count}", threading.BoundedSemaphore(count))
