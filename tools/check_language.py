"""Check the language of pages, docstrings and comments: no idioms of our own, no long sentences.

    python tools/check_language.py [PAGE ...]

A finding is printed as FILE:LINE, the words, and the remedy. The exit code is 1 if there is any.
"""

from __future__ import annotations

import ast
import bisect
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent

#: largest mean number of words in the sentences of a paragraph
MEAN_SENTENCE = 20

#: pages that are checked; docs/reference is generated from the code
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")


#: packages of verl/ whose docstrings and comments are checked for idioms
PACKAGES: tuple[str, ...] = ()

#: pattern of an idiom -> remedy
IDIOMS: dict[str, str] = {
    r"what there is": "name the things",
    r"as far as": "write 'if' or 'where' and name the condition",
    r"(?:is|are|was|were) told (?!apart)": "write who reports or logs it, or what receives the value",
    r"go(?:es)? on (?:from|with|as|where|at)": "write 'continues' or 'resumes'",
    r"the side (?:that|which|who)": "name the component",
    r"hands?[- ]over": "write 'weight sync', or 'passes'",
    r"hand(?:s|ed|ing) (?:\w+ ){0,4}over": "write 'passes' or 'syncs'",
    r"as it stands": "write 'unchanged' or 'as written'",
    r"so to say|so to speak": "leave it out",
    r"whatever is left": "write 'the remaining ...'",
    r"what is left": "write 'the remaining ...'",
    r"under the feet": "name the effect",
    r"comes? back to life": "write 'restarts'",
    r"its way back": "write 'scatter' or 'inverse'",
    r"come what may|for good measure|by and large|to all intents": "leave it out",
    r"(?:does|do|did) not know (?:each other|of each other)": "write 'are independent'",
    r"stands? (?:twice|beside it)": "write 'is duplicated' or 'is defined'",
    r"is a matter of": "write 'depends on'",
    r"it goes without saying|needless to say": "leave it out",
}
_IDIOM = re.compile("|".join(rf"\b(?P<i{n}>{pattern})\b" for n, pattern in enumerate(IDIOMS)), re.IGNORECASE)
_REMEDIES = list(IDIOMS.values())

_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|al|approx|resp|incl|no|fig|eq|sec|dr|mr|ms)\.$", re.IGNORECASE)
_END = re.compile(r"""[.!?]+["')\]]*(?=\s+["'(\[]*[A-Z0-9])""")
_WORD = re.compile(r"\w[\w'’./%-]*")


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    words: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: {self.remedy}"


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph's plain text. Semicolons and colons do not end a sentence."""
    found, start = [], 0
    for end in _END.finditer(text):
        if _ABBREVIATION.search(text[: end.end()]):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    return [sentence for sentence in [*found, text[start:].strip()] if sentence]


def count_words(sentence: str) -> int:
    return len(_WORD.findall(sentence))


def plain_text(inline: Token) -> str:
    """Text of a paragraph: a piece of code is one word, a link its text, an image nothing."""
    parts = []
    for token in inline.children or []:
        if token.type == "text":
            parts.append(token.content)
        elif token.type == "code_inline":
            parts.append("CODE")
        elif token.type in ("softbreak", "hardbreak"):
            parts.append(" ")
    return "".join(parts)


def prose(page: str) -> Iterator[tuple[int, str]]:
    """First line and plain text of each paragraph and list item; no code blocks, tables, headings or HTML."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    for before, token in itertools.pairwise(tokens):
        if before.type == "paragraph_open" and token.type == "inline":
            assert token.map is not None
            yield token.map[0] + 1, plain_text(token)


def idioms(path: str, text: str, first_line: int = 1) -> Iterator[Finding]:
    """Idioms in a text, also those that a line break cuts in two."""
    words = list(re.finditer(r"[^\s#]+", text))
    line = " ".join(word[0] for word in words)
    starts, position = [], 0
    for word in words:
        starts.append(position)
        position += len(word[0]) + 1
    for match in _IDIOM.finditer(line):
        assert match.lastgroup is not None
        offset = words[bisect.bisect_right(starts, match.start()) - 1].start()
        remedy = _REMEDIES[int(match.lastgroup[1:])]
        yield Finding(path, first_line + text.count("\n", 0, offset), match[0].strip(), remedy)


def check_page(path: str, page: str) -> list[Finding]:
    found = []
    for line, text in prose(page):
        found += idioms(path, text, line)
        lengths = [count_words(sentence) for sentence in sentences(text)]
        mean = sum(lengths) / max(len(lengths), 1)
        if mean > MEAN_SENTENCE:
            words = " ".join(text.split()[:8]) + " ..."
            remedy = f"{mean:.0f} words a sentence; split them, one idea each, at most {MEAN_SENTENCE} in the mean"
            found.append(Finding(path, line, words, remedy))
    return found


def check_code(path: str, source: str) -> list[Finding]:
    """Idioms in the docstrings and comments of a module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                found += idioms(path, docstring, node.body[0].lineno)
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1].start[0] + 1:
                found += _comment(path, block)
                block = []
            block.append(token)
    return sorted(found + _comment(path, block), key=lambda finding: finding.line)


def _comment(path: str, block: list[tokenize.TokenInfo]) -> list[Finding]:
    text = "\n".join(token.string for token in block)
    return list(idioms(path, text, block[0].start[0])) if block else []


def main(names: list[str]) -> int:
    pages = [Path(name).resolve() for name in names]
    modules: list[Path] = []
    if not names:
        pages = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
        modules = sorted(module for package in PACKAGES for module in (ROOT / "verl" / package).rglob("*.py"))
    found = []
    for page in pages:
        name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else str(page)
        found += check_page(name, page.read_text("utf-8"))
    for module in modules:
        found += check_code(str(module.relative_to(ROOT)), module.read_text("utf-8"))
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
