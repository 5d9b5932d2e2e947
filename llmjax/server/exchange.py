"""One HTTP exchange: reading a body within its limit, noticing that the client left, sending to one that may be slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from llmjax.server.http_errors import HttpError
from llmjax.server.pace import Alarm

CLIENT_LEFT = 499  # in counts and logs; nobody is there to be told


class SlowReaderError(Exception):
    """The client did not take in time what was sent."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises `HttpError`: 413 above `limit` bytes, 415 for a compressed one, 499 when the client leaves."""
    headers = Headers(scope=scope)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "compressed bodies are not supported: send the JSON as it is", code="unsupported_encoding")
    length = headers.get("content-length", "0")
    too_large = HttpError(413, f"the body is larger than {limit} bytes: send less", code="body_too_large")
    if len(length) > 18 or (length.isdigit() and int(length) > limit):
        raise too_large
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(CLIENT_LEFT, "the client left", code="client_left")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(chunks)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client leaves. The body must have been read.

    Servers differ in what they cancel by themselves (a stream perhaps, a plain answer never), so this looks for itself.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
    if not worker.cancelled():
        worker.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventSender:
    """Sends a stream of events; the headers go with the first."""

    def __init__(self, send: Send, timeout: float, headers: Mapping[str, str]) -> None:
        self._send = send
        self._timeout = timeout
        self._alarm: Alarm | None = None
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }
        self.started = False

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Everything is sent inside. A client that takes too long for one event ends the block with `SlowReaderError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                self._alarm = Alarm(self._timeout, lambda: limit.reschedule(loop.time()))
                try:
                    yield
                finally:
                    self._alarm.close()
        except TimeoutError:
            raise SlowReaderError from None

    async def send(self, data: bytes, now: float, *, last: bool = False) -> None:
        """Returns when the client may have more; `now` is the loop's time."""
        assert self._alarm is not None
        self._alarm.start(now)
        if not self.started:
            self.started = True
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._alarm.stop()
