"""The page about the certificate knows every check and every bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.selftest.certificate import CHECKS
from verl.selftest.certificate.faults import FAULTS
from verl.selftest.certificate.suite import START


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> str:
    root: Path = request.getfixturevalue("repo_root")
    return (root / "docs" / "certificate.md").read_text("utf-8")


def test_every_check_is_described(page: str) -> None:
    for name in (START, *CHECKS):
        assert f"| {name} |" in page


def test_every_bug_is_described(page: str) -> None:
    for name, fault in FAULTS.items():
        assert f"| `{name}` | {fault.what.rstrip('.')} | {fault.check} |" in page
