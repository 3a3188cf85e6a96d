"""Check the language of the documentation: no idiom of our own, and sentences of about 15 words.

    python tools/check_language.py            # all hand-written pages
    python tools/check_language.py README.md  # some

A paragraph fails if the mean length of its sentences is over 20 words. Code, tables and headings do not count. Every
finding is a line ``file:line: what; remedy``, and the exit code is 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 20
#: phrase -> what to write instead
IDIOMS = {
    r"as far as (?:it|they|the|that|there|one)\b": "say the condition: where, if",
    r"goes on\b|went on\b|going on\b": "continues, resumes",
    r"hand[- ]over\b|hands? over\b|handed over\b": "weight sync, transfer",
    r"is told\b|are told\b|was told\b": "is reported",
    r"what there is\b|that there (?:is|are)\b": "name the thing",
    r"the side that\b|the one that asks\b": "name the component: client, server",
    r"so to say\b": "leave it out",
    r"nobody\b": "no process, no user",
    r"whatever is left\b": "the rest",
    r"for all that\b": "despite",
    r"comes back to life\b": "is restarted",
    r"in one go\b": "at once",
    r"makes? way\b": "is released",
    r"at home in\b": "part of",
}
_IDIOM = {re.compile(rf"\b(?:{pattern})", re.IGNORECASE): remedy for pattern, remedy in IDIOMS.items()}
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "al.", "Fig.", "No.", "approx.")
_MARKER = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*>\s?")
_TERM = "term"


@dataclass(frozen=True)
class Paragraph:
    """Prose between blank lines, or one item of a list."""

    line: int
    text: str


def paragraphs(page: str) -> Iterator[Paragraph]:
    """The prose of a Markdown page; code, tables, headings and HTML are left out."""
    fence, start, lines = "", 0, list[str]()

    def flush() -> Iterator[Paragraph]:
        if lines:
            yield Paragraph(start, " ".join(lines))
        lines.clear()

    for number, line in enumerate(page.splitlines(), 1):
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) or (fence == "$$" and stripped.endswith("$$")) else fence
            continue
        if stripped.startswith(("```", "~~~")):
            fence = stripped[:3]
            yield from flush()
        elif stripped.startswith("$$"):
            fence = "" if stripped.endswith("$$") and len(stripped) > 2 else "$$"
            yield from flush()
        elif not stripped or stripped.startswith(("#", "|", "<", "![")):
            yield from flush()
        else:
            if _MARKER.match(line):
                yield from flush()
            if not lines:
                start = number
            lines.append(_MARKER.sub("", line).strip())
    yield from flush()


def plain(text: str) -> str:
    """Markdown as it is read: links are their text, code and formulas one word each."""
    text = re.sub(r"`[^`]+`", _TERM, text)
    text = re.sub(r"\$[^$]+\$", _TERM, text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(\S[^*_]*)[*_]{1,2}", r"\1", text)


def sentences(text: str) -> list[str]:
    """Split prose; a full stop inside a number, a name or an abbreviation ends no sentence."""
    if " · " in text:  # a line of links
        return [sentence for part in text.split(" · ") for sentence in sentences(part)]
    found, begin = list[str](), 0
    for stop in re.finditer(r"[.!?][)\"”]?(?=\s+[A-Z“\"(\d]|\s+term\b|\s*$)", text):
        if text[: stop.end()].endswith(_ABBREVIATIONS):
            continue
        found.append(text[begin : stop.end()].strip())
        begin = stop.end()
    rest = text[begin:].strip()
    return [*found, rest] if rest else found


def words(sentence: str) -> int:
    """Number of words; signs and lone punctuation are none."""
    return len(re.findall(r"[^\W_](?:[\w'’.,/-]*\w)?", sentence))


def findings(page: str) -> Iterator[tuple[int, str]]:
    """Line and message of everything that is wrong with a page."""
    for paragraph in paragraphs(page):
        text = plain(paragraph.text)
        for pattern, remedy in _IDIOM.items():
            for match in pattern.finditer(text):
                yield paragraph.line, f"{match[0]!r}: {remedy}"
        lengths = [words(sentence) for sentence in sentences(text)]
        mean = sum(lengths) / max(len(lengths), 1)
        if mean > MOST_WORDS:
            yield (
                paragraph.line,
                f"{mean:.0f} words a sentence in {text[:50]!r}...: one idea a sentence, {MOST_WORDS} words at most",
            )


def pages() -> list[Path]:
    """All hand-written pages."""
    written = sorted((ROOT / "docs").rglob("*.md"))
    kept = [page for page in written if "reference" not in page.relative_to(ROOT).parts]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *kept]


def main(names: Iterable[str]) -> int:
    """Print the findings of the given pages, or of all."""
    count = 0
    for page in [Path(name) for name in names] or pages():
        for line, message in findings(page.read_text("utf-8")):
            shown = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
            sys.stdout.write(f"{shown}:{line}: {message}\n")
            count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
