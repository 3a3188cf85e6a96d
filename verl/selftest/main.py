"""``verl selftest``: does this machine, with these plug-ins, compute the same numbers however the work is cut?"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from verl.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="verl selftest",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run every registered advantage estimator and loss through the training engine, cut in many ways,\n"
        "and compare loss, gradient and metrics. Exit code 1 if one differs.\n\n"
        "example:\n  verl selftest --plugin my_losses.py --only 'loss *'",
    )
    options.add_argument("--full", action="store_true", help="all cuts, aggregations and rank counts (minutes)")
    options.add_argument(
        "--plugin", action="append", default=[], metavar="MODULE", help="module or .py file that registers names"
    )
    options.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options.add_argument(
        "--ranks",
        type=_counts,
        metavar="N,N",
        help="data-parallel ranks to compare, 0 for none (default: 2; full: 2,4)",
    )
    options.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="rows to check, for example 'loss *'"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write every comparison to a file")
    options.add_argument(
        "--plant", action="append", default=[], metavar="BUG", help="switch a known bug on, to see it found"
    )
    options.add_argument("--list", action="store_true", help="list the rows and the bugs that can be planted, and stop")
    return options


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if any(not 0 <= count <= 8 for count in counts):
        raise argparse.ArgumentTypeError("give numbers of ranks from 1 to 8, or 0")
    return tuple(count for count in counts if count > 1)


def main() -> int:
    """Run the command line; 0 if all is well, 1 if a check failed, 2 if it could not run."""
    options = parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        if options.list:
            sys.stdout.write(_listing(options))
            return 0
        from verl.selftest.suite import run_selftest

        report = run_selftest(
            full=options.full,
            ranks=options.ranks,
            device=options.device,
            plugins=options.plugin,
            only=options.only,
            bugs=options.plant,
        )
    except ConfigError as error:
        sys.stderr.write(f"verl selftest: {error}\n")
        return 2
    if options.json:
        report.write_json(options.json)
    if not report.findings:
        sys.stderr.write(f"verl selftest: no row matches {', '.join(options.only)}; --list shows them\n")
        return 2
    sys.stdout.write(report.text() + "\n")
    return 0 if report.ok else 1


def _listing(options: argparse.Namespace) -> str:
    from verl.selftest.entries import enumerate_entries
    from verl.selftest.planted import BUGS
    from verl.utils.dynamic_import import load_module

    for plugin in options.plugin:
        load_module(plugin)
    rows = dict.fromkeys(entry.row for entry in enumerate_entries(options.full, options.only))
    bugs = [f"  {name:<22}{(install.__doc__ or '').strip()}" for name, install in BUGS.items()]
    return "\n".join(["rows:", *(f"  {row}" for row in rows), "bugs to plant:", *bugs]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
