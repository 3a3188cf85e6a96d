"""Every cell of the table of model families in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.families import FAMILIES
from tests.models.family_checks import CHECKS, UNSUPPORTED, save_model
from verl.errors import VerlError


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("families")
    return {family: save_model(family, root / family) for family in FAMILIES}


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, column: str, model_dirs: dict[str, str], tmp_path: Path) -> None:
    check, reason = CHECKS[column], UNSUPPORTED.get((family, column))
    if reason is None:
        check(model_dirs[family], tmp_path)
    else:
        with pytest.raises(VerlError, match=reason):
            check(model_dirs[family], tmp_path)
