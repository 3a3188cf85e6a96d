"""Operation counts against counts by hand and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from verl.utils.flops import FlopsCounter, model_flops_utilization, peak_flops

TINY = Qwen2Config(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)


def test_counts_by_hand() -> None:
    counter = FlopsCounter.from_config(TINY)
    # per layer: q 32*32, k and v 32*16 each, o 32*32, three matrices of 32*64; the head 32*100
    assert counter.per_token == 2 * (2 * (1024 + 512 + 512 + 1024 + 3 * 2048) + 3200)
    # 4 * layers * heads * head_dim for scores and values
    assert counter.attention == 4 * 2 * 4 * 8
    assert counter.forward([3, 2]) == 5 * counter.per_token + (6 + 3) * counter.attention
    assert counter.train([3]) == 3 * counter.forward([3])
    assert FlopsCounter.from_config(TINY, head_outputs=1).per_token == counter.per_token - 2 * 32 * 99


def test_projections_agree_with_torchs_counter() -> None:
    model = AutoModelForCausalLM.from_config(TINY, attn_implementation="eager").eval()
    length = 16
    with FlopCounterMode(display=False) as measured, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
    counter = FlopsCounter.from_config(TINY)
    # Eager attention computes the full square where a causal kernel needs half of it.
    rotary = measured.get_total_flops() - (counter.per_token * length + counter.attention * length * length)
    assert 0 <= rotary < 0.01 * measured.get_total_flops()


def test_a_mixture_counts_only_the_experts_that_a_token_visits() -> None:
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=10,
    )
    expected = 2 * (4 * 32 * 32 + 3 * 32 * 2 * 16 + 32 * 8 + 32 * 10)
    assert FlopsCounter.from_config(config).per_token == expected


def test_utilization_is_the_share_of_the_peak() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("AMD EPYC") is None
    assert model_flops_utilization(989e12, 2.0, 2, "NVIDIA H100") == pytest.approx(0.25)
    assert model_flops_utilization(1.0, 1.0, 1, "cpu") is None
