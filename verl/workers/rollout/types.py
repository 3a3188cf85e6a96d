"""What rollout engines accept and return: sampling parameters, requests, completions, memory, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from verl.errors import RolloutError

if TYPE_CHECKING:
    from verl.models.vision import PromptImages


FinishReason = Literal["stop", "length", "abort"]


MemoryPart = Literal["weights", "kv_cache"]


MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one completion are chosen.

    They apply in this order: repetition penalty, temperature, top-k, top-p, min-p; what remains is renormalised.

    Attributes:
        max_tokens: most tokens to generate, at least 1; tokens of a partial completion count.
        temperature: divides the logits; 0 means greedy (the filters then change nothing).
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many most likely tokens; -1 or 0 keeps all.
        min_p: drop tokens less likely than this times the most likely one; 0 keeps all.
        repetition_penalty: positive logits of tokens that the prompt or the completion has already are divided by this,
            negative ones multiplied (CTRL, https://arxiv.org/abs/1909.05858); 1 changes nothing. Applies to greedy
            requests too.
        seed: seed of this completion's own random stream; None draws one from the operating system.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        stop_token_ids: further tokens that end the completion, also with ``ignore_eos``.

    Raises:
        RolloutError: a value is out of its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RolloutError(f"max_tokens={self.max_tokens}: a completion needs room for at least 1 token")
        if not 0.0 <= self.temperature < float("inf"):
            raise RolloutError(f"temperature={self.temperature}: use 0 (greedy) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise RolloutError(f"top_p={self.top_p}: use a number in (0, 1]; 1 keeps all tokens")
        if self.top_k < -1:
            raise RolloutError(f"top_k={self.top_k}: use a positive count, or -1 to keep all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            raise RolloutError(f"min_p={self.min_p}: use a number in [0, 1]; 0 keeps all tokens")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise RolloutError(
                f"repetition_penalty={self.repetition_penalty}: use a positive number; 1 changes nothing, more than 1 "
                "makes repetitions less likely"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every step."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request got.

    Attributes:
        token_ids: sampled tokens, including the token that stopped it.
        log_probs: natural log-probability of each sampled token under the distribution that it was drawn from
            (penalty, temperature and filters applied), computed in float32. For greedy requests, whose distribution is
            a single token, the log-probability at temperature 1 without filters.
        finish_reason: ``"stop"`` (end-of-sequence or stop token), ``"length"`` or ``"abort"``.
        policy_version: version of the weights that sampled the first token.
        last_policy_version: version that sampled the last token; None when it is the same.
        version_runs: where the weights changed in between, (version, number of tokens) in order; else empty.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int = 0
    last_policy_version: int | None = None
    version_runs: tuple[tuple[int, int], ...] = ()

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(version, number of tokens) in order, of all tokens.

        A completion that says nothing of the tokens between the first and the last has them from the first version.
        """
        count, last = len(self.token_ids), self.last_policy_version
        if self.version_runs:
            return self.version_runs
        if last is None or last == self.policy_version or not count:
            return ((self.policy_version, count),)
        return ((self.policy_version, count - 1), (last, 1))

    @property
    def token_versions(self) -> list[int]:
        """Version of the weights that sampled each token."""
        return [version for version, count in self.runs for _ in range(count)][: len(self.token_ids)]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to make, or to continue.

    An aborted completion is continued by the same request with ``partial``: ``replace(request, partial=completion)``.
    Token ``t`` of a seeded request is drawn with the ``t``-th random number of its seed, so under the same weights the
    result is what an uninterrupted request gets. Under newer weights the tokens that were sampled stay as they are,
    with their log-probabilities, and the others come from the newer policy.

    Attributes:
        prompt_ids: the prompt's tokens, without padding.
        sampling: how to sample; of the whole completion, also when part of it is there.
        request_id: name for ``abort`` and messages; unique among the requests in flight.
        partial: what an earlier call of this request got before it was aborted. The result then begins with it.
        images: what the prompt's placeholder tokens stand for, as the model's processor makes it.

    Raises:
        RolloutError: ``partial`` did not end by an abort, or leaves nothing to sample.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    request_id: str
    partial: Completion | None = None
    images: PromptImages | None = None

    def __post_init__(self) -> None:
        partial = self.partial
        if partial is None:
            return
        if partial.finish_reason != "abort":
            raise RolloutError(
                f"request {self.request_id!r}: its partial completion ended with {partial.finish_reason!r}; only "
                "aborted ones can be continued"
            )
        if len(partial.token_ids) != len(partial.log_probs) or len(partial.token_ids) >= self.sampling.max_tokens:
            raise RolloutError(
                f"request {self.request_id!r}: a partial completion of {len(partial.token_ids)} tokens and "
                f"{len(partial.log_probs)} log-probabilities must have as many of both, and fewer than "
                f"max_tokens={self.sampling.max_tokens}"
            )

    @property
    def context_ids(self) -> list[int]:
        """What the next token follows: the prompt and the tokens sampled so far."""
        return self.prompt_ids if self.partial is None else [*self.prompt_ids, *self.partial.token_ids]

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return 0 if self.partial is None else len(self.partial.token_ids)

    @property
    def remaining(self) -> int:
        """Most tokens still to sample."""
        return self.sampling.max_tokens - self.sampled


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Bytes that a rollout engine holds.

    Attributes:
        kv_cache: key and value cache.
        owned_weights: weights that the engine holds in its own copy.
        aliased_weights: weights that belong to the training engine and are read in place; not counted twice.
    """

    kv_cache: int
    owned_weights: int
    aliased_weights: int


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A box of a weight, and where the engine reads it from.

    Attributes:
        start, stop: first and end index along each dimension of the whole weight.
        tensor: the memory that holds the box, of its shape.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    tensor: torch.Tensor
