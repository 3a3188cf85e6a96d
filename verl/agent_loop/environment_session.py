"""A trajectory's simulated user or environment: its calls within their time limits, its rewards in their place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from verl.errors import RolloutError
from verl.rewards.outcome import checked_score

if TYPE_CHECKING:
    from verl.agent_loop.trace import Trace
    from verl.data.chat import Message
    from verl.interactions.base import BaseInteraction
    from verl.tools.toolbox import ToolLimits

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EnvironmentSession:
    """What answers the model when it calls no tool; without an interaction nothing does.

    Args:
        interaction: of the row; None for none.
        kwargs: the row's ``interaction_kwargs``.
        session: name of the trajectory.
        limits: time and length of answers.
        trace: record of the trajectory.
    """

    def __init__(
        self,
        interaction: BaseInteraction | None,
        kwargs: Mapping[str, Any] | None,
        *,
        session: str,
        limits: ToolLimits,
        trace: Trace,
    ) -> None:
        self.interaction = interaction
        self.session = session
        self._kwargs = dict(kwargs or {})
        self._limits = limits
        self._trace = trace
        self._started = False
        #: name of the state that the next turn of the model acts in, where the interaction tells it
        self.state: Any = None

    async def start(self, messages: Sequence[Message]) -> list[Message]:
        """Begin; returns the prompt with what the interaction says first."""
        if self.interaction is None:
            return list(messages)
        self._started = True
        await self._limited("start", self.interaction.start_interaction(self.session, **self._kwargs))
        opening = await self._limited("opening", self.interaction.opening(self.session))
        if not opening:
            return list(messages)
        return with_opening(messages, self._limits.shown(opening))

    async def answer(self, messages: Sequence[Message]) -> tuple[bool, str, float]:
        """Whether the trajectory ends, what the model is told, and the reward of its turn."""
        if self.interaction is None:
            return True, "", 0.0
        call = self.interaction.generate_response(self.session, list(messages), **self._kwargs)
        done, text, reward, more = await self._limited("answer", call)
        self.state = (more or {}).get("state")
        given = 0.0 if reward is None else checked_score(reward, f"interaction {self.interaction.name!r}")
        return bool(done), self._limits.shown(str(text)), given

    async def close(self) -> None:
        """End; failures are logged, nothing depends on them any more."""
        if self.interaction is None or not self._started:
            return
        try:
            await self._limited("end", self.interaction.finalize_interaction(self.session))
        except Exception as error:  # noqa: BLE001 - see above
            logger.warning("ending interaction %s failed: %s: %s", self.interaction.name, type(error).__name__, error)

    async def _limited(self, what: str, call: Awaitable[T]) -> T:
        assert self.interaction is not None
        seconds = float(self.interaction.config.get("timeout_s") or self._limits.timeout_s)
        name = self.interaction.name
        return await limited(
            call, f"{name}.{what}", seconds, trace=self._trace, about=f"interaction {name!r}", key="config.timeout_s"
        )


def with_opening(messages: Sequence[Message], opening: str) -> list[Message]:
    """A prompt with what a environment says first: part of the user's last message where that ends the prompt."""
    *before, last = messages
    if last["role"] == "user" and not isinstance(last["content"], str):
        return [*before, {**last, "content": [*last["content"], {"type": "text", "text": f"\n\n{opening}"}]}]
    if last["role"] == "user":
        return [*before, {**last, "content": f"{last['content']}\n\n{opening}".strip()}]
    return [*messages, {"role": "user", "content": opening}]


async def limited(call: Awaitable[T], name: str, seconds: float, *, trace: Trace, about: str, key: str) -> T:
    """Await a call of somebody outside, which the trace notes as ``name``.

    Raises:
        RolloutError: it took longer than ``seconds``; the message says so of ``about``, and names the ``key``.
    """
    started = time.time()
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        what = name.rpartition(".")[2]
        raise RolloutError(f"{about} took longer than {seconds:g} s ({what}); {key} changes the limit") from error
    finally:
        trace.interacted(name, started)
