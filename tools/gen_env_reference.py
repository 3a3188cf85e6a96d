"""Write docs/reference/env.md from the table in verl/envs.py; with --check only say whether it is fresh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl.envs import ENV_VARS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "env.md"


def render() -> str:
    """The page's text."""
    lines = [
        "# Environment variables",
        "",
        "Generated from `verl/envs.py` by `make docs`; do not edit. Everything else is set in the configuration.",
        "",
        "| name | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for var in ENV_VARS.values():
        default = "unset" if var.default is None else f"`{int(var.default) if var.kind == 'bool' else var.default}`"
        lines.append(f"| `{var.name}` | {var.kind} | {default} | {var.doc} |")
    lines += [
        "",
        "Worker processes inherit these variables from the process that starts the run. Process groups also read",
        "`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`, which Ray workers and `torchrun` set.",
    ]
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
