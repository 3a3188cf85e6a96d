"""The interface that every rollout engine has."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl.errors import RolloutError, WeightSyncError
from verl.utils.stopping import call_is_cancelled

if TYPE_CHECKING:
    from verl.workers.rollout.pausing import PauseController
from verl.workers.rollout.types import (
    MEMORY_PARTS,
    Completion,
    GenerationRequest,
    MemoryPart,
    RolloutMemory,
    WeightPart,
)

T = TypeVar("T")


_LOOK_S = 0.5  # between two questions whether a call is still wanted


class RolloutEngine(ABC):
    """Generates with the current policy.

    While awake it serves requests. While asleep it has released all releasable memory.
    """

    #: what right-padding of responses should use
    pad_token_id: int
    #: queue of requests while the engine is paused; ``generate_many`` runs through it
    pauses: PauseController

    #: where one of the ranks that share the weights serves all requests: it calls this when the others must join in
    on_tp_work: Callable[[], None] | None = None

    #: whether updates bring the matrices of a low-rank adapter (``NAME.lora_A``, ``NAME.lora_B``) beside the base
    #: weights, which then need to come once only, before the adapter; otherwise the adapter comes added to the weights
    supports_lora_update: bool = False

    @property
    def needs_base_weights(self) -> bool:
        """With :attr:`supports_lora_update`: whether the next update has to bring the base weights too."""
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
        """Serve requests together, in the order given; through :attr:`pauses`.

        Raises:
            RolloutError: as in :meth:`generate`; none of the requests is then served.
        """

    @abstractmethod
    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End requests now (all when None), paused ones too (``pauses.abort``).

        They complete with the tokens so far and reason ``"abort"``, and can be continued as ``partial``.
        """

    async def pause(self) -> None:
        """Sample no further token, and let requests wait, new ones too, until :meth:`resume`.

        Nothing is in flight then: the engine may sleep and take new weights. Requests keep their tokens and go on with
        the next one; their keys and values are recomputed with the weights loaded at that time. Where ranks share
        the weights, all of them pause and resume.
        """
        self.pauses.pause()
        await self.halt()

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        self.pauses.resume()

    async def tp_step(self) -> None:
        """Serve with the rank that called :attr:`on_tp_work`, until nothing is left.

        Raises:
            RolloutError: the engine does not split its weights over ranks.
        """
        raise RolloutError(f"{type(self).__name__} does not split its weights over ranks")

    @abstractmethod
    async def halt(self) -> None:
        """End what is being computed, for :meth:`pause`: like ``abort`` of everything, but does not pause."""

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

    def shard_views(self, names: Iterable[str]) -> dict[str, list[WeightPart]] | None:
        """Within an update: the parts of weights that this rank generates with, to be written in place.

        Who writes them instead of calling :meth:`load` says so with :meth:`mark_loaded`.

        Args:
            names: Hugging Face parameter names.

        Returns:
            The parts by name; None where the engine takes whole tensors only.

        Raises:
            WeightSyncError: a name is unknown, or no update is running.
        """
        return None

    def mark_loaded(self, names: Iterable[str]) -> None:
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
