"""Small real HTTP servers that answer as the services do which rewards talk to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


@dataclass
class Service:
    """A running server and what it was asked."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def serve(path: str, answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[Service]:
    """Answer posts to ``path`` with what ``answer(request, number of the request)`` gives: status and object."""
    service = Service()
    lock = threading.Lock()
    at_once = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal at_once
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                at_once += 1
                service.most_at_once = max(service.most_at_once, at_once)
                number = len(service.requests)
                service.requests.append(body)
                service.headers.append(dict(self.headers))
            status, reply, *more = answer(body, number) if self.path == path else (404, {"error": self.path})
            with lock:
                at_once -= 1
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def run_for_real(request: dict[str, Any], _: int) -> Answer:
    """What a code service does, with a real interpreter, for programs that this test suite wrote."""
    import subprocess
    import sys

    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", request["code"]],
            input=request["stdin"],
            capture_output=True,
            text=True,
            timeout=request["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        run: dict[str, Any] = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        return 200, {"status": "Failed", "message": "", "compile_result": None, "run_result": run}
    run = {
        "status": "Finished",
        "execution_time": time.monotonic() - started,
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
    status = "Success" if done.returncode == 0 else "Failed"
    return 200, {"status": status, "message": "", "compile_result": None, "run_result": run, "files": {}}
