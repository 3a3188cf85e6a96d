"""Requests and completions as a few flat arrays: what travels between the controller and rollout servers.

Object stores carry NumPy arrays as they are, while thousands of small lists are pickled one by one. A prompt that many
requests share travels once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from verl.models.vision import PromptImages
from verl.utils.transport import tensor_of
from verl.workers.rollout.types import Completion, FinishReason, GenerationRequest, SamplingParams

_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True)
class PackedRequests:
    """N requests.

    Attributes:
        request_ids: N names.
        prompt_tokens: int32, the different prompts one after the other.
        prompt_lengths: int64, of each different prompt.
        prompt_of: int64 (N,), which prompt a request has.
        sampling: the different settings, without seeds.
        sampling_of: int64 (N,), which of them a request has.
        seeds: N seeds.
        partials: what continued requests have already, by the number of the request.
        images: pixel values, grids, keys and starts of different prompts with images, by the number of the prompt.
    """

    request_ids: list[str]
    prompt_tokens: np.ndarray
    prompt_lengths: np.ndarray
    prompt_of: np.ndarray
    sampling: list[SamplingParams]
    sampling_of: np.ndarray
    seeds: list[int | None]
    partials: dict[int, PackedCompletions]
    images: dict[int, tuple[np.ndarray, np.ndarray, tuple[str, ...], tuple[int, ...] | None]]

    @classmethod
    def pack(cls, requests: Sequence[GenerationRequest]) -> PackedRequests:
        """Arrays from requests."""
        prompts: dict[tuple[tuple[int, ...], Any], int] = {}
        settings: dict[SamplingParams, int] = {}
        prompt_of = [prompts.setdefault(prompt_key(request), len(prompts)) for request in requests]
        sampling_of = [settings.setdefault(replace(item.sampling, seed=None), len(settings)) for item in requests]
        return cls(
            [request.request_id for request in requests],
            _flat((tokens for tokens, _ in prompts), np.int32),
            np.array([len(tokens) for tokens, _ in prompts], np.int64),
            np.array(prompt_of, np.int64),
            list(settings),
            np.array(sampling_of, np.int64),
            [request.sampling.seed for request in requests],
            {
                number: PackedCompletions.pack([request.partial])
                for number, request in enumerate(requests)
                if request.partial is not None
            },
            {
                prompt: (
                    request.images.pixel_values.numpy(),
                    request.images.grid_thw.numpy(),
                    *request.images.identity,
                )
                for prompt, request in zip(prompt_of, requests, strict=True)
                if request.images is not None
            },
        )

    def unpack(self) -> list[GenerationRequest]:
        """The requests; those with the same prompt share its list."""
        prompts = _cut(self.prompt_tokens, self.prompt_lengths)
        rows = zip(self.request_ids, self.prompt_of.tolist(), self.sampling_of.tolist(), self.seeds, strict=True)
        partials = {number: packed.unpack()[0] for number, packed in self.partials.items()}
        images = {
            prompt: PromptImages(tensor_of(pixels), tensor_of(grid), keys, starts)
            for prompt, (pixels, grid, keys, starts) in self.images.items()
        }
        return [
            GenerationRequest(
                prompts[prompt],
                replace(self.sampling[sampling], seed=seed),
                request_id,
                partials.get(number),
                images.get(prompt),
            )
            for number, (request_id, prompt, sampling, seed) in enumerate(rows)
        ]


@dataclass(frozen=True)
class PackedCompletions:
    """N completions.

    Attributes:
        tokens: int32, one completion after the other.
        log_probs: float32, of each token.
        lengths: int64 (N,).
        reasons: uint8 (N,), index into the possible reasons.
        versions: int32 (N, 2), of the first and the last token's weights.
        runs: ``version_runs`` of the completions that have any, by the number of the completion.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    lengths: np.ndarray
    reasons: np.ndarray
    versions: np.ndarray
    runs: dict[int, tuple[tuple[int, int], ...]]

    @classmethod
    def pack(cls, completions: Sequence[Completion]) -> PackedCompletions:
        """Arrays from completions."""
        versions = [
            (item.policy_version, item.policy_version if item.last_policy_version is None else item.last_policy_version)
            for item in completions
        ]
        return cls(
            _flat((item.token_ids for item in completions), np.int32),
            _flat((item.log_probs for item in completions), np.float32),
            np.array([len(item.token_ids) for item in completions], np.int64),
            np.array([_REASONS.index(item.finish_reason) for item in completions], np.uint8),
            np.array(versions, np.int32).reshape(-1, 2),
            {number: item.version_runs for number, item in enumerate(completions) if item.version_runs},
        )

    def unpack(self) -> list[Completion]:
        """The completions."""
        rows = zip(
            _cut(self.tokens, self.lengths),
            _cut(self.log_probs, self.lengths),
            self.reasons.tolist(),
            self.versions.tolist(),
            strict=True,
        )
        return [
            Completion(
                tokens, log_probs, _REASONS[reason], first, None if last == first else last, self.runs.get(number, ())
            )
            for number, (tokens, log_probs, reason, (first, last)) in enumerate(rows)
        ]


def prompt_key(request: GenerationRequest) -> tuple[tuple[int, ...], Any]:
    """Equal for requests with the same prompt."""
    return tuple(request.prompt_ids), None if request.images is None else request.images.identity


def _flat(rows: Iterable[Iterable[float]], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype)


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[list]:
    ends = lengths.cumsum().tolist()
    flat = values.tolist()
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
