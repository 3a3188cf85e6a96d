"""Tools made of functions: the signature and the docstring are the description."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.threads import run_in_thread
from verl.utils.json_text import dumps_json

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class FunctionTool(BaseTool):
    """A function as a tool. Plain functions run in a thread, ``async`` ones in the event loop.

    The function's result is the answer: text as it is, other values as JSON. A :class:`ToolResponse`, or a tuple like
    that of :meth:`BaseTool.execute`, is passed on.

    Args:
        function: what is called.
        name: how the model calls it.
        schema: the description; None derives it from the signature.
        config: see :class:`BaseTool`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.function = function
        if schema is None:
            schema = schema_of(function, name)
        elif not isinstance(schema, OpenAIFunctionToolSchema):
            schema = OpenAIFunctionToolSchema.model_validate(schema)
        if schema.function.name != name:
            raise ConfigError(f"function tool {name!r} has a schema that calls it {schema.function.name!r}")
        super().__init__(config or {}, schema)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the function with the model's arguments and the row's ``execute_kwargs``."""
        arguments = {**parameters, **kwargs}
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**arguments)
        else:
            result = await run_in_thread(self.function, **arguments)
        return _as_answer(result)


def function_tool(
    name: str | None = None, *, schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None, **config: Any
) -> Callable[[Callable[..., Any]], FunctionTool]:
    """Decorator: make a tool of a typed function.

    Args:
        name: how the model calls it; not given = the function's name.
        schema: its description; not given = from the signature, the docstring's first paragraph and, in an ``Args:``
            section, the parameters' sentences.
        config: settings of the tool, such as ``timeout_s``.

    Raises:
        ConfigError: a parameter without a type, or of one that JSON does not have.
    """

    def make(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name or function.__name__, schema, config)

    return make


def schema_of(function: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    """The description of a typed function."""
    hints = typing.get_type_hints(function)
    summary, sentences = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name.startswith("_"):
            continue
        if parameter.name not in hints:
            raise ConfigError(
                f"function tool {name!r}: parameter {parameter.name!r} has no type; annotate it, or give schema="
            )
        described = json_schema(hints[parameter.name], f"function tool {name!r}, parameter {parameter.name!r}")
        if parameter.name in sentences:
            described["description"] = sentences[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = described
    parameters = {"type": "object", "properties": properties, "required": required}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}
    )


def json_schema(kind: Any, where: str) -> dict[str, Any]:
    """The JSON Schema of a Python type.

    Raises:
        ConfigError: JSON has no such type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        kinds = {_JSON_TYPES.get(type(value)) for value in arguments}
        return {"type": kinds.pop() if len(kinds) == 1 else "string", "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        if len(options) == 1:
            return json_schema(options[0], where)
        return {"anyOf": [json_schema(option, where) for option in options]}
    if origin is list or origin is tuple:
        return {"type": "array", "items": json_schema(arguments[0], where)}
    if origin is dict:
        return {"type": "object"}
    if kind is Any:
        return {}
    if kind not in _JSON_TYPES:
        raise ConfigError(
            f"{where}: {kind!r} is no JSON type; use str, int, float, bool, list, dict, Literal or schema="
        )
    return {"type": _JSON_TYPES[kind]}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the sentence of each parameter in the ``Args:`` section."""
    head, _, rest = text.partition("Args:")
    sentences: dict[str, str] = {}
    current = ""
    section = re.split(r"\n\s*(?:Returns|Raises|Yields):", rest)[0]
    for line in section.split("\n"):
        found = re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s+(.*)", line)
        if found:
            current = found[1]
            sentences[current] = found[2].strip()
        elif current and line.strip():
            sentences[current] += f" {line.strip()}"
    return " ".join(head.strip().split("\n\n")[0].split()), sentences


def _as_answer(result: Any) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], ToolResponse | str):
        answer, reward, metrics = result
        return answer if isinstance(answer, ToolResponse) else ToolResponse(text=answer), reward, dict(metrics or {})
    if isinstance(result, ToolResponse):
        return result, None, {}
    if isinstance(result, bytes | bytearray):
        return ToolResponse.model_construct(text=bytes(result)), None, {}  # type: ignore[arg-type]
    text = result if isinstance(result, str) else dumps_json(result)
    return ToolResponse(text=text), None, {}
