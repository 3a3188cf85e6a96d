"""The model that a role loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.base import Config, opt


@dataclass
class ModelConfig(Config):
    """A Hugging Face model and how it is run."""

    path: str | None = opt(None, "Model directory or Hugging Face id.")
    tokenizer_path: str | None = opt(None, "Tokenizer directory or id; not given = path.")
    trust_remote_code: bool = opt(False, "Run Python code that comes with the model or tokenizer.")
    use_shm: bool = opt(False, "Copy the model files to /dev/shm first, so that all ranks of a node read from memory.")
    override_config: dict[str, Any] = opt({}, "Values that replace those of the model's config.json.")
    external_lib: str | None = opt(
        None,
        "Python modules, comma-separated, imported before anything is built; registers estimators, losses, models.",
    )
    enable_gradient_checkpointing: bool = opt(
        True, "Recompute a layer's activations in the backward pass instead of keeping them."
    )
    enable_activation_offload: bool = opt(False, "Keep checkpointed activations in host memory between the passes.")
    use_fused_kernels: bool = opt(
        False, "Recompute a chunk's logits in the backward pass: no logits are kept, at the cost of one more product."
    )
    use_remove_padding: bool = opt(True, "Pack the samples of a micro-batch without padding tokens.")
