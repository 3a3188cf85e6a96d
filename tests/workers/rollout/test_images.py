"""Requests with images: shared prefills, positions while decoding, pauses, the wire, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.models.families import make_config
from tests.models.images import example_rows, image_prompt, make_images, pad_rows
from tests.workers.engine.reference import LOG_PROBS, make_engine
from tests.workers.rollout.helpers import generate, hand_over, hf_rollout, loaded_engine, make_model, random_prompts
from verl.agent_loop.batch import rows_from_batch
from verl.config import RolloutConfig
from verl.errors import RolloutError
from verl.models.vision import PromptImages
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.images import with_images
from verl.workers.rollout.batch import requests_from_batch
from verl.workers.rollout.hf.engine import HFRolloutEngine
from verl.workers.rollout.serving.packed_requests import PackedRequests
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model("qwen2_5_vl", spread=3.0)


@pytest.fixture
def engine(model: torch.nn.Module, tmp_path: Path) -> HFRolloutEngine:
    return loaded_engine(model, tmp_path)


def test_log_probs_of_sampling_are_those_of_training(model: torch.nn.Module, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    rollout = hf_rollout(str(tmp_path))
    asyncio.run(hand_over(rollout, model))
    prompts, images = example_rows()
    params = [SamplingParams(length, seed=length, ignore_eos=True) for length in (12, 3, 8, 12, 5, 9)]
    out = generate(rollout, prompts, params, images)
    rows = TensorDict(pad_rows(prompts, [completion.token_ids for completion in out]), batch_size=[len(prompts)])
    got = make_engine(str(tmp_path)).forward(with_images(rows, images), LOG_PROBS, micro=MicroBatching())["log_probs"]
    for completion, row in zip(out, got, strict=True):
        want = row[: len(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), want, rtol=1e-5, atol=1e-5)


def test_one_prefill_for_equal_prompts_with_equal_images(engine: HFRolloutEngine) -> None:
    images, other = make_images((4, 4), seed=1), make_images((4, 4), seed=2)
    prompt = image_prompt(images, (3, 4))
    params = [SamplingParams(1, seed=seed) for seed in range(4)]
    before = engine.runner.forward_tokens
    generate(engine, [prompt] * 4, params, [images, dict(images), make_images((4, 4), seed=1), images])
    assert engine.runner.forward_tokens - before == len(prompt)
    before = engine.runner.forward_tokens
    generate(engine, [prompt] * 4, params, [images, other, images, other])
    assert engine.runner.forward_tokens - before == 2 * len(prompt)


def test_rows_that_come_and_go_do_not_change_a_completion(engine: HFRolloutEngine) -> None:
    prompts, images = example_rows()
    params = [SamplingParams(length, seed=7, ignore_eos=True) for length in (20, 2, 11, 3, 20, 7)]
    alone = [generate(engine, [p], s, [i])[0] for p, s, i in zip(prompts, params, images, strict=True)]
    engine.scheduler.max_rows = 2  # rows enter as others leave, and the cache is laid out anew
    together = generate(engine, prompts, params, images)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_a_continued_completion_is_the_uninterrupted_one(engine: HFRolloutEngine) -> None:
    prompts, images = example_rows()
    request = GenerationRequest(
        prompts[3], SamplingParams(12, seed=3, ignore_eos=True), "r", images=PromptImages.of(images[3])
    )
    whole = asyncio.run(engine.generate(request))
    part = Completion(whole.token_ids[:5], whole.log_probs[:5], "abort", whole.policy_version)
    rest = asyncio.run(engine.generate(replace(request, partial=part)))
    assert rest.token_ids == whole.token_ids
    assert rest.log_probs == pytest.approx(whole.log_probs, abs=1e-5)


def test_requests_of_a_batch_have_its_images() -> None:
    prompts, images = example_rows()
    padded = pad_rows(prompts[2:5], [[5], [5], [5]])
    batch = DataProto.from_dict(
        {name: padded[name][:, :-1] for name in ("input_ids", "attention_mask")},
        {"multi_modal_inputs": images[2:5]},
    )
    requests = requests_from_batch(batch.repeat(2), RolloutConfig(), seed=0, step=1, validate=False)
    assert [request.prompt_ids for request in requests[::2]] == prompts[2:5]
    assert [None if r.images is None else len(r.images.grid_thw) for r in requests] == [1, 1, 2, 2, None, None]
    assert requests[0].images is requests[1].images
    rows = rows_from_batch(batch, RolloutConfig(), seed=0, step=1, validate=False)
    assert [row.fields["images"] and len(row.fields["images"].keys) for row in rows] == [1, 2, None]


def test_images_travel_once_for_each_different_prompt() -> None:
    one, other = PromptImages.of(make_images((4, 4), seed=1)), PromptImages.of(make_images((4, 4), seed=2))
    params = SamplingParams(3, seed=1)
    requests = [
        GenerationRequest([5, 6], params, f"r{n}", images=images) for n, images in enumerate([one, one, other, None])
    ]
    packed = PackedRequests.pack(requests)
    assert sorted(packed.images) == [0, 1]
    assert packed.prompt_of.tolist() == [0, 0, 1, 2]
    unpacked = packed.unpack()
    assert [r.images and r.images.keys for r in unpacked] == [one.keys, one.keys, other.keys, None]
    torch.testing.assert_close(unpacked[2].images.pixel_values, other.pixel_values, rtol=0, atol=0)
    assert unpacked[2].images.grid_thw.tolist() == [[1, 4, 4]]


def test_what_cannot_be_read_is_refused(engine: HFRolloutEngine, tmp_path: Path) -> None:
    images = make_images((4, 4))
    with pytest.raises(RolloutError, match="'request-0': image 0 of a row needs 4 placeholder tokens"):
        generate(engine, [[5, 6]], SamplingParams(1), [images])
    text = loaded_engine(make_model(make_config("qwen2")), tmp_path / "text")
    with pytest.raises(RolloutError, match="'request-0' has images, and this rollout engine or model reads none"):
        generate(text, random_prompts([4]), SamplingParams(1), [images])
