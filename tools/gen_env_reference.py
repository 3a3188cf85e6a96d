"""Write docs/reference/env.md from the table in verl/envs.py; with --check only say whether it is fresh."""

from __future__ import annotations

import sys

from _page import run

from verl.envs import ENV_VARS


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


if __name__ == "__main__":
    sys.exit(run("env.md", render, __doc__))
