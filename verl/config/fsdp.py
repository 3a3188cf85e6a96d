"""The FSDP2 training engine (``strategy=fsdp`` and ``strategy=fsdp2`` both mean it)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.base import Config, opt, section

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_SPELLINGS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}


@dataclass
class MixedPrecisionConfig(Config):
    """Numeric types of computing and of gradient reduction."""

    param_dtype: str = opt(
        "auto",
        "Type of the parameters in the forward and backward pass; auto = bfloat16 on CUDA, float32 on CPU.",
        choices=DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    reduce_dtype: str = opt(
        "float32",
        "Type in which gradients are reduced over ranks.",
        choices=DTYPES[1:],
        spellings=DTYPE_SPELLINGS,
    )
    buffer_dtype: str = opt(
        "float32",
        "Type of the buffers; FSDP2 leaves buffers alone, so only float32.",
        choices=("float32",),
        spellings=DTYPE_SPELLINGS,
    )


@dataclass
class WrapPolicyConfig(Config):
    """Which modules become one unit of sharding."""

    transformer_layer_cls_to_wrap: list[str] = opt(
        [],
        "Class names of the modules to shard; empty = the blocks that the model itself names as not to be split.",
        affects="speed",
    )


@dataclass
class FSDPConfig(Config):
    """Sharding, offload and numeric types of one model."""

    fsdp_size: int = opt(
        -1,
        "Ranks that share one copy of the parameters (HSDP when smaller than the world); -1 = all ranks.",
        ge=-1,
        affects="speed",
    )
    param_offload: bool = opt(
        False, "Keep the parameters in host memory while the model is not in use.", affects="speed"
    )
    optimizer_offload: bool = opt(
        False, "Keep the optimizer state in host memory outside optimizer steps.", affects="speed"
    )
    offload_policy: bool = opt(
        False,
        "Keep parameters, gradients and optimizer in host memory during training too (slow, least memory).",
        affects="speed",
    )
    reshard_after_forward: bool = opt(
        True,
        "Free the gathered parameters after the forward pass and gather them again for the backward pass.",
        affects="speed",
    )
    forward_prefetch: bool = opt(
        False, "Gather the next block's parameters while the current one computes.", affects="speed"
    )
    model_dtype: str = opt(
        "auto",
        "Type in which the parameters are kept; auto = float32 for trained models, the computing type for others.",
        choices=DTYPES,
        spellings=DTYPE_SPELLINGS,
    )
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig, "Numeric types of computing and reduction.")
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig, "Which modules become one unit of sharding.")
    ulysses_sequence_parallel_size: int = opt(
        1,
        "Ranks that share the tokens of each sequence (Ulysses); divides the number of ranks and the model's attention "
        "heads, needs use_remove_padding.",
        ge=1,
        affects="speed",
    )
    use_torch_compile: bool = opt(False, "Compile the model with torch.compile.", affects="speed")
    entropy_checkpointing: bool = opt(
        False,
        "Recompute logits in the backward pass instead of keeping them, as model.use_fused_kernels does.",
        affects="speed",
    )

    def problems(self) -> Iterator[str]:
        if self.fsdp_size == 0:
            yield "fsdp_size=0: must be -1 (all ranks) or a positive number of ranks"
