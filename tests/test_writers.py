"""Every JSON that the library writes goes through one writer, and every print through the guarded streams."""

from __future__ import annotations

import ast
from pathlib import Path

import verl

ROOT = Path(verl.__file__).parent

#: modules that call ``json.dumps`` themselves, and why
OWN = {
    "utils/json_text.py": "is the writer",
    "agent_loop/templating.py": "escapes text as a template does",
    "tools/parsers/harmony.py": "part of a prompt, as the model's format has it",
    "checkpoint/final_model.py": "compares with what JSON gives back",
    "rewards/code.py": "arguments of a program, which Python reads again with NaN and infinities",
    "rewards/sandbox/launcher.py": "protocol of the sandbox, both ends are ours",
    "rewards/reasoning_gym.py": "a key of a cache",
    "rewards/sandbox/local.py": "protocol of the sandbox, both ends are ours",
    "selftest/certificate/subject.py": "a model's own config.json with one value changed",
    "selftest/certificate/tokens.py": "rows of plain text for a test",
    "selftest/certificate/faults.py": "a tokenizer's own settings with one value changed",
    "utils/run_lock.py": "the owner of a lock, which our own reader reads",
    "workers/rollout/serving/openai_api.py": "answers that are plain already, and the writer for others",
    "workers/rollout/sglang/lora.py": "protocol between our processes",
    "workers/rollout/sglang/process.py": "protocol between our processes",
    "workers/rollout/sglang/scheduler.py": "protocol between our processes",
    "workers/rollout/sglang/arguments.py": "a server's argument",
    "workers/sharding_manager/transports/disk.py": "an index that our own reader reads",
    "workers/sharding_manager/transports/base.py": "protocol between our processes",
}


def calls(tree: ast.AST, module: str, names: tuple[str, ...]) -> bool:
    """Whether a module calls ``module.name``."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == module
        for node in ast.walk(tree)
    )


def test_json_has_one_writer() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if calls(ast.parse(path.read_text("utf-8")), "json", ("dumps", "dump"))
    }
    assert found <= OWN.keys(), f"use verl.utils.json_text in {sorted(found - OWN.keys())}"


def test_the_library_does_not_print() -> None:
    """What is printed passes the guarded streams of a program, or the log."""
    found = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
        )
    ]
    assert found == []
