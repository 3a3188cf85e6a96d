"""How a tool is described to the model, how the model calls it, and what it answers."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Open(BaseModel):
    """Keeps keys that are not named here: JSON Schema has many."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """One parameter of a function."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The parameters of a function, as a JSON Schema of an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Open):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A tool as chat templates expect it."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema

    def for_template(self) -> dict[str, Any]:
        """The schema as plain values, without what was not given."""
        return self.model_dump(exclude_unset=True, exclude_none=True) | {"type": "function"}


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the model wrote it: the arguments are text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments could not be read (they are empty then)."""
        try:
            arguments = json.loads(parsed.arguments)
        except ValueError:
            return OpenAIFunctionCallSchema(name=parsed.name, arguments={}), True
        if not isinstance(arguments, dict):
            return OpenAIFunctionCallSchema(name=parsed.name, arguments={}), True
        return OpenAIFunctionCallSchema(name=parsed.name, arguments=arguments), False


class OpenAIFunctionToolCall(BaseModel):
    """A call with the identifier that its answer refers to."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool answers.

    Attributes:
        text: what the model is shown.
        image: images that the model is shown before the text, each bytes, a path, a PIL image or a mapping with one of
            them; for models that read images.
        video: videos, which are not shown.
    """

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="after")
    def _lists(self) -> ToolResponse:
        for name in ("image", "video"):
            if getattr(self, name) == []:
                object.__setattr__(self, name, None)
        return self

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not self.text and self.image is None and self.video is None

    def is_text_only(self) -> bool:
        """Whether there is text and nothing else."""
        return bool(self.text) and self.image is None and self.video is None
