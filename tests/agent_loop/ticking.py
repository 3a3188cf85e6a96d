"""An engine whose tokens, lengths and speed are known: one token a tick for every request, which can be ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from verl.workers.rollout.pausing import with_partial
from verl.workers.rollout.types import Completion, GenerationRequest


def length_of(seed: int, longest: int) -> int:
    """Tokens of the sample with a seed: often few, sometimes many."""
    draw = random.Random(seed).random()
    return 3 + int((longest - 3) * draw**2)


def token_of(seed: int, place: int) -> int:
    """The token of a sample at a place."""
    return 10 + random.Random(f"{seed}-{place}").randrange(80)


class Ticking:
    """``version`` of its weights shows in the log-probability of a token: ``-version - place / 1000``."""

    def __init__(self, version: int = 0, longest: int = 40) -> None:
        self.version = version
        self.longest = longest
        self.sampled = 0
        self._unwanted: set[str] = set()

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        seed, version = request.sampling.seed or 0, self.version
        limit = min(length_of(seed, self.longest), request.sampling.max_tokens)
        ids: list[int] = []
        reason = "stop" if limit < request.sampling.max_tokens else "length"
        while request.sampled + len(ids) < limit:
            await asyncio.sleep(0)
            if request.request_id in self._unwanted:
                self._unwanted.discard(request.request_id)
                reason = "abort"
                break
            ids.append(token_of(seed, request.sampled + len(ids)))
        self.sampled += len(ids)
        log_probs = [log_prob_of(version, request.sampled + place) for place in range(len(ids))]
        return with_partial(request, replace(Completion(ids, log_probs, "stop", version), finish_reason=reason))  # type: ignore[arg-type]

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        assert request_ids is not None
        self._unwanted |= set(request_ids)


def log_prob_of(version: int, place: int) -> float:
    """The log-probability of a token that weights of a version sampled at a place."""
    return -version - place / 1000
