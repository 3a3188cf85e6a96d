"""Images of prompts: from what a data file holds to what a model reads."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.data import DEFAULT_IMAGE_KEY
from verl.data.chat import Message, as_messages
from verl.errors import ConfigError, DataError
from verl.schema import IMAGE_FIELD

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from verl.config.data import ImagesConfig
    from verl.data.files import Rows

#: stands for the next image of the row in the text of a message
MARK = "<image>"
#: column of a batch with what the model reads of each row's images


def as_values(column: Any) -> list[Any]:
    """The images of a row; the column may hold one, several or none."""
    if column is None:
        return []
    if isinstance(column, np.ndarray):
        column = column.tolist()
    return list(column) if isinstance(column, list | tuple) else [column]


def with_image_parts(messages: Sequence[Message], count: int) -> list[Message]:
    """Messages whose ``<image>`` marks are parts of their content, as chat templates want them.

    Args:
        messages: contents are texts with marks, or lists of parts.
        count: images of the row.

    Raises:
        DataError: there are more or fewer marks than images.
    """
    out: list[Message] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and MARK in content:
            parts: list[dict[str, str]] = []
            for number, text in enumerate(content.split(MARK)):
                if number:
                    parts.append({"type": "image"})
                if text:
                    parts.append({"type": "text", "text": text})
            content = parts
        out.append({**message, "content": content})
    marks = image_parts(out)
    if marks != count:
        raise DataError(
            f"the messages have {marks} place(s) for images ({MARK} marks, or parts of type 'image') and the row has "
            f"{count} image(s)"
        )
    return out


class ImageReader:
    """Opens images and cuts them into patches with the model's processor.

    Args:
        processor: has Transformers' ``image_processor``, and ``image_token_id``.
        min_pixels: smaller images are enlarged to about this many pixels; None: as the processor says.
        max_pixels: larger images are reduced to about this many.
    """

    def __init__(self, processor: Any, *, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        self.processor = processor.image_processor
        self.token_id = int(processor.image_token_id)
        size = self.processor.size
        self.min_pixels = int(size["shortest_edge"] if min_pixels is None else min_pixels)
        self.max_pixels = int(size["longest_edge"] if max_pixels is None else max_pixels)
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"data.image_min_pixels={self.min_pixels} is more than data.image_max_pixels={self.max_pixels} (the "
                "processor's own values stand where a key is not given)"
            )

    @classmethod
    def of(cls, rows: Rows, config: ImagesConfig, processor: Any | None) -> ImageReader | None:
        """What reads the images of a data set's rows; None where no row has any.

        Args:
            rows: of the data set.
            config: names the column and the limits.
            processor: of the model; None where it has none.

        Raises:
            DataError: the column that ``image_key`` names is not there, or the model has no processor of images.
        """
        key = config.image_key
        if key not in rows.columns:
            if key != DEFAULT_IMAGE_KEY:
                raise DataError(f"data.image_key={key!r}: there is no such column; the data has {rows.columns}")
            return None
        if not any(as_values(value) for value in rows.column(key)):
            return None
        require_pillow()
        if not hasattr(processor, "image_processor"):
            raise DataError(
                f"{rows.files[0].path} has images (data.image_key={key!r}), and the model has no processor of images; "
                "use a vision-language model, whose directory has a preprocessor_config.json, or leave the column out"
            )
        return cls(processor, min_pixels=config.image_min_pixels, max_pixels=config.image_max_pixels)

    def read(self, values: Sequence[Any], directory: Path) -> dict[str, Tensor]:
        """``multi_modal_inputs`` of a row from what its column holds; arguments and errors of :meth:`open`."""
        return self.process(self.open(values, directory))

    def open(self, values: Sequence[Any], directory: Path) -> list[Image]:
        """The images of a row, in RGB.

        Args:
            values: each bytes, a path, a PIL image, a ``data:`` address, or a mapping with ``bytes``, ``path`` or
                ``image``.
            directory: of the data file, where relative paths begin.

        Raises:
            DataError: one cannot be read.
        """
        from PIL import ImageOps

        out = []
        for number, value in enumerate(values):
            try:
                out.append(ImageOps.exif_transpose(_opened(value, directory)).convert("RGB"))
            except DataError as error:
                raise DataError(f"image {number}: {error}") from error.__cause__
            except Exception as error:  # decoders of many formats: anything may come out of them
                raise DataError(f"image {number} cannot be decoded: {type(error).__name__}: {error}") from error
        return out

    def process(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """``pixel_values`` (patches, numbers of a patch) float32 and ``image_grid_thw`` (images, 3) int64."""
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        try:
            made = self.processor(images=list(images), size=size, return_tensors="pt")
        except ValueError as error:  # an image of extreme proportions
            raise DataError(f"the model's processor rejects the images: {error}") from error
        return {"pixel_values": made["pixel_values"].float(), "image_grid_thw": made["image_grid_thw"].long()}

    def token_count(self, values: Sequence[Any], directory: Path) -> int:
        """Tokens that the images of a row take; reads their headers alone."""
        total = 0
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        for number, value in enumerate(values):
            try:
                with _opened(value, directory) as image:
                    width, height = image.size
                total += self.processor.get_number_of_image_patches(height, width, limits)
            except DataError as error:
                raise DataError(f"image {number}: {error}") from error.__cause__
            except Exception as error:  # as in `open`
                raise DataError(f"image {number} cannot be read: {type(error).__name__}: {error}") from error
        return total // self.processor.merge_size**2

    def copies(self, token_ids: Sequence[int], grid_thw: Tensor) -> list[int]:
        """How often each token is to stand so that there is a placeholder for each feature of an image.

        Args:
            token_ids: with one placeholder for each image.
            grid_thw: (images, 3).

        Raises:
            DataError: the chat template wrote another number of placeholders than there are images.
        """
        return copies_of(token_ids, self.token_id, (grid_thw.prod(-1) // self.processor.merge_size**2).tolist())

    def expand(self, token_ids: Sequence[int], grid_thw: Tensor) -> list[int]:
        """Token ids with one placeholder for each feature of an image instead of one for each image.

        Raises:
            DataError: as :meth:`copies`.
        """
        return repeated(token_ids, self.copies(token_ids, grid_thw))


def copies_of(token_ids: Sequence[int], token_id: int, counts: Sequence[int]) -> list[int]:
    """How often each token is to stand: the n-th ``token_id`` ``counts[n]`` times, all others once.

    Raises:
        DataError: there are more or fewer of them than counts.
    """
    found = sum(token == token_id for token in token_ids)
    if found != len(counts):
        raise DataError(
            f"the chat template wrote {found} image token(s) (id {token_id}) for {len(counts)} image(s); use the "
            "template of the vision-language model, and keep its image token out of texts"
        )
    following = iter(counts)
    return [next(following) if token == token_id else 1 for token in token_ids]


def image_parts(messages: Sequence[Message]) -> int:
    """How many images messages show."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return sum(part["type"] == "image" for content in contents for part in content)


def repeated(values: Sequence[int], copies: Sequence[int]) -> list[int]:
    """Each value so often as ``copies`` says."""
    return [value for value, count in zip(values, copies, strict=True) for _ in range(count)]


class RowImageReader:
    """The images of a data set's rows on their way into tokenised conversations.

    Args:
        rows: of the data set.
        config: names the column and the limits.
        processor: of a vision-language model; needed where a row has an image.

    Attributes:
        present: whether some row has an image. Where none has, everything passes through unchanged.
    """

    def __init__(self, rows: Rows, config: ImagesConfig, processor: Any | None) -> None:
        self._rows = rows
        self._key = config.image_key
        self._reader = ImageReader.of(rows, config, processor)
        self.present = self._reader is not None

    def messages(self, row: Mapping[str, Any], value: Any) -> list[Message]:
        """The checked messages of a conversation, with the row's images in their places."""
        messages = as_messages(value, parts=self.present)
        return with_image_parts(messages, len(as_values(row.get(self._key)))) if self.present else messages

    def prompt(self, row: Mapping[str, Any], prompt: Any) -> Any:
        """A prompt, text or chat messages; as messages where rows have images."""
        if not self.present:
            return prompt
        return self.messages(row, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def read(self, index: int, row: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """``multi_modal_inputs`` of a row and its number; None without an image."""
        values = as_values(row.get(self._key))
        if self._reader is None or not values:
            return None
        return self._reader.read(values, self._rows.directory(index))

    def expand(
        self, token_ids: list[int], mask: list[int], inputs: Mapping[str, Tensor] | None
    ) -> tuple[list[int], list[int]]:
        """Tokens and mask of a conversation with one placeholder for each feature of its images.

        Raises:
            DataError: the chat template wrote another number of placeholders than there are images, or one in a turn
                that the model is to learn.
        """
        if self._reader is None or inputs is None:
            return token_ids, mask
        if any(wanted and token == self._reader.token_id for token, wanted in zip(token_ids, mask, strict=True)):
            raise DataError("an image stands in a turn of the assistant, which writes text alone")
        copies = self._reader.copies(token_ids, inputs["image_grid_thw"])
        return repeated(token_ids, copies), repeated(mask, copies)


def image_column(items: Sequence[Mapping[str, Any]], copies: int = 1) -> dict[str, list[Any]]:
    """``multi_modal_inputs`` of a batch, each item's ``copies`` times; nothing where items have none."""
    if not items or IMAGE_FIELD not in items[0]:
        return {}
    return {IMAGE_FIELD: [item[IMAGE_FIELD] for item in items for _ in range(copies)]}


def reject_images(row: Mapping[str, Any], reader: str, keys: Sequence[str] = (DEFAULT_IMAGE_KEY, "videos")) -> None:
    """Refuse a row that shows something where text alone is read.

    Args:
        row: of a data file.
        reader: what reads it, for the message.
        keys: columns that must be empty.

    Raises:
        DataError: one is not.
    """
    for key in keys:
        if as_values(row.get(key)):
            raise DataError(f"has {key!r}, which {reader} does not read; remove the column or use rows without")


def require_pillow() -> None:
    """Say what to install where images cannot be opened.

    Raises:
        ConfigError: Pillow is missing.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError("images in prompts need Pillow: pip install 'verl[vision]'") from error


def _opened(value: Any, directory: Path) -> Image:
    """An image whose pixels may still be unread."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", "image", "path") if value.get(key) is not None), None)
        if inner is None:
            raise DataError(f"a mapping with {sorted(value)}; expected a value for 'bytes', 'path' or 'image'")
        return _opened(inner, directory)
    if isinstance(value, bytes | bytearray):
        return Image.open(io.BytesIO(value))
    if not isinstance(value, str):
        raise DataError(f"a {type(value).__name__}; expected bytes, a path, a PIL image or a mapping with one of them")
    if value.startswith(("http://", "https://")):
        raise DataError(f"{value[:80]!r} is an address; download images beforehand and give bytes or paths")
    if value.startswith("data:"):
        try:
            return Image.open(io.BytesIO(base64.b64decode(value.partition(",")[2], validate=True)))
        except binascii.Error as error:
            raise DataError("a data: address that is not valid base64") from error
    path = Path(value.removeprefix("file://")).expanduser()
    found = next((p for p in (directory / path, path) if p.is_file()), None)
    if found is None:
        raise DataError(f"there is no file {value!r} (looked beside the data file and in {Path.cwd()})")
    return Image.open(found)
