"""The text of an answer while it grows: every token is decoded a fixed number of times, however long the answer is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: stands for bytes that are no character, or not yet
_INCOMPLETE = "\ufffd"
#: tokens that may wait for the rest of a character; what is longer is no character
_MAX_WAITING = 256
#: what cleaning up tokenization spaces changes; text that could become one of these waits
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Detokenizer:
    """Decodes the tokens of one answer as they come.

    The pieces joined are the text of all tokens. A character whose tokens are not all there waits for them. New tokens
    are decoded behind the last ones before them, because what a token means may depend on whether it is the first.

    Args:
        tokenizer: of the model.
        keep: special tokens that are part of the text; others are not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = not keep
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        self._hidden = special - {number for number, token in added.items() if token.content in keep}
        self._waiting_for = _CLEANED if getattr(tokenizer, "clean_up_tokenization_spaces", False) else ()
        self._window: list[int] = []  # the last tokens whose text is out, and those whose text is not
        self._context = 0  # how many of the window's tokens are the former
        self._context_text = 0  # characters of their text
        self._known = 0  # characters of the window's text that are out

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that is certain by these tokens and was not before.

        Args:
            tokens: those that follow the earlier ones.
            last: no more tokens follow, so that everything is certain.
        """
        self._window += [token for token in tokens if token not in self._hidden]
        text = self._decode(self._window)
        whole = last or len(self._window) - self._context > _MAX_WAITING
        certain = len(text) if whole else len(text) - _uncertain(text, self._waiting_for)
        new = text[self._known : certain]
        if certain < len(text):
            self._known = max(self._known, certain)
        elif len(text) > self._context_text:  # a context without text would not show what a token means inside a text
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._known = self._context_text = len(self._decode(self._window))
        else:
            self._known = len(text)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip))


def _uncertain(text: str, forms: Sequence[str]) -> int:
    """Characters at the end that further tokens may change."""
    complete = text.rstrip(_INCOMPLETE)
    if len(complete) < len(text) or not forms:
        return len(text) - len(complete)
    for size in range(min(3, len(text)), 0, -1):
        if any(form.startswith(text[-size:]) and len(form) > size for form in forms):
            return size
    return 0
