"""The tools that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.dynamic_import import load_module, load_target, read_yaml

_KEY = "rollout.multi_turn.tool_config_path"
_ENTRY = {"class_name", "config", "tool_schema"}


def load_tools(tool_config_path: str | None = None, function_tool_path: str | None = None) -> dict[str, BaseTool]:
    """Tools by name.

    Args:
        tool_config_path: YAML file with ``tools``: a list of ``class_name`` (``package.module.Class`` or
            ``file.py:Class``, or the name of a function tool in the same way), ``config`` and ``tool_schema``. A class
            with a method ``load_tools`` stands for several tools.
        function_tool_path: Python file, or ``pkg://module``, of which every function tool is taken.

    Raises:
        ConfigError: a file, class or schema is wrong, or two tools have one name.
    """
    found: list[BaseTool] = []
    if tool_config_path is not None:
        content = read_yaml(tool_config_path, _KEY)
        entries = content.get("tools") if isinstance(content, Mapping) else None
        if not isinstance(entries, list):
            raise ConfigError(f"{_KEY}={tool_config_path}: expected a list under 'tools', got {content!r}")
        for number, entry in enumerate(entries):
            found += _tools_of(entry, f"{tool_config_path}, tool {number}")
    if function_tool_path is not None:
        module = load_module(function_tool_path)
        tools = [value for value in vars(module).values() if isinstance(value, FunctionTool)]
        if not tools:
            raise ConfigError(
                f"rollout.multi_turn.function_tool_path={function_tool_path}: no function there is decorated with "
                "@function_tool"
            )
        found += tools
    by_name: dict[str, BaseTool] = {}
    for tool in found:
        if by_name.setdefault(tool.name, tool) is not tool:
            raise ConfigError(f"two tools are called {tool.name!r}; a call would not say which one it means")
    return by_name


def _tools_of(entry: Any, where: str) -> list[BaseTool]:
    if not isinstance(entry, Mapping) or "class_name" not in entry:
        raise ConfigError(f"{where}: expected class_name, config and tool_schema, got {entry!r}")
    if unknown := set(entry) - _ENTRY:
        raise ConfigError(f"{where}: has the unknown key {sorted(unknown)[0]!r}; it takes {', '.join(sorted(_ENTRY))}")
    target = load_target(str(entry["class_name"]))
    config = dict(entry.get("config") or {})
    if isinstance(target, FunctionTool):
        return [FunctionTool(target.function, target.name, target.tool_schema, {**target.config, **config})]
    given = entry.get("tool_schema")
    try:
        schema = None if given is None else OpenAIFunctionToolSchema.model_validate(given)
    except ValueError as error:
        raise ConfigError(f"{where}: tool_schema is not a function schema: {error}") from error
    several = getattr(target, "load_tools", None)
    if several is not None:
        return list(several(config))
    if not (isinstance(target, type) and issubclass(target, BaseTool)):
        raise ConfigError(f"{where}: {entry['class_name']} is {target!r}, not a class derived from BaseTool")
    try:
        return [target(config, schema)]
    except TypeError as error:
        raise ConfigError(f"{where}: {entry['class_name']} cannot be made from config and schema: {error}") from error
