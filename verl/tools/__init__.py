"""Tools that a model may call: the base class, function tools, and those that come with the library."""

from __future__ import annotations

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "FunctionTool", "OpenAIFunctionToolSchema", "ToolResponse", "function_tool"]
