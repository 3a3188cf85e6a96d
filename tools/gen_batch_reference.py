"""Write docs/reference/batch.md from the table in verl/schema.py; with --check only say whether it is fresh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl.schema import FIELDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "batch.md"


def render() -> str:
    """The page's text."""
    lines = [
        "# Batch fields",
        "",
        "Generated from `verl/schema.py` by `make docs`; do not edit.",
        "",
        "B rows, P prompt tokens, R response tokens, S = P + R.",
        "",
        "| field | shape | dtype | made by | read by | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for field in FIELDS.values():
        dtypes = " or ".join(field.dtypes)
        lines.append(
            f"| `{field.name}` | {field.shape_text} | {dtypes} | {field.made_by} | {field.read_by} | {field.doc} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the page is stale, and write nothing")
    arguments = parser.parse_args()
    text = render()
    if not arguments.check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE.name} is stale; run `make docs`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
