"""The certificate finds what it is for: each planted fault fails the check that names it, which passes without."""

from __future__ import annotations

import pytest

from tests.selftest.certificate.models import MODELS
from verl.errors import ConfigError
from verl.selftest.certificate import Certificate, certify
from verl.selftest.certificate.faults import FAULTS, plant

#: faults that need another model than the quick start's
MODEL_OF = {
    "sparse-indexer": "sparse",
    "tokens-without-text": "padded",
    "frame-lost": "framed",
    "window-ignored": "sliding",
    "rope-scaling": "scaled",
    "expert-order": "experts",
    "router-precision": "experts",
}
WITH_ADAPTERS = {"adapter-scale"}
ON_RANKS = {"sequence-gradient"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("certified")
    for name, maker in MODELS.items():
        maker(root / name)
    return {name: str(root / name) for name in MODELS}


def checked(directory: str, fault: str, *, planted: bool) -> Certificate:
    return certify(
        directory,
        device="cpu",
        lora=fault in WITH_ADAPTERS,
        ranks=2 if fault in ON_RANKS else 0,
        only=[FAULTS[fault].check],
        faults=[fault] if planted else [],
    )


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.dist] if name in ON_RANKS else []) for name in FAULTS]
)
def test_each_fault_fails_its_check(fault: str, directories: dict[str, str]) -> None:
    directory = directories[MODEL_OF.get(fault, "tiny")]
    sound = checked(directory, fault, planted=False)
    assert sound.verdict == "passed", sound.text()
    assert sound.verdict_of(FAULTS[fault].check) == "passed", sound.text()
    found = checked(directory, fault, planted=True)
    assert found.failed == [FAULTS[fault].check], found.text()
    assert found.exit_code == 1
    assert f"FAILED: {FAULTS[fault].check}" in found.text()


def test_patches_end_with_the_block(directories: dict[str, str]) -> None:
    for fault in FAULTS:
        with plant(fault):
            pass
    assert certify(directories["tiny"], device="cpu", ranks=0).verdict == "passed"
    with pytest.raises(ConfigError, match="unknown bug 'off-by-one'"), plant("off-by-one"):
        pass
