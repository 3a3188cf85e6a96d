"""Certificates of every model family of the table: how they are made, and what the table keeps of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.models.families import FAMILIES, SPARSE
from tests.selftest.certificate.models import family
from verl.selftest.certificate import Certificate, certify
from verl.selftest.certificate.rank_pool import Ranks

#: what the table in the documentation is made from
DATA = Path(__file__).resolve().parents[3] / "docs" / "reference" / "certificates.json"

#: families outside of the table of tested ones: the table says how they are refused
REFUSED: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**SPARSE, "index_n_heads": 32},
    "glm_moe_dsa": {**SPARSE, "index_n_heads": 32},
}
#: families whose rows or samples an engine of the first column refuses, by name; the other engine is checked
REFUSING = frozenset({*REFUSED, "lfm2"})
EXTRA_ROWS = 8

#: column of the table -> options of the certificate
SETUPS: dict[str, dict[str, Any]] = {
    "fsdp, hf": {},
    "fsdp, hf, adapters": {"lora": True, "ranks": 0},
    "megatron, hf": {"engine": "megatron", "ranks": 0},
}


def names() -> list[str]:
    """Families of the table."""
    return sorted([*FAMILIES, *REFUSED])


def make_family(name: str, directory: Path) -> None:
    """A tiny model of the family whose embedding has more rows than the tokenizer has tokens."""
    family(name, directory, extra_rows=EXTRA_ROWS, **REFUSED.get(name, {}))


def certify_family(directory: Path, setup: str, ranks: Ranks | None = None) -> Certificate:
    """The certificate of one cell of the table."""
    options = dict(SETUPS[setup])
    return certify(str(directory), device="cpu", **{"ranks": ranks if ranks is not None else 0, **options})


def record(certificate: Certificate) -> dict[str, Any]:
    """What the table keeps: verdicts, the largest difference of a log-prob, seconds of this process."""
    figures = [
        measure.deviation.value
        for measure in certificate.measures
        if measure.deviation is not None and measure.deviation.quantity == "log-probs"
    ]
    return {
        "model_type": certificate.subject["model_type"],
        "verdict": certificate.verdict,
        "refusal": certificate.refusal or None,
        "checks": {check: certificate.verdict_of(check) for check in certificate.checks},
        "log_probs": float(f"{max(figures):.1e}") if figures else None,
        "cpu_seconds": round(certificate.cpu_seconds, 1),
    }


def stored() -> dict[str, dict[str, Any]]:
    """The stored results: family -> setup -> record."""
    found: dict[str, dict[str, Any]] = json.loads(DATA.read_text("utf-8"))["families"]
    return found


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """The parts of a record that do not depend on the machine."""
    return {key: value for key, value in result.items() if key not in ("cpu_seconds", "log_probs")}


def certify_all(root: Path, wanted: list[str], setups: list[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Family, setup and record, one after the other; the ranks that share sequences start once."""
    with Ranks(2) as ranks:
        for setup in setups:
            for name in wanted:
                if not (root / name).is_dir():
                    make_family(name, root / name)
                yield name, setup, record(certify_family(root / name, setup, ranks))


__all__ = ["DATA", "SETUPS", "certify_all", "certify_family", "comparable", "make_family", "names", "stored"]
