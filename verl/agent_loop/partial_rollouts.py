"""Trajectories that are stopped before their end, to go on in a later step.

A trajectory is a coroutine that talks with tools and environments; no file can hold it. What is kept of one that is
stopped is what the model said: every completion, the last one perhaps cut off in the middle. To go on, its loop runs
from the beginning once more and is given those completions in place of new ones; tools and environments are asked
again. The completion that was cut off is continued, with the weights that there are then.

A kept completion is used only if it is asked for with the same context and settings. Where a tool answers differently
the second time, the model is asked afresh: a row holds in any case what the model wrote to what it was shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from verl.errors import RolloutError
from verl.workers.rollout.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from verl.agent_loop.trace import Trace

logger = logging.getLogger(__name__)

#: seconds in which requests that are stopped must come back, and after which they are asked again to stop
_GRACE_S = 30.0
_AGAIN_S = 1.0


class StoppableGenerator(Protocol):
    """A :class:`~verl.agent_loop.base.TokenGenerator` whose requests can be ended."""

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...


class TrajectoryStopped(RolloutError):
    """The step has enough trajectories; this one goes on in a later step, or never."""


@dataclass(frozen=True)
class RecordedCompletion:
    """A completion and what it was an answer to.

    Attributes:
        place: number of the call in its trajectory.
        key: digest of the context and the settings.
        completion: what was sampled; cut off if its ``finish_reason`` is ``"abort"``.
    """

    place: int
    key: str
    completion: Completion

    def to_plain(self) -> dict[str, Any]:
        """Lists, numbers and strings."""
        done = self.completion
        return {
            "place": self.place,
            "key": self.key,
            "token_ids": list(done.token_ids),
            "log_probs": list(done.log_probs),
            "finish_reason": done.finish_reason,
            "runs": [list(run) for run in done.runs],
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> RecordedCompletion:
        """The recorded completion that :meth:`to_plain` described."""
        runs = tuple((int(version), int(count)) for version, count in values["runs"])
        first, last = runs[0][0], runs[-1][0]
        completion = Completion(
            list(values["token_ids"]),
            list(values["log_probs"]),
            values["finish_reason"],
            first,
            None if last == first else last,
            runs if len(runs) > 1 else (),
        )
        return cls(values["place"], values["key"], completion)


class CutOff:
    """Ends the generation of a batch when enough of its groups are complete.

    Args:
        waited_for: of each row, whether its group has to be completed in any case; rows of a group are neighbours.
        group_size: rows of a group.
        groups: complete groups after which the others are stopped.

    Attributes:
        reached: there are enough; nothing may be sampled any more.
    """

    def __init__(self, waited_for: Sequence[bool], group_size: int, groups: int) -> None:
        if len(waited_for) % group_size:
            raise RolloutError(f"{len(waited_for)} rows are no whole number of groups of {group_size}")
        self.group_size = group_size
        self.groups = groups
        self.reached = False
        self._missing = [group_size] * (len(waited_for) // group_size)
        self._waited_for = {row // group_size for row, wait in enumerate(waited_for) if wait}
        self._complete = 0
        self._enough = asyncio.Event()
        self._quiet = asyncio.Event()
        self._in_flight: set[str] = set()
        self._running: dict[int, tuple[CompletionRecorder, asyncio.Future[Any]]] = {}
        self._look()

    def began(self, row: int, recorder: CompletionRecorder, task: asyncio.Future[Any]) -> None:
        """A trajectory runs, as ``task``."""
        self._running[row] = (recorder, task)

    def ended(self, row: int) -> None:
        """A trajectory has ended, or was given up for good."""
        self._running.pop(row, None)
        group = row // self.group_size
        self._missing[group] -= 1
        if not self._missing[group]:
            self._complete += 1
            self._waited_for.discard(group)
            self._look()

    def _look(self) -> None:
        if self._complete >= self.groups and not self._waited_for:
            self.reached = True
            self._enough.set()

    def asked(self, name: str) -> None:
        """A request is on its way."""
        self._in_flight.add(name)
        self._quiet.clear()

    def answered(self, name: str) -> None:
        """It came back, or failed."""
        self._in_flight.discard(name)
        if not self._in_flight:
            self._quiet.set()

    async def enforce(self, generator: StoppableGenerator) -> None:
        """Wait until there are enough, then end what runs: requests first, which keeps their tokens, then tools."""
        await self._enough.wait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _GRACE_S
        while self._in_flight and loop.time() < deadline:
            await generator.abort(sorted(self._in_flight))
            try:
                await asyncio.wait_for(self._quiet.wait(), _AGAIN_S)
            except TimeoutError:
                continue  # a request may have arrived after the call that was to end it
        if self._in_flight:
            logger.warning(
                "%d requests did not stop within %g s; what they sampled in this step is lost",
                len(self._in_flight),
                _GRACE_S,
            )
        cancelled: dict[asyncio.Future[Any], CompletionRecorder] = {}
        for recorder, task in self._running.values():
            if task.cancel():
                recorder.stopped = True
                cancelled[task] = recorder
        if cancelled:
            _, hanging = await asyncio.wait(cancelled, timeout=_GRACE_S)
            for task in hanging:
                logger.warning("a trajectory goes on %g s after it was stopped; it is left to itself", _GRACE_S)
                cancelled[task].given_up.set_result(None)


class CompletionRecorder:
    """What the model said in one trajectory: plays back, continues and records.

    Args:
        generator: samples what is not recorded.
        recorded: completions from earlier steps.
        cut: says when to stop.
        trace: of the trajectory.

    Attributes:
        stopped: the trajectory was stopped before its end.
        given_up: done when it does not end although it was stopped.
    """

    def __init__(
        self, generator: StoppableGenerator, recorded: Sequence[RecordedCompletion], cut: CutOff, trace: Trace
    ) -> None:
        self.stopped = False
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._recorded = {done.place: done for done in recorded}
        self._generator = generator
        self._cut = cut
        self._trace = trace
        self._calls = 0

    @property
    def recorded(self) -> list[RecordedCompletion]:
        """The completions so far."""
        return [self._recorded[place] for place in sorted(self._recorded)]

    async def generate(self, request: GenerationRequest, *, session: str | None = None) -> Completion:
        """Answer with what is recorded as far as it goes, then from the model.

        Raises:
            TrajectoryStopped: the step has enough; what was sampled is recorded.
        """
        place = self._calls
        self._calls += 1
        key = _key(request)
        known = self._recorded.get(place)
        if known is not None and known.key != key:
            self._trace.count("replays_diverged")
            known = None
        if known is not None:
            if known.completion.finish_reason != "abort":
                return known.completion
            request = replace(request, partial=known.completion)
        if self._cut.reached:
            self._stop()
        self._cut.asked(request.request_id)
        try:
            completion = await self._generator.generate(request, session=session)
        finally:
            self._cut.answered(request.request_id)
        if completion.token_ids or completion.finish_reason != "abort":
            self._recorded[place] = RecordedCompletion(place, key, completion)
        if completion.finish_reason == "abort" and self._cut.reached:
            self._stop()
        return completion

    def _stop(self) -> None:
        self.stopped = True
        raise TrajectoryStopped("the step has enough trajectories; this one was stopped")


def _key(request: GenerationRequest) -> str:
    digest = hashlib.blake2b(array("q", request.prompt_ids).tobytes(), digest_size=12)
    digest.update(repr(request.sampling).encode())
    if request.images is not None:
        digest.update(repr(request.images.identity).encode())
    return digest.hexdigest()
