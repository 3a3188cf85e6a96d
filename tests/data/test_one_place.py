"""Rules that hold for the whole tree, checked on its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from verl.schema import FIELDS, PRIVATE, reserved_for

ROOT = Path(__file__).resolve().parents[2]

#: what is cut into lines there is a message, a docstring, or a file of the kernel, and is not read back
MAY_SPLIT_LINES = {
    "verl/config/cli.py",
    "verl/config/load.py",
    "verl/models/families.py",
    "verl/rewards/sandbox/supervisor.py",
    "verl/rewards/sandbox/users.py",
    "verl/selftest/certificate/report.py",
    "verl/selftest/main.py",
    "verl/single_controller/ray/session.py",
    "verl/workers/engine/oom_retry.py",
    "verl/workers/rollout/sglang/process.py",
    "tools/gen_families_reference.py",
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("verl", "tools", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def test_only_a_line_feed_ends_a_line() -> None:
    """``str.splitlines`` also cuts at U+2028 and nine other characters, which texts of models and users contain."""
    users = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    }
    assert users <= MAY_SPLIT_LINES, (
        "split text that is read back at '\\n'; a message for people may stand in MAY_SPLIT_LINES"
    )


def test_every_column_that_the_source_writes_is_reserved() -> None:
    """Names under which ``batch.batch[...]`` and ``batch.non_tensor_batch[...]`` are assigned to."""
    written: dict[str, str] = {}
    for name, tree in trees():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if (
                    isinstance(target, ast.Subscript)
                    and isinstance(target.value, ast.Attribute)
                    and target.value.attr in ("batch", "non_tensor_batch")
                    and isinstance(target.slice, ast.Constant)
                    and isinstance(target.slice.value, str)
                ):
                    written[target.slice.value] = name
    assert len(written) > 10
    assert {name: place for name, place in written.items() if reserved_for(name) is None} == {}


def test_private_names_are_no_fields() -> None:
    assert not set(PRIVATE) & set(FIELDS)
    assert all(reserved_for(name) for name in PRIVATE)
