"""The table of model families: its stored certificates are complete, and making them again gives the same verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selftest.certificate.families import (
    REFUSING,
    SETUPS,
    certify_family,
    comparable,
    make_family,
    names,
    record,
    stored,
)
from verl.selftest.certificate import CHECKS
from verl.selftest.certificate.rank_pool import Ranks
from verl.selftest.certificate.suite import START

#: families of the ordinary test run: dense with tied embeddings, sliding window, experts, latent attention, refused
A_FEW = {"qwen2", "gpt_oss", "deepseek_v3", "lfm2", "deepseek_v32"}


def test_every_family_is_in_the_table_and_passes_there() -> None:
    table = stored()
    assert list(table) == names()
    for name, results in table.items():
        assert next(iter(results)) == "fsdp, hf", name
        assert set(results) <= set(SETUPS), name
        for setup, result in results.items():
            assert result["verdict"] in ("passed", "refused"), (name, setup)
            refused_by_trainer = list(result["checks"]) == [START]
            assert refused_by_trainer or list(result["checks"]) == [START, *CHECKS], (name, setup)
        assert (results["fsdp, hf"]["verdict"] == "refused") == (name in REFUSING), name


@pytest.mark.parametrize(
    ("name", "setup"),
    [
        pytest.param(name, setup, marks=() if name in A_FEW else pytest.mark.slow)
        for name, results in stored().items()
        for setup in results
    ],
)
def test_a_family_has_the_certificate_of_the_table(name: str, setup: str, tmp_path: Path) -> None:
    make_family(name, tmp_path / name)
    expected = stored()[name][setup]
    shares = expected["checks"].get("sequence parallel") == "passed" and name not in A_FEW
    with Ranks(2) as ranks:
        certificate = certify_family(tmp_path / name, setup, ranks if shares else None)
    got = comparable(record(certificate))
    if not shares:  # processes for every family would take the time of all others
        for result in (got, expected):
            result["checks"].pop("sequence parallel", None)
    assert got == comparable(expected), certificate.text()
