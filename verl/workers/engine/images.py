"""Images of a batch on their way through an engine.

A batch is cut into mini- and micro-batches, regrouped and sent to devices many times. Its rows therefore carry a number
(``image_number``) and the batch as a whole the different images (``image_table``), which no cut copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from verl.data.images import IMAGE_FIELD
from verl.errors import ConfigError
from verl.models.vision import ImageTokens, PromptImages, RowImages, prompt_images
from verl.protocol import DataProto

NUMBER, TABLE = "image_number", "image_table"


def engine_rows(data: DataProto) -> TensorDict:
    """The tensors of a batch, and the images of its :data:`IMAGE_FIELD` if there is one."""
    rows: TensorDict = data.batch
    column = data.non_tensor_batch.get(IMAGE_FIELD)
    return rows if column is None else with_images(rows, list(column))


def with_images(rows: TensorDict, inputs: Sequence[Mapping[str, Any] | None]) -> TensorDict:
    """Rows together with their images; the tensors are shared.

    Args:
        rows: B rows.
        inputs: ``multi_modal_inputs`` of each: ``pixel_values`` and ``image_grid_thw`` of all its images, or None.

    Returns:
        ``rows`` itself where no row has an image.
    """
    images = prompt_images(inputs)
    table: dict[Any, PromptImages] = {}
    numbers: dict[Any, int] = {}
    for image in images:
        if image is not None:
            numbers.setdefault(image.identity, len(table))
            table.setdefault(image.identity, image)
    if not table:
        return rows
    out = rows.copy()
    out[NUMBER] = torch.tensor([-1 if image is None else numbers[image.identity] for image in images])
    out[TABLE] = NonTensorData(list(table.values()), batch_size=out.batch_size)
    return out


def prompt_parts(inputs: Sequence[Mapping[str, Any] | None], counts: Sequence[int]) -> list[dict[str, Any] | None]:
    """``multi_modal_inputs`` of the first ``counts`` images of each row; rows with the same object share the result."""
    made: dict[tuple[int, int], dict[str, Any] | None] = {}
    for row, count in zip(inputs, counts, strict=True):
        key = (id(row), count)
        if key not in made:
            images = PromptImages.of(row) if count else None
            made[key] = None
            if images is not None:
                patches = int(images.grid_thw[:count].prod(-1).sum())
                made[key] = {
                    "pixel_values": images.pixel_values[:patches],
                    "image_grid_thw": images.grid_thw[:count],
                }
    return [made[id(row), count] for row, count in zip(inputs, counts, strict=True)]


def has_images(rows: TensorDict) -> bool:
    """Whether there are images of the batch that these rows come from."""
    return NUMBER in rows.keys()  # noqa: SIM118 - a TensorDict iterates over rows


def images_of(rows: TensorDict, tokens: ImageTokens | None) -> RowImages | None:
    """The images of some rows as the model's input is planned from them; None without images.

    Raises:
        ConfigError: there are images and the model reads none.
    """
    if not has_images(rows):
        return None
    if tokens is None:
        raise ConfigError(
            "the batch has images (multi_modal_inputs) and the model reads none; use a vision-language model, or leave "
            "the column of images out of the data"
        )
    table = rows.get(TABLE)
    return RowImages.of(
        tokens,
        table.data if isinstance(table, NonTensorData) else table,
        rows[NUMBER].cpu().numpy(),
        rows["input_ids"].cpu().numpy(),
        rows["attention_mask"].cpu().numpy() != 0,
        rows["position_ids"].cpu().numpy(),
        rows["input_ids"].shape[1] - rows["response_mask"].shape[1],
    )
