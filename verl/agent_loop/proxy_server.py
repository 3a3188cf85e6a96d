"""The HTTP side of agents that are programs: one small server for all trajectories of an event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verl.agent_loop.proxy_session import Answer, ProxySession
from verl.workers.rollout.serving.openai_api import (
    aiohttp_web,
    errors_as_json,
    json_of,
    read_body,
    send_event,
    usage_of,
)
from verl.workers.rollout.serving.openai_protocol import LIMITS, ApiError, envelope, parse_json

#: seconds that a request in progress may take when the last trajectory has ended
_SHUTDOWN_S = 1.0
_MODEL = "policy"


class ProxyServer:
    """Listens on this machine only; the key of a request says whose trajectory it belongs to.

    Attributes:
        sessions: those in progress, by key.

    Raises:
        ConfigError: aiohttp is missing.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, ProxySession] = {}
        self._web = aiohttp_web()
        self._runner: Any = None
        self._changing = asyncio.Lock()
        self._url = ""

    async def start(self) -> str:
        """Listen, unless it does already; returns the base URL."""
        async with self._changing:
            if self._runner is None:
                await self._start()
        return self._url

    async def stop(self) -> None:
        """Stop listening."""
        async with self._changing:
            if self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    async def _start(self) -> None:
        web = self._web
        app = web.Application(client_max_size=LIMITS.body_bytes, middlewares=[errors_as_json(web)])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/reward", self._reward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._runner = runner

    def _session(self, request: Any) -> ProxySession:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key not in self.sessions:
            raise ApiError(
                401, "no trajectory in progress has this key; use the api_key that the agent was given", code="key"
            )
        return self.sessions[key]

    async def _models(self, request: Any) -> Any:
        self._session(request)
        entry = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "verl"}
        return self._web.json_response({"object": "list", "data": [entry]})

    async def _reward(self, request: Any) -> Any:
        self._session(request).score(await _json(request))
        return self._web.json_response({"status": "ok"})

    async def _chat(self, request: Any) -> Any:
        session, body = self._session(request), await _json(request)
        retried = request.headers.get("x-stainless-retry-count", "0") != "0"
        answer = await session.chat(body, retried=retried)
        model = str(body.get("model") or _MODEL)
        if answer.call.stream:
            return await self._stream(request, answer, model)
        whole = {**envelope("chat.completion", model), "choices": [answer.whole()]}
        whole["usage"] = usage_of([answer.choice], 1)
        if answer.call.token_ids:
            whole["prompt_token_ids"] = answer.choice.prompt_ids
        return self._web.json_response(whole, dumps=json_of)

    async def _stream(self, request: Any, answer: Answer, model: str) -> Any:
        """Send an answer as events. It is whole before the first event is sent."""
        response = self._web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        head = envelope("chat.completion.chunk", model)
        for chunk in answer.chunks():
            await send_event(response, {**head, "choices": [chunk]})
        if answer.call.include_usage:
            await send_event(response, {**head, "choices": [], "usage": usage_of([answer.choice], 1)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


_servers: dict[asyncio.AbstractEventLoop, ProxyServer] = {}


@asynccontextmanager
async def serving(session: ProxySession) -> AsyncIterator[tuple[str, str]]:
    """Serve a session while the block runs; gives the base URL and the key.

    All sessions of an event loop share a server, which is there as long as one of them is.
    """
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        _servers[loop] = ProxyServer()
    server = _servers[loop]
    key = f"verl-{secrets.token_urlsafe(24)}"
    server.sessions[key] = session
    try:
        yield await server.start(), key
    finally:
        del server.sessions[key]
        session.close()
        if not server.sessions:
            del _servers[loop]
            await server.stop()


async def _json(request: Any) -> Any:
    return parse_json(await read_body(request))
