"""Write docs/reference/models.md from the checks of model families; with --check only say whether it is fresh."""

from __future__ import annotations

import sys
from pathlib import Path

from _page import run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.families import FAMILIES, make_config
from tests.models.family_checks import CHECKS, UNSUPPORTED


def render() -> str:
    """The page's text."""
    lines = [
        "# Model families",
        "",
        "Generated from `tests/models/family_checks.py` by `make docs`; do not edit.",
        "",
        "Every cell is a test on a tiny random model of the family (`tests/models/test_families.py`, float32 on CPU).",
        "Other families of Transformers usually work too. The engines compare them with plain Transformers at start-up",
        "(`model.verify`), and refuse what they do not compute right.",
        "",
    ]
    for column, check in CHECKS.items():
        meaning = (check.__doc__ or "").strip().splitlines()[0]
        lines.append(f"- **{column}**: {meaning}")
    lines += ["", f"| family | architecture | {' | '.join(CHECKS)} |", f"|---|---|{'---|' * len(CHECKS)}"]
    for family in sorted(FAMILIES):
        cells = [UNSUPPORTED.get((family, column), "yes") for column in CHECKS]
        lines.append(f"| {family} | `{make_config(family).model_type}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run("models.md", render, __doc__))
