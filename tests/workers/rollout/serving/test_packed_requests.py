"""Requests and completions survive the way to a server and back."""

from __future__ import annotations

import pickle

from verl.workers.rollout.serving.packed_requests import PackedCompletions, PackedRequests
from verl.workers.rollout.types import Completion, GenerationRequest, SamplingParams


def test_requests_come_back_as_they_were() -> None:
    requests = [
        GenerationRequest([5, 6, 7], SamplingParams(8, seed=2**63 - 1), "a"),
        GenerationRequest([9], SamplingParams(8, temperature=0.0, stop_token_ids=(4, 2)), "b"),
        GenerationRequest([5, 6, 7], SamplingParams(8, top_k=3, top_p=0.5, min_p=0.1, ignore_eos=True), "c"),
        GenerationRequest([], SamplingParams(1), "empty"),
        GenerationRequest([5], SamplingParams(8), "continued", Completion([3, 4], [-0.25, -0.5], "abort", 7, 8)),
    ]
    assert pickle.loads(pickle.dumps(PackedRequests.pack(requests))).unpack() == requests
    assert PackedRequests.pack([]).unpack() == []


def test_completions_come_back_as_they_were() -> None:
    completions = [
        Completion([3, 4], [-0.25, -1.5], "stop", 7),
        Completion([], [], "abort", 7),
        Completion([1], [-3.0], "length", 7, 8),
    ]
    assert pickle.loads(pickle.dumps(PackedCompletions.pack(completions))).unpack() == completions
    assert PackedCompletions.pack([]).unpack() == []


def test_a_shared_prompt_travels_once() -> None:
    prompt = list(range(1000))
    requests = [GenerationRequest(prompt, SamplingParams(8, seed=n), f"sample-{n}") for n in range(64)]
    packed = PackedRequests.pack(requests)
    assert packed.prompt_tokens.nbytes == 4000
    assert len(pickle.dumps(packed)) < 10_000
