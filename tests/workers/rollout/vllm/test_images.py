"""vLLM with images: greedy tokens of Transformers, log-probabilities of training, features of the newest weights."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.fixtures.vision import make_vision_model_dir
from tests.models.images import image_prompt, make_images, pad_rows
from tests.workers.engine.reference import LOG_PROBS, make_engine
from tests.workers.rollout.helpers import generate, hand_over, missing_package, reference_greedy
from verl.config import ModelConfig, RolloutConfig
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.images import with_images
from verl.workers.rollout.engine import RolloutEngine
from verl.workers.rollout.types import SamplingParams

pytestmark = pytest.mark.vllm

MISSING = missing_package("vllm") or (
    None if importlib.util.find_spec("torchvision") else "vLLM reads images beside torchvision alone"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_vision_model_dir(tmp_path_factory.mktemp("vision"), hidden=64, heads=2, vision_width=32)


@pytest.fixture(scope="module")
def rollout(directory: str) -> RolloutEngine:
    if MISSING:
        pytest.skip(MISSING)
    from verl.workers.rollout.vllm.engine import VLLMRolloutEngine

    settings = {"name": "vllm", "dtype": "float32", "prompt_length": 32, "response_length": 16, "max_num_seqs": 16}
    return VLLMRolloutEngine(ModelConfig(path=directory), RolloutConfig(**settings), device="cpu")


def rows_of(directory: str) -> tuple[list[list[int]], list[dict[str, torch.Tensor] | None]]:
    """One prompt with two samples, its text with another image, two images in a prompt, text alone."""
    config = AutoConfig.from_pretrained(directory)
    tokens = (config.image_token_id, config.vision_start_token_id, config.vision_end_token_id)
    one, other, two = make_images((4, 6), seed=1), make_images((4, 6), seed=2), make_images((2, 2), (6, 4), seed=3)
    images = [one, one, other, two, None]
    lengths = [(4, 3), (4, 3), (4, 3), (2, 1, 5), (9,)]
    prompts = [
        image_prompt(image, pieces, seed, tokens)
        for image, pieces, seed in zip(images, lengths, (1, 1, 1, 2, 3), strict=True)
    ]
    return prompts, images


def test_greedy_tokens_and_log_probs_before_and_after_an_update(directory: str, rollout: RolloutEngine) -> None:
    prompts, images = rows_of(directory)
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    engine = make_engine(directory)
    answers = []
    for version in (1, 2):
        asyncio.run(hand_over(rollout, model, version))
        out = generate(rollout, prompts, SamplingParams(8, temperature=0.0), images)
        for prompt, shown, completion in zip(prompts, images, out, strict=True):
            assert completion.token_ids == reference_greedy(model, prompt, 8, shown, model.config.image_token_id)
        answers.append([completion.token_ids for completion in out])
        sampled = generate(rollout, prompts, SamplingParams(8, seed=5, ignore_eos=True), images)
        rows = TensorDict(pad_rows(prompts, [c.token_ids for c in sampled]), batch_size=[len(prompts)])
        engine.module.model.load_state_dict(model.state_dict())
        got = engine.forward(with_images(rows, images), LOG_PROBS, micro=MicroBatching())["log_probs"]
        want = torch.tensor([completion.log_probs for completion in sampled])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():  # of the tower alone: features of the old weights must not be used again
            for name, parameter in model.model.visual.named_parameters():
                if "norm" not in name:
                    parameter.mul_(-1.0)
    assert answers[0][:4] != answers[1][:4]
    assert answers[0][4] == answers[1][4]
