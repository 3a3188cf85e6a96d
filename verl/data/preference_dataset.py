"""Pairs of answers to the same prompt, of which one was preferred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from verl.data import forms
from verl.data.chat import as_messages
from verl.data.files import Row, Rows
from verl.data.images import IMAGE_FIELD, RowImageReader, image_column, reject_images
from verl.data.row_gate import Column, RowGate
from verl.data.sft_dataset import answer_tokens, conversation_tokens
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import PreferenceDataConfig


class PreferenceDataset(Dataset):
    """Tokenised pairs.

    A row has a prompt (``prompt_key``, text or chat messages) and two answers (``chosen_key``, ``rejected_key``), each
    a text or the chat messages that follow the prompt. Without a prompt column the answers are whole conversations.
    What counts is the last assistant turn; everything before it is the prompt.

    An item holds ``chosen`` and ``rejected``, pairs of int64 tensors (prompt tokens, answer tokens), together at most
    ``max_length`` long, and ``margin``, a float; with images in some row also ``multi_modal_inputs``, as
    :class:`~verl.data.RLHFDataset` has them. Both answers are given with all images of the row.

    Args:
        data_files: a path or a list of paths to ``.parquet``, ``.jsonl`` or ``.json`` files.
        tokenizer: the model's tokenizer.
        config: the ``data`` section.
        processor: of a vision-language model, needed for images, which are those of the prompt.

    Raises:
        DataError: a file or a row is not as described; the message names it.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: PreferenceDataConfig,
        processor: Any | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template_kwargs = dict(config.apply_chat_template_kwargs)
        margin = [config.margin_key] if config.margin_key else []
        self.rows = Rows(data_files, required=[config.chosen_key, config.rejected_key, *margin])
        self.images = RowImageReader(self.rows, config, processor)
        self.gate = RowGate(self.rows, self._columns())

    def _columns(self) -> list[Column]:
        config = self.config
        conversation = partial(forms.prompt, parts=self.has_images)
        columns = [Column(key, conversation, required=True) for key in (config.chosen_key, config.rejected_key)]
        columns.append(Column(config.prompt_key, partial(forms.optional, form=conversation)))
        return columns + ([Column(config.margin_key, forms.number, required=True)] if config.margin_key else [])

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
        row = self.gate[index]
        try:
            reject_images(row, "preference training", ["videos"])
            inputs = self.images.read(index, row)
            images = {IMAGE_FIELD: inputs} if self.has_images else {}
            return {
                "chosen": self._side(row, self.config.chosen_key, inputs),
                "rejected": self._side(row, self.config.rejected_key, inputs),
                "margin": row[self.config.margin_key] if self.config.margin_key else 0.0,
                **images,
            }
        except DataError as error:
            raise DataError(f"{self.rows.place(index)}: {error}") from error.__cause__

    def _side(self, row: Row, key: str, inputs: dict[str, Any] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(prompt tokens, answer tokens) of one answer; ``inputs`` are the row's images."""
        try:
            token_ids, mask = self.images.expand(*self._tokens(row, row[key]), inputs)
        except DataError as error:
            raise DataError(f"column {key!r}: {error}") from error
        start = mask.index(1)
        end = len(mask) - mask[::-1].index(1)
        prompt, answer = token_ids[:start], token_ids[start:end]
        excess = len(prompt) + len(answer) - self.config.max_length
        if excess > 0:
            if self.config.truncation == "error" or inputs is not None:
                remedy = "set data.truncation=left to cut the beginning of such prompts"
                if inputs is not None:
                    remedy = "lower data.image_max_pixels; prompts with images are not cut"
                raise DataError(
                    f"column {key!r}: prompt and answer have {len(prompt) + len(answer)} tokens, more than "
                    f"data.max_length={self.config.max_length}; raise the limit, or {remedy}"
                )
            prompt = prompt[excess:]
        if not prompt:
            raise DataError(
                f"column {key!r}: no token of the prompt is left before the answer's {len(answer)} tokens "
                f"(data.max_length={self.config.max_length}); raise the limit or remove the row"
            )
        return torch.tensor(prompt), torch.tensor(answer)

    def _tokens(self, row: Row, answer: Any) -> tuple[list[int], list[int]]:
        prompt = row.get(self.config.prompt_key)
        if isinstance(answer, str):
            if prompt is None:
                raise DataError(
                    f"the answer is text and the row has no column {self.config.prompt_key!r}; set data.prompt_key, or "
                    "give whole conversations as answers"
                )
            prompt = self.images.prompt(row, prompt)
            return answer_tokens(self.tokenizer, prompt, answer, self.template_kwargs, parts=self.has_images)
        before: list[dict[str, Any]] = []
        if prompt is not None:
            before = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else as_messages(prompt, parts=self.has_images)
            )
        messages = self.images.messages(row, [*before, *as_messages(answer, parts=self.has_images)])
        if messages[-1]["role"] != "assistant":
            raise DataError(f"the answer ends with a message of role {messages[-1]['role']!r}; expected 'assistant'")
        return conversation_tokens(self.tokenizer, messages, None, self.template_kwargs, only_last=True)


class PreferenceCollator:
    """Batches in the layout that training engines read: rows 2i and 2i+1 are the chosen and rejected answers of pair i.

    ``prompts`` (2N,P) left-padded, ``responses`` (2N,R) right-padded, ``input_ids``, ``attention_mask``,
    ``position_ids`` (2N,P+R), ``response_mask`` (2N,R) and ``margin`` (2N,). Where items have ``multi_modal_inputs``,
    so has the batch: a list of 2N.

    Args:
        pad_token_id: fills what is not text.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sides = [item[name] for item in items for name in ("chosen", "rejected")]
        width = max((len(prompt) for prompt, _ in sides), default=1)
        length = max((len(answer) for _, answer in sides), default=1)
        input_ids = torch.full((len(sides), width + length), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, (prompt, answer) in enumerate(sides):
            used = slice(width - len(prompt), width + len(answer))
            input_ids[row, used] = torch.cat([prompt, answer])
            attention_mask[row, used] = 1
        return {
            "prompts": input_ids[:, :width].clone(),
            "responses": input_ids[:, width:].clone(),
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": attention_mask[:, width:].clone(),
            "margin": torch.tensor([item["margin"] for item in items for _ in range(2)], dtype=torch.float32),
            **image_column(items, copies=2),
        }
