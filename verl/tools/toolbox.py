"""The tools in the hands of one trajectory: every call ends within its limits, and no failure leaves them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import DataError, ScoreError
from verl.models.vision import PromptImages
from verl.rewards.outcome import checked_score
from verl.rewards.rate import RateLimiter
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

if TYPE_CHECKING:
    from verl.data.images import ImageReader

logger = logging.getLogger(__name__)

_CUT = "...(truncated)..."
_CONTROL = {code: None for code in range(32) if chr(code) not in "\t\n\r"} | {127: None}
_RELEASE_S = 10.0

#: (tool, when it began, what went wrong if anything, details)
Note = Callable[..., None]


@dataclass(frozen=True)
class ToolResult:
    """How a call ended.

    Attributes:
        text: what the model is shown; begins with ``Error:`` after a failure.
        reward: what the tool gave for the call.
        failure: ``unknown_tool``, ``bad_arguments``, ``exception``, ``timeout``, ``not_text`` or ``bad_image``; None
            after success.
        images: that it is shown before the text.
    """

    text: str
    reward: float = 0.0
    failure: str | None = None
    images: PromptImages | None = None


@dataclass
class ToolLimits:
    """Limits that all trajectories of a process share.

    Attributes:
        timeout_s: of a call, unless the tool's own ``timeout_s`` says otherwise.
        max_length: of an answer, in characters.
        truncate_side: part of a longer answer that is left out: ``left``, ``right`` or ``middle``.
    """

    timeout_s: float = 60.0
    max_length: int = 256
    truncate_side: str = "middle"
    _rates: dict[str, RateLimiter] = field(default_factory=dict)
    _places: dict[tuple[str, int], asyncio.Semaphore] = field(default_factory=dict)

    def shown(self, text: str) -> str:
        """Text as the model is shown it: cut to its length, without what is no character."""
        text = truncate(text, self.max_length, self.truncate_side)
        return text.translate(_CONTROL).encode("utf-8", "replace").decode("utf-8")

    def timeout_of(self, tool: BaseTool) -> float:
        """Seconds that a call of ``tool`` may take."""
        return float(tool.config.get("timeout_s") or self.timeout_s)

    def rate_of(self, tool: BaseTool) -> RateLimiter:
        """Spaces the calls of ``tool``."""
        if tool.name not in self._rates:
            self._rates[tool.name] = RateLimiter(tool.config.get("max_rpm"))
        return self._rates[tool.name]

    def places_of(self, tool: BaseTool) -> asyncio.Semaphore:
        """Places for calls of ``tool`` at the same time; a semaphore serves one event loop."""
        key = (tool.name, id(asyncio.get_running_loop()))
        if key not in self._places:
            self._places[key] = asyncio.Semaphore(int(tool.config.get("max_concurrent") or 1_000_000))
        return self._places[key]


class ToolBox:
    """The tools of one trajectory.

    Args:
        tools: by name.
        limits: shared by the process.
        session: name of the trajectory, the tools' ``instance_id``.
        tools_kwargs: the row's arguments: ``{tool: {create_kwargs, execute_kwargs, calc_reward_kwargs,
            release_kwargs}}``.
        note: called after each call, see :data:`Note`.
        image_reader: opens images as the policy reads them; None where it reads text alone.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        limits: ToolLimits,
        *,
        session: str,
        tools_kwargs: Mapping[str, Any] | None = None,
        note: Note | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        self.image_reader = image_reader
        self.tools = tools
        self.limits = limits
        self.session = session
        self._kwargs = dict(tools_kwargs or {})
        self._note = note
        self._created: dict[str, asyncio.Task[None]] = {}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Carry out a call; the result describes any failure.

        Raises:
            ScoreError: the tool gave a reward that is no finite number.
        """
        started = time.time()
        result = await self._call(name, arguments)
        if self._note is not None:
            self._note(name, started, result.failure, characters=len(result.text), reward=result.reward)
        return result

    def reject(self, name: str, message: str, failure: str) -> ToolResult:
        """The result of a call that cannot be carried out."""
        if self._note is not None:
            self._note(name, time.time(), failure)
        return _error(message, failure)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        tool = self.tools.get(name)
        if tool is None:
            return _error(f"there is no tool {name!r}; the tools are {', '.join(self.tools) or 'none'}", "unknown_tool")
        if problem := _argument_problem(tool, arguments):
            return _error(problem, "bad_arguments")
        limit = self.limits.timeout_of(tool)
        try:
            async with asyncio.timeout(None) as deadline:
                await asyncio.sleep(self.limits.rate_of(tool).reserve())
                async with self.limits.places_of(tool):
                    # waiting for a turn is not the tool's doing
                    deadline.reschedule(asyncio.get_running_loop().time() + limit)
                    await self._create(tool)
                    answer = await tool.execute(self.session, dict(arguments), **self._of(name, "execute_kwargs"))
                return await self._result(tool, answer)
        except TimeoutError as error:
            if not deadline.expired():  # the tool's own
                return self._raised(tool, error)
            return _error(f"{name} gave no answer within {limit:g} s", "timeout")
        except ScoreError:  # the trajectory has no score then; the model cannot help it
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model is told; tools are programs of others
            return self._raised(tool, error)

    def _raised(self, tool: BaseTool, error: BaseException) -> ToolResult:
        logger.debug("tool %s raised", tool.name, exc_info=error)
        message = self.limits.shown(f"{type(error).__name__}: {error}")
        return _error(message, "exception")

    async def _create(self, tool: BaseTool) -> None:
        """Begin the trajectory for a tool, once, also where its first calls are made at the same time."""
        if tool.name not in self._created:
            kwargs = self._of(tool.name, "create_kwargs")

            async def create() -> None:
                await tool.create(self.session, **kwargs)

            self._created[tool.name] = asyncio.ensure_future(create())
        await asyncio.shield(self._created[tool.name])

    async def _result(self, tool: BaseTool, answer: Any) -> ToolResult:
        response, reward, _ = answer if isinstance(answer, tuple) else (answer, 0.0, {})
        text = response.text if isinstance(response, ToolResponse) else response
        reward = 0.0 if reward is None else checked_score(reward, f"tool {tool.name!r}")
        if isinstance(text, bytes | bytearray):
            return ToolResult(f"Error: the answer is {len(text)} bytes of binary data, not text", reward, "not_text")
        shown = response.image if isinstance(response, ToolResponse) else None
        if isinstance(response, ToolResponse) and response.video:
            return ToolResult("Error: the answer has videos, and only text and images can be shown", reward, "not_text")
        if shown and self.image_reader is None and not (tool.images_optional and text):
            return ToolResult("Error: the answer has images, and only text can be shown", reward, "not_text")
        images = None
        if shown and self.image_reader is not None:
            try:
                images = PromptImages.of(await asyncio.to_thread(self.image_reader.read, shown, Path.cwd()))
            except DataError as error:
                return ToolResult(f"Error: {self.limits.shown(str(error))}", reward, "bad_image")
        if text is not None and not isinstance(text, str):
            return ToolResult(f"Error: the answer is of type {type(text).__name__}, not text", reward, "not_text")
        return ToolResult(self.limits.shown(text or ""), reward, images=images)

    async def rewards(self) -> dict[str, float]:
        """What each tool that was used says of the whole trajectory.

        Raises:
            ScoreError: a tool gave a reward that is no finite number.
        """
        found: dict[str, float] = {}
        for name in self._used():
            tool = self.tools[name]
            started = time.time()
            try:
                async with asyncio.timeout(self.limits.timeout_of(tool)):
                    reward = await tool.calc_reward(self.session, **self._of(name, "calc_reward_kwargs"))
            except Exception as error:  # noqa: BLE001 - counted; the trajectory goes on without this reward
                logger.warning("calc_reward of tool %s failed: %s: %s", name, type(error).__name__, error)
                if self._note is not None:
                    self._note(name, started, "reward")
                continue
            if reward is not None:
                found[name] = checked_score(reward, f"calc_reward of tool {name!r}")
        return found

    async def close(self) -> None:
        """End the trajectory for every tool that was used."""
        for name in self._used():
            try:
                async with asyncio.timeout(_RELEASE_S):
                    await self.tools[name].release(self.session, **self._of(name, "release_kwargs"))
            except Exception as error:  # noqa: BLE001 - nothing depends on it any more
                logger.warning("release of tool %s failed: %s: %s", name, type(error).__name__, error)
        for task in self._created.values():
            task.cancel()
        self._created.clear()

    def _used(self) -> list[str]:
        return [
            name
            for name, task in self._created.items()
            if task.done() and not task.cancelled() and task.exception() is None
        ]

    def _of(self, name: str, key: str) -> dict[str, Any]:
        return dict((self._kwargs.get(name) or {}).get(key) or {})


def truncate(text: str, limit: int, side: str) -> str:
    """Shorten text to ``limit`` characters and a note that something is missing on ``side``."""
    if len(text) <= limit:
        return text
    if side == "left":
        return _CUT[:-3] + text[-limit:]
    if side == "right":
        return text[:limit] + _CUT[3:]
    head = (limit + 1) // 2
    return text[:head] + _CUT + (text[head - limit :] if limit > head else "")


def _error(message: str, failure: str) -> ToolResult:
    return ToolResult(f"Error: {message}", failure=failure)


def _argument_problem(tool: BaseTool, arguments: Mapping[str, Any]) -> str | None:
    parameters = tool.tool_schema.function.parameters
    missing = [name for name in parameters.required if name not in arguments]
    if missing:
        return f"{tool.name} needs the parameter {', '.join(map(repr, missing))}"
    open_ended = getattr(parameters, "additionalProperties", False) or not parameters.properties
    unknown = [] if open_ended else [name for name in arguments if name not in parameters.properties]
    if unknown:
        return (
            f"{tool.name} has no parameter {', '.join(map(repr, unknown))}; it takes {', '.join(parameters.properties)}"
        )
    return None
