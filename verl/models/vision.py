"""Images in prompts: which tokens stand for them, the positions that tokens get, and what takes the tokens' place.

A vision-language model of the Qwen2-VL kind (https://arxiv.org/abs/2409.12191) reads an image as a grid of patches. Its
vision tower makes one feature of every ``merge`` x ``merge`` patches, and the features replace the embeddings of as
many equal placeholder tokens in the prompt. Rotary positions have three parts (time, height, width): text counts all
three alike, an image's tokens keep the position where the image begins and add their place in the grid, and the text
behind goes on after the larger side of the grid.

Only the placeholders of a row's images are replaced. A placeholder that the policy samples is text like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import DataError

#: model types whose images and positions work as described above
FAMILIES = ("qwen2_5_vl", "qwen2_vl")

#: of ``multi_modal_inputs``, optional: see :attr:`PromptImages.starts`
STARTS = "image_starts"
_NEEDED = {"pixel_values", "image_grid_thw"}


@dataclass(frozen=True)
class ImageTokens:
    """How a model reads images.

    Attributes:
        token_id: the placeholder.
        merge: patches along each side that become one token.
        patch_values: numbers in one patch.
    """

    token_id: int
    merge: int
    patch_values: int

    @classmethod
    def of(cls, config: Any) -> ImageTokens | None:
        """From a Transformers configuration; None for a model whose images are not read here."""
        if config.model_type not in FAMILIES:
            return None
        vision = config.vision_config
        area = np.prod(np.broadcast_to(vision.patch_size, 2))
        pixels = int(vision.in_channels * np.max(vision.temporal_patch_size) * area)
        return cls(int(config.image_token_id), int(vision.spatial_merge_size), pixels)

    def counts(self, grid_thw: np.ndarray) -> np.ndarray:
        """Tokens of each image, (images,), from their grids (images, 3)."""
        return np.asarray(grid_thw).prod(-1) // self.merge**2

    def positions(
        self, token_ids: np.ndarray, grid_thw: np.ndarray, starts: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Rotary positions of one row.

        Args:
            token_ids: (L,) without padding.
            grid_thw: (images, 3) patches in time, height and width of each image, in the order of the text.
            starts: where each image's placeholders begin; None: at the next placeholder.

        Returns:
            (3, L) positions, (M,) places of the placeholders, and what to add to the number of a token behind the row
            to get its position.

        Raises:
            DataError: the placeholders are not those of the images.
        """
        out = np.empty((3, len(token_ids)), np.int64)
        is_image = token_ids == self.token_id
        places: list[np.ndarray] = []
        at = position = 0
        for number, (grid, count) in enumerate(zip(np.asarray(grid_thw).tolist(), self.counts(grid_thw), strict=True)):
            if starts is None:
                found = np.flatnonzero(is_image[at:])
                begin = at + int(found[0]) if len(found) else len(token_ids)
            else:
                begin = int(starts[number])
            end = begin + int(count)
            if begin < at or end > len(token_ids) or not is_image[begin:end].all():
                raise DataError(
                    f"image {number} of a row needs {int(count)} placeholder tokens (id {self.token_id}) in one piece "
                    f"behind token {at}; a prompt with images must not be cut"
                )
            out[:, at:begin] = np.arange(begin - at) + position
            position += begin - at
            sides = (grid[0], grid[1] // self.merge, grid[2] // self.merge)
            out[:, begin:end] = np.indices(sides).reshape(3, -1) + position
            position += max(sides[1:])
            places.append(np.arange(begin, end))
            at = end
        out[:, at:] = np.arange(len(token_ids) - at) + position
        behind = position - at
        return out, np.concatenate(places) if places else np.empty(0, np.int64), behind


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, or of a whole row, as a processor makes them. Equal images have equal keys.

    Attributes:
        pixel_values: (patches, numbers of a patch) float32, image after image.
        grid_thw: (images, 3) int64, patches in time, height and width.
        keys: digest of each image.
        starts: number of the row's token at which each image's placeholders begin; None: at the next placeholder that
            no image has. Needed where the policy may have sampled placeholders before an image.
    """

    pixel_values: Tensor
    grid_thw: Tensor
    keys: tuple[str, ...]
    starts: tuple[int, ...] | None = None

    @property
    def identity(self) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
        """Equal for equal images in equal places."""
        return self.keys, self.starts

    @classmethod
    def of(cls, inputs: Mapping[str, Any] | None) -> PromptImages | None:
        """From a row's ``multi_modal_inputs``, whose patches may be in several pieces; None where it has no image.

        Raises:
            DataError: it holds something else than images.
        """
        if not inputs:
            return None
        if not _NEEDED <= set(inputs) <= _NEEDED | {STARTS}:
            raise DataError(
                f"multi_modal_inputs of a row holds {sorted(inputs)}; models here read pixel_values and image_grid_thw "
                f"(and {STARTS}, where an image's placeholders are not the next ones)"
            )
        pixels = inputs["pixel_values"]
        pixels = torch.cat(pixels) if isinstance(pixels, list | tuple) else torch.as_tensor(pixels)
        pixels = pixels.float().contiguous()
        grid = torch.as_tensor(inputs["image_grid_thw"]).long().contiguous()
        patches = int(grid.prod(-1).sum()) if grid.dim() == 2 else -1
        if pixels.dim() != 2 or patches != pixels.shape[0]:
            raise DataError(
                f"pixel_values {tuple(pixels.shape)} must be (patches, numbers of a patch) with as many patches as "
                f"image_grid_thw {tuple(grid.shape)} says ({patches})"
            )
        parts = pixels.split(grid.prod(-1).tolist())
        keys = tuple(_digest(*image) for image in zip(grid, parts, strict=True))
        starts = inputs.get(STARTS)
        return cls(pixels, grid, keys, None if starts is None else tuple(torch.as_tensor(starts).tolist()))

    def followed_by(self, more: PromptImages) -> PromptImages:
        """These and further images of the row; with their places if both have them."""
        placed = self.starts is not None and more.starts is not None
        return PromptImages(
            torch.cat([self.pixel_values, more.pixel_values]),
            torch.cat([self.grid_thw, more.grid_thw]),
            self.keys + more.keys,
            (*(self.starts or ()), *(more.starts or ())) if placed else None,
        )

    def behind(self, count: int) -> PromptImages:
        """The images that follow the first ``count``."""
        patches = int(self.grid_thw[:count].prod(-1).sum())
        starts = None if self.starts is None else self.starts[count:]
        return PromptImages(self.pixel_values[patches:], self.grid_thw[count:], self.keys[count:], starts)


def _digest(grid: Tensor, pixels: Tensor) -> str:
    digest = hashlib.blake2b(grid.numpy().tobytes(), digest_size=16)
    digest.update(pixels.numpy().data)
    return digest.hexdigest()


def joined(images: Sequence[PromptImages | None]) -> PromptImages | None:
    """All images, one after the other; None where there are none."""
    there = [one for one in images if one is not None]
    return reduce(PromptImages.followed_by, there) if there else None


def prompt_images(rows: Sequence[Mapping[str, Any] | None]) -> list[PromptImages | None]:
    """:meth:`PromptImages.of` each row; rows that have the same object, samples of one prompt, share the result."""
    made: dict[int, PromptImages | None] = {}
    for row in rows:
        if id(row) not in made:
            made[id(row)] = PromptImages.of(row)
    return [made[id(row)] for row in rows]


@dataclass(frozen=True)
class RowImages:
    """Images of some padded rows, for planning the model's input.

    Attributes:
        images: of each row.
        in_prompt: (B,) how many of them stand in the row's prompt.
        number: (B,) equal for rows whose prompts have equal images, -1 without.
        positions: (3, B, S) rotary positions, 0 at padding.
        places: (B, S) bool, the placeholders.
    """

    images: list[PromptImages | None]
    in_prompt: np.ndarray
    number: np.ndarray
    positions: np.ndarray
    places: np.ndarray

    @classmethod
    def of(
        cls,
        tokens: ImageTokens,
        table: Sequence[PromptImages],
        number: np.ndarray,
        input_ids: np.ndarray,
        valid: np.ndarray,
        positions: np.ndarray,
        prompt_length: int,
    ) -> RowImages:
        """Find the placeholders and positions of rows.

        Args:
            tokens: the model's.
            table: the different images.
            number: (B,) which of them a row has; -1 for none.
            input_ids, valid, positions: (B, S) tokens, which of them are real, and the positions that text has.
            prompt_length: so many of the first columns are the prompt.

        Raises:
            DataError: a row's placeholders are not those of its images, or patches have another size than the model's.
        """
        stacked = np.repeat(positions[None], 3, 0)
        places = np.zeros(input_ids.shape, bool)
        in_prompt, prompt_number = np.zeros(len(number), np.int64), np.full(len(number), -1)
        numbers: dict[tuple[str, ...], int] = {}
        for row, which in enumerate(number.tolist()):
            if which < 0:
                continue
            check_patches(table[which], tokens)
            columns = np.flatnonzero(valid[row])
            images = table[which]
            found, at, _ = tokens.positions(input_ids[row, columns], images.grid_thw.numpy(), images.starts)
            stacked[:, row, columns] = found
            places[row, columns[at]] = True
            ends = tokens.counts(images.grid_thw.numpy()).cumsum()
            shown = int(places[row, :prompt_length].sum())
            in_prompt[row] = count = int(np.searchsorted(ends, shown, "right"))
            if shown != (ends[count - 1] if count else 0):
                prompt_number[row] = -2 - row  # an image over the prompt's end makes the prompt like no other
            elif count:
                prompt_number[row] = numbers.setdefault(images.keys[:count], len(numbers))
        return cls([None if n < 0 else table[n] for n in number.tolist()], in_prompt, prompt_number, stacked, places)

    def take(self, follows: np.ndarray, index: np.ndarray) -> ImageInputs | None:
        """What the model reads of the images.

        Args:
            follows: (B,) rows whose prompt another row has stored, with its images.
            index: (M,) where the features of all others go.
        """
        chosen = [
            image.behind(count) if later else image
            for image, later, count in zip(self.images, follows.tolist(), self.in_prompt.tolist(), strict=True)
            if image is not None and not (later and count == len(image.keys))
        ]
        return joined_images(chosen, index) if chosen else None


@dataclass(frozen=True)
class ImageInputs:
    """Images of a model's input.

    Attributes:
        pixel_values: (patches, numbers of a patch).
        grid_thw: (images, 3).
        index: (M,) places of the placeholders in the flattened tokens, in the order of the features.
        mine: (M,) which features these are, where another rank has the places of the others; None: all features.
    """

    pixel_values: Tensor
    grid_thw: Tensor
    index: Tensor
    mine: Tensor | None = None

    def to(self, device: torch.device) -> ImageInputs:
        """The same on ``device``."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("pixel_values", "index")}
        mine = None if self.mine is None else self.mine.to(device, non_blocking=True)
        return replace(self, **moved, grid_thw=self.grid_thw.to(device), mine=mine)

    def part(self, start: int, stop: int) -> ImageInputs:
        """For a stretch of the tokens: the features that have their place in it."""
        (mine,) = ((self.index >= start) & (self.index < stop)).nonzero(as_tuple=True)
        return replace(self, index=self.index[mine] - start, mine=mine)


def joined_images(images: Sequence[PromptImages], index: np.ndarray) -> ImageInputs:
    """The images of several prompts, whose features go to the places ``index`` (M,)."""
    return ImageInputs(
        torch.cat([image.pixel_values for image in images]),
        torch.cat([image.grid_thw for image in images]),
        torch.from_numpy(np.ascontiguousarray(index, np.int64)),
    )


def check_patches(images: PromptImages, tokens: ImageTokens) -> None:
    """Refuse images that another model's processor cut.

    Raises:
        DataError: a patch has another number of values than the model reads.
    """
    if images.pixel_values.shape[1] != tokens.patch_values:
        raise DataError(
            f"patches of {images.pixel_values.shape[1]} numbers, and the model reads {tokens.patch_values}: its "
            "preprocessor_config.json must have the model's patch_size and temporal_patch_size"
        )


def embed(backbone: Any, tokens: ImageTokens, input_ids: Tensor, images: ImageInputs | None) -> Tensor:
    """Input embeddings with the features of images at their places.

    Without images the vision tower runs all the same, and changes nothing. Where it is sharded, parameters are gathered
    and gradients reduced by all ranks together: one whose rows have no image must take part, or the others wait for
    ever.

    Args:
        backbone: the Transformers model without its head.
        tokens: how it reads images.
        input_ids: (B, S).
        images: what to put where; None for text alone.

    Returns:
        (B, S, H) embeddings.
    """
    embeds: Tensor = backbone.get_input_embeddings()(input_ids)
    if images is None:
        pixels = torch.zeros(tokens.merge**2, tokens.patch_values, device=input_ids.device)
        grid = torch.tensor([[1, tokens.merge, tokens.merge]], device=input_ids.device)
        features = _features(backbone, pixels, grid)
        never = torch.zeros((), dtype=torch.bool, device=embeds.device)
        return embeds + torch.where(never, features.sum().to(embeds.dtype), embeds.new_zeros(()))
    flat = embeds.flatten(0, 1)
    features = _features(backbone, images.pixel_values, images.grid_thw).to(flat.dtype)
    if images.mine is not None:
        features = features[images.mine]
    return flat.index_copy(0, images.index, features).view_as(embeds)


def _features(backbone: Any, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
    """(M, H) features of all images, in order."""
    return torch.cat(backbone.get_image_features(pixel_values, grid_thw, return_dict=True).pooler_output)
