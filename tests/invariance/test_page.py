"""The page about the self-test knows every bug, law and column, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.selftest import batches, invariances
from verl.selftest.checks import FIRST_STEP, LAWS, REFERENCE
from verl.selftest.planted_bugs import BUGS
from verl.selftest.splits import COLUMNS, DYNAMIC, MICRO, ORDER, OUTSIDE, PADDED


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> str:
    root: Path = request.getfixturevalue("repo_root")
    return (root / "docs" / "invariance.md").read_text("utf-8")


def test_every_bug_law_and_column_is_described(page: str) -> None:
    for bug in BUGS:
        assert f"| `{bug}` |" in page
    for name in (REFERENCE, MICRO, DYNAMIC, PADDED, COLUMNS, ORDER, OUTSIDE, FIRST_STEP, LAWS):
        assert f"| {name} |" in page
    for law in set().union(*invariances._ESTIMATORS.values(), *invariances._LOSSES.values()) - {
        "scale-free-at-zero-values"
    }:
        assert f"| {law} |" in page
    for table, kind in ((invariances._ESTIMATORS, "vectorized"), (invariances._LOSSES, "_token")):
        for name in table:
            assert name.removesuffix(f"_{kind}").removesuffix(kind) in page, name


def test_the_example_for_plug_ins_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (invariances._ESTIMATORS, invariances._LOSSES, batches._MAKERS):
        for name in ("my_estimator", "my_loss", "tool_cost"):
            monkeypatch.delitem(table, name, raising=False)
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})
    fields = batches.make_batch()
    batches.add_fields(fields, ["tool_cost"])
    assert fields["tool_cost"].shape == (batches.ROWS,)
    assert invariances.laws_of_estimator("my_estimator") == {"group-shift", "tied"}
    assert invariances.laws_of_loss("my_loss") == {"minus-mean-advantage"}
