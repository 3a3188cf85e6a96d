"""Which weights a rollout engine is owed."""

from __future__ import annotations

import pytest
import torch

from tests.models.families import make_config
from tests.workers.rollout.helpers import make_model, served_everywhere, weights_of
from verl.errors import WeightSyncError
from verl.workers.rollout.policy_weights import WeightManifest, digest


@pytest.fixture
def manifest() -> WeightManifest:
    return WeightManifest(served_everywhere(), torch.float32)


def test_a_complete_update_is_accepted_and_tied_weights_pass_once(manifest: WeightManifest) -> None:
    weights = weights_of(make_model(served_everywhere()))
    manifest.begin()
    passed = [name for name, _ in manifest.accept(weights.items())]
    manifest.end()
    assert set(weights) - set(passed) == {"lm_head.weight"}
    assert manifest.names_of("lm_head.weight") == manifest.names_of("model.embed_tokens.weight")
    assert manifest.nbytes == sum(weights[name].nbytes for name in passed)


def test_what_is_wrong_with_an_update_is_said(manifest: WeightManifest) -> None:
    weights = {name: tensor.detach() for name, tensor in weights_of(make_model(served_everywhere())).items()}
    manifest.begin()
    with pytest.raises(WeightSyncError, match=r"unexpected weight 'model.layers.9.mlp.up_proj.weight'.*similar ones"):
        list(manifest.accept([("model.layers.9.mlp.up_proj.weight", torch.zeros(1))]))
    with pytest.raises(WeightSyncError, match=r"'model.norm.weight' has shape \(3,\), the rollout expects \(64,\)"):
        list(manifest.accept([("model.norm.weight", torch.zeros(3))]))
    list(manifest.accept([("model.embed_tokens.weight", weights["model.embed_tokens.weight"])]))
    with pytest.raises(WeightSyncError, match="are tied in the rollout but arrived with different values"):
        list(manifest.accept([("lm_head.weight", weights["lm_head.weight"] + 1)]))
    with pytest.raises(WeightSyncError, match="25 of 26 weights did not arrive"):
        manifest.end()


def test_experts_are_offered_one_by_one_as_in_checkpoints() -> None:
    config = make_config("deepseek_v3")
    manifest = WeightManifest(config, torch.float32)
    fused = next(name for name in manifest._by_name if name.endswith("experts.gate_up_proj"))
    whole = torch.randn(manifest._by_name[fused].shape)
    pieces = dict(manifest.as_in_checkpoint(fused, whole))
    prefix = fused.removesuffix("gate_up_proj")
    assert len(pieces) == 2 * config.n_routed_experts
    torch.testing.assert_close(pieces[f"{prefix}2.up_proj.weight"], whole[2, config.moe_intermediate_size :])
    norm = torch.randn(config.hidden_size)
    assert manifest.as_in_checkpoint("model.norm.weight", norm) == [("model.norm.weight", norm)]


def test_digests_ignore_how_values_are_stored_but_no_value() -> None:
    values = torch.tensor([[1.0, -0.0], [2.5, 3.0]])
    same = digest([values.t().contiguous().t()], torch.float32)
    assert same == digest([values.abs()], torch.float32) == digest([values[:1], values[1:]], torch.float32)
    assert same != digest([values + torch.tensor([[0.0, 0.0], [0.0, 2e-7]])], torch.float32)
    assert digest([values * 1.0001], torch.bfloat16) == digest([values], torch.bfloat16)
