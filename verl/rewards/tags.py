"""Answers between tags."""

from __future__ import annotations

import re

_OPEN = re.compile("<answer>", re.IGNORECASE)
_CLOSE = re.compile("</answer>", re.IGNORECASE)


def last_answer(text: str) -> str | None:
    """What the last ``<answer>...</answer>`` holds, without spaces around it; ``None`` if there is none."""
    found = None
    place = 0
    while (opened := _OPEN.search(text, place)) and (closed := _CLOSE.search(text, opened.end())):
        found = text[opened.end() : closed.start()]
        place = closed.end()
    return None if found is None else found.strip()
