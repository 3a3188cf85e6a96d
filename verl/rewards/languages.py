"""Which language a text is in: by its script, and among languages of the Latin script by its most frequent words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

# Unicode's names of letters start with the script's name
_SCRIPTS = {
    "HANGUL": ("ko",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "CJK": ("zh", "ja"),
    "ARABIC": ("ar", "fa", "ur"),
    "CYRILLIC": ("ru", "uk", "bg"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "BENGALI": ("bn",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
    "HEBREW": ("he",),
    "GREEK": ("el",),
    "GEORGIAN": ("ka",),
    "ARMENIAN": ("hy",),
}
_WORDS = {
    "en": "the of and to in is that it for was with as be on not this are have you by from or an at",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für im dem auch es werden sie wir ich",
    "fr": "le la les de des et est un une du que en dans pour pas qui sur au avec il elle nous vous sont",
    "es": "el la los las de y que en un una es se no por con para del lo como más su al está",
    "it": "il lo la gli di e che è un una per non con del della sono nel si da come anche più",
    "pt": "o a os as de e que em um uma é não para com do da no na se por mais como ao",
    "nl": "de het een en van is dat niet op te zijn voor met die aan er ook maar wij ik bij",
    "sv": "och att det som en på är av för med den till inte ett om har de jag vi kan",
    "da": "og det at en den til er som på de med han af for ikke der var et jeg har",
    "no": "og det at en den til er som på de med av for ikke der var et jeg har så",
    "fi": "ja on ei se että hän ovat mutta niin kun myös tai oli olla joka ne voi mitä kuin tämä",
    "pl": "i w na z się nie to że do jest o jak po co ale od za przez dla są",
    "tr": "ve bir bu da de için ile çok ne gibi daha var olan olarak ama kadar mi en sonra değil",
    "vi": "và của là có không được trong cho một những các với người này đã để khi từ đến như",
    "id": "dan yang di ini itu dengan untuk tidak dari dalam adalah pada akan ke juga saya kami bisa atau ada",
    "sw": "na ya wa kwa ni katika la za kuwa hii hiyo ili cha kama pia lakini sana watu moja yake",
    "ro": "și de la în o un nu că cu pe din este pentru mai care sunt au ce dar ca",
    "cs": "a se v na je že to s z do o i jako po ale pro jsou by od k",
}
_TABLE = {language: frozenset(words.split()) for language, words in _WORDS.items()}
# letters that tell languages of one script apart; an earlier language's letters may be missing in the later ones only
_MARKERS = {
    "ur": "ٹڈڑںےھہ",
    "fa": "پچژگکی",
    "uk": "іїєґ",
    "ru": "ыэё",
    "bg": "ъ",
}
_SINGLE = {"mr": "आहे आणि नाही", "ne": "छ र हो गर्न", "hi": "है और के में नहीं"}

KNOWN = frozenset(_WORDS) | {language for group in _SCRIPTS.values() for language in group}
"""ISO 639-1 codes that :func:`is_language` can tell."""


def is_language(text: str, language: str) -> bool:
    """Whether a text is mainly in a language.

    Args:
        text: at least a few words; too short a text in the Latin script counts as any language.
        language: ISO 639-1 code, one of :data:`KNOWN`.

    Raises:
        ValueError: a language that cannot be told.
    """
    code = language.lower().split("-")[0]
    if code not in KNOWN:
        raise ValueError(f"language={language!r} cannot be recognised; known: {', '.join(sorted(KNOWN))}")
    scripts: Counter[str] = Counter()
    for char, count in Counter(text).items():
        if char.isalpha():
            scripts[_script(char)] += count
    if not scripts:
        return False
    main = scripts.most_common(1)[0][0]
    if main == "CJK" and scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.05 * scripts.total():
        main = "HIRAGANA"
    if main in _SCRIPTS:
        among = _SCRIPTS[main]
        if main == "CJK":
            among = ("zh",)
        return code in among and (len(among) == 1 or _closest(text, among) in (code, None))
    guess = _by_words(text)
    return code in _TABLE and (guess is None or guess == code)


def _script(char: str) -> str:
    return unicodedata.name(char, "?").split()[0].split("-")[0]


def _closest(text: str, among: tuple[str, ...]) -> str | None:
    """One language of a script that several share; ``None`` where nothing tells them apart."""
    for code, letters in _MARKERS.items():
        if code in among and any(letter in text for letter in letters):
            return code
    words = Counter(text.split())
    hits = {code: sum(words[word] for word in _SINGLE.get(code, "").split()) for code in among}
    best = max(hits, key=lambda code: hits[code])
    if hits[best] > 0:
        return best
    return "ar" if "ar" in among else None


def _by_words(text: str) -> str | None:
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    hits = {language: sum(words[word] for word in table) for language, table in _TABLE.items()}
    best = max(hits, key=lambda language: hits[language])
    return best if hits[best] > 0 else None
