"""Certify a tiny model of every family and store the results, from which ``make docs`` makes the table of families.

python tools/certify_families.py                         all families (about ten minutes on two idle cores)
python tools/certify_families.py qwen3 phi               some of them; the results of the others stay
python tools/certify_families.py --setup 'megatron, hf'  one pair of engines
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.selftest.certificate.families import DATA, SETUPS, certify_all, names
from verl.selftest.certificate.report import versions

_VERSIONS = ("torch", "transformers", "megatron-core")


def main() -> int:
    """Write the data file; 1 if a certificate failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to certify (default: all)")
    parser.add_argument("--setup", action="append", choices=list(SETUPS), help="engines (default: all)")
    options = parser.parse_args()
    wanted = options.families or names()
    if unknown := sorted(set(wanted) - set(names())):
        sys.stderr.write(f"{unknown[0]!r} is not in the table of families: {', '.join(names())}\n")
        return 2
    logging.getLogger("verl").setLevel(logging.ERROR)
    kept = json.loads(DATA.read_text("utf-8"))["families"] if DATA.is_file() else {}
    families = {name: kept[name] for name in names() if name in kept}
    failed = False
    with tempfile.TemporaryDirectory(prefix="verl-families-") as root:
        for name, setup, result in certify_all(Path(root), wanted, options.setup or list(SETUPS)):
            families.setdefault(name, {})[setup] = result
            failed |= result["verdict"] == "failed"
            wrong = [check for check, verdict in result["checks"].items() if verdict == "failed"]
            sys.stdout.write(f"{name}, {setup}: {result['verdict']} {', '.join(wrong)} ({result['cpu_seconds']} s)\n")
            sys.stdout.flush()
            _write({name: {s: families[name][s] for s in SETUPS if s in families[name]} for name in sorted(families)})
    return int(failed)


def _write(families: dict[str, object]) -> None:
    used = {name: value for name, value in versions().items() if name in _VERSIONS}
    DATA.write_text(json.dumps({"versions": used, "families": families}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
