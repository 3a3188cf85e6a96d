"""Write docs/reference/batch.md from the table in verl/schema.py; with --check only say whether it is fresh."""

from __future__ import annotations

import sys

from _page import run

from verl.schema import FIELDS, PRIVATE, REPORTED_PREFIX


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
    lines += [
        "",
        "## Reserved names",
        "",
        "A column of a data file can have the name of a field that is made by `data`, and any name that is not here.",
        "It cannot have the name of another field, a name that begins with `__` (but pandas' `__index_level_0__`) or",
        f"with `{REPORTED_PREFIX}` (but `reward_model`), or one of these:",
        "",
        "| column | what the run keeps there |",
        "|---|---|",
        *(f"| `{name}` | {what} |" for name, what in PRIVATE.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run("batch.md", render, __doc__))
