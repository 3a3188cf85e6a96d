"""Write docs/reference/batch.md from the table in verl/schema.py; with --check only say whether it is fresh."""

from __future__ import annotations

import sys

from _page import run

from verl.schema import FIELDS


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


if __name__ == "__main__":
    sys.exit(run("batch.md", render, __doc__))
