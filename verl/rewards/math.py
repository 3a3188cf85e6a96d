r"""Competition mathematics: the last ``\boxed{...}`` against the reference answer.

Equality is decided by rules on the text (the same number, fraction, tuple or interval in different notation); what they
do not find equal is then compared by computer algebra, if the extra ``math`` is installed.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verl.errors import ConfigError
from verl.rewards import symbolic

_WRAPPERS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)"


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}`` whose braces close; ``None`` if there is none."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{|\\boxed\s+([^\s${}]+)", text))):
        if match.group(1) is not None:
            return match.group(1)
        end = _closing_brace(text, match.end() - 1)
        if end is not None:
            return text[match.end() : end]
    return None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


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
    """The rational number that a normalised answer is, or ``None``."""
    sign = -1 if text.startswith("-") else 1
    body = text.lstrip("+-") if text[:1] in "+-" else text
    if re.fullmatch(r"\d+\.?\d*|\.\d+", body):
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
    parts, depth, current = [], 0, ""
    for char in inner:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    parts.append(current)
    return (text[:opening], parts, text[-closing:]) if len(parts) > 1 else None


def is_equivalent(answer: str, reference: str) -> bool:
    """Whether two answers are the same after normalisation, as numbers, or part by part."""
    return _same(normalize(answer), normalize(reference))


def _same(left: str, right: str) -> bool:
    if left == right:
        return left != ""
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        return a == b
    x, y = _parts(left), _parts(right)
    if x is None or y is None or x[0] != y[0] or x[2] != y[2] or len(x[1]) != len(y[1]):
        return False
    return all(_same(p, q) for p, q in zip(x[1], y[1], strict=True))


def same_answer(answer: str, reference: str) -> bool:
    """Whether two answers are equal by :func:`is_equivalent`, or else by computer algebra where it is installed."""
    if is_equivalent(answer, reference):
        return True
    return symbolic.installed() and symbolic.equal(f"\\boxed{{{answer}}}", f"\\boxed{{{reference}}}")


def compute_score(solution_str: str, ground_truth: str) -> float:
    r"""1.0 if the last ``\boxed{...}`` of the response equals the reference, else 0.0.

    The reference may itself be a text with a ``\boxed{...}``.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    reference = last_boxed(ground_truth)
    return 1.0 if same_answer(answer, ground_truth if reference is None else reference) else 0.0


def compute_score_symbolic(solution_str: str, ground_truth: str) -> float:
    """1.0 if ``math-verify`` finds the response's answer, boxed or not, equal to the reference, else 0.0.

    Raises:
        ConfigError: ``math-verify`` is not installed.
    """
    if not symbolic.installed():
        raise ConfigError(
            "the math_verify scorer needs the package math-verify; install it with: pip install 'verl[math]'"
        )
    reference = ground_truth if last_boxed(ground_truth) else f"\\boxed{{{ground_truth}}}"
    return float(symbolic.equal(solution_str, reference))
