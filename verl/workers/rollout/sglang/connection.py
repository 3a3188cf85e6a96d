"""Calls to an SGLang server.

Workers run one event loop per call, a server actor has one for its life; connections belong to the loop that made
them. So all calls run in a loop of their own, in a thread of its own, and any loop can wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from verl.errors import ConfigError, RolloutError, VerlError

T = TypeVar("T")

#: seconds between two looks at a server that works on a request, and for the answer to such a look
_LOOK_S = 5.0
_LOOK_TIMEOUT_S = 60.0


class BackgroundLoop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="verl-sglang", daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it here; cancelling the wait cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def run_blocking(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The same for plain code."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        """End the thread."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Connection:
    """Calls to one server.

    Args:
        url: ``http://host:port``.
        death: says why the server is gone, if it is known to be; None while it may be alive.
        api_key: sent with each call, where the server asks for one.
        timeout_s: for calls other than generation.

    Raises:
        ConfigError: the package for HTTP is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        death: Callable[[], str | None] = lambda: None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise ConfigError("rollout.name=sglang needs the package aiohttp; install verl[sglang]") from error
        self.url = url.rstrip("/")
        self.death = death
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._background = BackgroundLoop()
        self._session: Any = None

    async def call(self, path: str, body: Any = None) -> Any:
        """The answer to a POST request, decoded from JSON.

        Raises:
            RolloutError: the server is gone, does not answer in time, or refuses.
        """
        return await self._background.run(self._watched(path, body, self.timeout_s))

    def call_blocking(self, path: str, body: Any = None) -> Any:
        """:meth:`call` for plain code."""
        return self._background.run_blocking(self._watched(path, body, self.timeout_s))

    def ask_blocking(self, path: str) -> Any:
        """The answer to a GET request, for plain code.

        Raises:
            RolloutError: as for :meth:`call`.
        """
        try:
            return self._background.run_blocking(self._get(path, timeout_s=_LOOK_TIMEOUT_S))
        except (OSError, TimeoutError) as error:
            raise RolloutError(f"the SGLang server at {self.url} does not answer {path}: {error}") from error

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background loop, without waiting; it may use :meth:`post`."""
        asyncio.run_coroutine_threadsafe(coroutine, self._background.loop)

    async def post(self, path: str, body: Any) -> None:
        """A call inside :meth:`start` whose failure matters to nobody: those who wait for the server notice its end."""
        with contextlib.suppress(RolloutError, OSError):
            await self._post(path, body)

    async def generate(self, body: Any) -> Any:
        """The answer to ``/generate``, however long it takes while the server is alive."""
        return await self._background.run(self._watched("/generate", body, None))

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for a server that is starting.

        Raises:
            RolloutError: it ended, or took too long.
        """
        end = time.monotonic() + timeout_s
        while True:
            if (why := self.death()) is not None:
                raise RolloutError(why)
            try:
                self._background.run_blocking(self._get("/ready", timeout_s=5.0))
                return
            except (RolloutError, OSError, TimeoutError) as error:
                if time.monotonic() > end:
                    raise RolloutError(
                        f"the SGLang server at {self.url} was not ready after {timeout_s:g} s"
                    ) from error
            time.sleep(0.1)

    def close(self) -> None:
        """End all calls; the connection cannot be used again."""
        if not self._background.loop.is_closed():
            with contextlib.suppress(Exception):
                self._background.run_blocking(self._close())
            self._background.stop()

    # -- in the background loop

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> Any:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                self.url, connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def _watched(self, path: str, body: Any, timeout_s: float | None) -> Any:
        """Call, and look now and then whether the server is still there."""
        started = time.monotonic()
        call = asyncio.create_task(self._post(path, body))
        try:
            while True:
                done, _ = await asyncio.wait([call], timeout=_LOOK_S)
                if done:
                    return call.result()
                if timeout_s is not None and time.monotonic() - started > timeout_s:
                    raise RolloutError(f"{self.url}{path} gave no answer within {timeout_s:g} s")
                if (why := self.death()) is not None:
                    raise RolloutError(why)
                await self._get("/health", timeout_s=_LOOK_TIMEOUT_S)
        except VerlError:
            raise
        except (OSError, TimeoutError) as error:  # aiohttp's connection errors are OSErrors or wrapped below
            await asyncio.sleep(0.2)  # a dying server closes its sockets first
            why = self.death() or f"{type(error).__name__}: {error}"
            raise RolloutError(f"the SGLang server at {self.url} does not answer {path}: {why}") from error
        finally:
            call.cancel()

    async def _post(self, path: str, body: Any) -> Any:
        return await self._request("POST", path, {} if body is None else body)

    async def _get(self, path: str, *, timeout_s: float) -> Any:
        return await asyncio.wait_for(self._request("GET", path, None), timeout_s)

    async def _request(self, method: str, path: str, body: Any) -> Any:
        import aiohttp

        try:
            async with self._open().request(method, path, json=body) as response:
                text = await response.text()
                answer = await response.json() if "json" in response.content_type else text
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        refused = isinstance(answer, dict) and answer.get("success") is False
        if response.status >= 400 or refused:
            raise RolloutError(f"{self.url}{path} answered {response.status}: {_message(answer)}")
        return answer


def _message(answer: Any) -> str:
    """The explanation in an error's body."""
    for key in ("message", "error", "detail"):
        if isinstance(answer, dict) and key in answer:
            return _message(answer[key])
    return str(answer)[:500]
