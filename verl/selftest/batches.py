"""The batch that every check starts from, and fields made up for whatever a plug-in's parameters name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from verl.schema import FIELDS, OBJECT
from verl.selftest.model import VOCABULARY
from verl.utils.seeding import derive_seed, torch_generator

Fields: TypeAlias = dict[str, Any]  # tensors (B, ...) and object arrays (B,)
FieldMaker: TypeAlias = Callable[[Mapping[str, Any], torch.Generator], Any]

#: prompt of each row; rows with the same letter are samples of one prompt
GROUPS = ("a", "a", "a", "b", "b", "c", "c", "d")
PROMPT_LENGTHS = {"a": 4, "b": 6, "c": 3, "d": 5}
#: one response is empty, as after an abort
RESPONSE_LENGTHS = (3, 7, 1, 6, 2, 5, 0, 4)
#: tokens of a tool in the middle of a response: row, first, end
TOOL_OUTPUT = (1, 2, 4)
ROWS, PROMPT_WIDTH, RESPONSE_WIDTH = len(GROUPS), max(PROMPT_LENGTHS.values()), max(RESPONSE_LENGTHS)

#: values that a reward function may report beside the score
REWARD_COMPONENTS = ("correct", "format")

_MAKERS: dict[str, FieldMaker] = {}


def register_field(name: str) -> Callable[[FieldMaker], FieldMaker]:
    """Decorator: how the self-test makes a batch field that only a plug-in knows.

    The function gets the batch so far and a random generator, and returns a tensor or object array of B entries.
    Without it a field is made by its shape in the schema, or as ``(B, R)`` random numbers.
    """

    def add(maker: FieldMaker) -> FieldMaker:
        _MAKERS[name] = maker
        return maker

    return add


@register_field("state_hashes")
def _states(batch: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    """Few states, so that different episodes meet in them."""
    return torch.randint(0, 2, batch["response_mask"].shape, generator=generator)


@register_field("outcomes")
def _outcomes(batch: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    """Right or wrong, ``(B,)``."""
    return torch.randint(0, 2, batch["response_mask"].shape[:1], generator=generator).float()


@register_field("multi_modal_inputs")
def _images(batch: Mapping[str, Any], generator: torch.Generator) -> np.ndarray:
    """A picture for every other prompt."""
    pictures: dict[str, dict[str, Tensor] | None] = {}
    for label in batch["uid"]:
        if label not in pictures:
            patches = torch.randn(4, 6, generator=generator)
            pictures[label] = {"pixel_values": patches} if len(pictures) % 2 else None
    return object_array(pictures[label] for label in batch["uid"])


def make_batch(seed: int = 0) -> Fields:
    """The rollout's fields, token rewards and group labels of eight ragged rows.

    Rewards are positive (some estimators divide by a group's mean), dense, and larger on the last token.
    """
    generator = torch_generator(derive_seed(seed, "selftest", "tokens"))
    width = PROMPT_WIDTH + RESPONSE_WIDTH
    ids = torch.zeros(ROWS, width, dtype=torch.int64)
    present = torch.zeros(ROWS, width, dtype=torch.int64)
    prompts: dict[str, Tensor] = {}
    for row, (group, length) in enumerate(zip(GROUPS, RESPONSE_LENGTHS, strict=True)):
        size = PROMPT_LENGTHS[group]
        if group not in prompts:
            prompts[group] = torch.randint(2, VOCABULARY, (size,), generator=generator)
        ids[row, PROMPT_WIDTH - size : PROMPT_WIDTH] = prompts[group]
        ids[row, PROMPT_WIDTH : PROMPT_WIDTH + length] = torch.randint(2, VOCABULARY, (length,), generator=generator)
        present[row, PROMPT_WIDTH - size : PROMPT_WIDTH + length] = 1
    mask = present[:, PROMPT_WIDTH:].clone()
    row, first, end = TOOL_OUTPUT
    mask[row, first:end] = 0
    batch: Fields = {
        "prompts": ids[:, :PROMPT_WIDTH].clone(),
        "responses": ids[:, PROMPT_WIDTH:].clone(),
        "input_ids": ids,
        "attention_mask": present,
        "position_ids": (present.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask,
        "uid": object_array(f"prompt-{group}" for group in GROUPS),
        "sample_index": torch.arange(ROWS),
    }
    batch["token_level_rewards"] = rewards(mask, generator)
    batch["token_level_scores"] = batch["token_level_rewards"].clone()
    for name in REWARD_COMPONENTS:
        values = torch.rand(ROWS, generator=generator).tolist()
        batch[f"reward_{name}"] = object_array(values)
    return batch


def rewards(mask: Tensor, generator: torch.Generator) -> Tensor:
    """Positive token rewards ``(B, R)``, the last one of each response larger than the others; 0 outside the mask."""
    dense = 0.05 * torch.rand(mask.shape, generator=generator)
    final = 0.2 + torch.rand(mask.shape[0], generator=generator)
    is_last = (mask != 0) & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(mask != 0, dense, 0.0) + torch.where(is_last, final[:, None], 0.0)


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A ``(B,)`` object array, whatever the values are."""
    items = list(values)
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def add_fields(batch: Fields, names: Iterable[str], seed: int = 0) -> None:
    """Make up the fields of these names that the batch lacks; each depends on its name and the seed alone."""
    for name in sorted(names):
        if name not in batch:
            batch[name] = _make(name, batch, torch_generator(derive_seed(seed, "selftest", "field", name)))


def _make(name: str, batch: Mapping[str, Any], generator: torch.Generator) -> Any:
    if name in _MAKERS:
        return _MAKERS[name](batch, generator)
    mask = batch["response_mask"]
    field = FIELDS.get(name)
    sizes: dict[str | int, int] = {"B": mask.shape[0], "R": mask.shape[1], "S": batch["input_ids"].shape[1]}
    sizes["P"] = sizes["S"] - sizes["R"]
    shape = ("B", "R") if field is None else field.shape
    dims = [sizes.get(size, size if isinstance(size, int) else 1) for size in shape]
    kinds = ("float32",) if field is None else field.dtypes
    if kinds == OBJECT or (field is None and name.endswith(("_id", "_ids", "index"))):
        return object_array(f"{name}-{group}" for group in GROUPS[: mask.shape[0]])
    if "mask" in name:
        value = torch.ones(dims)
    elif kinds[0] != "float32":
        value = torch.randint(0, 3, dims, generator=generator)
    elif "log_prob" in name and "old_log_probs" in batch and dims == list(mask.shape):
        value = batch["old_log_probs"] + 0.5 * torch.randn(dims, generator=generator)
    elif "squared" in name:
        value = torch.rand(dims, generator=generator)
    elif "weight" in name:
        value = 0.5 + torch.rand(dims, generator=generator)
    else:
        value = torch.randn(dims, generator=generator)
    if dims == list(mask.shape):
        value = torch.where(mask != 0, value, torch.zeros((), dtype=value.dtype))
    return value
