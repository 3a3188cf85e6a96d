"""Demonstrations for supervised fine-tuning: conversations with a loss on the assistant's turns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Subset

from verl.config import ExamplesConfig, SFTDataConfig
from verl.data import forms
from verl.data.chat import Message, as_messages, encode, encode_plain, render
from verl.data.files import Row, Rows
from verl.data.images import IMAGE_FIELD, RowImageReader, image_column, reject_images
from verl.data.row_gate import CHECK_S, Column, Problems, RowError, RowGate, look_through, looks_at
from verl.errors import ConfigError, DataError
from verl.utils.dynamic_import import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

#: where the gate puts what it reads: both may be inside one column
_PROMPT, _RESPONSE = "__prompt__", "__response__"


class SFTDataset(Dataset):
    """Tokenised demonstrations.

    A row is a prompt and a response (``prompt_key``, ``response_key``; the prompt may be text or chat messages), or
    with ``multiturn.enable`` a conversation (``multiturn.messages_key``). Conversations are rendered with the
    tokenizer's chat template; text is one user message where the tokenizer has a template, and used as it stands where
    it has none.

    The loss is on what the model has to produce: each assistant turn with the token that ends it, and nothing of the
    template around it. Where a turn has no such token, the token that begins the next turn ends it. Where there is none
    either, the tokenizer's end-of-text token is added behind the turn.

    Items hold int64 tensors of one length, at most ``max_length``: ``input_ids``, ``attention_mask`` (ones),
    ``position_ids`` and ``loss_mask``, which is 1 at the tokens to be predicted. Where some row has images, they also
    hold ``multi_modal_inputs`` as :class:`~verl.data.RLHFDataset` does. Rows with images are never cut.

    Args:
        data_files: a path or a list of paths to ``.parquet``, ``.jsonl`` or ``.json`` files.
        tokenizer: the model's tokenizer.
        config: the ``data`` section, or a mapping with its keys.
        processor: of a vision-language model, needed for images.

    Raises:
        DataError: a file or a row is not as described; the message names it.
    """

    multiturn = False

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig | Mapping[str, Any],
        processor: Any | None = None,
    ) -> None:
        self.config = as_sft_data_config(config)
        self.tokenizer = tokenizer
        self.template_kwargs = dict(self.config.apply_chat_template_kwargs)
        self.multiturn = self.multiturn or self.config.multiturn.enable
        keys = [self.config.prompt_key, self.config.response_key]
        self.rows = Rows(data_files, required=[self.config.multiturn.messages_key] if self.multiturn else keys)
        self.images = RowImageReader(self.rows, self.config, processor)
        self.gate = RowGate(self.rows, self._columns())

    def _columns(self) -> list[Column]:
        config = self.config
        if self.multiturn:
            conversation = partial(forms.messages, parts=self.has_images)
            return [
                Column(config.multiturn.messages_key, conversation, required=True),
                Column(config.multiturn.tools_key, forms.tools),
            ]
        prompt = partial(forms.prompt, parts=self.has_images)
        prompt = partial(forms.inside, keys=config.prompt_dict_keys, form=prompt)
        response = partial(forms.inside, keys=config.response_dict_keys, form=forms.text)
        return [
            Column(config.prompt_key, prompt, required=True, into=_PROMPT),
            Column(config.response_key, response, required=True, into=_RESPONSE),
        ]

    @property
    def has_images(self) -> bool:
        """Whether some row has an image."""
        return self.images.present

    def fingerprint(self, items: Iterable[int] | None = None) -> str:
        """SHA-256 of the rows, or of those of some items, in their order; see
        :meth:`verl.data.files.Rows.fingerprint`.
        """
        return self.rows.fingerprint(items)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self.gate[index]
            reject_images(row, "supervised training", ["videos"])
            inputs = self.images.read(index, row)
            token_ids, loss_mask = self.images.expand(*self._tokens(row), inputs)
            token_ids, loss_mask = self._truncated(token_ids, loss_mask, cut=inputs is None)
        except RowError:
            raise
        except DataError as error:
            raise DataError(f"{self.rows.place(index)}: {error}") from error.__cause__
        length = len(token_ids)
        images = {IMAGE_FIELD: inputs} if self.has_images else {}
        return images | {
            "input_ids": torch.tensor(token_ids, dtype=torch.int64),
            "attention_mask": torch.ones(length, dtype=torch.int64),
            "position_ids": torch.arange(length),
            "loss_mask": torch.tensor(loss_mask, dtype=torch.int64),
        }

    def _tokens(self, row: Row) -> tuple[list[int], list[int]]:
        if self.multiturn:
            messages = self.images.messages(row, row[self.config.multiturn.messages_key])
            return conversation_tokens(
                self.tokenizer, messages, row.get(self.config.multiturn.tools_key), self.template_kwargs
            )
        prompt = self.images.prompt(row, row[_PROMPT])
        return answer_tokens(self.tokenizer, prompt, row[_RESPONSE], self.template_kwargs, parts=self.has_images)

    def _truncated(
        self, token_ids: list[int], loss_mask: list[int], *, cut: bool = True
    ) -> tuple[list[int], list[int]]:
        limit, mode = self.config.max_length, self.config.truncation
        if len(token_ids) > limit:
            if mode == "error" or not cut:
                remedy = "set data.truncation=left|right to cut such examples"
                if not cut:
                    remedy = "lower data.image_max_pixels; examples with images are not cut"
                raise DataError(
                    f"the example has {len(token_ids)} tokens, more than data.max_length={limit}; raise the limit, or "
                    f"{remedy}"
                )
            part = slice(len(token_ids) - limit, None) if mode == "left" else slice(0, limit)
            token_ids, loss_mask = token_ids[part], loss_mask[part]
        # the first token of a sequence is never predicted
        return token_ids, [0, *loss_mask[1:]]


class MultiTurnSFTDataset(SFTDataset):
    """An :class:`SFTDataset` whose rows are conversations, whatever ``multiturn.enable`` says."""

    multiturn = True


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    answer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    parts: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, text or chat messages, with its answer, and the mask of the answer's tokens.

    Args:
        parts: contents of messages may be lists of parts.

    Raises:
        DataError: the answer is not text, or the prompt is neither text nor messages.
    """
    if not isinstance(answer, str):
        raise DataError(f"the response is {type(answer).__name__}; expected text")
    if isinstance(prompt, str) and not getattr(tokenizer, "chat_template", None):
        before, after = encode_plain(tokenizer, prompt), [*encode(tokenizer, answer), tokenizer.eos_token_id]
        return before + after, [0] * len(before) + [1] * len(after)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_messages(prompt, parts=parts)
    messages.append({"role": "assistant", "content": answer})
    return conversation_tokens(tokenizer, messages, None, template_kwargs, only_last=True)


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    only_last: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and the mask of those that an assistant has to produce.

    The turns are found in the rendered text: each begins where the conversation before it, rendered with an opened
    assistant turn, ends, which is exactly what the model is given in use. Templates that mark the turns themselves
    (``{% generation %}``) are asked instead.

    Args:
        only_last: leave out all assistant turns but the last one (a prompt may hold earlier turns).

    Returns:
        (token ids, mask), both of the conversation's length.

    Raises:
        DataError: no assistant turn, or one that cannot be found in the rendered text.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant turn, so there is nothing to learn from")
    if only_last:
        turns = turns[-1:]
    kwargs: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
    if not only_last and re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        return _marked_by_template(tokenizer, messages, tools, template_kwargs)
    text = render(tokenizer, messages, add_generation_prompt=False, **kwargs)
    spans = [_turn_span(tokenizer, messages, number, text, kwargs) for number in turns]
    ended = _is_ended(tokenizer, text[slice(*spans[-1])])
    text, spans = _with_ends(tokenizer, text, spans)
    token_ids, mask = _mask_spans(tokenizer, text, spans)
    if not ended:
        last = max(i for i, wanted in enumerate(mask) if wanted)
        token_ids, mask = [*token_ids[: last + 1], tokenizer.eos_token_id], [*mask[: last + 1], 1]
    return token_ids, mask


def _turn_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], number: int, text: str, kwargs: Mapping[str, Any]
) -> Span:
    """Where an assistant turn, with the token that ends it, lies in the conversation's text."""
    opened = _opened(tokenizer, messages, number, text, kwargs)
    if text.startswith(opened):
        start = len(opened)
    else:
        # the template opens a turn differently from how it writes a past one (an empty thinking block, for example):
        # skip as much of the opening as the text has
        before = render(tokenizer, messages[:number], add_generation_prompt=False, **kwargs)
        if not text.startswith(before):
            raise DataError(
                f"cannot find assistant turn {number} in the rendered conversation, because the chat template rewrites "
                "earlier messages; mark the assistant's part in it with {% generation %} ... {% endgeneration %}"
            )
        start = len(before) + _common_length(opened[len(before) :], text[len(before) :])
    through = render(tokenizer, messages[: number + 1], add_generation_prompt=False, **kwargs)
    exact = text.startswith(through) and len(through) > start
    return start, _after_end_token(tokenizer, text, start, len(through) if exact else len(text), exact=exact)


def _opened(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], number: int, text: str, kwargs: Mapping[str, Any]
) -> str:
    """The conversation before a turn, with the assistant's turn opened."""
    if number:
        return render(tokenizer, messages[:number], add_generation_prompt=True, **kwargs)
    # many templates cannot render an empty conversation: see how a turn is opened after the first message instead
    closed = render(tokenizer, messages[:1], add_generation_prompt=False, **kwargs)
    opening = render(tokenizer, messages[:1], add_generation_prompt=True, **kwargs)[len(closed) :]
    return text[: text.find(opening) + len(opening)] if opening and opening in text else ""


def _after_end_token(tokenizer: PreTrainedTokenizerBase, text: str, start: int, end: int, *, exact: bool) -> int:
    """Cut what follows the token that ends the turn: line breaks, or with ``exact=False`` the turns after it."""
    special = _special_tokens(tokenizer)
    found = list(re.finditer(special, text[start:end]))
    if exact:
        # only white space may follow: a special token inside the turn does not end it
        closing = [m.end() for m in found if not text[start + m.end() : end].strip()]
        if closing:
            return start + closing[0]
        words = start + len(text[start:end].rstrip())
        # without an end of its own, a turn ends with the token that begins the next one
        following = re.match(rf"\s*{special}", text[words:])
        return words + following.end() if following else words
    if not found:
        raise DataError("cannot find the end of an assistant turn in the rendered conversation")
    return start + found[0].end()


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """A pattern of the tokens that may end a turn, the longest ones first."""
    tokens = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, tokens))})" if tokens else "(?!)"


def _is_ended(tokenizer: PreTrainedTokenizerBase, turn: str) -> bool:
    return re.search(_special_tokens(tokenizer) + r"\Z", turn) is not None


def _with_ends(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
    """The text with an end-of-text token after each turn but the last that no token ends, and the spans in it."""
    out, placed, done = "", [], 0
    for start, end in spans:
        out += text[done:start]
        turn = text[start:end]
        if (start, end) != spans[-1] and not _is_ended(tokenizer, turn):
            turn += str(tokenizer.eos_token)
        placed.append((len(out), len(out) + len(turn)))
        out, done = out + turn, end
    return out + text[done:], placed


def _mask_spans(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Tokenise the text and mark the tokens inside the spans.

    The text is tokenised in one piece, unless a token would straddle the border of a span. Then the pieces are
    tokenised one by one, as they are in use, where the model continues after the prompt's tokens.
    """
    borders = sorted({border for span in spans for border in span})
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
        if not any(a < border < b for border in borders for a, b in offsets):
            ids = [int(token) for token in encoded["input_ids"]]
            return ids, [int(any(s <= a < e and a < b for s, e in spans)) for a, b in offsets]
    token_ids: list[int] = []
    mask: list[int] = []
    edges = [0, *borders, len(text)]
    for left, right in pairwise(edges):
        ids = encode(tokenizer, text[left:right]) if right > left else []
        inside = any(start <= left and right <= end for start, end in spans)
        token_ids += ids
        mask += [int(inside)] * len(ids)
    return token_ids, mask


def _marked_by_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> tuple[list[int], list[int]]:
    render(tokenizer, messages, add_generation_prompt=False, tools=tools, template_kwargs=template_kwargs)  # its errors
    encoded = tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) if tools else None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **dict(template_kwargs or {}),
    )
    ids, mask = [int(i) for i in encoded["input_ids"]], [int(m) for m in encoded["assistant_masks"]]
    special = set(tokenizer.all_special_ids)
    for last, (inside, following) in enumerate(pairwise(mask)):
        # marks around the words alone: the token that ends the turn stands behind them
        if inside and not following and ids[last] not in special and ids[last + 1] in special:
            mask[last + 1] = 1
    if mask and mask[-1] and ids[-1] not in special:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, 1]
    return ids, mask


def _common_length(left: str, right: str) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def as_sft_data_config(config: SFTDataConfig | Mapping[str, Any]) -> SFTDataConfig:
    """The ``data`` section as its dataclass; a mapping may hold any of its keys."""
    if isinstance(config, SFTDataConfig):
        return config
    try:
        return SFTDataConfig(**dict(config))
    except TypeError as error:
        raise ConfigError(f"data section: {error}") from error


def create_examples(
    default: type[Dataset],
    data_files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: ExamplesConfig,
    max_samples: int = -1,
    processor: Any | None = None,
) -> Dataset:
    """The data set that the configuration asks for: ``default``, or the user's class with the same constructor.

    The processor of a vision-language model is given to classes whose constructor has a parameter of that name.

    Raises:
        ConfigError: ``data.custom_cls`` names something that is not a ``torch.utils.data.Dataset``.
    """
    cls: Any = default
    if config.custom_cls.path:
        cls = load_object(config.custom_cls.path, config.custom_cls.name or "")
        if not (isinstance(cls, type) and issubclass(cls, Dataset)):
            raise ConfigError(
                f"data.custom_cls: {config.custom_cls.name!r} in {config.custom_cls.path!r} must be a class derived "
                f"from torch.utils.data.Dataset, got {cls!r}"
            )
    more = {"processor": processor} if "processor" in inspect.signature(cls).parameters else {}
    dataset = cls(data_files=data_files, tokenizer=tokenizer, config=config, **more)
    if 0 <= max_samples < len(dataset):
        return Subset(dataset, range(max_samples))
    return dataset


def check_examples(dataset: Any, first: int = 0, step: int = 1, within_s: float = CHECK_S) -> int:
    """Make examples once, so that one that cannot be used ends the run now and not at its turn, hours later.

    Args:
        dataset: with examples of text.
        first, step: which ones: ranks share the work.
        within_s: the rest is left alone after so many seconds.

    Returns:
        How many were made.

    Raises:
        DataError: some cannot be made.
    """
    indices, problems = range(first, len(dataset), step), Problems()
    return look_through(looks_at(dataset.__getitem__, indices, problems), len(indices), problems, within_s)


class SFTCollator:
    """Batches of demonstrations in the layout that training engines read.

    The whole sequence after its first token counts as the response, so that one layout serves every conversation:
    ``prompts`` (B,1), ``responses`` (B,S-1), ``input_ids``, ``attention_mask``, ``position_ids`` (B,S), right-padded,
    and ``response_mask`` (B,S-1), 1 at the tokens that the loss is on. Where items have ``multi_modal_inputs``, so has
    the batch: a list of B.

    Args:
        pad_token_id: fills what is not text.
        length: S; ``None`` for the longest example of the batch.
    """

    def __init__(self, pad_token_id: int, length: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.length = length

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        longest = max((len(item["input_ids"]) for item in items), default=0)
        length = max(2, longest if self.length is None else self.length)
        batch: dict[str, Any] = {
            name: _stack([_right_padded(item[name], length, fill) for item in items], length)
            for name, fill in (
                ("input_ids", self.pad_token_id),
                ("attention_mask", 0),
                ("position_ids", 0),
                ("loss_mask", 0),
            )
        }
        batch["prompts"] = batch["input_ids"][:, :1].clone()
        batch["responses"] = batch["input_ids"][:, 1:].clone()
        batch["response_mask"] = batch.pop("loss_mask")[:, 1:].clone()
        return batch | image_column(items)


def _stack(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """(B, length); a rank may have no row of a short batch."""
    return torch.stack(rows) if rows else torch.empty((0, length), dtype=torch.int64)


def _right_padded(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=fill)
