"""What every rollout engine accepts and returns, and the interface itself."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from verl.errors import RolloutError, WeightSyncError
from verl.utils.stopping import call_is_cancelled

if TYPE_CHECKING:
    from verl.models.vision import PromptImages
    from verl.workers.rollout.pausing import Gate

FinishReason = Literal["stop", "length", "abort"]
MemoryPart = Literal["weights", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")

T = TypeVar("T")

_LOOK_S = 0.5  # between two questions whether a call is still wanted


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


class RolloutEngine(ABC):
    """Generates with the current policy.

    While awake it serves requests. While asleep it has released all releasable memory.
    """

    #: what right-padding of responses should use
    pad_token_id: int
    #: queue of requests while the engine is paused; ``generate_many`` runs through it
    gate: Gate

    #: where one of the ranks that share the weights serves all requests: it calls this when the others must join in
    on_round: Callable[[], None] | None = None

    #: whether updates bring the matrices of a low-rank adapter (``NAME.lora_A``, ``NAME.lora_B``) beside the base
    #: weights, which then need to come once only, before the adapter; otherwise the adapter comes added to the weights
    takes_adapter: bool = False

    @property
    def needs_base(self) -> bool:
        """With :attr:`takes_adapter`: whether the next update has to bring the base weights too."""
        return True

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first complete update."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Serve one request; concurrent calls are batched.

        Raises:
            RolloutError: the request is invalid, the engine sleeps or has no weights, or generation failed.
        """
        return (await self.generate_many([request]))[0]

    @abstractmethod
    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Serve requests together, in the order given; through :attr:`gate`.

        Raises:
            RolloutError: as in :meth:`generate`; none of the requests is then served.
        """

    @abstractmethod
    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now (all when None), paused ones too (``gate.abort``).

        They complete with the tokens so far and reason ``"abort"``, and can be continued as ``partial``.
        """

    async def pause(self) -> None:
        """Sample no further token, and let requests wait, new ones too, until :meth:`resume`.

        Nothing is in flight then: the engine may sleep and take new weights. Requests keep their tokens and go on with
        the next one; their keys and values are recomputed with the weights loaded at that time. Where ranks share
        the weights, all of them pause and resume.
        """
        self.gate.close()
        await self.halt()

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        self.gate.open()

    async def join_round(self) -> None:
        """Serve with the rank that called :attr:`on_round`, until nothing is left.

        Raises:
            RolloutError: the engine does not split its weights over ranks.
        """
        raise RolloutError(f"{type(self).__name__} does not split its weights over ranks")

    @abstractmethod
    async def halt(self) -> None:
        """End what is being computed, for :meth:`pause`: like ``abort`` of everything, but leaves the gate alone."""

    @abstractmethod
    async def sleep(self) -> None:
        """Give back the memory of the key-value cache and of weights that the engine holds in its own copy."""

    @abstractmethod
    async def wake(self, parts: Iterable[MemoryPart] = MEMORY_PARTS) -> None:
        """Make ready to generate again; with ``parts``, only those (a weight update needs no cache)."""

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Start to receive the weights of policy ``version``. Nothing may be in flight.

        Raises:
            WeightSyncError: requests are in flight, or an update is already running.
        """

    @abstractmethod
    async def load(self, bucket: Iterable[tuple[str, torch.Tensor]], *, live: bool = True) -> None:
        """Take some of the weights.

        Args:
            bucket: (Hugging Face parameter name, whole tensor).
            live: True when the tensors are the training engine's own and stay valid: the engine then reads them in
                place where dtype and device allow it. False when they are only valid during the call.

        Raises:
            WeightSyncError: a name is unknown, a shape is wrong, or no update is running.
        """

    def weight_parts(self, names: Iterable[str]) -> dict[str, list[WeightPart]] | None:
        """Within an update: the parts of weights that this rank generates with, to be written in place.

        Who writes them instead of calling :meth:`load` says so with :meth:`parts_written`.

        Args:
            names: Hugging Face parameter names.

        Returns:
            The parts by name; None where the engine takes whole tensors only.

        Raises:
            WeightSyncError: a name is unknown, or no update is running.
        """
        return None

    def parts_written(self, names: Iterable[str]) -> None:
        """The parts of these weights are complete."""
        raise WeightSyncError(f"{type(self).__name__} takes whole tensors; call load")

    @abstractmethod
    async def end_update(self) -> None:
        """Finish the update; cached prefixes of older weights are dropped.

        Raises:
            WeightSyncError: weights are missing; the engine then refuses to generate until a complete update.
        """

    @abstractmethod
    async def checksums(self, source: Mapping[str, torch.Tensor] | None = None) -> dict[str, str]:
        """Digest per weight name, of the engine's weights or of ``source`` as the engine would store it."""

    @abstractmethod
    def memory(self) -> RolloutMemory:
        """Bytes held now."""

    def counters(self) -> dict[str, int]:
        """Events since the engine was made, by name; the metrics ``rollout/NAME`` are what a step adds to them."""
        return {}


async def unless_cancelled(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """:meth:`RolloutEngine.generate_many`; its completions are cut short when the caller of this process gives up."""
    generation = asyncio.ensure_future(engine.generate_many(requests))
    try:
        while not (await asyncio.wait([generation], timeout=_LOOK_S))[0]:
            if call_is_cancelled():
                await engine.abort()
        return generation.result()
    finally:
        generation.cancel()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from plain code, also where an event loop is already running in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread below
            failure.append(error)

    thread = threading.Thread(target=target, name="verl-run-blocking")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
