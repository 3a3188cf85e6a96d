"""What does not work with images in rows, told before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.config import ModelConfig
from verl.errors import ConfigError
from verl.models.loading import load_hf_config
from verl.models.vision import FAMILIES, ImageTokens


def engine_problems(path: str, section: Any) -> Iterator[str]:
    """A sentence for what keeps a training engine from reading images.

    Args:
        path: of the section in the configuration.
        section: has ``strategy``.
    """
    if section.strategy == "megatron":
        yield f"{path}.strategy=megatron: trains on text alone; use fsdp2"


def model_problems(models: Mapping[str, ModelConfig]) -> Iterator[str]:
    """A sentence for each model, by its key, that does not read images as the first one does."""
    first: ImageTokens | None = None
    for key, model in models.items():
        tokens = ImageTokens.of(hf_config := load_hf_config(model))
        first = first or tokens
        if tokens is None:
            yield (
                f"{key}={model.path}: images of a {hf_config.model_type!r} model are not read here; use a model of the "
                f"kinds {', '.join(FAMILIES)}"
            )
        elif tokens != first:
            yield f"{key}={model.path}: reads images as {tokens}, the policy as {first}; use a model of its family"


def refuse(problems: Sequence[str]) -> None:
    """Raise :class:`ConfigError` with all problems, if there are any."""
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the data has images, with which this does not work:\n{lines}")
