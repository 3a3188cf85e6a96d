"""Ask a JSON service over HTTP, with patience: for sandboxes and judges on other machines. Standard library only."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from verl.errors import RewardError
from verl.utils.json_text import dumps_json

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


def post_json(
    url: str,
    payload: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    max_retries: int = 3,
    first_wait_s: float = _FIRST_WAIT_S,
) -> Any:
    """Post an object and return the answer's.

    Connections that fail, and answers that say "not now" (408, 429, 5xx), are tried again after a pause that doubles,
    or as long as the answer's ``Retry-After`` asks.

    Raises:
        RewardError: no usable answer after all tries, or the server refuses the request.
    """
    body = dumps_json(payload, ascii_only=True).encode()
    wait = first_wait_s
    for attempt in range(max_retries + 1):
        request = urllib.request.Request(
            url,
            data=body,
            headers={"Content-Type": "application/json", "Accept": "application/json", **(headers or {})},
        )
        pause = wait
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {error.read(500).decode(errors='replace')!r}"
            if error.code not in _AGAIN:
                raise RewardError(f"{url} refuses the request: {problem}") from None
            asked = error.headers.get("Retry-After", "")
            pause = float(asked) if asked.replace(".", "", 1).isdigit() else wait
        except (OSError, ValueError) as error:  # no connection, a broken one, an answer that is no JSON
            problem = f"{type(error).__name__}: {error}"
        if attempt < max_retries:
            time.sleep(min(pause, _LONGEST_WAIT_S))
            wait *= 2
    raise RewardError(f"{url} gave no answer in {max_retries + 1} tries; the last: {problem}")
