"""Client of the rollout servers: load balancing, sticky sessions, failover."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray import ObjectRef
from ray import cancel as ray_cancel
from ray.exceptions import RayActorError, RayError, RayTaskError

from verl.errors import ConfigError, LostProcessError, ReplicaError, RolloutError, VerlError
from verl.workers.rollout.serving.packed_requests import PackedRequests
from verl.workers.rollout.serving.server import ServerHealth
from verl.workers.rollout.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)

#: conversations whose replica is remembered; the longest unused are forgotten first
_MAX_SESSIONS = 100_000
#: seconds after which a replica that does not answer a question about its health counts as absent
_HEALTH_TIMEOUT_S = 10.0


class RolloutClient:
    """Generates with a set of replicas that all have the same policy.

    A client may be sent to other Ray actors; each copy counts its own requests. It belongs to one event loop at a time.

    Args:
        replicas: actor handles of :class:`~verl.workers.rollout.serving.server.RolloutServer`; where several
            processes share the weights of a replica, the first one's.
        timeout_s: longest time that a call may take, with all its attempts.
        max_attempts: how many replicas are asked before a request fails.
        retry_delay_s: pause where no replica is known to be up, and time for which a replica that failed is avoided.
    """

    def __init__(
        self,
        replicas: Sequence[Any],
        *,
        timeout_s: float = 3600.0,
        max_attempts: int = 3,
        retry_delay_s: float = 2.0,
    ) -> None:
        if not replicas:
            raise ConfigError("a rollout client needs at least one replica")
        if max_attempts < 1 or timeout_s <= 0:
            raise ConfigError(f"max_attempts={max_attempts}, timeout_s={timeout_s}: both must be positive")
        self.replicas = list(replicas)
        self.timeout_s = timeout_s
        self.max_attempts = max_attempts
        self.retry_delay_s = retry_delay_s
        self._forget()

    def _forget(self) -> None:
        self._in_flight = [0] * len(self.replicas)
        self._down_until = [0.0] * len(self.replicas)
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._turn = random.randrange(len(self.replicas))  # several clients must not begin with the same replica

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("replicas", "timeout_s", "max_attempts", "retry_delay_s")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        """Serve one request.

        Args:
            request: what to complete.
            session: name of a conversation. Its requests go to the same replica as long as that one lives, which has
                the beginning in its cache; others go where the fewest requests are.

        Raises:
            RolloutError: the request is invalid, or took longer than the time limit.
            LostProcessError: no replica served it within the number of attempts.
        """
        (completion,) = await self._serve([request], session)
        return completion

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Serve requests together, in the order given, in one call per replica.

        Neighbours stay together, so that samples of one prompt share its prefill.

        Raises:
            RolloutError, LostProcessError: as for :meth:`generate`.
        """
        now = time.monotonic()
        up = [index for index in range(len(self.replicas)) if self._down_until[index] <= now]
        places = up or list(range(len(self.replicas)))
        size, more = divmod(len(requests), len(places))
        parts: list[Any] = []
        begin = 0
        for number, index in enumerate(places):
            end = begin + size + (number < more)
            if end > begin:
                parts.append(self._serve(requests[begin:end], None, first=index))
            begin = end
        return [completion for part in await _all(parts) for completion in part]

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests in flight, wherever they are (all when None); they complete with what they have."""
        calls = [replica.abort.remote(request_ids) for replica in self.replicas]
        await asyncio.gather(*(_value(call, _HEALTH_TIMEOUT_S) for call in calls), return_exceptions=True)

    async def health(self) -> list[ServerHealth | None]:
        """What each replica says about itself; None for one that does not answer."""
        calls = [replica.health.remote() for replica in self.replicas]
        answers = await asyncio.gather(*(_value(call, _HEALTH_TIMEOUT_S) for call in calls), return_exceptions=True)
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    # -- choosing

    def _choose(self, session: str | None) -> int:
        now = time.monotonic()
        index = self._sessions.get(session, -1) if session is not None else -1
        if index >= 0 and self._down_until[index] > now:
            index = -1
        if index < 0:
            index = self._least_loaded(now)
        if session is not None:
            self._sessions[session] = index
            self._sessions.move_to_end(session)
            while len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return index

    def _least_loaded(self, now: float) -> int:
        count = len(self.replicas)
        self._turn = (self._turn + 1) % count
        up = [index for index in range(count) if self._down_until[index] <= now]
        if not up:  # all failed lately: the one whose failure is the oldest
            return min(range(count), key=lambda index: self._down_until[index])
        return min(up, key=lambda index: (self._in_flight[index], (index - self._turn) % count))

    # -- asking

    async def _serve(
        self, requests: Sequence[GenerationRequest], session: str | None, *, first: int | None = None
    ) -> list[Completion]:
        packed = PackedRequests.pack(requests)
        deadline = time.monotonic() + self.timeout_s
        failures: list[str] = []
        for attempt in range(self.max_attempts):
            index = first if first is not None and not attempt else self._choose(session)
            try:
                return await self._ask(index, packed, deadline)
            except (ReplicaError, RayActorError) as error:
                failures.append(f"replica {index}: {_summary(error)}")
                logger.warning("%s did not serve %s (%s)", f"replica {index}", _names(packed), _summary(error))
                self._down_until[index] = time.monotonic() + self.retry_delay_s
            last = attempt + 1 == self.max_attempts
            if not last and all(until > time.monotonic() for until in self._down_until):
                await asyncio.sleep(max(0.0, min(self.retry_delay_s, deadline - time.monotonic())))
        raise LostProcessError(
            f"{_names(packed)}: no replica served it in {self.max_attempts} attempts; " + "; ".join(failures)
        )

    async def _ask(self, index: int, packed: PackedRequests, deadline: float) -> list[Completion]:
        count = len(packed.request_ids)
        self._in_flight[index] += count
        call = self.replicas[index].generate_packed.remote(packed)
        try:
            answer = await _value(call, deadline - time.monotonic())
        except TimeoutError:
            ray_cancel(call)
            raise RolloutError(
                f"{_names(packed)}: not completed by replica {index} within the time limit of {self.timeout_s:g} s "
                "(rollout.server.timeout)"
            ) from None
        except asyncio.CancelledError:
            ray_cancel(call)
            raise
        finally:
            self._in_flight[index] -= count
        return answer.unpack()


async def _value(call: ObjectRef, timeout_s: float) -> Any:
    """The result of a remote call; the server's own error where it raised one."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(call.future()), max(0.0, timeout_s))
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, VerlError):
            raise cause from None
        raise RolloutError(f"a rollout server failed: {error}") from error


async def _all(parts: Sequence[Any]) -> list[list[Completion]]:
    """Results of all; when one fails, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _names(packed: PackedRequests) -> str:
    ids = packed.request_ids
    return f"request {ids[0]!r}" if len(ids) == 1 else f"{len(ids)} requests ({ids[0]!r} to {ids[-1]!r})"


def _summary(error: Exception) -> str:
    if isinstance(error, RayError):
        return f"its process is gone ({type(error).__name__})"
    return str(error)
