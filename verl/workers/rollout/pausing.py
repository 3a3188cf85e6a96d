"""What engines share in serving requests: calls and their completions, pausing, checks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verl.errors import DataError, RolloutError, VerlError
from verl.models.vision import ImageTokens, PromptImages, check_patches
from verl.workers.rollout.types import MEMORY_PARTS, Completion, GenerationRequest, MemoryPart


class Call:
    """Requests that were given together: collects their completions in order.

    Args:
        size: number of requests.
        future: gets the completions, or the error.
    """

    def __init__(self, size: int, future: asyncio.Future[list[Completion]]) -> None:
        self.completions: list[Completion | None] = [None] * size
        self.missing = size
        self.future = future

    def deliver(self, index: int, completion: Completion) -> None:
        """Take one completion; with the last one the caller gets all."""
        self.completions[index] = completion
        self.missing -= 1
        if not self.missing and not self.future.done():
            self.future.set_result([item for item in self.completions if item is not None])

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller, as one of this package's types."""
        if self.future.done():
            return
        if not isinstance(error, VerlError):
            wrapped = RolloutError(f"generation failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.future.set_exception(error)


@dataclass(eq=False)
class _Caller:
    """A call that is being served.

    Attributes:
        open: the requests without a completion, by their place in the call.
        done: completions by place.
        unwanted: requests that were aborted by name: their next completion is their last.
        wake: set when there is something to look at again.
    """

    open: dict[int, GenerationRequest]
    done: dict[int, Completion] = field(default_factory=dict)
    unwanted: set[str] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class PauseController:
    """Holds requests back while an engine is paused.

    A pause ends what an engine computes; the controller keeps those requests with their tokens and gives them to the
    engine again on resume. It checks every completion of the engine.

    Args:
        engine: its name, for messages.
        vocab_size: tokens that the model has.
    """

    def __init__(self, engine: str, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self.paused = False
        self._pauses = 0
        self._callers: set[_Caller] = set()

    def pause(self) -> None:
        """Let no request through, and keep those that the engine ends now."""
        self.paused = True
        self._pauses += 1

    def resume(self) -> None:
        """Let requests through."""
        self.paused = False
        for caller in self._callers:
            caller.wake.set()

    def abort(self, request_ids: Collection[str] | None) -> None:
        """Complete waiting requests with what they have, and do not keep those that the engine ends now."""
        for caller in self._callers:
            caller.unwanted |= {
                request.request_id
                for request in caller.open.values()
                if request_ids is None or request.request_id in request_ids
            }
            caller.wake.set()

    async def run(
        self,
        serve: Callable[[list[GenerationRequest]], Awaitable[list[Completion]]],
        requests: Sequence[GenerationRequest],
        *,
        collective: bool = False,
    ) -> list[Completion]:
        """Serve a call, over pauses.

        Args:
            serve: what the engine does while it is not paused.
            requests: of the call.
            collective: ranks serve together: after a pause this one takes part again, even without requests.

        Raises:
            RolloutError: as the engine does, or a completion cannot be what the model sampled.
        """
        caller = _Caller(dict(enumerate(requests)))
        self._callers.add(caller)
        try:
            while True:
                while self.paused:
                    self._drop_unwanted(caller)
                    if not caller.open and not collective:
                        break
                    caller.wake.clear()
                    await caller.wake.wait()
                if self.paused:
                    break
                pauses = self._pauses
                places = list(caller.open)
                results = await serve([caller.open[place] for place in places])
                interrupted = self._pauses != pauses
                for place, completion in zip(places, results, strict=True):
                    request = caller.open[place]
                    check_completion(request, completion, engine=self.engine, vocab_size=self.vocab_size)
                    unwanted = request.request_id in caller.unwanted
                    if interrupted and completion.finish_reason == "abort" and not unwanted:
                        caller.open[place] = replace(request, partial=completion)
                    else:
                        caller.done[place] = completion
                        del caller.open[place]
                if not interrupted or not (caller.open or collective):
                    break
        finally:
            self._callers.discard(caller)
        return [caller.done[place] for place in range(len(requests))]

    @staticmethod
    def _drop_unwanted(caller: _Caller) -> None:
        for place, request in list(caller.open.items()):
            if request.request_id in caller.unwanted:
                caller.done[place] = request.partial or Completion([], [], "abort")
                del caller.open[place]


def with_partial(request: GenerationRequest, completion: Completion) -> Completion:
    """The whole completion of a request, from the tokens that were sampled now."""
    partial = request.partial
    if partial is None or not partial.token_ids:
        return completion
    if not completion.token_ids:
        return replace(partial, finish_reason=completion.finish_reason)
    last = completion.policy_version if completion.last_policy_version is None else completion.last_policy_version
    runs = [*partial.runs, *completion.runs]
    return Completion(
        partial.token_ids + completion.token_ids,
        partial.log_probs + completion.log_probs,
        completion.finish_reason,
        partial.policy_version,
        None if last == partial.policy_version else last,
        _merged(runs) if len({version for version, _ in runs}) > 1 else (),
    )


def _merged(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring runs of one version as one."""
    merged: list[tuple[int, int]] = []
    for version, count in runs:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    return tuple(merged)


def check_ready(*, updating: bool, complete: bool, awake: Collection[MemoryPart]) -> None:
    """Refuse to generate without weights or memory.

    Raises:
        RolloutError: an update is running, weights are missing or the engine sleeps.
    """
    if updating:
        raise RolloutError("a weight update is running; generate after end_update")
    if not complete:
        raise RolloutError("the rollout has no complete weights; sync the policy's weights (sync_weights) first")
    asleep = [part for part in MEMORY_PARTS if part not in awake]
    if asleep:
        raise RolloutError(f"the rollout is asleep ({', '.join(asleep)}); call wake() before generating")


def check_request(
    request: GenerationRequest, *, vocab_size: int, max_model_len: int | None, image_tokens: ImageTokens | None = None
) -> None:
    """Refuse a request that the model cannot serve.

    Args:
        request: to check.
        vocab_size: the model's.
        max_model_len: most tokens of prompt and completion; None: any number.
        image_tokens: how the model reads images; None: not at all.

    Raises:
        RolloutError: an empty or too long prompt, an unknown token, or images that the model cannot read.
    """
    context, name = request.context_ids, request.request_id
    if not request.prompt_ids:
        raise RolloutError(f"request {name!r} has an empty prompt; give at least one token")
    if min(context) < 0 or max(context) >= vocab_size:
        bad = min(context) if min(context) < 0 else max(context)
        raise RolloutError(
            f"request {name!r} has token id {bad}, outside of the model's vocabulary of {vocab_size}; tokenizer and "
            "model must belong together"
        )
    if request.images is not None:
        _check_images(request, request.images, image_tokens)
    total = len(request.prompt_ids) + request.sampling.max_tokens
    if max_model_len is not None and total > max_model_len:
        raise RolloutError(
            f"request {name!r}: {len(request.prompt_ids)} prompt tokens + max_tokens={request.sampling.max_tokens} "
            f"exceed max_model_len={max_model_len}, which is rollout's or the number of positions that the model has"
        )


def check_completion(request: GenerationRequest, completion: Completion, *, engine: str, vocab_size: int) -> None:
    """Refuse a completion that cannot be what the model sampled.

    Args:
        request: that it answers.
        completion: to check.
        engine: its name, for messages.
        vocab_size: the model's.

    Raises:
        RolloutError: a token is none of the model's, or has no finite log-probability.
    """
    tokens, values = completion.token_ids, completion.log_probs
    where = f"rollout.name={engine}: the engine answered request {request.request_id!r} with"
    remedy = (
        f"its samples cannot be trained on; leave out settings of rollout.engine_kwargs.{engine}, set rollout.dtype to "
        "a wider type, or set rollout.name=hf"
    )
    if engine == "hf":
        remedy = "the weights may have become infinite or NaN (see actor/grad_norm); lower the learning rate"
    if len(tokens) != len(values):
        raise RolloutError(f"{where} {len(tokens)} tokens and {len(values)} log-probabilities; {remedy}")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        place = next(index for index, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise RolloutError(
            f"{where} token id {tokens[place]} at position {place}, outside of the model's vocabulary of {vocab_size}; "
            f"{remedy}"
        )
    if not all(map(math.isfinite, values)):
        place = next(index for index, value in enumerate(values) if not math.isfinite(value))
        raise RolloutError(
            f"{where} the log-probability {values[place]} for token {tokens[place]} at position {place}; {remedy}"
        )


def _check_images(request: GenerationRequest, images: PromptImages, tokens: ImageTokens | None) -> None:
    name = request.request_id
    if tokens is None:
        raise RolloutError(
            f"request {name!r} has images, and this rollout engine or model reads none; use a vision-language model "
            "with rollout.name=hf or vllm"
        )
    try:
        check_patches(images, tokens)
        tokens.positions(np.array(request.prompt_ids), images.grid_thw.numpy(), images.starts)
    except DataError as error:
        raise RolloutError(f"request {name!r}: {error}") from error


def parts_of(parts: Iterable[MemoryPart]) -> list[MemoryPart]:
    """The parts to wake, weights before the cache.

    Raises:
        RolloutError: an unknown part.
    """
    wanted = set(parts)
    unknown = wanted - set(MEMORY_PARTS)
    if unknown:
        raise RolloutError(f"wake: unknown parts {sorted(unknown)}; use {', '.join(MEMORY_PARTS)}")
    return [part for part in MEMORY_PARTS if part in wanted]
