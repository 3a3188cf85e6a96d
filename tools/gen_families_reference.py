"""Write docs/reference/models.md from stored certificates of families; with --check only say whether it is fresh."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from _page import REFERENCE, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DATA = REFERENCE / "certificates.json"

#: column -> checks of the certificate of FSDP2 with the built-in rollout engine
COLUMNS = {
    "trainer": ("log-probs", "gradients", "pad token", "noise"),
    "routing": ("routing",),
    "sequence parallel": ("sequence parallel",),
    "rollout": ("sampling", "filters", "rollout = trainer", "stop tokens", "vocabulary"),
    "weights": ("weight sync", "tied weights", "save and merge", "tokenizer"),
}
PLAIN = "fsdp, hf"
#: column -> other pair of engines
OTHERS = {"adapters": "fsdp, hf, adapters", "Megatron-core": "megatron, hf"}

_INTRODUCTION = """\
# Model families

Generated from `docs/reference/certificates.json` by `make docs`; do not edit. `make certify-families` writes that file:
the [certificate](../certificate.md) of a tiny random model of each family, float32 on CPU.

Other families of Transformers usually work too. The engines compare them with plain Transformers when they build
them (`model.verify`), and refuse what they do not compute right.

- **trainer**: log-probs, entropies, loss and every gradient are those of plain Transformers, packed, padded and in
  micro-batches, with the pad token inside rows; training passes have no noise.
- **routing**: experts and selected keys are those of plain Transformers; a dash where a model chooses none.
- **sequence parallel**: two processes that share sequences give the same numbers.
- **rollout**: the built-in engine samples from the distribution of plain Transformers, with filters, stop tokens and a
  vocabulary larger than the tokenizer; the trainer computes the same log-probs.
- **weights**: after an update the rollout engine has the new weights; saved and merged models load in Transformers.
- **adapters**: the certificate with `--lora`. **Megatron-core**: that with `--engine megatron`.
- **difference**: the largest difference of a log-prob in the first certificate; **seconds**: what it took of one core.

A dash: the check says nothing about the family, or an engine refuses it by name. An empty cell: not certified.
Certificates have text alone. `tests/models/test_families.py` tests images and gradient checkpointing, for every family
of the table that has them.
"""


def render() -> str:
    """The page's text."""
    families: dict[str, dict[str, dict[str, Any]]] = json.loads(DATA.read_text("utf-8"))["families"]
    others = {title: setup for title, setup in OTHERS.items() if any(setup in results for results in families.values())}
    heads = ["family", "architecture", *COLUMNS, *others, "difference", "seconds"]
    lines = [_INTRODUCTION, f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    refused = []
    for name, results in sorted(families.items()):
        plain = results[PLAIN]
        cells = [_cell(plain, checks) for checks in COLUMNS.values()]
        cells += [_whole(results.get(setup)) for setup in others.values()]
        figure = "–" if plain["log_probs"] is None else f"{plain['log_probs']:.0e}"
        lines.append(f"| {name} | `{plain['model_type']}` | {' | '.join(cells)} | {figure} | {_seconds(plain):.0f} |")
        if plain["refusal"]:
            refused.append(f"- `{name}`: {plain['refusal']}")
    if refused:
        lines += ["", "Refused at start-up:", "", *refused]
    return "\n".join(lines) + "\n"


def _seconds(result: dict[str, Any]) -> float:
    return float(result["cpu_seconds"] if "cpu_seconds" in result else result["seconds"])


def _cell(result: dict[str, Any], checks: tuple[str, ...]) -> str:
    verdicts = {check: result["checks"].get(check, "not applicable") for check in checks}
    if wrong := [check for check, verdict in verdicts.items() if verdict == "failed"]:
        return f"no: {', '.join(wrong)}"
    if "passed" in verdicts.values():
        return "yes"
    return "refused" if result["refusal"] and "sampling" in checks else "–"


def _whole(result: dict[str, Any] | None) -> str:
    """A certificate as one word."""
    if result is None:
        return ""
    if result["verdict"] == "failed":
        return f"no: {', '.join(check for check, verdict in result['checks'].items() if verdict == 'failed')}"
    return {"passed": "yes", "refused": "refused"}[result["verdict"]]


if __name__ == "__main__":
    sys.exit(run("models.md", render, __doc__))
