"""The language check of `make check`, on literal texts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_language", repo_root / "tools" / "check_language.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        (
            "Use a rate, e.g. CODE or 1e-6, etc. and so on. Next.",
            ["Use a rate, e.g. CODE or 1e-6, etc. and so on.", "Next."],
        ),
        ("Version 3.11 works. 4 GiB are enough.", ["Version 3.11 works.", "4 GiB are enough."]),
        ("It runs (on a CPU). CODE ends it.", ["It runs (on a CPU).", "CODE ends it."]),
        ("First part; second part: third part", ["First part; second part: third part"]),
    ],
)
def test_sentences(check: ModuleType, text: str, expected: list[str]) -> None:
    assert check.sentences(text) == expected


def test_prose_leaves_out_code_tables_and_headings(check: ModuleType) -> None:
    page = (
        "# Title\n\nSee [the page](a.md#b) and `x.y. Z`.\nMore.\n\n```bash\nas far as\n```\n\n"
        "| a | b |\n|---|---|\n| as far as | d |\n\n- First item.\n- Second **item**.\n"
    )
    assert list(check.prose(page)) == [
        (3, "See the page and CODE. More."),
        (14, "First item."),
        (15, "Second item."),
    ]


def test_a_long_sentence_is_reported_with_its_line(check: ModuleType) -> None:
    long = " ".join(["word"] * 21) + "."
    (finding,) = check.check_page("a.md", f"Short.\n\n{long}\n")
    assert (finding.path, finding.line) == ("a.md", 3)
    assert finding.remedy.startswith("21 words a sentence")
    assert check.check_page("a.md", f"{long} Short.\n") == []  # the mean counts


def test_idioms_in_pages(check: ModuleType) -> None:
    page = "Fine.\n\nIt is used\nas\nfar as the run needs it. The weight hand-over ends.\n"
    first, second = check.check_page("a.md", page)
    assert (first.words, second.words) == ("as far as", "hand-over")
    assert str(second).endswith("'hand-over': write 'weight sync', or 'passes'")
    assert check.check_page("a.md", "Groups are told apart by CODE. A handover_key, `hand-over`.\n") == []


def test_idioms_in_docstrings_and_comments_and_not_in_code(check: ModuleType) -> None:
    source = (
        '"""Fine."""\nx = "as far as"\n\n\n'
        'def f():\n    """One.\n\n    What there is.\n    """\n    # goes\n    # on with it\n'
    )
    assert [(f.line, f.words.lower()) for f in check.check_code("a.py", source)] == [
        (8, "what there is"),
        (10, "goes on with"),
    ]


def test_pages_of_this_project_are_clean(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0, capsys.readouterr().out
