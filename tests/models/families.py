"""Tiny random models of each supported family, and ragged batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_VISION_TOKENS = {
    "image_token_id": 57,
    "video_token_id": 58,
    "vision_start_token_id": 59,
    "vision_end_token_id": 60,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 5, "tie_word_embeddings": False},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {},
    "smollm3": {},
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True},
    "granite": {"logits_scaling": 3.0},
    "gpt_oss": {"head_dim": 16, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
    },
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "apertus": {},
    "exaone4": {"head_dim": 16, "sliding_window": 4, "sliding_window_pattern": 2},
    "ernie4_5_moe": {
        "head_dim": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mimo_v2_flash": {
        "head_dim": 16,
        "v_head_dim": 12,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "hy_v3": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 24,
    },
    "starcoder2": {"sliding_window": 4, "use_bias": True},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen2_5_vl": {
        **_VISION_TOKENS,
        "vision_config": {
            **_VISION,
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "tie_word_embeddings": True,
    },
    "qwen2_vl": {
        **_VISION_TOKENS,
        "vision_config": {**_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
        "tie_word_embeddings": False,
    },
}

#: families whose tokens exchange values by attention alone, so that rows can be packed
ATTENTION_FAMILIES = sorted(set(FAMILIES) - {"lfm2"})

#: latent attention to a selection of tokens (DeepSeek V3.2, GLM 5), which no family of the table has
SPARSE: dict[str, Any] = {
    **{name: value for name, value in FAMILIES["glm4_moe_lite"].items() if name != "n_group"},
    "n_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
}


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a family, with ``changes``."""
    settings = {**COMMON, **FAMILIES.get(family, {}), **changes}
    return AutoConfig.for_model(settings.pop("model_type", family), **settings)


def make_batch(
    prompt_lengths: list[int],
    response_lengths: list[int],
    *,
    prompt_width: int | None = None,
    response_width: int | None = None,
    vocab: int = 61,
    seed: int = 0,
    equal_prompts_of: int = 1,
    pad: int = 0,
) -> dict[str, Tensor]:
    """A batch as the rollout makes it: prompts padded left, responses padded right.

    Args:
        prompt_lengths, response_lengths: real tokens per row.
        prompt_width, response_width: padded widths; by default the longest.
        vocab: tokens are drawn from [3, vocab).
        seed: of the draw.
        equal_prompts_of: rows in a group of this size get the group's first prompt.
        pad: token id at padding.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = len(prompt_lengths)
    p, r = prompt_width or max(prompt_lengths), response_width or max(response_lengths)
    ids = torch.full((rows, p + r), pad)
    mask = torch.zeros((rows, p + r), dtype=torch.long)
    for i, (a, b) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        drawn = torch.randint(3, vocab, (a + b,), generator=generator)
        first = i - i % equal_prompts_of
        if first != i:
            drawn[:a] = ids[first, p - a : p]
        ids[i, p - a : p + b] = drawn
        mask[i, p - a : p + b] = 1
    return {
        "prompts": ids[:, :p].clone(),
        "responses": ids[:, p:].clone(),
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask[:, p:].clone(),
    }
