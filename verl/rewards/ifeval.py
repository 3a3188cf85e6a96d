"""Instructions whose following can be checked by rules (Zhou et al. 2023, arXiv:2311.07911).

The reference has ``instruction_id_list`` and, for each, an entry of ``kwargs``, under the data set's own names. The
rules are written from the paper's descriptions; where those leave room, a rule's docstring says how it is read here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from verl.errors import DataError
from verl.rewards.languages import is_language
from verl.rewards.references import is_missing, mapping_of, plain, reads_reference, shown

_BULLET = re.compile(r"[*-]\s++\S")
_TITLE = re.compile(r"<<([^<>\n]*+)>>")
_MARK_OR_LINE = re.compile(r"[*\n]")

Rule = Callable[..., bool]
RULES: dict[str, Rule] = {}
"""Rule by instruction id; called with the response and the instruction's own arguments."""


def _rule(name: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return add


def _holds(count: int, relation: str | None, bound: int) -> bool:
    if relation == "less than":
        return count < bound
    if relation in (None, "at least"):
        return count >= bound
    raise DataError(f"relation={relation!r}: choose 'less than' or 'at least'")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _beginnings(text: str) -> Iterator[int]:
    """Where the text of each line begins, behind its spaces; empty lines have none."""
    begin = 0
    for line in text.split("\n"):
        words = line.lstrip()
        if words:
            yield begin + len(line) - len(words)
        begin += len(line) + 1


def _count_highlights(text: str) -> int:
    """Parts between ``*`` or ``**`` on a line that are not empty; the longest marks first, none inside another."""
    count = 0
    place = text.find("*")
    while place >= 0:
        end = _double(text, place) or _single(text, place)
        count += end is not None
        place = text.find("*", place + 1 if end is None else end)
    return count


def _double(text: str, place: int) -> int | None:
    """The end of ``**...**`` that begins here."""
    if not text.startswith("**", place):
        return None
    stop = _stop(text, place + 2)
    if text.startswith("*", stop):
        behind = _stop(text, stop + 1)  # the mark in the middle counts as text: **bold***
        if text.startswith("**", behind):
            return behind + 2
    return stop + 2 if text.startswith("**", stop) and text[place + 2 : stop].strip() else None


def _single(text: str, place: int) -> int | None:
    """The end of ``*...*`` that begins here."""
    stop = _stop(text, place + 1)
    return stop + 1 if text.startswith("*", stop) and text[place + 1 : stop].strip() else None


def _stop(text: str, place: int) -> int:
    match = _MARK_OR_LINE.search(text, place)
    return len(text) if match is None else match.start()


@_rule("keywords:existence")
def _keywords(text: str, keywords: list[str]) -> bool:
    return all(_occurrences(text, word) for word in keywords)


@_rule("keywords:frequency")
def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return _holds(_occurrences(text, keyword), relation, frequency)


@_rule("keywords:forbidden_words")
def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(_occurrences(text, word) for word in forbidden_words)


@_rule("keywords:letter_frequency")
def _letters(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


@_rule("language:response_language")
def _language(text: str, language: str) -> bool:
    return is_language(text, language)


@_rule("length_constraints:number_sentences")
def _sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    """A sentence ends in ``.``, ``!`` or ``?`` before a space or the end; abbreviations and decimals do not end one."""
    plain = re.sub(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|[A-Z])\.", lambda m: m.group().replace(".", ""), text)
    pieces = re.split(r"(?<=[.!?。！？])[\"')\]]*(?:\s+|$)|\n{2,}", plain)
    return _holds(sum(bool(_words(piece)) for piece in pieces), relation, num_sentences)


@_rule("length_constraints:number_words")
def _word_count(text: str, num_words: int, relation: str | None = None) -> bool:
    return _holds(len(_words(text)), relation, num_words)


@_rule("length_constraints:number_paragraphs")
def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are what ``***`` separates; exactly so many, none of them empty."""
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    inner = pieces[1:-1] if len(pieces) > 2 else []
    return all(inner) and sum(bool(piece) for piece in pieces) == num_paragraphs


@_rule("length_constraints:nth_paragraph_first_word")
def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are what empty lines separate; case and punctuation around the word do not matter."""
    pieces = [piece for piece in re.split(r"\n\s*\n", text.strip()) if piece.strip()]
    if len(pieces) != num_paragraphs or not 1 <= nth_paragraph <= len(pieces):
        return False
    words = _words(pieces[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


@_rule("detectable_content:number_placeholders")
def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


@_rule("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str) -> bool:
    letters = re.sub(r"[^A-Za-z]", "", postscript_marker)
    if letters.upper() in ("PS", "PPS"):
        pattern = r"\.?\s?".join(letters) + r"\b"
    else:
        pattern = re.escape(postscript_marker.strip())
    marker = re.compile(rf"[*_]*{pattern}", re.IGNORECASE)
    return any(marker.match(text, begin) for begin in _beginnings(text))


@_rule("detectable_format:number_bullet_lists")
def _bullets(text: str, num_bullets: int) -> bool:
    """Exactly so many lines that start with ``*`` or ``-`` and a space."""
    count, end = 0, 0
    for begin in _beginnings(text):
        if begin >= end and (match := _BULLET.match(text, begin)):
            count, end = count + 1, match.end()
    return count == num_bullets


@_rule("detectable_format:constrained_response")
def _one_of_three(text: str) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


@_rule("detectable_format:number_highlighted_sections")
def _highlights(text: str, num_highlights: int) -> bool:
    return _count_highlights(text) >= num_highlights


@_rule("detectable_format:multiple_sections")
def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s+\d+", text)) >= num_sections


@_rule("detectable_format:json_format")
def _json(text: str) -> bool:
    body = re.sub(r"\A```(?:json)?\s*", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body.removesuffix("```"), parse_int=str)  # a number of any length is JSON
    except (ValueError, RecursionError):
        return False
    return True


@_rule("detectable_format:title")
def _title(text: str) -> bool:
    return any(match.group(1).strip() for match in _TITLE.finditer(text))


@_rule("combination:two_responses")
def _two_responses(text: str) -> bool:
    pieces = [piece.strip() for piece in text.split("******")]
    pieces = [piece for i, piece in enumerate(pieces) if piece or 0 < i < len(pieces) - 1]
    return len(pieces) == 2 and pieces[0] != pieces[1] and all(pieces)


@_rule("combination:repeat_prompt")
def _repeat(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_rule("startend:end_checker")
def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').strip().lower().endswith(end_phrase.strip().strip('"').lower())


@_rule("startend:quotation")
def _quotation(text: str) -> bool:
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


@_rule("change_case:capital_word_frequency")
def _capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    return _holds(sum(word.isupper() for word in _words(text)), capital_relation, capital_frequency)


@_rule("change_case:english_capital")
def _capital(text: str) -> bool:
    return text.isupper() and is_language(text, "en")


@_rule("change_case:english_lowercase")
def _lower_case(text: str) -> bool:
    return text.islower() and is_language(text, "en")


@_rule("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return "," not in text


def follows(text: str, instruction: str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether a response follows one instruction; an empty one follows none.

    Raises:
        DataError: no such instruction, or its arguments do not fit.
    """
    rule = RULES.get(instruction)
    if rule is None:
        raise DataError(f"no rule for the instruction {instruction!r}; known: {', '.join(RULES)}")
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    if not text.strip():
        return False
    try:
        return rule(text, **given)
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"instruction {instruction!r} with the arguments {shown(given)}: {error}") from error


def _variants(text: str) -> list[str]:
    """The response as it is, and without what people put around one: its first or last line, asterisks."""
    lines = text.split("\n")
    bodies = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*bodies, *(body.replace("*", "") for body in bodies)]


def read_reference(
    ground_truth: Any, extra_info: Mapping[str, Any] | None = None, *_: Any, **__: Any
) -> list[tuple[str, dict[str, Any]]]:
    """The instructions and the arguments of each.

    Args:
        ground_truth: ``instruction_id_list`` and ``kwargs``, a mapping or its JSON text.
        extra_info: used where the reference does not have them.

    Raises:
        DataError: no instructions, an unknown one, or arguments that do not fit.
    """
    truth: Any = None
    if not is_missing(ground_truth):
        with suppress(DataError):
            truth = mapping_of(ground_truth, "")
    if not isinstance(truth, Mapping) or is_missing(truth.get("instruction_id_list")):
        truth = extra_info or {}
    names = plain(truth.get("instruction_id_list"))
    if not isinstance(names, list | tuple) or not names:
        raise DataError(
            f"ground_truth={shown(ground_truth)} has no 'instruction_id_list'; give it and 'kwargs', one for each"
        )
    arguments = plain(truth.get("kwargs"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise DataError(f"kwargs={shown(arguments)} is no JSON text of a list") from None
    if arguments is None:
        arguments = [{}] * len(names)
    if not isinstance(arguments, list | tuple) or len(arguments) != len(names):
        size = len(arguments) if isinstance(arguments, list | tuple) else "no"
        raise DataError(f"{len(names)} instructions with {size} kwargs; give one for each")
    return [(str(name), _arguments(str(name), given)) for name, given in zip(names, arguments, strict=True)]


def _arguments(instruction: str, given: Any) -> dict[str, Any]:
    """An instruction's arguments without those that a column filled in; they fit its rule."""
    if given is not None and not isinstance(given, Mapping):
        raise DataError(f"kwargs of {instruction!r}: {shown(given)} is no mapping")
    arguments = {name: _whole(plain(value)) for name, value in (given or {}).items() if not _is_gap(value)}
    follows("a", instruction, arguments)  # raises where they do not fit
    return arguments


def _is_gap(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _whole(value: Any) -> Any:
    """Counts that a column with gaps made floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@reads_reference(read_reference)
def compute_score(
    solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, *, loose: bool = False
) -> dict[str, Any]:
    """1.0 if every instruction is followed, else 0.0.

    Args:
        solution_str: the response's text.
        ground_truth: see :func:`read_reference`.
        extra_info: see there.
        loose: an instruction counts as followed if it is without the first line, the last line or asterisks.

    Returns:
        ``score``, ``acc``, and ``instruction_acc``, the share of instructions followed.

    Raises:
        DataError: no instructions, an unknown one, or arguments that do not fit.
    """
    instructions = read_reference(ground_truth, extra_info)
    texts = _variants(solution_str) if loose else [solution_str]
    followed = [any(follows(text, name, given) for text in texts) for name, given in instructions]
    return {
        "score": float(all(followed)),
        "acc": all(followed),
        "instruction_acc": sum(followed) / len(followed),
    }
