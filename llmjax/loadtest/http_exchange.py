"""`Exchange`: one request on one connection, as an asyncio protocol. Owns bytes on their way; knows no tokens and no statistics.

What comes is noted with its time and left for later, so that the times of many streams do not wait for the parsing of others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import h11


class Exchange(asyncio.Protocol):
    """One POST, and its answer.

    Args:
        request: head and body.
        came: called when there is something to `read`.
    """

    def __init__(self, request: tuple[h11.Request, bytes], came: Callable[[Exchange], None]) -> None:
        self._connection = h11.Connection(h11.CLIENT)
        head, body = request
        parts = (self._connection.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage()))
        self._request = b"".join(part for part in parts if part is not None)
        self._came = came
        self._transport: asyncio.Transport | None = None
        self._waiting: list[tuple[float, bytes]] = []  # b"": the other side has closed
        self.last_news = time.monotonic()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.closed:
            transport.abort()
        else:
            transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self.last_news = time.monotonic()
        self._waiting.append((self.last_news, data))
        self._came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self._waiting.append((time.monotonic(), b""))
        self._came(self)

    @property
    def open(self) -> bool:
        """Whether there is a connection."""
        return self._transport is not None

    def close(self) -> None:
        """Read no more and leave."""
        self.closed = True
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()

    def read(self) -> Iterator[tuple[float, h11.Event]]:
        """What came since the last call, and when. Raises `h11.RemoteProtocolError` for what is no HTTP, or half an answer."""
        waiting, self._waiting = self._waiting, []
        for when, data in waiting:
            if self._connection.their_state is h11.DONE:
                break  # all that was asked for is here
            self._connection.receive_data(data)
            while isinstance(event := self._connection.next_event(), h11.Event):
                yield when, event
                if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    break
