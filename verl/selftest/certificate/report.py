"""The certificate: a table for people, and one JSON document for programs."""

from __future__ import annotations

import dataclasses
import math
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import verl
from verl.selftest.certificate.outcome import Measure, Tolerances, Verdict
from verl.selftest.certificate.subject import file_hashes
from verl.utils.json_text import write_json

#: of the JSON document; it grows when a reader must know of a change
FORMAT = 1
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "tensordict", "megatron-core", "vllm", "sglang")
_HEADINGS = ("check", "compared with", "case", "figure", "allowed", "verdict")


@dataclass
class Certificate:
    """All that was found about one model.

    Attributes:
        subject: the model, as the document describes it.
        source: its directory.
        setup: engines.
        tolerances: largest allowed figures.
        measures: every comparison, in order.
        notes: what was not covered.
        seconds: of all.
        cpu_seconds: of this process, all threads together.
        seconds_of: of each check.
        planted: faults that were switched on.
    """

    subject: dict[str, Any]
    source: Path
    setup: dict[str, Any]
    tolerances: Tolerances
    measures: list[Measure]
    notes: list[str]
    seconds: float
    seconds_of: dict[str, float]
    cpu_seconds: float = 0.0
    planted: tuple[str, ...] = ()

    @property
    def checks(self) -> dict[str, list[Measure]]:
        """Measures by the name of their check."""
        found: dict[str, list[Measure]] = {}
        for measure in self.measures:
            found.setdefault(measure.check, []).append(measure)
        return found

    def verdict_of(self, check: str) -> Verdict:
        """The verdict of one check."""
        verdicts = {measure.verdict for measure in self.checks[check]}
        order: tuple[Verdict, ...] = ("refused", "failed", "passed", "not applicable")
        return next(verdict for verdict in order if verdict in verdicts)

    @property
    def verdict(self) -> Verdict:
        """``passed``, ``failed`` or ``refused``."""
        if self.failed:
            return "failed"
        return "refused" if self.refusal else "passed"

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed; a refusal is no failure."""
        return [check for check in self.checks if self.verdict_of(check) == "failed"]

    @property
    def exit_code(self) -> int:
        """0: passed; 1: a check failed; 2: the engines refuse the model."""
        return {"passed": 0, "failed": 1}.get(self.verdict, 2)

    @property
    def refusal(self) -> str:
        """The sentence with which the engines refused the model; empty if they did not."""
        return next((measure.error for measure in self.measures if measure.refused), "")

    def text(self) -> str:
        """The table, what failed in words, and what was not covered."""
        layers = f"{self.subject['layers']} layers"
        if self.subject["layers"] != self.subject["all_layers"]:
            layers = f"{self.subject['layers']} of {self.subject['all_layers']} layers"
        engines = f"{self.setup['engine']} + {self.setup['rollout']}" + (", adapters" if self.setup["lora"] else "")
        parts = [f"{self.source} ({self.subject['model_type']}, {layers}), {engines}, {self.setup['device']}"]
        if len(self.measures) > 1:
            parts.append(self.table())
        lines = [describe(measure) for measure in self.measures if measure.verdict == "failed"]
        if lines:
            shown = lines[:20]
            more = [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
            parts.append("\n".join(["failures:", *shown, *more]))
        if self.notes:
            parts.append("\n".join(f"Note: {note}" for note in self.notes))
        if self.planted:
            parts.append(f"Planted: {', '.join(self.planted)}")
        count = sum(measure.verdict in ("passed", "failed") for measure in self.measures)
        if self.refusal:
            parts.append(f"refused at start-up: {self.refusal}")
        if self.failed:
            parts.append(f"FAILED: {', '.join(self.failed)} ({count} comparisons in {self.seconds:.0f} s)")
        elif not self.refusal:
            parts.append(f"passed {count} comparisons in {self.seconds:.0f} s")
        return "\n\n".join(parts)

    def table(self) -> str:
        """One line for each check: its worst case."""
        lines: list[tuple[str, ...]] = [_HEADINGS]
        for check, measures in self.checks.items():
            verdict = self.verdict_of(check)
            worst = max(measures, key=lambda measure: measure.severity)
            shown = verdict.upper() if verdict == "failed" else verdict
            if worst.deviation is None:
                reason = next((m.reason or m.error for m in measures if m.reason or m.error), "")
                lines.append((check, "", reason.splitlines()[0][:70] if reason else "", "", "", shown))
                continue
            case = ", ".join(filter(None, (worst.deviation.quantity, worst.case)))
            figures = _number(worst.deviation.value), _number(worst.deviation.tolerance)
            lines.append((check, worst.against, case, *figures, shown))
        widths = [max(len(line[place]) for line in lines) for place in range(len(_HEADINGS))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def document(self, *, hashes: bool = True) -> dict[str, Any]:
        """Everything, for programs.

        Args:
            hashes: read all files of the model for their digests.
        """
        checks = {
            check: {
                "verdict": self.verdict_of(check),
                "seconds": round(self.seconds_of.get(check, 0.0), 2),
                "measures": [_plain(measure) for measure in measures],
            }
            for check, measures in self.checks.items()
        }
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "refusal": self.refusal or None,
            "failed": self.failed,
            "model": {**self.subject, "files": file_hashes(self.source) if hashes else None},
            "setup": self.setup,
            "tolerances": dataclasses.asdict(self.tolerances),
            "versions": versions(),
            "checks": checks,
            "notes": self.notes,
            "planted": list(self.planted),
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
        }

    def write_json(self, path: Path, *, hashes: bool = True) -> None:
        """Write :meth:`document`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.document(hashes=hashes))


def describe(measure: Measure) -> str:
    """A failure in one line."""
    case = f" ({measure.case})" if measure.case else ""
    if measure.deviation is None:
        return f"  {measure.check}{case}: {measure.error}"
    found = measure.deviation
    against = f" from {measure.against}" if measure.against else ""
    if found.tolerance == 0 and found.value == int(found.value if math.isfinite(found.value) else 0.5):
        figure = f"{found.quantity}: {found.value:g}"
    else:
        figure = f"{found.quantity} off by {_number(found.value)}{against}, allowed {_number(found.tolerance)}"
    return f"  {measure.check}{case}: {figure}" + (f"; {measure.where}" if measure.where else "")


def versions() -> dict[str, str | None]:
    """Versions of what computes."""
    found: dict[str, str | None] = {"verl": verl.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _number(value: float) -> str:
    return f"{value:.1e}" if value and math.isfinite(value) and value != int(value) else f"{value:g}"


def _plain(measure: Measure) -> dict[str, Any]:
    found = measure.deviation
    finite = found is not None and math.isfinite(found.value)
    return {
        "case": measure.case,
        "against": measure.against,
        "quantity": found.quantity if found else None,
        # JSON has no nan
        "figure": found.value if found and finite else None,
        "tolerance": found.tolerance if found else None,
        "verdict": measure.verdict,
        "where": measure.where or None,
        "error": measure.error or None,
        "reason": measure.reason or None,
    }
