"""Floating-point work of a transformer from its Hugging Face configuration, and the share of a device's peak it used.

Counted are matrix products (two operations per multiply-add) of dense and mixture-of-experts decoders: projections,
attention scores, feed-forward layers and the output head. Norms, activations and embeddings look-ups are not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# Dense peak in TFLOP/s for bf16 matrix products, from the vendors' data sheets; matched in order, first hit counts.
_PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("GH200", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("MI300X", 1307.0),
)


@dataclass(frozen=True)
class FlopsCounter:
    """Operations of one model.

    Attributes:
        per_token: matrix-product operations of a forward pass per token, attention scores left out.
        attention: operations of attention scores and their products with values, per token and attended position.
    """

    per_token: float
    attention: float

    @classmethod
    def from_config(cls, config: Any, *, head_outputs: int | None = None) -> FlopsCounter | None:
        """Count from a Transformers configuration.

        Args:
            config: a decoder's configuration; for a multi-modal model its text part is used.
            head_outputs: outputs of the head per token, by default the vocabulary; 1 for a value head.

        Returns:
            None for a configuration whose sizes are not those of a decoder with equal layers, such as one with a list
            of sizes.
        """
        config = getattr(config, "text_config", None) or config
        try:
            return cls._of_decoder(config, head_outputs)
        except (AttributeError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            logger.warning(
                "operations of model type %r are not counted (%s): there will be no mfu metrics",
                getattr(config, "model_type", "unknown"),
                error,
            )
            return None

    @classmethod
    def _of_decoder(cls, config: Any, head_outputs: int | None) -> FlopsCounter:
        hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
        intermediate = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        gated = not str(getattr(config, "model_type", "")).startswith(("gpt2", "gpt_neox", "opt"))
        matrices = 3 if gated else 2

        attention_weights = hidden * head_dim * (2 * heads + 2 * kv_heads)
        dense = matrices * hidden * intermediate
        experts = int(
            getattr(config, "num_experts", None)
            or getattr(config, "num_local_experts", None)
            or getattr(config, "n_routed_experts", None)
            or 0
        )
        if experts:
            width = int(getattr(config, "moe_intermediate_size", None) or intermediate)
            active = int(getattr(config, "num_experts_per_tok", None) or 1)
            shared_width = int(getattr(config, "shared_expert_intermediate_size", None) or 0)
            shared_width += int(getattr(config, "n_shared_experts", None) or 0) * width
            sparse = matrices * hidden * (active * width + shared_width) + hidden * experts
            dense_layers = int(getattr(config, "first_k_dense_replace", None) or 0)
            feed_forward = dense_layers * dense + (layers - dense_layers) * sparse
        else:
            feed_forward = layers * dense
        head = hidden * int(config.vocab_size if head_outputs is None else head_outputs)
        return cls(
            per_token=2.0 * (layers * attention_weights + feed_forward + head),
            attention=4.0 * layers * heads * head_dim,
        )

    def forward(self, seqlens: Iterable[int]) -> float:
        """Operations of one forward pass over causal sequences of these lengths."""
        # Token t attends to t positions: n * (n + 1) / 2 pairs per sequence.
        return sum(self.per_token * n + self.attention * n * (n + 1) / 2 for n in map(int, seqlens))

    def train(self, seqlens: Iterable[int]) -> float:
        """Operations of forward and backward; recomputed activations are not counted, as is usual for MFU."""
        return 3.0 * self.forward(seqlens)


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 operations per second of a device by its name; None when it is not in the table, as every CPU."""
    for name, tflops in _PEAK_TFLOPS:
        if name.lower() in device_name.lower():
            return tflops * 1e12
    return None


def model_flops_utilization(flops: float, seconds: float, device_count: int, device_name: str) -> float | None:
    """Share of the devices' peak that useful work reached (MFU), 0 to 1; None for an unknown device."""
    peak = peak_flops(device_name)
    if peak is None or seconds <= 0 or device_count < 1:
        return None
    return flops / seconds / (peak * device_count)
