r"""Competition mathematics: the last ``\boxed{...}`` against the reference answer.

Equality is decided by rules on the text (the same number, fraction, tuple or interval in different notation); what they
do not find equal is then compared by computer algebra, if the extra ``math`` is installed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from verl.errors import ConfigError, DataError
from verl.rewards import symbolic
from verl.rewards.references import accepted, reads_reference, shown

#: characters of a number that is read as one: Python converts texts of up to 640 digits under every setting
_LONGEST_NUMBER = 600
#: tuples inside tuples that are compared part by part
_DEEPEST = 20
_BOXED = re.compile(r"\\f?boxed\s*\{|\\fbox\s*\{|\\boxed\s+([^\s${}]+)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_SEPARATOR = re.compile(r"[(\[{)\]},]")
_WRAPPERS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)"


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces close; ``None`` if there is none."""
    openings = list(_BOXED.finditer(text))
    if not openings:
        return None
    closing = _closing_braces(text, openings[0].start())
    for match in reversed(openings):
        if match.group(1) is not None:
            return match.group(1)
        end = closing.get(match.end() - 1)
        if end is not None:
            return text[match.end() : end]
    return None


def _closing_braces(text: str, begin: int) -> dict[int, int]:
    """The place of the closing brace for each opening one from ``begin`` on; those behind a backslash are text."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text, begin):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


def normalize(answer: str) -> str:
    r"""One spelling for the common ways of writing the same answer.

    Removes spacing, ``$``, ``\left``/``\right``, text wrappers, degree and percent signs, thousands separators and a
    leading ``x =``; writes ``\dfrac`` and ``\tfrac`` as ``\frac`` and ``\frac12`` as ``\frac{1}{2}``.
    """
    text = answer.strip().strip("$").strip()
    text = text.removesuffix(".")
    text = re.sub(r"\\[,;:! ]|~|\\quad|\\qquad", " ", text)
    text = re.sub(rf"{_WRAPPERS}\s*\{{([^{{}}]*)\}}", r"\1", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits|bigl?|bigr?)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|°", "", text)
    text = re.sub(r"\\?%|\\?\$", "", text)
    text = text.replace(r"\le ", r"\leq ").replace(r"\ge ", r"\geq ")
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))(?<!\(\d,)", "", text) if not re.search(r"[(\[{]", text) else text
    text = re.sub(r"^[a-zA-Z]\s*(?:=|\\in)\s*(?=\S)", "", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    return re.sub(r"\s+", "", text)


def _number(text: str) -> Fraction | None:
    """The rational number that a normalised answer is, or ``None``; longer numbers are compared as texts."""
    sign = -1 if text.startswith("-") else 1
    body = text.lstrip("+-") if text[:1] in "+-" else text
    if len(body) > _LONGEST_NUMBER:
        return None
    if re.fullmatch(r"\d+(?:\.\d*)?|\.\d+", body):
        return sign * Fraction(body.rstrip(".") if not body.startswith(".") else "0" + body)
    match = re.fullmatch(r"(\d*)\\frac\{(-?\d+)\}\{(-?\d+)\}", body) or re.fullmatch(r"()(\d+)/(\d+)", body)
    if match and int(match.group(3)) != 0:
        whole = int(match.group(1) or 0)
        return sign * (whole + Fraction(int(match.group(2)), int(match.group(3))))
    return None


def _parts(text: str) -> tuple[str, list[str], str] | None:
    """A tuple, set or interval as its brackets and parts."""
    if len(text) < 2 or (text[0] not in "([" and not text.startswith("\\{")):
        return None
    opening = 2 if text.startswith("\\{") else 1
    closing = 2 if text.endswith("\\}") else 1
    inner = text[opening:-closing]
    parts, depth, begin = [], 0, 0
    for match in _SEPARATOR.finditer(inner):
        char = match.group()
        if char != ",":
            depth += 1 if char in "([{" else -1
        elif depth == 0:
            parts.append(inner[begin : match.start()])
            begin = match.end()
    parts.append(inner[begin:])
    return (text[:opening], parts, text[-closing:]) if len(parts) > 1 else None


def is_equivalent(answer: str, reference: str) -> bool:
    """Whether two answers are the same after normalisation, as numbers, or part by part."""
    return _same(normalize(answer), normalize(reference))


def _same(left: str, right: str, depth: int = 0) -> bool:
    if left == right:
        return left != ""
    if depth > _DEEPEST:
        return False
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        return a == b
    x, y = _parts(left), _parts(right)
    if x is None or y is None or x[0] != y[0] or x[2] != y[2] or len(x[1]) != len(y[1]):
        return False
    return all(_same(p, q, depth + 1) for p, q in zip(x[1], y[1], strict=True))


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are equal by :func:`is_equivalent`, or else by computer algebra where it is installed."""
    return is_equivalent(answer, reference) or _algebra(answer, reference)


def _algebra(answer: str, reference: str) -> bool:
    return symbolic.installed() and symbolic.equal(f"\\boxed{{{answer}}}", f"\\boxed{{{reference}}}")


def read_reference(ground_truth: Any, *_: Any, **__: Any) -> list[str]:
    r"""The accepted answers.

    Args:
        ground_truth: an answer, a text with a ``\boxed{...}``, a number, or a list of them.

    Raises:
        DataError: one is missing, or nothing of it is left after :func:`normalize`.
    """
    answers = []
    for text in accepted(ground_truth):
        boxed = last_boxed(text)
        answer = text if boxed is None else boxed
        if not normalize(answer):
            raise DataError(f"ground_truth={shown(ground_truth)}: {shown(text)} holds no answer; write the right one")
        answers.append(answer)
    return answers


def is_any_of(answer: str, references: Sequence[str]) -> bool:
    """Whether an answer equals one of those accepted: text rules decide first, computer algebra is slow."""
    return any(is_equivalent(answer, one) for one in references) or any(_algebra(answer, one) for one in references)


@reads_reference(read_reference)
def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 if the last ``\boxed{...}`` of the response equals the reference, else 0.0.

    The reference may itself be a text with a ``\boxed{...}``, a number, or a list of accepted answers.
    """
    references = read_reference(ground_truth)
    answer = last_boxed(solution_str)
    return 1.0 if answer is not None and is_any_of(answer, references) else 0.0


def read_symbolic(ground_truth: Any, *_: Any, **__: Any) -> list[str]:
    """The accepted answers as texts that ``math-verify`` finds an answer in.

    Raises:
        DataError: one is missing.
    """
    return [text if last_boxed(text) else f"\\boxed{{{text}}}" for text in accepted(ground_truth)]


@reads_reference(read_symbolic)
def compute_score_symbolic(solution_str: str, ground_truth: Any) -> float:
    """1.0 if ``math-verify`` finds the response's answer, boxed or not, equal to the reference, else 0.0.

    Of a long response the last boxed answer is looked at, or else its end.

    Raises:
        ConfigError: ``math-verify`` is not installed.
    """
    if not symbolic.installed():
        raise ConfigError(
            "the math_verify scorer needs the package math-verify; install it with: pip install 'verl[math]'"
        )
    references = read_symbolic(ground_truth)
    solution = solution_str
    if len(solution) > symbolic.LONGEST:
        answer = last_boxed(solution)
        solution = solution[-symbolic.LONGEST :] if answer is None else f"\\boxed{{{answer}}}"
    return float(any(symbolic.equal(solution, reference) for reference in references))
