"""Answers between tags."""

from __future__ import annotations

import re

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def last_answer(text: str) -> str | None:
    """What the last ``<answer>...</answer>`` holds, without spaces around it; ``None`` if there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None
