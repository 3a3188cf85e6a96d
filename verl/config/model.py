"""The model that a role loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.base import Config, opt


@dataclass
class ModelConfig(Config):
    """A Hugging Face model and how it is run."""

    path: str | None = opt(None, "Model directory or Hugging Face id.", affects="model")
    tokenizer_path: str | None = opt(None, "Tokenizer directory or id; not given = path.", affects="model")
    trust_remote_code: bool = opt(False, "Run Python code that comes with the model or tokenizer.")
    use_shm: bool = opt(
        False, "Copy the model files to /dev/shm first, so that all ranks of a node read from memory.", affects="speed"
    )
    override_config: dict[str, Any] = opt({}, "Values that replace those of the model's config.json.")
    external_lib: str | None = opt(
        None,
        "Python modules, comma-separated, imported before anything is built; registers estimators, losses, models.",
        affects="file",
    )
    enable_gradient_checkpointing: bool = opt(
        True, "Recompute a layer's activations in the backward pass instead of keeping them.", affects="speed"
    )
    enable_activation_offload: bool = opt(
        False,
        "Keep what the backward pass needs (with gradient checkpointing, each layer's input) in host memory between "
        "the passes; on a CPU it is there already.",
        affects="speed",
    )
    use_fused_kernels: bool = opt(
        False,
        "Recompute a chunk's logits in the backward pass: no logits are kept, at the cost of one more product.",
        affects="speed",
    )
    use_remove_padding: bool = opt(True, "Pack the samples of a micro-batch without padding tokens.", affects="speed")
    training_noise: bool = opt(
        False,
        "Train with the dropout, left-out layers and router jitter of the model's config.json; sampling has none.",
    )
    verify: str = opt(
        "auto",
        "Compare the model with plain Transformers when it is built, and refuse it where the numbers differ: auto = "
        "families outside of the tested table and code that comes with the model, always, never.",
        choices=("auto", "always", "never"),
        affects="limit",
    )
    lora_rank: int = opt(
        0, "Rank of low-rank adapters, which train instead of the weights; 0 trains the weights.", ge=0
    )
    lora_alpha: float = opt(16.0, "The adapters' output is scaled by lora_alpha / lora_rank.", gt=0)
    lora_init: str = opt(
        "kaiming",
        "How the first adapter matrix starts; the second one is zero.",
        choices=("kaiming", "xavier", "normal"),
    )
    target_modules: list[str] = opt(
        ["all-linear"],
        "Layers with an adapter: last parts of their names, one regular expression, or all-linear.",
    )
    exclude_modules: list[str] = opt([], "Of these, the layers to leave alone.")
    lora_adapter_path: str | None = opt(
        None, "Directory of an adapter in PEFT's format to start from.", affects="model"
    )

    def problems(self) -> Iterator[str]:
        if self.lora_rank == 0 and self.lora_adapter_path:
            yield (
                f"lora_adapter_path={self.lora_adapter_path!r}: needs the adapter's lora_rank and lora_alpha, as its "
                "adapter_config.json has them"
            )
        if self.lora_rank and not self.target_modules:
            yield "target_modules=[]: name the layers that get an adapter, or use all-linear"
