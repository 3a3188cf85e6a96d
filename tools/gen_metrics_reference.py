"""Write docs/reference/metrics.md from the glossary of metrics; with --check only say whether it is fresh."""

from __future__ import annotations

import sys

from _page import run

from verl.trainer.ppo.glossary import GLOSSARY


def render() -> str:
    """The page's text."""
    lines = [
        "# Metrics",
        "",
        "Generated from `verl/trainer/ppo/glossary.py` by `make docs`; do not edit.",
        "",
        "`{a|b}` stands for one of the words, `<name>` for any text, `<N>` for a number.",
        "",
        "| metric | meaning |",
        "|---|---|",
    ]
    for pattern, sentence in GLOSSARY.items():
        escaped = pattern.replace("|", "\\|")  # a bar would end the table's cell, also inside code
        lines.append(f"| `{escaped}` | {sentence} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run("metrics.md", render, __doc__))
