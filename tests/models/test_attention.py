"""Packed, prompt-sharing and padded rows against plain Transformers on each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.families import ATTENTION_FAMILIES, make_batch, make_config
from verl.errors import ConfigError
from verl.models.attention import IMPLEMENTATION, split_into_blocks
from verl.models.heads import PolicyModel
from verl.models.loading import language_model_class
from verl.models.packing import build_layout

TEMPERATURE = 0.7
WANT = frozenset({"log_probs", "entropys"})


def make_model(family: str) -> PreTrainedModel:
    """A random model with weights large enough that attention and logits are far from uniform."""
    torch.manual_seed(0)
    config = make_config(family)
    model = language_model_class(config).from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return model


def ragged(**changes: Any) -> dict[str, Tensor]:
    settings: dict[str, Any] = {"prompt_width": 11, "response_width": 10, "equal_prompts_of": 3} | changes
    return make_batch([5, 5, 5, 9, 9, 9], [3, 7, 1, 6, 2, 9], **settings)


def one_row_at_a_time(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Log-probs and entropies from the model's own logits, without any padding."""
    rows, width = batch["response_mask"].shape
    lps, ents = [], []
    for i in range(rows):
        ids = batch["input_ids"][i][batch["attention_mask"][i].bool()][None]
        n = int(batch["response_mask"][i].sum())
        logits = model(input_ids=ids, use_cache=False).logits[0, -n - 1 : -1].float() / TEMPERATURE
        log_p = torch.log_softmax(logits, -1)
        lp = log_p.gather(1, ids[0, -n:, None])[:, 0]
        ent = -(log_p.exp() * log_p).sum(-1)
        lps.append(torch.nn.functional.pad(lp, (0, width - n)))
        ents.append(torch.nn.functional.pad(ent, (0, width - n)))
    return {"log_probs": torch.stack(lps), "entropys": torch.stack(ents)}


def gradients(model: PreTrainedModel, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a fixed weighted sum of the outputs that are not zero, as a vision tower's without images are."""
    generator = torch.Generator().manual_seed(7)
    loss = sum((out * torch.randn(out.shape, generator=generator)).sum() for _, out in sorted(outputs.items()))
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_every_layout_gives_the_numbers_of_plain_transformers(family: str) -> None:
    model = make_model(family)
    batch = ragged()
    expected = one_row_at_a_time(model, batch)
    expected_grads = gradients(model, expected)
    model.config._attn_implementation = IMPLEMENTATION
    policy = PolicyModel(model)
    # Whatever stands at padding, even ids outside the vocabulary, must not matter.
    ids = torch.where(batch["attention_mask"].bool(), batch["input_ids"], torch.tensor(-100))
    tokens = {}
    for name, packed, share in (("padded", False, False), ("packed", True, False), ("shared", True, True)):
        layout = build_layout(
            ids,
            batch["attention_mask"],
            batch["position_ids"],
            batch["response_mask"],
            packed=packed,
            share_prompts=share,
        )
        tokens[name] = layout.tokens
        outputs = policy(layout, WANT, TEMPERATURE)
        for field in WANT:
            torch.testing.assert_close(outputs[field], expected[field], rtol=1e-5, atol=1e-5)
            assert outputs[field].dtype == torch.float32
        grads = gradients(model, outputs)
        assert grads.keys() == expected_grads.keys()
        for parameter, grad in grads.items():
            scale = float(expected_grads[parameter].norm())
            assert float((grad - expected_grads[parameter]).norm()) <= 2e-5 * scale + 1e-7, (name, parameter)
    assert tokens == {"padded": 6 * (9 + 9), "packed": 3 * 5 + 11 + 3 * 9 + 17, "shared": 5 + 11 + 9 + 17}


def test_long_shared_rows_attend_without_a_mask_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")
    batch = ragged()
    model.config._attn_implementation = IMPLEMENTATION
    policy = PolicyModel(model)
    args = [batch[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    with_mask = build_layout(*args, packed=True)
    monkeypatch.setattr("verl.models.packing._MAX_MASK_SCORES", 0)
    without = build_layout(*args, packed=True)
    assert any(block.q_positions is not None for block in with_mask.plan.blocks)
    assert all(block.q_positions is None for block in without.plan.blocks)
    one, two = policy(with_mask, WANT, 1.0), policy(without, WANT, 1.0)
    torch.testing.assert_close(one["log_probs"], two["log_probs"], rtol=1e-5, atol=1e-5)
    grads_one, grads_two = gradients(model, one), gradients(model, two)
    for name, grad in grads_one.items():
        torch.testing.assert_close(grad, grads_two[name], rtol=1e-4, atol=1e-5)


def test_rows_of_very_different_length_run_in_several_blocks() -> None:
    model = make_model("llama")
    batch = make_batch([3, 60, 4, 50, 2], [2, 50, 3, 60, 2])
    expected = one_row_at_a_time(model, batch)
    model.config._attn_implementation = IMPLEMENTATION
    args = [batch[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    layout = build_layout(*args, packed=True)
    assert len(layout.plan.blocks) == 2
    outputs = PolicyModel(model)(layout, WANT, TEMPERATURE)
    torch.testing.assert_close(outputs["log_probs"], expected["log_probs"], rtol=1e-5, atol=2e-5)


def test_gradient_checkpointing_recomputes_packed_attention() -> None:
    model = make_model("qwen2_sliding")
    model.config._attn_implementation = IMPLEMENTATION
    policy = PolicyModel(model)
    args = [ragged()[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    plain = gradients(model, policy(build_layout(*args, packed=True), WANT, 1.0))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    layout = build_layout(*args, packed=True)
    again = gradients(model, policy(layout, WANT, 1.0))
    assert layout.plan.calls == 2 * model.config.num_hidden_layers  # forward and recomputation
    for name, grad in plain.items():
        torch.testing.assert_close(grad, again[name], rtol=0, atol=0)


def test_a_model_that_ignores_the_attention_interface_is_refused() -> None:
    model = make_model("qwen2")  # still on "eager"
    args = [ragged()[k] for k in ("input_ids", "attention_mask", "position_ids", "response_mask")]
    with pytest.raises(ConfigError, match="use_remove_padding=false"):
        PolicyModel(model)(build_layout(*args, packed=True), WANT, 1.0)


def test_blocks_join_similar_lengths() -> None:
    assert split_into_blocks([10, 10, 10], [10, 10, 10]) == [[0, 1, 2]]
    assert split_into_blocks([], []) == []
    assert split_into_blocks([500, 10, 499, 12], [500, 10, 499, 12]) == [[1, 3], [0, 2]]
    lengths = list(range(1, 2000, 7))
    groups = split_into_blocks(lengths, lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    padded = sum(len(g) * max(lengths[i] for i in g) ** 2 for g in groups)
    assert padded < 1.25 * sum(n * n for n in lengths)
