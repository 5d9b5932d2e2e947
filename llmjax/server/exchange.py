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


_DISCARDED = 64 * 2**20  # bytes of a refused body that are read all the same


async def read_body(scope: Scope, receive: Receive, limit: int, timeout: float) -> bytes:
    """The whole body.

    Raises `HttpError`: 413 above `limit` bytes, 415 for a compressed one, 408 when it has not come after `timeout` seconds, 499
    when the client leaves.
    """
    headers = Headers(scope=scope)
    chunks: list[bytes] = []
    size, more = 0, True
    error = _refusal(headers, limit)
    try:
        async with asyncio.timeout(timeout):
            while more and error is None:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(CLIENT_LEFT, "the client left", code="client_left")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                more = message.get("more_body", False)
                error = _too_large(limit) if size > limit else None
    except TimeoutError:
        error, more = HttpError(408, f"the body has not come within {timeout:g} s: send it faster", code="body_timeout"), False
    if error is None:
        return b"".join(chunks)
    chunks.clear()
    error.headers["connection"] = "close"
    if more and headers.get("expect", "").lower() != "100-continue":
        await _discard(receive, timeout)
    raise error


def _refusal(headers: Headers, limit: int) -> HttpError | None:
    """What is wrong with a body to judge by its head."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        return HttpError(415, "compressed bodies are not supported: send the JSON as it is", code="unsupported_encoding")
    length = headers.get("content-length", "0")
    return _too_large(limit) if len(length) > 18 or (length.isdecimal() and int(length) > limit) else None


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes: send less", code="body_too_large")


async def _discard(receive: Receive, timeout: float) -> None:
    """Read on, up to a limit: a client that sends all of its body before it looks at the answer would never see it."""
    size, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while more and size < _DISCARDED:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)


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
