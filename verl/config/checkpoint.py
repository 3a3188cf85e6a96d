"""What a checkpoint of one role holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.base import Config, opt

CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class CheckpointConfig(Config):
    """Contents of a role's checkpoint."""

    save_contents: list[str] = opt(
        ["model", "optimizer", "extra"],
        "Parts to write: sharded weights, optimizer state, schedule and random state, a Hugging Face model directory.",
        choices=CONTENTS,
    )
    load_contents: list[str] = opt(
        ["model", "optimizer", "extra"],
        "Parts to read when resuming.",
        choices=CONTENTS[:3],
    )
    strict: bool = opt(True, "Refuse a checkpoint that lacks a parameter or has one that the model lacks.")
    async_save: bool = opt(
        False, "Copy the state to host memory and write it while the training goes on; keeps that much host memory."
    )

    def engine_problems(self, key: str, strategy: str) -> Iterator[str]:
        """What the engine of a role cannot do.

        Args:
            key: of this section.
            strategy: of the role.
        """
        if self.async_save and strategy == "megatron":
            yield (
                f"{key}.async_save=True: the Megatron engine writes its checkpoints before the training goes on; leave "
                "it out"
            )

    def problems(self) -> Iterator[str]:
        if not self.save_contents:
            yield f"save_contents=[]: name at least one of {', '.join(CONTENTS)}, or set save_freq=-1 to save nothing"
