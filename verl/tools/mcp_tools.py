"""Tools of servers that speak the Model Context Protocol (the package ``mcp``, an optional extra)."""

from __future__ import annotations

import asyncio
import atexit
import base64
import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from verl.errors import ConfigError, RolloutError
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)

T = TypeVar("T")
_START_S = 30.0
_CLOSE_S = 10.0
_KEYS = {"command", "args", "env", "cwd", "url", "headers", "tools", "start_timeout_s"}
_OF_TOOLS = {"timeout_s", "max_rpm", "max_concurrent"}


class MCPConnection:
    """One session with a server, kept in a thread and an event loop of its own.

    Agent loops come and go with their event loops; a session has to stay in one.

    Args:
        config: ``command``, ``args``, ``env``, ``cwd`` start a server and talk over its standard streams; ``url`` and
            ``headers`` reach one over streamable HTTP. ``start_timeout_s`` limits the start (30).

    Raises:
        ConfigError: the package is missing, the settings name no server, or it did not start.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if ("command" in config) == ("url" in config):
            raise ConfigError("an MCP server needs config.command (a program to start) or config.url (its address)")
        self.config = dict(config)
        self.name = str(config.get("command") or config.get("url"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=f"verl-mcp-{self.name}")
        self._thread.start()
        self._stop: asyncio.Event | None = None
        self._session: Any = None
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._served = asyncio.run_coroutine_threadsafe(self._serve(started), self._loop)
        limit = float(config.get("start_timeout_s", _START_S))
        try:
            started.result(limit)
        except TimeoutError:
            self.close()
            raise ConfigError(f"the MCP server {self.name} did not answer within {limit:g} s") from None
        except ConfigError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise ConfigError(f"the MCP server {self.name} cannot be used: {_innermost(error)}") from error
        atexit.register(_close_weakly, weakref.ref(self))

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        """Open the session and keep it until :meth:`close`: it must be closed by the task that opened it."""
        self._stop = asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                self._session = await _open(stack, self.config)
                started.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            elif isinstance(error, Exception):
                logger.warning("the session with MCP server %s ended: %s", self.name, _innermost(error))
            if not isinstance(error, Exception):
                raise
        finally:
            self._session = None

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool of the server, from any event loop."""
        return await asyncio.wrap_future(self._submit(self._call(name, arguments)))

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._session is None:
            raise RolloutError(f"the MCP server {self.name} is gone")
        call = asyncio.ensure_future(self._session.call_tool(name, arguments))
        # a session that breaks does not always wake up who waits for an answer
        served = asyncio.wrap_future(self._served)
        done, _ = await asyncio.wait({call, served}, return_when=asyncio.FIRST_COMPLETED)
        if call in done:
            return call.result()
        call.cancel()
        raise RolloutError(f"the MCP server {self.name} ended while it was asked")

    def list_tools(self) -> list[Any]:
        """What the server offers."""
        return list(self._submit(self._list()).result(float(self.config.get("start_timeout_s", _START_S))))

    async def _list(self) -> list[Any]:
        found: list[Any] = []
        cursor = None
        while True:
            page = await self._session.list_tools(params=_page(cursor))
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the session, and the server if it was started here."""
        if self._loop.is_closed():
            return
        if self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        try:
            self._served.result(_CLOSE_S)
        except (Exception, concurrent.futures.CancelledError) as error:  # noqa: BLE001 - it ends in any case
            logger.debug("closing MCP server %s: %s", self.name, error)
            self._served.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class MCPTool(BaseTool):
    """A tool of an MCP server.

    In a tool file its ``class_name`` stands for all tools of a server, or those that ``config.tools`` lists; further
    settings are those of :class:`MCPConnection` and of :class:`~verl.tools.base_tool.BaseTool`.
    """

    images_optional = True

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema, connection: MCPConnection
    ) -> None:
        super().__init__(config, tool_schema)
        self.connection = connection

    @classmethod
    def load_tools(cls, config: Mapping[str, Any]) -> list[MCPTool]:
        """Connect to the server of a tool file's entry and make a tool of each of its own.

        Raises:
            ConfigError: unknown settings, no connection, or a listed tool that the server does not have.
        """
        if unknown := set(config) - _KEYS - _OF_TOOLS:
            raise ConfigError(
                f"an MCP server has no setting {sorted(unknown)[0]!r}; there are {', '.join(sorted(_KEYS | _OF_TOOLS))}"
            )
        connection = MCPConnection({key: value for key, value in config.items() if key in _KEYS - {"tools"}})
        offered = {tool.name: tool for tool in connection.list_tools()}
        wanted = list(config.get("tools") or offered)
        if missing := [name for name in wanted if name not in offered]:
            connection.close()
            raise ConfigError(
                f"the MCP server {connection.name} has no tool {missing[0]!r}; it has {', '.join(offered)}"
            )
        settings = {key: value for key, value in config.items() if key in _OF_TOOLS}
        return [cls(settings, _schema(offered[name]), connection) for name in wanted]

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the tool; an error that the server reports is raised.

        Raises:
            RolloutError: the server says that the call failed, or is gone.
        """
        result = await self.connection.call(self.name, {**parameters, **kwargs})
        parts = [part for part in result.content if getattr(part, "type", "") == "text"]
        images = [base64.b64decode(part.data) for part in result.content if getattr(part, "type", "") == "image"]
        others = [str(getattr(part, "type", "?")) for part in result.content if part not in parts]
        text = "\n".join(part.text for part in parts)
        if result.is_error:
            raise RolloutError(text or "the tool failed without a message")
        if others and not parts and not images:
            raise RolloutError(f"the answer is of type {', '.join(others)}; text and images can be shown")
        return ToolResponse(text=text, image=images), None, {}

    def close(self) -> None:
        """End the connection, which all tools of the server share."""
        self.connection.close()


async def _open(stack: AsyncExitStack, config: Mapping[str, Any]) -> Any:
    try:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
    except ImportError as error:
        raise ConfigError("MCP tools need the package mcp: pip install 'verl[mcp]'") from error
    if "url" in config:
        http = None
        if headers := config.get("headers"):
            http = await stack.enter_async_context(create_mcp_http_client(headers=dict(headers)))
        streams = await stack.enter_async_context(streamable_http_client(str(config["url"]), http_client=http))
    else:
        settings = {key: config[key] for key in ("args", "env", "cwd") if key in config}
        server = StdioServerParameters(command=str(config["command"]), **settings)
        streams = await stack.enter_async_context(stdio_client(server))
    session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
    await session.initialize()
    return session


def _schema(tool: Any) -> OpenAIFunctionToolSchema:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema or {"type": "object", "properties": {}},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _page(cursor: str | None) -> Any:
    from mcp.types import PaginatedRequestParams

    return None if cursor is None else PaginatedRequestParams(cursor=cursor)


def _innermost(error: BaseException) -> str:
    """The message of what went wrong, out of groups of exceptions."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _close_weakly(reference: weakref.ref[MCPConnection]) -> None:
    connection = reference()
    if connection is not None:
        connection.close()
