"""``verl selftest``: do numbers depend on how work is cut; and with ``--model``, do all parts agree about a model?"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from verl.errors import ConfigError, VerlError
from verl.utils.fs import ensure_writable_dir, write_error
from verl.utils.output import guard_streams, write_result

_DESCRIPTION = """\
Without --model: run every registered advantage estimator and loss through the training engine on a tiny model, cut in
many ways, and compare loss, gradient and metrics.

With --model DIR: the certificate of that model. Trainer, rollout engine and plain Transformers compute the same
log-probs and gradients with it, samples end where they should, weights arrive after an update, and what is saved and
merged is what was trained.

exit code: 0 all is well, 1 a check failed, 2 it could not run, or the engines refuse the model

example:
  verl selftest --plugin my_losses.py --only 'loss *'
  verl selftest --model ~/models/tiny --json certificate.json
  verl selftest --model Qwen/Qwen3-8B --layers 4 --rollout vllm --lora
"""

#: options of one mode only, and their defaults
_CERTIFICATE = {
    "engine": None,
    "rollout": None,
    "lora": False,
    "layers": None,
    "length": None,
    "trust_remote_code": False,
    "no_hashes": False,
}
_INVARIANCE = {"full": False, "plugin": []}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        prog="verl selftest", formatter_class=argparse.RawDescriptionHelpFormatter, description=_DESCRIPTION
    )
    options.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options.add_argument(
        "--ranks",
        type=_counts,
        metavar="N,N",
        help="processes to compare with one, 0 for none (default: 2; with --full: 2,4). With --model they share "
        "sequences, and only one number is used",
    )
    options.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="rows to check, for example 'loss *'; with --model names of checks",
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write every comparison to a file")
    options.add_argument(
        "--plant", action="append", default=[], metavar="BUG", help="switch a known bug on, to see it found"
    )
    options.add_argument(
        "--list", action="store_true", help="list the rows or checks, and the bugs that can be planted, and stop"
    )
    cuts = options.add_argument_group("without --model")
    cuts.add_argument("--full", action="store_true", help="all cuts, aggregations and rank counts (minutes)")
    cuts.add_argument(
        "--plugin", action="append", default=[], metavar="MODULE", help="module or .py file that registers names"
    )
    model = options.add_argument_group("the certificate of a model")
    model.add_argument("--model", metavar="DIR", help="model directory, or hub name")
    model.add_argument("--engine", choices=("fsdp", "megatron"), help="training engine (default: fsdp)")
    model.add_argument("--rollout", choices=("hf", "vllm", "sglang"), help="rollout engine (default: hf)")
    model.add_argument("--lora", action="store_true", help="train low-rank adapters")
    model.add_argument(
        "--layers", type=int, metavar="N", help="certify a copy of the first N layers, with their sizes and weights"
    )
    model.add_argument("--length", type=int, metavar="N", help="most tokens of a row (default: 4608)")
    model.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    model.add_argument("--no-hashes", action="store_true", help="leave digests of the model's files out of the JSON")
    return options


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if any(not 0 <= count <= 8 for count in counts):
        raise argparse.ArgumentTypeError("give numbers of ranks from 1 to 8, or 0")
    return tuple(count for count in counts if count > 1)


def _check_mode(options: argparse.Namespace) -> None:
    """Refuse options of the other mode.

    Raises:
        ConfigError: naming the option.
    """
    other = _INVARIANCE if options.model is not None else _CERTIFICATE
    for name, absent in other.items():
        if getattr(options, name) != absent:
            flag = f"--{name.replace('_', '-')}"
            if options.model is None:
                raise ConfigError(f"{flag} belongs to the certificate of a model; give --model DIR with it")
            raise ConfigError(f"{flag} belongs to the self-test of estimators and losses; leave it out with --model")
    if options.model is not None and options.ranks is not None and len(options.ranks) > 1:
        raise ConfigError(f"--ranks={','.join(map(str, options.ranks))}: with --model give one number")


def main() -> int:
    """Run the command line; 0 if all is well, 1 if a check failed, 2 if it could not run."""
    guard_streams()
    options = parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        _check_mode(options)
        if options.json and not options.list:  # before the checks, which take minutes
            ensure_writable_dir(options.json.expanduser().absolute().parent, purpose="directory of --json")
        if options.list:
            write_result(_listing(options))
            return 0
        return _certify(options) if options.model is not None else _run(options)
    except VerlError as error:
        sys.stderr.write(f"verl selftest: {error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    from verl.selftest.suite import run_selftest

    report = run_selftest(
        full=options.full,
        ranks=options.ranks,
        device=options.device,
        plugins=options.plugin,
        only=options.only,
        bugs=options.plant,
    )
    if not report.findings:
        sys.stderr.write(f"verl selftest: no row matches {', '.join(options.only)}; --list shows them\n")
        return 2
    write_result(report.text() + "\n")
    if options.json:
        _write(report.write_json, options.json)
    return 0 if report.ok else 1


def _certify(options: argparse.Namespace) -> int:
    from verl.selftest.certificate import certify
    from verl.selftest.certificate.suite import LONGEST

    certificate = certify(
        options.model,
        engine=options.engine or "fsdp",
        rollout=options.rollout or "hf",
        lora=options.lora,
        layers=options.layers,
        longest=options.length or LONGEST,
        device=options.device,
        ranks=2 if options.ranks is None else max(options.ranks, default=0),
        only=options.only,
        faults=options.plant,
        trust_remote_code=options.trust_remote_code,
    )
    if certificate.refusal:
        sys.stderr.write(f"verl selftest: refused at start-up: {certificate.refusal}\n")
    write_result(certificate.text() + "\n")
    if options.json:
        _write(partial(certificate.write_json, hashes=not options.no_hashes), options.json)
    return certificate.exit_code


def _write(write: Callable[[Path], None], path: Path) -> None:
    try:
        write(path)
    except OSError as error:
        raise write_error(error, path, "--json") from error


def _listing(options: argparse.Namespace) -> str:
    if options.model is not None:
        from verl.selftest.certificate import CHECKS
        from verl.selftest.certificate.faults import FAULTS

        checks = [f"  {name:<24}{check.claim}" for name, check in CHECKS.items()]
        faults = [f"  {name:<24}{fault.what}" for name, fault in FAULTS.items()]
        return "\n".join(["checks:", *checks, "bugs to plant:", *faults]) + "\n"
    from verl.selftest.entries import enumerate_entries
    from verl.selftest.planted_bugs import BUGS
    from verl.utils.dynamic_import import load_module

    for plugin in options.plugin:
        load_module(plugin)
    rows = dict.fromkeys(entry.row for entry in enumerate_entries(options.full, options.only))
    bugs = [f"  {name:<22}{_first_line(install)}" for name, install in BUGS.items()]
    return "\n".join(["rows:", *(f"  {row}" for row in rows), "bugs to plant:", *bugs]) + "\n"


def _first_line(function: object) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
