"""What the generators of documentation pages share: write the page, or with --check say whether it is fresh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"


def run(name: str, render: Callable[[], str], description: str | None) -> int:
    """Write ``docs/reference/<name>``, or with ``--check`` compare it; the result is the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit 1 when the page is stale, and write nothing")
    arguments = parser.parse_args()
    page, text = REFERENCE / name, render()
    if not arguments.check:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"docs/reference/{name} is stale; run `make docs`\n")
    return 1
