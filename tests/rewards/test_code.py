"""Programs against tests: forms of references, comparison of outputs, local and remote sandboxes."""

from __future__ import annotations

import json
import shutil
import threading
import time
from typing import Any

import pytest

from tests.rewards.servers import run_for_real, serve
from verl.errors import ConfigError, DataError, RewardError
from verl.rewards import code
from verl.rewards.default import default_compute_score
from verl.rewards.http import post_json
from verl.rewards.sandbox.remote import RemoteSandbox
from verl.rewards.sandbox.spec import Limits, Status

SQUARES = {"inputs": ["3\n", "5\n", "0\n"], "outputs": ["9\n", "25", "0"]}


def block(source: str, language: str = "python") -> str:
    return f"Here you are:\n```{language}\n{source}\n```\nDone."


def test_last_block_counts() -> None:
    text = block("first") + block("second", "py") + "```"
    assert code.extract_code(text) == ("second", "python")
    assert code.extract_code("```C++\nint main() {}\n```") == ("int main() {}", "cpp")
    assert code.extract_code("```\nx = 1\n```") == ("x = 1", "python")
    assert code.extract_code("no block") is None


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 3", True),
        ("  a\n\n", "a", True),
        ("a", "A", False),
        ("1 2", "1 2 3", False),
        ("0.3333333", "0.33333333", True),
        ("0.334", "0.333", False),
        ("1", "1.0", True),
        ("1.0", "1", False),  # a whole number is wanted as it is
        ("1e3", "1000.0", True),
        ("nan", "1.0", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_by_word(printed: str, expected: str, same: bool) -> None:
    assert code.same_words(printed, expected) is same


def test_standard_input_and_output() -> None:
    right = block("print(int(input()) ** 2)")
    assert code.compute_score(right, SQUARES) == {"score": 1.0, "acc": True, "code_status": "passed"}
    assert code.compute_score(right, json.dumps(SQUARES))["score"] == 1.0
    tripled = block("print(int(input()) * 3)")  # right for 3 and for 0
    assert code.compute_score(tripled, SQUARES) == {"score": 0.0, "acc": False, "code_status": "wrong"}
    partly = code.compute_score(tripled, SQUARES, continuous=True)
    assert partly["score"] == pytest.approx(2 / 3)
    assert partly["acc"] is False


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("print(", "error"),
        ("raise ValueError", "error"),
        ("while True: pass", "timeout"),
        ("x = [0] * 10**9", "memory"),
        ("print('x' * 2**21)", "output"),
    ],
)
def test_what_went_wrong(source: str, status: str) -> None:
    result = code.compute_score(block(source), SQUARES, timeout_s=1.0, memory_limit_mb=400)
    assert result == {"score": 0.0, "acc": False, "code_status": status}


def test_functions() -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [[3], 7]}
    assert code.compute_score(block("def add(a, b):\n    print('noise')\n    return a + b"), truth)["score"] == 1.0
    solution = (
        "from __future__ import annotations\nclass Solution:\n    def add(self, a: int, b: int):\n        return a + b"
    )
    assert code.compute_score(block(solution), truth)["score"] == 1.0
    assert code.compute_score(block("def add(a, b): return a - b"), truth)["code_status"] == "wrong"
    assert code.compute_score(block("def sub(a, b): return a - b"), truth)["code_status"] == "error"
    nested = {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [{"a": [1.0, None], "b": True}]}
    assert code.compute_score(block("def f(x): return {'a': [1.0000000001, None], 'b': True}"), nested)["score"] == 1.0
    assert code.compute_score(block("def f(x): return {'a': [1.0, None], 'b': 1}"), nested)["score"] == 0.0


def test_only_a_line_feed_separates_arguments() -> None:
    truth = {"fn_name": "add", "inputs": ['"a\u2028b"\r\n"c\x85d"'], "outputs": ["a\u2028bc\x85d"]}
    assert code.compute_score(block("def add(a, b): return a + b"), truth)["score"] == 1.0


def test_assertions() -> None:
    good, bad = block("def f(x): return x + 1"), block("def f(x): return 2")
    for truth in ({"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]}, ["assert f(1) == 2", "assert f(2) == 3"]):
        assert code.compute_score(good, truth)["score"] == 1.0
        assert code.compute_score(bad, truth, continuous=True)["score"] == 0.5
    check = {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}
    assert code.compute_score(good, check)["score"] == 1.0
    assert code.compute_score(block("def f(x): return x"), check)["score"] == 0.0
    # leaving before the tests is no pass
    assert code.compute_score(block("import os\nos._exit(0)"), check)["code_status"] == "wrong"
    assert code.compute_score(block("raise SystemExit"), check)["code_status"] == "wrong"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_languages() -> None:
    source = "#include <iostream>\nint main() { long a; std::cin >> a; std::cout << a * a; }"
    assert code.compute_score(block(source, "cpp"), SQUARES)["score"] == 1.0
    assert code.compute_score(block(source, ""), SQUARES, {"language": "cpp"})["score"] == 1.0
    assert code.compute_score(block("int main() { return }", "cpp"), SQUARES)["code_status"] == "compile"


def test_no_program() -> None:
    assert code.compute_score("I cannot.", SQUARES)["code_status"] == "no_code"
    assert code.compute_score(block("puts 1", "ruby"), SQUARES)["code_status"] == "no_code"


@pytest.mark.parametrize(
    "truth",
    [{"a": 1}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, {"assert_case": []}, 3],
)
def test_references_without_tests(truth: Any) -> None:
    with pytest.raises(DataError, match="describes no tests"):
        code.compute_score(block("x"), truth)


# --- a remote sandbox -------------------------------------------------------------------------------------------------


def test_remote_sandbox() -> None:
    with serve("/run_code", run_for_real) as service:
        url = f"{service.url}/run_code"
        right = default_compute_score("codecontests", block("print(int(input()) ** 2)"), SQUARES, None, url)
        assert right == {"score": 1.0, "acc": True, "code_status": "passed"}
        assert service.requests[0] == {
            "code": "print(int(input()) ** 2)",
            "language": "python",
            "stdin": "3\n",
            "compile_timeout": 20.0,
            "run_timeout": 10.0,
            "memory_limit_MB": 1024,
        }
        functions = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
        assert code.compute_score(block("def add(a, b): return a + b"), functions, url=url)["score"] == 1.0
        slow = code.compute_score(block("while True: pass"), SQUARES, url=url, timeout_s=0.5)
        assert slow["code_status"] == "timeout"
        assert code.compute_score(block("print('9')"), SQUARES, url=url, continuous=True)["score"] == pytest.approx(
            1 / 3
        )


def test_remote_compile_error_is_the_programs_fault() -> None:
    compile_result = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "expected ;"}
    reply = {"status": "Failed", "message": "", "compile_result": compile_result, "run_result": None}
    with serve("/run_code", lambda *_: (200, reply)) as service:
        result = RemoteSandbox(f"{service.url}/run_code").run("int main() {", language="cpp")
        assert (result.status, result.exit_code, result.stderr) == (Status.ERROR, 1, "expected ;")


def test_remote_failures_are_errors_not_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.rewards.http._LONGEST_WAIT_S", 0.01)
    sick = {"status": "SandboxError", "message": "no container left", "compile_result": None, "run_result": None}
    with serve("/run_code", lambda *_: (200, sick)) as service, pytest.raises(RewardError, match="no container left"):
        code.compute_score(block("print(1)"), SQUARES, url=f"{service.url}/run_code")
    with serve("/run_code", lambda *_: (503, {})) as service:
        with pytest.raises(RewardError, match="no answer in 4 tries; the last: HTTP 503"):
            code.compute_score(block("print(1)"), SQUARES, url=f"{service.url}/run_code")
        assert len(service.requests) == 4
    with pytest.raises(RewardError, match="no answer in 4 tries"):
        code.compute_score(block("print(1)"), SQUARES, url="http://127.0.0.1:9/run_code")


def test_remote_sandbox_comes_back_after_a_while() -> None:
    def flaky(request: dict[str, Any], number: int) -> Any:
        return (429, {}, {"Retry-After": "0.01"}) if number < 2 else run_for_real(request, number)

    with serve("/run_code", flaky) as service:
        result = RemoteSandbox(f"{service.url}/run_code", Limits(cpu_s=5)).run("print(4)")
        assert (result.ok, result.stdout) == (True, "4\n")
        assert len(service.requests) == 3


def test_remote_concurrency_is_limited() -> None:
    ok = {"status": "Success", "message": "", "run_result": {"status": "Finished", "return_code": 0, "stdout": "1"}}

    def slowly(*_: Any) -> Any:
        time.sleep(0.05)
        return 200, ok

    with serve("/run_code", slowly) as service:
        box = RemoteSandbox(f"{service.url}/run_code", max_concurrent=2)
        threads = [threading.Thread(target=box.run, args=("print(1)",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(service.requests) == 8
        assert service.most_at_once == 2


def test_refused_requests_are_not_repeated() -> None:
    with serve("/x", lambda *_: (400, {"error": "bad field"})) as service:
        with pytest.raises(RewardError, match="refuses the request: HTTP 400.*bad field"):
            post_json(f"{service.url}/x", {})
        assert len(service.requests) == 1


def test_isolation_is_checked_at_start() -> None:
    from tests.rewards.batches import TOKENIZER
    from verl.config import PPOConfig, RewardConfig
    from verl.config.reward import SandboxConfig
    from verl.rewards import load_reward_manager

    built = load_reward_manager(PPOConfig(reward=RewardConfig(sandbox=SandboxConfig(memory_limit_mb=300))), TOKENIZER)
    assert built.compute_score.kwargs["sandbox"]["memory_limit_mb"] == 300
    with pytest.raises(ConfigError, match=r"reward\.sandbox\.isolation='jail'"):
        load_reward_manager(PPOConfig(reward=RewardConfig(sandbox=SandboxConfig(isolation="jail"))), TOKENIZER)


@pytest.mark.parametrize(
    "value",
    [
        "print('\\n' + call['mark'] + '[' * 100_000)",
        "print('\\n' + call['mark'] + '[' * 900 + ']' * 900)",
        "print('\\n' + call['mark'] + '1' * 5000)",
        "print('\\n' + call['mark'] + 'NaN')",
        "print('\\n' + call['mark'] + '\\\\ud83d')",
    ],
)
def test_values_that_a_program_makes_up_are_wrong_and_never_an_error(value: str) -> None:
    source = (
        f"import sys\ncall = sys._getframe(1).f_globals['call']\n{value}\nsys.stdout.flush()\nimport os\nos._exit(0)"
    )
    truth = {"fn_name": "f", "inputs": [[1]], "outputs": [1.5]}
    assert code.compute_score(block(source), truth) == {"score": 0.0, "acc": False, "code_status": "wrong"}


def test_numbers_beyond_all_floats_are_compared() -> None:
    truth = {"fn_name": "f", "inputs": [[1]], "outputs": [1.5]}
    assert code.compute_score(block("def f(x): return 10 ** 4000"), truth)["code_status"] == "wrong"
    assert code.compute_score(block("def f(x): return '\ud83d'"), truth)["code_status"] in ("wrong", "error")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_compiled_programs_that_spoil_their_folder_or_cannot_start() -> None:
    spoil = (
        "#include <stdio.h>\n#include <sys/stat.h>\n#include <unistd.h>\n"
        'int main() { int a; scanf("%d", &a); printf("%d", a * a); unlink("main"); chmod(".", 0); return 0; }'
    )
    assert code.compute_score(block(spoil, "c"), SQUARES) == {"score": 1.0, "acc": True, "code_status": "passed"}
    large = "char a[3L << 30]; int main() { return a[1]; }"
    verdict = code.compute_score(block(large, "c"), SQUARES)
    assert (verdict["score"], verdict["code_status"]) in ((0.0, "error"), (0.0, "compile"), (0.0, "memory"))


def test_languages_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    text = block("int main() {}", "cpp")
    # the policy's choice is its own fault; the task's is one of set-up, and no score
    assert code.compute_score(text, SQUARES) == {"score": 0.0, "acc": False, "code_status": "no_code"}
    with pytest.raises(ConfigError, match=r"a program in cpp, and this machine has no g\+\+"):
        code.compute_score(text, SQUARES, {"language": "cpp"})
