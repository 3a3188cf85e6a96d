"""The report: one row for each name, one column for each check, the largest deviation in each cell."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl.selftest.checks import FIRST_STEP, LAWS, REFERENCE, Finding
from verl.selftest.compare import ALLOWANCES, FLOOR, GRADIENT_FLOOR, TOLERANCE, Allowance
from verl.selftest.splits import COLUMNS, DYNAMIC, MICRO, ORDER, OUTSIDE, PADDED
from verl.utils.json_text import write_json

_FIRST_COLUMNS = (REFERENCE, MICRO, DYNAMIC, PADDED, COLUMNS, ORDER, OUTSIDE)
_LAST_COLUMNS = (FIRST_STEP, LAWS)
_MOST_FAILURES = 40


@dataclass
class Report:
    """All findings of a run.

    Attributes:
        findings: in the order in which they were made.
        notes: what a reader must know besides, such as checks that could not run.
        seconds: how long it took.
    """

    findings: list[Finding]
    notes: list[str]
    seconds: float

    @property
    def failures(self) -> list[Finding]:
        """The findings that failed."""
        return [finding for finding in self.findings if not finding.ok]

    @property
    def ok(self) -> bool:
        """Whether every check passed, and there was one."""
        return bool(self.findings) and not self.failures

    def checks(self) -> list[str]:
        """The columns, in order."""
        seen = dict.fromkeys(finding.check for finding in self.findings)
        known = (*_FIRST_COLUMNS, *_LAST_COLUMNS)
        ranks = sorted(check for check in seen if check not in known)
        return [check for check in (*_FIRST_COLUMNS, *ranks, *_LAST_COLUMNS) if check in seen]

    def table(self) -> str:
        """The table: largest deviation in a cell, ``FAIL`` behind one that is too large, ``.`` where none applies."""
        cells: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            cells.setdefault((finding.row, finding.check), []).append(finding)
        rows, checks = list(dict.fromkeys(finding.row for finding in self.findings)), self.checks()
        lines = [["", *checks]]
        lines += [[row, *(_cell(cells.get((row, check), ())) for check in checks)] for row in rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(checks) + 1)]
        return "\n".join(
            "  ".join(
                text.ljust(width) if i == 0 else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def text(self) -> str:
        """The table, the failures in words, and the rules that were applied."""
        parts = [self.table()]
        if self.failures:
            shown = [describe(finding) for finding in self.failures[:_MOST_FAILURES]]
            more = len(self.failures) - len(shown)
            parts.append("\n".join(["failures:", *shown, *([f"  ... and {more} more"] if more else [])]))
        rules = [
            f"Cells: largest deviation from the whole batch on one process, relative. Allowed: {TOLERANCE:g}; numbers",
            f"below {FLOOR:g} are compared as if they were {FLOOR:g}, gradients of parameters as if they had at least "
            f"{GRADIENT_FLOOR:g} of",
            "the whole gradient's norm; the log ratio of the first step must be exactly 0.",
            *(f"Exception: {_allowance(a)}" for a in ALLOWANCES if any(_concerns(a, f) for f in self.findings)),
            *(f"Note: {note}" for note in self.notes),
        ]
        parts.append("\n".join(rules))
        verdict = "passed" if self.ok else f"FAILED: {len(self.failures)} of"
        parts.append(f"{verdict} {len(self.findings)} comparisons in {self.seconds:.0f} s")
        return "\n\n".join(parts)

    def write_json(self, path: Path) -> None:
        """Write every finding, for programs."""
        rows = [
            {
                "row": f.row,
                "check": f.check,
                "case": f.label,
                "ok": f.ok,
                "quantity": f.deviation.quantity if f.deviation else None,
                # JSON has no nan
                "deviation": f.deviation.value if f.deviation and math.isfinite(f.deviation.value) else None,
                "tolerance": f.deviation.tolerance if f.deviation and math.isfinite(f.deviation.tolerance) else None,
                "error": f.error,
            }
            for f in self.findings
        ]
        document = {"ok": self.ok, "seconds": round(self.seconds, 1), "notes": self.notes, "findings": rows}
        write_json(path, document)


def describe(finding: Finding) -> str:
    """A failure in one line."""
    case = f" ({finding.label})" if finding.label else ""
    if finding.deviation is None:
        what = finding.error
    else:
        d = finding.deviation
        what = f"{d.quantity} is off by {d.value:.1e}, allowed {d.tolerance:.0e}"
    return f"  {finding.row}, {finding.check}{case}: {what}"


def _cell(findings: Iterable[Finding]) -> str:
    items = list(findings)
    if not items:
        return "."
    if any(f.deviation is None for f in items):
        return "ERROR"
    largest = max((f for f in items if f.deviation), key=lambda f: f.deviation.excess if f.deviation else 0.0)
    assert largest.deviation is not None
    number = f"{largest.deviation.value:.1e}" if largest.deviation.value else "0"
    return number if all(f.ok for f in items) else f"{number} FAIL"


def _concerns(allowance: Allowance, finding: Finding) -> bool:
    return fnmatch.fnmatchcase(finding.row, allowance.row) and fnmatch.fnmatchcase(finding.check, allowance.check)


def _allowance(allowance: Allowance) -> str:
    limit = "not compared" if math.isinf(allowance.tolerance) else f"allowed {allowance.tolerance:g}"
    return f"{allowance.quantity} of {allowance.row} in {allowance.check}: {limit}, because {allowance.why}"
