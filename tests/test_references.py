"""Files and objects that documentation and docstrings name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FOLDERS = "verl|tests|tools|benchmarks|examples|" + "|".join(
    sorted(path.name for path in (ROOT / "verl").iterdir() if (path / "__init__.py").is_file())
)
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w/]+(?:\.py)?)`")
_OBJECT = re.compile(r":(?:mod|class|func|meth|data|attr|exc):`~?(verl(?:\.\w+)+)`")
#: names of metrics, which look like paths
_METRICS = ("checkpoint/rollbacks", "checkpoint/failed_saves")


def pages() -> list[Path]:
    return [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def missing_paths(page: Path) -> Iterator[str]:
    for number, line in enumerate(page.read_text("utf-8").split("\n"), 1):
        for name in _PATH.findall(line):
            if name not in _METRICS and not any((base / name).exists() for base in (ROOT, ROOT / "verl")):
                yield f"{page.relative_to(ROOT)}:{number} {name}"


def missing_objects(module: Path) -> Iterator[str]:
    for number, line in enumerate(module.read_text("utf-8").split("\n"), 1):
        for name in _OBJECT.findall(line):
            parts = name.split(".")
            for count in range(len(parts), 0, -1):
                place = ROOT.joinpath(*parts[:count])
                files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
                if files:
                    rest = parts[count : count + 1]
                    if rest and not re.search(rf"\b{rest[0]}\b", files[0].read_text("utf-8")):
                        yield f"{module.relative_to(ROOT)}:{number} {name}"
                    break
            else:
                yield f"{module.relative_to(ROOT)}:{number} {name}"


def test_documentation_names_files_that_exist() -> None:
    assert [name for page in pages() for name in missing_paths(page)] == []


def test_docstrings_name_objects_that_exist() -> None:
    modules = sorted((ROOT / "verl").rglob("*.py"))
    assert [name for module in modules for name in missing_objects(module)] == []
