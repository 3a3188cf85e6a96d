"""The check of the documentation's language, on literal texts."""

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
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("See e.g. Table 1. It has 1.5 rows.", ["See e.g. Table 1.", "It has 1.5 rows."]),
        ("The key trainer.seed is a number. Set it.", ["The key trainer.seed is a number.", "Set it."]),
        ("[a](b.md) · [c](d.md)", ["[a](b.md)", "[c](d.md)"]),
        ("No stop at the end", ["No stop at the end"]),
    ],
)
def test_sentences(check: ModuleType, text: str, expected: list[str]) -> None:
    assert check.sentences(text) == expected


def test_only_prose_is_looked_at(check: ModuleType) -> None:
    page = "\n".join(
        [
            "# A heading goes on",
            "First line",
            "second line.",
            "",
            "| a | goes on |",
            "```bash",
            "goes on",
            "```",
            "$$",
            "x = goes on",
            "$$",
            "- item one",
            "  continued",
            "- item two",
        ]
    )
    found = [(paragraph.line, paragraph.text) for paragraph in check.paragraphs(page)]
    assert found == [(2, "First line second line."), (12, "item one continued"), (14, "item two")]


@pytest.mark.parametrize(
    ("page", "line", "words"),
    [
        ("Fine.\n\nThe run goes on.", 3, "'goes on'"),
        ("The weight hand-over is fast.", 1, "'hand-over'"),
        (f"{'word ' * 21}.", 1, "21 words a sentence"),
        (f"Short. The {'word ' * 39}.", 1, "20 words a sentence"),  # 1 and 40: a mean of 20.5
    ],
)
def test_what_is_found(check: ModuleType, page: str, line: int, words: str) -> None:
    ((found_line, message),) = check.findings(page)
    assert found_line == line
    assert words in message


def test_code_links_and_formulas_count_as_they_are_read(check: ModuleType) -> None:
    text = check.plain(
        "Set `trainer.total_training_steps=100 trainer.x=1`, see [the page](a/very/long/path.md) and $a + b$."
    )
    assert text == "Set term, see the page and term."
    assert check.words(text) == 7


def test_a_page_that_fails_is_named(check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("It goes on.\n", "utf-8")
    assert check.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:1: 'goes on': continues, resumes\n"
    page.write_text("It continues.\n", "utf-8")
    assert check.main([str(page)]) == 0
