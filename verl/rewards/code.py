r"""Programs: the last code block of the response against tests, run in a sandbox.

The reference (a mapping, or its JSON text) is one of

* ``{"inputs": [...], "outputs": [...]}``: each input goes to the program's standard input, and what it prints must be
  the output, compared word by word (numbers with a fraction to a relative 1e-6);
* ``{"inputs": [...], "outputs": [...], "fn_name": "f"}``: ``f`` (or ``Solution().f``) is called with each input, a list
  of arguments or one JSON value per line, and its value must equal the output;
* ``{"assert_case": ["assert f(1) == 2", ...]}``, or such a list: each must hold after the program ran;
* ``{"test": "def check(candidate): ...", "entry_point": "f"}``: ``check(f)`` must not raise.

Expected values never enter the sandbox, except where the reference itself is code.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError, DataError
from verl.rewards.references import is_missing, plain, reads_reference, required, shown
from verl.rewards.sandbox.local import LocalSandbox
from verl.rewards.sandbox.pool import shared_pool
from verl.rewards.sandbox.remote import RemoteSandbox
from verl.rewards.sandbox.spec import Isolation, Limits, ProgramResult, Status

_FENCE = "```"
_TAG = re.compile(r"[ \t]*+([A-Za-z0-9_+#-]*)")
_LANGUAGES = {"": "python", "py": "python", "python3": "python", "c++": "cpp", "cc": "cpp", "cxx": "cpp"}
_COMPILERS = {
    "c": ("main.c", ["gcc", "-O2", "-o", "main", "main.c", "-lm"]),
    "cpp": ("main.cpp", ["g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"]),
}
_MODULE = """
import json, sys, types
call = json.loads(sys.stdin.readline())
module = sys.modules["solution"] = types.ModuleType("solution")
exec(compile({code}, "solution.py", "exec"), vars(module))
"""
_CALL = (
    _MODULE
    + """
function = getattr(module, call["name"], None) or getattr(module.Solution(), call["name"])
print("\\n" + call["mark"] + json.dumps(function(*call["arguments"])))
"""
)
_ASSERT = (
    _MODULE
    + """
exec(compile(call["test"], "test.py", "exec"), vars(module))
print("\\n" + call["mark"] + "true")
"""
)

Run = Callable[[str, str], ProgramResult]
"""Code and input -> how it ended."""


@dataclass(frozen=True)
class Check:
    """One test: a program around the policy's code, its input, and whether the output is right."""

    template: str | None
    stdin: str
    right: Callable[[str], bool]

    def program(self, code: str) -> str:
        """The source that is run."""
        return code if self.template is None else self.template.replace("{code}", repr(code))


def extract_code(text: str) -> tuple[str, str] | None:
    """The last fenced code block and its language (``python`` if it names none); ``None`` without a block."""
    found = None
    place = text.find(_FENCE)
    while place >= 0:
        line_end = text.find("\n", place)
        end = text.find(_FENCE, line_end + 1) if line_end >= 0 else -1
        if end < 0:
            break
        found = (place, line_end + 1, end)
        place = text.find(_FENCE, end + len(_FENCE))
    if found is None:
        return None
    begin, body, end = found
    match = _TAG.match(text, begin + len(_FENCE))
    tag = match.group(1).lower() if match else ""
    return text[body:end].removesuffix("\n"), _LANGUAGES.get(tag, tag)


def checks_of(ground_truth: Any, *_: Any, **__: Any) -> list[Check]:
    """The tests that a reference describes.

    Raises:
        DataError: it is missing, or none of the known forms.
    """
    truth = required(ground_truth)
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            truth = {"assert_case": [truth]}
    if isinstance(truth, list | tuple):
        truth = {"assert_case": list(truth)}
    if isinstance(truth, Mapping):
        tests = plain(truth.get("assert_case"))
        if isinstance(tests, str):
            tests = [tests]
        if isinstance(tests, list | tuple) and tests:
            return [_assertion(str(required(test, f"assert_case[{place}]"))) for place, test in enumerate(tests)]
        if not is_missing(truth.get("test")):
            call = f"\ncheck({truth['entry_point']})" if truth.get("entry_point") else ""
            return [_assertion(f"{truth['test']}{call}")]
        inputs, outputs = plain(truth.get("inputs")), plain(truth.get("outputs"))
        both = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
        if both and len(inputs) == len(outputs) > 0:
            name = truth.get("fn_name")
            return [_check(name, *pair, place) for place, pair in enumerate(zip(inputs, outputs, strict=True))]
    raise DataError(
        f"the reference {str(ground_truth)[:200]!r} describes no tests; give inputs and outputs of equal number, "
        "assert_case, or test with entry_point"
    )


def _check(name: Any, given: Any, wanted: Any, place: int) -> Check:
    """One test of a reference with inputs and outputs.

    Raises:
        DataError: its input or output cannot be used.
    """
    if name:
        try:
            return _function(str(name), plain(given), plain(wanted))
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"inputs[{place}]={shown(given)}: arguments of {name} are a list, or one JSON value a line ({error})"
            ) from None
    for what, value in (("inputs", given), ("outputs", wanted)):
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise DataError(f"{what}[{place}]={value!r} is missing; give text, or an empty one")
    return _stdin(plain(given), plain(wanted))


def _stdin(given: Any, wanted: Any) -> Check:
    source = "\n".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    expected = "\n".join(map(str, wanted)) if isinstance(wanted, list | tuple) else str(wanted)
    return Check(None, source, lambda printed: same_words(printed, expected))


def _function(name: str, given: Any, wanted: Any) -> Check:
    arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    if isinstance(wanted, str):
        with suppress(ValueError):  # a text is a value too
            wanted = json.loads(wanted)
    mark = secrets.token_hex(8)
    call = json.dumps({"name": name, "arguments": list(arguments), "mark": mark})

    def right(printed: str) -> bool:
        value = _marked(printed, mark)
        # some data sets wrap every expected value into a list of one
        try:
            return value is not None and any(_same_value(value[0], expected) for expected in _candidates(wanted))
        except RecursionError:
            return False

    return Check(_CALL, call + "\n", right)


def _candidates(wanted: Any) -> Iterable[Any]:
    yield wanted
    if isinstance(wanted, list) and len(wanted) == 1:
        yield wanted[0]


def _assertion(test: str) -> Check:
    mark = secrets.token_hex(8)
    call = json.dumps({"test": test, "mark": mark})
    return Check(_ASSERT, call + "\n", lambda printed: _marked(printed, mark) is not None)


def _marked(printed: str, mark: str) -> list[Any] | None:
    for line in reversed(printed.split("\n")):
        if line.startswith(mark):
            try:
                return [json.loads(line[len(mark) :])]
            except (ValueError, RecursionError):  # the program wrote it, not the function's value
                return None
    return None


def same_words(printed: str, expected: str) -> bool:
    """Whether two texts have the same words; numbers with a fraction may differ by a relative 1e-6."""
    left, right = printed.split(), expected.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", expected):
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        both = isinstance(value, int | float) and isinstance(expected, int | float)
        try:
            return both and math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
        except OverflowError:  # a whole number beyond all floats
            return False
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_value(value[k], expected[k]) for k in value)
    return bool(value == expected)


@reads_reference(checks_of)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    continuous: bool = False,
    url: str | None = None,
    max_concurrent: int | None = None,
    memory_limit_mb: int = 1024,
    timeout_s: float = 10.0,
    isolation: str = "auto",
) -> dict[str, Any]:
    """Run the response's last code block against the reference's tests.

    Args:
        solution_str: the response's text.
        ground_truth: the tests, see the module.
        extra_info: ``language``, where the block does not name it. ``python``, ``c`` and ``cpp`` run here, and whatever
            the remote sandbox knows there.
        continuous: the score is the share of tests passed; otherwise 1.0 if all pass, and the first failure ends it.
        url: of a remote sandbox; ``None`` = on this machine.
        max_concurrent: programs at the same time: one per CPU here, 64 remotely, unless given.
        memory_limit_mb: per program, in MiB.
        timeout_s: CPU seconds per test; the wall-clock limit is twice that.
        isolation: of the local sandbox, see :class:`~verl.rewards.sandbox.local.LocalSandbox`.

    Returns:
        ``score``, ``acc`` (all passed), ``code_status`` (``passed``, ``wrong``, ``error``, ``timeout``, ``memory``,
        ``output``, ``compile``, ``no_code``), the status of the first test that failed.

    Raises:
        ConfigError: ``extra_info`` asks for a language that cannot be run on this machine.
        DataError: the reference describes no tests.
        RewardError: the sandbox failed; that says nothing about the program.
    """
    checks = checks_of(ground_truth)
    found = extract_code(solution_str)
    if found is None:
        return {"score": 0.0, "acc": False, "code_status": "no_code"}
    code, language = found
    language = str((extra_info or {}).get("language") or language)
    limits = Limits(cpu_s=timeout_s, wall_s=2 * timeout_s, memory_mb=memory_limit_mb)
    if url is not None:
        remote = RemoteSandbox(url, limits, max_concurrent=max_concurrent or 64)
        run: Run = lambda program, stdin: remote.run(program, language=language, stdin=stdin)  # noqa: E731
        return _verdict(checks, code, run, continuous)
    wanted = (extra_info or {}).get("language")
    if language != "python" and language not in _COMPILERS:
        return {"score": 0.0, "acc": False, "code_status": "no_code"}
    with shared_pool(isolation, max_concurrent).lend() as box:
        if language == "python":
            return _verdict(checks, code, lambda program, stdin: _python(box, program, stdin, limits), continuous)
        if problem := _cannot_compile(box, language):
            if wanted:  # the task's choice, which no answer can meet here
                raise ConfigError(problem)
            return {"score": 0.0, "acc": False, "code_status": "no_code"}  # the policy's choice
        if not _compiled(box, code, language, limits):
            return {"score": 0.0, "acc": False, "code_status": "compile"}
        run = lambda _, stdin: box.run(["./main"], stdin=stdin, limits=limits, use_kept=True)  # noqa: E731
        return _verdict(checks, code, run, continuous)


def _python(box: LocalSandbox, program: str, stdin: str, limits: Limits) -> ProgramResult:
    return box.run([sys.executable, "-I", "main.py"], files={"main.py": program}, stdin=stdin, limits=limits)


def _cannot_compile(box: LocalSandbox, language: str) -> str:
    """Why programs in a language cannot be run on this machine; empty if they can."""
    compiler = _COMPILERS[language][1][0]
    remedy = "set reward.sandbox.url to a remote sandbox that runs it"
    if box.isolation is Isolation.GUARD:
        return f"a row asks for a program in {language}, and only Python can be run here by isolation=guard; {remedy}"
    if shutil.which(compiler) is None:
        return f"a row asks for a program in {language}, and this machine has no {compiler}; install it, or {remedy}"
    return ""


def _compiled(box: LocalSandbox, code: str, language: str, limits: Limits) -> bool:
    name, command = _COMPILERS[language]
    return box.run(command, files={name: code}, limits=limits, keep=["main"]).ok


def _verdict(checks: Sequence[Check], code: str, run: Run, continuous: bool) -> dict[str, Any]:
    passed, first_failure = 0, ""
    for check in checks:
        result = run(check.program(code), check.stdin)
        right = result.ok and check.right(result.stdout)
        passed += right
        if not right:
            first_failure = first_failure or ("wrong" if result.status is Status.OK else str(result.status))
            if not continuous:
                break
    rate = passed / len(checks)
    everything = passed == len(checks)
    return {
        "score": rate if continuous else float(everything),
        "acc": everything,
        "code_status": first_failure or "passed",
    }
