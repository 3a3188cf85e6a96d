"""The base class of tools."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """Something that a model may call.

    One object serves all trajectories of a process; what belongs to one trajectory is kept under its ``instance_id``.
    A trajectory that uses the tool calls :meth:`create` before the first call, then :meth:`execute` for each, then
    :meth:`calc_reward`, and :meth:`release` in any case.

    Args:
        config: the tool's settings from the tool file. These are read for every tool: ``timeout_s`` (of a call),
            ``max_rpm`` (calls started per minute and process) and ``max_concurrent`` (calls at the same time).
        tool_schema: how the tool is described to the model; None takes :meth:`get_openai_tool_schema`.

    Attributes:
        images_optional: where the model reads no images, the text of an answer with images is shown alone; otherwise
            the model is told that it cannot be shown.
    """

    images_optional: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = dict(config or {})
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ConfigError(
                f"{type(self).__name__} has no schema; give tool_schema in the tool file, or override "
                "get_openai_tool_schema"
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The description of the tool; a class that brings its own overrides this."""
        return getattr(self, "tool_schema", None)  # type: ignore[return-value]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a trajectory.

        Args:
            instance_id: the trajectory's name; None makes one.
            kwargs: the row's ``tools_kwargs[name]["create_kwargs"]``.
        """
        return instance_id or uuid.uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Carry out a call.

        Args:
            instance_id: of the trajectory.
            parameters: the arguments that the model gave.
            kwargs: the row's ``tools_kwargs[name]["execute_kwargs"]``.

        Returns:
            The answer, a reward of this call (None or 0.0 for none), and numbers to log.
        """
        return ToolResponse(text="this tool does nothing"), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Reward of the whole trajectory as far as this tool can tell; None = none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory: forget what belongs to it."""
        return

    def close(self) -> None:
        """The run ends: give back connections and processes."""
        return
