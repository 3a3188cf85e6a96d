"""Random images, and rows with images, for the tiny vision-language models of ``families``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.workers.engine.images import with_images

IMAGE, VISION_START, VISION_END = 57, 59, 60
MERGE, PATCH, PATCH_VALUES = 2, 4, 3 * 2 * 4 * 4

Inputs = dict[str, Tensor]


def make_images(*grids: tuple[int, int], seed: int = 0) -> Inputs:
    """Random images of the given patches in height and width, as a processor makes them."""
    generator = torch.Generator().manual_seed(seed)
    patches = sum(height * width for height, width in grids)
    return {
        "pixel_values": torch.randn(patches, PATCH_VALUES, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width] for height, width in grids]),
    }


def image_prompt(
    images: Inputs | None,
    lengths: Sequence[int],
    seed: int = 0,
    tokens: tuple[int, int, int] = (IMAGE, VISION_START, VISION_END),
) -> list[int]:
    """Random text of the given lengths with an image between each two pieces; ``tokens`` as in this module."""
    image, begin, end = tokens
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randint(3, 57, (length,), generator=generator).tolist() for length in lengths]
    grids = [] if images is None else images["image_grid_thw"].tolist()
    assert len(pieces) == len(grids) + 1
    ids = pieces[0]
    for (_, height, width), text in zip(grids, pieces[1:], strict=True):
        ids = [*ids, begin, *[image] * (height * width // MERGE**2), end, *text]
    return ids


def example_rows() -> tuple[list[list[int]], list[Inputs | None]]:
    """Prompts and images: two samples of one prompt, the same text with another image, two images of different
    sizes in one prompt, text alone, one wide image.
    """
    one, other = make_images((4, 6), seed=1), make_images((4, 6), seed=2)
    two, wide = make_images((2, 2), (6, 4), seed=3), make_images((2, 8), seed=4)
    images = [one, one, other, two, None, wide]
    lengths = [(4, 3), (4, 3), (4, 3), (2, 1, 5), (9,), (1, 6)]
    seeds = [1, 1, 1, 2, 3, 4]
    prompts = [image_prompt(*row) for row in zip(images, lengths, seeds, strict=True)]
    return prompts, images


def pad_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Rows as the rollout makes them: prompts padded left, responses padded right."""
    p, r = max(map(len, prompts)), max(map(len, responses))
    ids, mask = torch.zeros((len(prompts), p + r), dtype=torch.long), torch.zeros((len(prompts), p + r)).long()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, p - len(prompt) : p + len(response)] = torch.tensor([*prompt, *response])
        mask[row, p - len(prompt) : p + len(response)] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask[:, p:].clone(),
    }


def image_batch() -> tuple[TensorDict, list[Inputs | None]]:
    """Rows of :func:`example_rows` with responses and advantages, with and as their images."""
    prompts, images = example_rows()
    generator = torch.Generator().manual_seed(5)
    responses = [torch.randint(3, 57, (length,), generator=generator).tolist() for length in (3, 7, 1, 6, 2, 9)]
    rows = pad_rows(prompts, responses)
    rows["response_mask"][5, 2:4] = 0
    rows["advantages"] = torch.randn(rows["response_mask"].shape, generator=generator)
    return with_images(TensorDict(rows, batch_size=[len(prompts)]), images), images


def model_arguments(ids: Tensor, images: Mapping[str, Any] | None, image: int = IMAGE) -> dict[str, Tensor]:
    """What Transformers' model reads besides ``input_ids`` (1, L)."""
    return {} if images is None else {**images, "mm_token_type_ids": (ids == image).long()}
