"""Packed weights of the built-in engine: the same tokens, given back when asleep, never stale."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.workers.rollout.helpers import (
    generate,
    hand_over,
    make_engine,
    make_model,
    random_prompts,
    reference_greedy,
    reference_logits,
    served_everywhere,
)
from verl.errors import ConfigError
from verl.utils.device import get_torch_device
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.hf.packed_linears import PackedLinears, packing_supported
from verl.workers.rollout.types import SamplingParams

pytestmark = pytest.mark.skipif(
    not packing_supported(torch.float32, get_torch_device("cpu")), reason="PyTorch was built without oneDNN"
)
GREEDY = SamplingParams(8, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Wide enough for its feed-forward layers to be packed: 256 × 512 numbers each."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_model(served_everywhere("qwen2", **shape), spread=2.0)


def loaded(model: torch.nn.Module, directory: Path, **rollout: object) -> HFRolloutEngine:
    engine = make_engine(model, directory, **rollout)
    asyncio.run(hand_over(engine, model))
    return engine


def test_tokens_and_log_probs_are_those_of_the_plain_weights(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded(model, tmp_path)
    prompts = random_prompts((3, 9, 5, 9))
    greedy = generate(engine, prompts, GREEDY)
    assert engine.packed is not None
    assert engine.packed.nbytes > 0
    assert [item.token_ids for item in greedy] == [reference_greedy(model, prompt, 8) for prompt in prompts]
    sampled = generate(engine, prompts, SamplingParams(8, seed=1, ignore_eos=True))
    for prompt, completion in zip(prompts, sampled, strict=True):
        expected = reference_logits(model, prompt, completion.token_ids).log_softmax(-1)
        expected = expected[torch.arange(8), torch.tensor(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_copies_are_counted_and_given_back(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded(model, tmp_path)
    assert engine.memory().owned_weights == 0
    generate(engine, random_prompts((3,)), GREEDY)
    layers = [layer.weight for layer in model.modules() if type(layer) is torch.nn.Linear]
    assert engine.memory().owned_weights == sum(weight.nbytes for weight in layers if weight.numel() >= 1 << 16)
    asyncio.run(engine.sleep())
    assert engine.memory().owned_weights == 0


def test_an_update_reaches_the_next_token(model: torch.nn.Module, tmp_path: Path) -> None:
    engine = loaded(model, tmp_path)
    prompts = random_prompts((6, 4))
    generate(engine, prompts, GREEDY)
    other = make_model(model.config, seed=5, spread=2.0)
    asyncio.run(hand_over(engine, other, version=2))
    completions = generate(engine, prompts, GREEDY)
    assert [item.token_ids for item in completions] == [reference_greedy(other, prompt, 8) for prompt in prompts]


def test_it_can_be_turned_off(model: torch.nn.Module, tmp_path: Path) -> None:
    assert loaded(model, tmp_path, pack_weights=False).packed is None


def test_asking_for_it_without_kernels_is_an_error(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pack_weights=True: there are no kernels .*float16"):
        make_engine(model, tmp_path, dtype="float16", pack_weights=True)


def test_small_matrices_and_subclasses_are_left_alone() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), Scaled(256, 256), torch.nn.Linear(256, 256))
    assert PackedLinears(module).layers == [module[2]]
