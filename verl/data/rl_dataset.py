"""Prompts for reinforcement learning, from rows in the schema that this ecosystem uses."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Subset

from verl.config import DataConfig
from verl.data import forms
from verl.data.chat import Message, encode, encode_plain, render
from verl.data.collate import collate_fn
from verl.data.files import Row, Rows
from verl.data.images import ImageReader, as_values, reject_images, with_image_parts
from verl.data.row_gate import Column, Problems, RowError, RowGate, check_names
from verl.errors import ConfigError, DataError
from verl.utils.dynamic_import import load_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RLHFDataset", "collate_fn", "create_dataset", "get_dataset_class", "has_images"]

logger = logging.getLogger(__name__)

_CHUNK = 512


class RLHFDataset(Dataset):
    """Tokenised prompts with what the reward needs.

    A prompt is a list of chat messages, rendered with the tokenizer's chat template and an opened assistant turn, or a
    plain string: that is one user message where the tokenizer has a chat template, and where it has none it is encoded
    as the tokenizer does it. Every other column of the file is passed on under its own name, but none may have the name
    of something that the run makes. ``data_source`` is what the column ``reward_fn_key`` holds.

    Items hold ``input_ids``, ``attention_mask``, ``position_ids`` (int64, length ``max_prompt_length``, left-padded),
    ``raw_prompt_ids`` (list without padding), ``raw_prompt`` (the messages, if ``return_raw_chat``), ``index``
    (``extra_info["index"]``, or the row's number), ``tools_kwargs`` and ``interaction_kwargs`` (from ``extra_info``, or
    empty) and the row's remaining columns. Where some row has images, they also hold ``multi_modal_inputs``:
    ``pixel_values`` (patches, numbers of a patch) and ``image_grid_thw`` (images, 3), or None for a row without.

    Args:
        data_files: a path or a list of paths to ``.parquet``, ``.jsonl`` or ``.json`` files.
        tokenizer: the model's tokenizer.
        config: the ``data`` section, or a mapping with its keys.
        processor: of a vision-language model (``image_processor`` and ``image_token_id`` are used); needed for images.

    Raises:
        DataError: a file or row is not as described (the message names it), or no prompt is left after filtering.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | Mapping[str, Any],
        processor: Any | None = None,
    ) -> None:
        self.config = as_data_config(config)
        self.tokenizer = tokenizer
        self.processor = processor
        self.template_kwargs = dict(self.config.apply_chat_template_kwargs or {})
        prompt_key, source_key = self.config.prompt_key, self.config.reward_fn_key
        self.rows = Rows(data_files, required=[prompt_key, source_key])
        if source_key != "data_source" and "data_source" in self.rows.columns:
            logger.warning("column 'data_source' is not read: data.reward_fn_key=%s names the data sources", source_key)
        check_names(self.rows.columns, read=[prompt_key, self.config.image_key])
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._images = ImageReader.of(self.rows, self.config, self.processor)
        self.gate = RowGate(
            self.rows,
            [
                Column(prompt_key, partial(forms.prompt, parts=self.has_images), required=True),
                Column(source_key, forms.source),
                Column("reward_model", forms.optional_mapping),
                Column("extra_info", forms.extra_info),
                Column("agent_name", partial(forms.optional, form=forms.text)),
            ],
        )
        self._indices = self._usable_rows()

    @property
    def has_images(self) -> bool:
        """Whether some row has an image."""
        return self._images is not None

    def _usable_rows(self) -> list[int]:
        """Check every prompt's form and, where none is to be cut, its length; drop those too long, if asked to."""
        limit, drop = self.config.max_prompt_length, self.config.filter_overlong_prompts
        if drop or (self.config.truncation == "error" and not self.has_images):  # images cost too much to ask for all
            lengths = self._prompt_lengths()
        else:
            self.gate.check()
            lengths = [0] * len(self.rows)
        kept = [index for index, length in enumerate(lengths) if length <= limit]
        dropped = len(lengths) - len(kept)
        if dropped and not drop:
            first = next(index for index, length in enumerate(lengths) if length > limit)
            with self._naming_row(first):
                raise DataError(f"{self._too_long(lengths[first])} ({dropped} of {len(lengths)} prompts are too long)")
        if drop:
            logger.info(
                "filtered %d of %d prompts longer than data.max_prompt_length=%d tokens",
                dropped,
                len(self.rows),
                limit,
            )
        if not kept:
            raise DataError(
                f"all {len(self.rows)} prompts of {', '.join(f.path for f in self.rows.files)} are longer than "
                f"data.max_prompt_length={limit}; raise it, or check data.prompt_key={self.config.prompt_key!r}"
            )
        return kept

    def _conversation(self, value: str | list[Message]) -> str | list[Message]:
        return [{"role": "user", "content": value}] if isinstance(value, str) and self._has_template else value

    def _shown(self, conversation: str | list[Message], images: list[Any]) -> str | list[Message]:
        """A conversation with its images in their places."""
        if not self.has_images:
            return conversation
        if not isinstance(conversation, str):
            return with_image_parts(conversation, len(images))
        if images:
            raise DataError("the row has images, and the tokenizer no chat template that says where they stand")
        return conversation

    def _prompts(self, problems: Problems) -> Iterator[tuple[str | list[Message], int]]:
        """Every prompt, and how many tokens its images take beyond one for each; empty where a row has problems."""
        also = [self.config.image_key] if self.has_images else []
        for index, row in self.gate.passed(range(len(self.rows)), problems, also=also):
            prompt: str | list[Message] = ""
            more = 0
            with problems.collecting(), self._naming_row(index):
                if row is not None:
                    images = as_values(row.get(self.config.image_key))
                    if self._images is not None and images:
                        more = self._images.token_count(images, self.rows.directory(index)) - len(images)
                    prompt = self._shown(self._conversation(row[self.config.prompt_key]), images)
            yield prompt, more

    def _naming_row(self, index: int) -> _NamingRow:
        return _NamingRow(self.rows, index, self.config.prompt_key)

    def _prompt_lengths(self) -> list[int]:
        """How many tokens each prompt has.

        Raises:
            DataError: rows have problems.
        """
        problems = Problems()
        image_tokens: list[int] = []

        def conversations() -> Iterator[str | list[Message]]:
            for prompt, more in self._prompts(problems):
                image_tokens.append(more)
                yield prompt

        prompts = conversations()
        chunks = iter(lambda: list(islice(prompts, _CHUNK)), [])
        workers = self.config.filter_overlong_prompts_workers or 0
        if workers > 1 and len(self.rows) > _CHUNK:
            # fresh processes: the parent may hold threads (Ray, OpenMP) that a fork would leave broken
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                results = list(pool.map(_chunk_lengths, repeat(self.tokenizer), chunks, repeat(self.template_kwargs)))
        else:
            results = [_chunk_lengths(self.tokenizer, chunk, self.template_kwargs) for chunk in chunks]
        lengths: list[int] = []
        for row, length in enumerate(length for result in results for length in result):
            with problems.collecting(), self._naming_row(row):
                if isinstance(length, DataError):
                    raise length
                lengths.append(length + image_tokens[row])
        problems.stop()
        return lengths

    def fingerprint(self, items: Iterable[int] | None = None) -> str:
        """SHA-256 of the rows that are used, in their order; see :meth:`verl.data.files.Rows.fingerprint`.

        Args:
            items: numbers of the items that count; None for all of them.
        """
        return self.rows.fingerprint(self._indices if items is None else map(self._indices.__getitem__, items))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, item: int) -> Row:
        index = self._indices[item]
        row = self.gate[index]
        with self._naming_row(index):
            reject_images(row, "this data set", ["videos"])
            row.pop("videos", None)
            images = as_values(row.pop(self.config.image_key, None))
            conversation = self._shown(self._conversation(row.pop(self.config.prompt_key)), images)
            token_ids = self._encoded(conversation)
            if self._images is not None:
                row["multi_modal_inputs"] = None
                if images:
                    inputs = self._images.read(images, self.rows.directory(index))
                    token_ids = self._images.expand(token_ids, inputs["image_grid_thw"])
                    row["multi_modal_inputs"] = inputs
            token_ids = self._truncated(token_ids, cut=not images)
        row.update(left_padded(token_ids, self.config.max_prompt_length, self.tokenizer.pad_token_id))
        row["raw_prompt_ids"] = token_ids
        if self.config.return_raw_chat:
            row["raw_prompt"] = conversation
        row["data_source"] = row[self.config.reward_fn_key]
        extra = row.setdefault("extra_info", {})
        given = extra.get("index")
        row["index"] = index if given is None else given
        row["tools_kwargs"] = extra.get("tools_kwargs") or {}
        row["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
        return row

    def _encoded(self, conversation: str | list[Message]) -> list[int]:
        if isinstance(conversation, str):
            return encode_plain(self.tokenizer, conversation)
        return encode(self.tokenizer, _rendered(self.tokenizer, conversation, self.template_kwargs))

    def _truncated(self, token_ids: list[int], *, cut: bool = True) -> list[int]:
        limit, mode = self.config.max_prompt_length, self.config.truncation
        if not token_ids:
            raise DataError("the prompt has no tokens")
        if len(token_ids) <= limit:
            return token_ids
        if not cut:
            raise DataError(
                f"the prompt has {len(token_ids)} tokens with those of its images, more than data.max_prompt_length="
                f"{limit}, and prompts with images are not cut; raise the limit, lower data.image_max_pixels, or set "
                "data.filter_overlong_prompts=True to drop such rows"
            )
        if mode == "left":
            return token_ids[-limit:]
        if mode == "right":
            return token_ids[:limit]
        if mode == "middle":
            head = limit // 2
            return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]
        raise DataError(self._too_long(len(token_ids)))

    def _too_long(self, length: int) -> str:
        return (
            f"the prompt has {length} tokens, more than data.max_prompt_length={self.config.max_prompt_length}; raise "
            "the limit, set data.filter_overlong_prompts=True to drop such rows, or data.truncation=left|right|middle "
            "to cut them"
        )


class _NamingRow:
    """Adds file and row to a :class:`DataError` that passes through."""

    def __init__(self, rows: Rows, index: int, column: str) -> None:
        self.rows, self.index, self.column = rows, index, column

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, DataError) and not isinstance(error, RowError):
            raise DataError(f"{self.rows.place(self.index)}, column {self.column!r}: {error}") from error.__cause__


def _chunk_lengths(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str | list[Message]], template_kwargs: Mapping[str, Any]
) -> list[int | DataError]:
    """Token counts of prompts; where the template rejects one, the error in its place."""
    lengths: dict[int, int | DataError] = {}
    plain = {number: prompt for number, prompt in enumerate(prompts) if isinstance(prompt, str)}
    rendered: dict[int, str] = {}
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            try:
                rendered[number] = _rendered(tokenizer, prompt, template_kwargs)
            except DataError as error:
                lengths[number] = error
    for texts, framed in ((plain, True), (rendered, False)):  # see `encode` and `encode_plain`
        if texts:
            ids = tokenizer(list(texts.values()), add_special_tokens=framed)["input_ids"]
            lengths.update(zip(texts, map(len, ids), strict=True))
    return [lengths[number] for number in range(len(prompts))]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Message], template_kwargs: Mapping[str, Any]) -> str:
    return render(tokenizer, messages, add_generation_prompt=True, template_kwargs=template_kwargs)


def left_padded(token_ids: Sequence[int], length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask``, ``position_ids`` (length,), left-padded; positions start at the text."""
    gap = length - len(token_ids)
    return {
        "input_ids": torch.tensor([pad_token_id] * gap + list(token_ids), dtype=torch.int64),
        "attention_mask": torch.tensor([0] * gap + [1] * len(token_ids), dtype=torch.int64),
        "position_ids": torch.tensor([0] * gap + list(range(len(token_ids))), dtype=torch.int64),
    }


def as_data_config(config: DataConfig | Mapping[str, Any]) -> DataConfig:
    """The ``data`` section as its dataclass; a mapping (or OmegaConf node) may hold any of its keys."""
    if isinstance(config, DataConfig):
        return config
    try:
        return DataConfig(**dict(config))
    except TypeError as error:
        raise ConfigError(f"data section: {error}") from error


def get_dataset_class(config: DataConfig) -> type[Dataset]:
    """:class:`RLHFDataset`, or the user's class named by ``data.custom_cls.{path,name}``.

    Raises:
        ConfigError: the file or class does not exist, or the class is not a ``torch.utils.data.Dataset``.
    """
    custom = config.custom_cls
    if not custom.path:
        return RLHFDataset
    if not custom.name:
        raise ConfigError(f"data.custom_cls.path={custom.path!r} without data.custom_cls.name; name the class to use")
    cls = load_object(custom.path, custom.name)
    if not (isinstance(cls, type) and issubclass(cls, Dataset)):
        raise ConfigError(
            f"data.custom_cls: {custom.name!r} in {custom.path!r} must be a class derived from "
            f"torch.utils.data.Dataset, got {cls!r}"
        )
    return cls


def create_dataset(
    data_files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    processor: Any | None = None,
    max_samples: int = -1,
) -> Dataset:
    """The data set that the configuration asks for: ours, or the user's class with the same constructor.

    ``max_samples`` (-1 for all) keeps the first so many items, whatever the class.
    """
    cls = get_dataset_class(config)
    dataset = cls(data_files=data_files, tokenizer=tokenizer, config=config, processor=processor)  # type: ignore[call-arg]
    if 0 <= max_samples < len(dataset):  # type: ignore[arg-type]
        return Subset(dataset, range(max_samples))
    return dataset


def has_images(dataset: Any) -> bool:
    """Whether a data set, or what it is a part of, has prompts with images."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return bool(getattr(dataset, "has_images", False))


def fingerprint_of(dataset: Any) -> str | None:
    """The fingerprint of the rows that a data set uses, or the part of one; None for a user's class without any.

    Any data set may have a method ``fingerprint(items)``: a text that is equal where the rows of these items are.
    """
    items: list[int] | None = None
    while isinstance(dataset, Subset):
        chosen = [int(index) for index in dataset.indices]
        items = chosen if items is None else [chosen[index] for index in items]
        dataset = dataset.dataset
    fingerprint = getattr(dataset, "fingerprint", None)
    return str(fingerprint(items)) if callable(fingerprint) else None
