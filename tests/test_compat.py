"""Well-known import paths lead to the things themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl.compat import WELL_KNOWN, load


@pytest.mark.parametrize("path", sorted(WELL_KNOWN))
def test_path_leads_home(path: str) -> None:
    assert load(path) is load(WELL_KNOWN[path])


def test_missing_name() -> None:
    with pytest.raises(ImportError, match=r"module 'verl\.utils\.dataset' has no 'Nothing'"):
        load("verl.utils.dataset.Nothing")


def test_leaf_packages_stay_light() -> None:
    code = "import sys, verl.utils, verl.rewards, verl.compat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
