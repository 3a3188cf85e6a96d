"""Prompt data of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from verl.config.base import Config, opt, section

DEFAULT_IMAGE_KEY = "images"
TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass
class CustomClsConfig(Config):
    """A dataset class of the user."""

    path: str | None = opt(None, "Python file with the class; not given = the built-in dataset.", affects="file")
    name: str | None = opt(None, "Name of the class in the file.")

    def problems(self) -> Iterator[str]:
        if bool(self.path) != bool(self.name):
            given, missing = ("path", "name") if self.path else ("name", "path")
            yield f"{missing}=None: {given}={getattr(self, given)!r} is given, so {missing} must be given too"


class ImagesConfig(Protocol):
    """A section with the keys of images in rows."""

    image_key: str
    image_min_pixels: int | None
    image_max_pixels: int | None


def image_key_opt() -> Any:
    """The key of the column with images."""
    return opt(
        DEFAULT_IMAGE_KEY,
        "Column with a row's images, each bytes, a path or a mapping with one of them; `<image>` in the text is the "
        "place of each.",
    )


def image_pixels_opt(change: str) -> Any:
    """A key with a limit to the size of images."""
    return opt(None, f"{change} to about this many pixels; not given = as the model's processor says.", ge=1)


@dataclass
class DataConfig(Config):
    """Prompts for training and validation."""

    train_files: list[str] = opt([], "Training files, Parquet or JSONL: one path or a list.", affects="rows")
    val_files: list[str] = opt(
        [], "Validation files, Parquet or JSONL: one path or a list; empty = no validation.", affects="report"
    )
    prompt_key: str = opt("prompt", "Column with the chat messages.")
    image_key: str = image_key_opt()
    image_min_pixels: int | None = image_pixels_opt("Smaller images are enlarged")
    image_max_pixels: int | None = image_pixels_opt("Larger images are reduced")
    reward_fn_key: str = opt("data_source", "Column that selects the scorer.")
    max_prompt_length: int = opt(512, "Longest prompt, in tokens.", ge=1)
    max_response_length: int = opt(512, "Longest response, in tokens.", ge=1)
    train_batch_size: int = opt(1024, "Prompts per training step, over all ranks.", ge=1)
    gen_batch_size: int | None = opt(
        None,
        "Prompts per generation call; another number than train_batch_size needs filter_groups.",
        ge=1,
        inherits="data.train_batch_size",
    )
    val_batch_size: int | None = opt(
        None, "Prompts per validation batch; not given = the whole validation set.", ge=1, affects="report"
    )
    shuffle: bool = opt(True, "Shuffle the training prompts in every epoch.")
    validation_shuffle: bool = opt(False, "Shuffle the validation prompts.", affects="report")
    seed: int | None = opt(None, "Seed of the shuffling; not given = derived from trainer.seed.")
    train_max_samples: int = opt(-1, "Use only this many training prompts; -1 = all.", ge=-1)
    val_max_samples: int = opt(-1, "Use only this many validation prompts; -1 = all.", ge=-1, affects="report")
    filter_overlong_prompts: bool = opt(False, "Drop prompts longer than max_prompt_length at start-up.")
    filter_overlong_prompts_workers: int = opt(
        1, "Processes that measure prompts for the filter.", ge=1, affects="speed"
    )
    truncation: str = opt(
        "error",
        "What a prompt longer than max_prompt_length means: an error, or where to cut.",
        choices=TRUNCATIONS,
    )
    return_raw_chat: bool = opt(True, "Keep the chat messages in the batch (raw_prompt); a reward model needs them.")
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "Keyword arguments of the tokenizer's chat template.")
    custom_cls: CustomClsConfig = section(CustomClsConfig, "A dataset class of the user.")
    dataloader_num_workers: int = opt(0, "Processes that read prompts; 0 = in the controller.", ge=0, affects="speed")
    trust_remote_code: bool = opt(
        False,
        "Run Python code that comes with the tokenizer.",
        inherits="actor_rollout_ref.model.trust_remote_code",
    )
