"""Tools made of functions, and the schemas that describe them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from verl.errors import ConfigError
from verl.tools import FunctionTool, OpenAIFunctionToolSchema, ToolResponse, function_tool
from verl.tools.schemas import OpenAIFunctionCallSchema, OpenAIFunctionParsedSchema


def run(tool: FunctionTool, **arguments: Any) -> Any:
    return asyncio.run(tool.execute("one", arguments))


@function_tool("weather")
def weather(city: str, unit: Literal["C", "F"] = "C", days: int | None = None, tags: list[str] = []) -> dict:  # noqa: B006
    """Look up the weather.

    Only of cities.

    Args:
        city: name of the city,
            in English.
        unit (str): degrees.

    Returns:
        days: is no parameter.
    """
    return {"city": city, "unit": unit, "days": days, "tags": tags}


def test_the_description_comes_from_signature_and_docstring() -> None:
    assert weather.tool_schema.for_template() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "name of the city, in English."},
                    "unit": {"type": "string", "enum": ["C", "F"], "description": "degrees."},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }


def test_results_become_text() -> None:
    assert run(weather, city="Rome")[0].text == '{"city": "Rome", "unit": "C", "days": null, "tags": []}'
    assert weather("Rome")["unit"] == "C"  # it is still a function

    @function_tool()
    async def rewarded(x: float) -> Any:
        return ToolResponse(text=str(x)), 0.5, {"seen": 1}

    assert rewarded.name == "rewarded"
    assert run(rewarded, x=2.0) == (ToolResponse(text="2.0"), 0.5, {"seen": 1})


def test_functions_that_cannot_be_described_are_refused() -> None:
    with pytest.raises(ConfigError, match="parameter 'x' has no type"):

        @function_tool()
        def untyped(x): ...

    with pytest.raises(ConfigError, match="is no JSON type"):

        @function_tool()
        def odd(x: bytes): ...

    with pytest.raises(ConfigError, match="has a schema that calls it 'weather'"):
        function_tool("other", schema=weather.tool_schema)(lambda: None)


def test_a_given_schema_is_taken_and_unknown_keys_of_json_schema_stay() -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3}}},
        },
    }
    tool = function_tool("f", schema=schema)(lambda x: x)
    assert tool.tool_schema.for_template() == schema
    with pytest.raises(ValueError):
        OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {}})


def test_calls_and_responses() -> None:
    parsed = OpenAIFunctionParsedSchema(name="f", arguments='{"x": 1}')
    call, broken = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.arguments, broken) == ({"x": 1}, False)
    parsed = OpenAIFunctionParsedSchema(name="f", arguments="[")
    assert OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)[1]
    assert ToolResponse().is_empty()
    assert ToolResponse(image=[]).is_empty()
    assert ToolResponse(text="x").is_text_only()
