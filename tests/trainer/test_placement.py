"""What processes of a run are given: where they look for modules."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from verl.trainer.ppo.placement import user_import_paths


def test_workers_look_where_the_driver_looks_and_not_into_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools appends a directory of older packages to ``sys.path``; in front they would hide the installed ones."""
    installed = Path(sysconfig.get_path("purelib"))
    paths = [str(tmp_path), str(installed), str(installed / "setuptools" / "_vendor"), sysconfig.get_path("stdlib")]
    monkeypatch.setattr(sys, "path", [*paths, f"{sys.base_prefix}/lib/python311.zip", str(tmp_path)])
    assert user_import_paths() == [str(tmp_path.resolve())]
