"""Small models as tables of tensors, and their values."""

from __future__ import annotations

import torch

from verl.workers.sharding_manager.reshard.layout import TensorInfo


def llama_tensors(
    *,
    hidden: int = 16,
    inner: int = 24,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 20,
    dtype: torch.dtype = torch.float32,
) -> dict[str, TensorInfo]:
    """Names and shapes of a Llama-like model."""
    head = hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * head, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * head, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return {name: TensorInfo(shape, dtype) for name, shape in shapes.items()}


def values_for(tensors: dict[str, TensorInfo], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random whole tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(info.shape, generator=generator).to(info.dtype) for name, info in tensors.items()}


def total_bytes(tensors: dict[str, TensorInfo]) -> int:
    """M of the formulas."""
    return sum(info.nbytes for info in tensors.values())
