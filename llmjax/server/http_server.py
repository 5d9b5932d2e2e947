"""Uvicorn as it is set up here; and `HttpServer`: an app and its engine in one process, with uvicorn on a thread.

The end, at SIGTERM or Ctrl-C: `/readyz` says 503 and new work is refused, while streams go on. Those that run at the deadline
end with an error event. Then connections are closed and the engine's thread ends. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import threading
import time
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import LlmjaxError
from llmjax.server.config import ServerConfig
from llmjax.server.listener import BACKLOG, listen, url_of
from llmjax.server.service import Service

log = logging.getLogger(__name__)

_CLOSING = 5  # seconds for answers that have ended to reach their clients
_STARTING = 30.0


class HttpServer:
    """Serves an app until it is told to stop.

    Args:
        app: the ASGI app over `engine`.
        engine: stopped with the server.
        host, port: to listen on; port 0 takes a free one.
        drain: seconds that running requests get at the end.

    Raises `LlmjaxError` when it cannot listen there.

    Attributes:
        url: where it can be reached from this machine.
    """

    def __init__(self, app: Any, engine: AsyncEngine, *, host: str, port: int, drain: float) -> None:
        self._engine = engine
        self._drain = drain
        self._socket = listen(host, port)
        self.url = url_of(self._socket)
        service = getattr(getattr(app, "state", None), "service", None)  # another app has none
        self._service = service if isinstance(service, Service) else None
        head_timeout = ServerConfig.send_timeout if self._service is None else self._service.config.send_timeout
        self._server = uvicorn.Server(server_config(app, head_timeout=head_timeout))
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="llmjax-http", daemon=True)
        self._signals = 0

    def start(self) -> None:
        """Returns when it answers."""
        self._engine.start()
        self._thread.start()
        deadline = time.monotonic() + _STARTING
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise LlmjaxError(f"the server did not start: {self._failure or 'see the log'}")
            time.sleep(0.005)

    def wait(self) -> None:
        """Stay until SIGTERM or SIGINT, then `close`. Only for the main thread; raises `LlmjaxError` when the server died."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self._signals:  # polled: a handler must not take a lock that this thread may hold
                if not self._thread.is_alive():
                    raise LlmjaxError(f"the server has died: {self._failure or 'see the log'}")
                time.sleep(0.05)
            log.info("stopping: no new requests, %d run; a second signal ends them at once", self._engine.num_open)
            self.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Drain, then stop server and engine thread. May be called again."""
        if self._thread.is_alive():
            asyncio.run(self._engine.drain(self._drain))
            self._server.should_exit = True
            self._thread.join(2.0 * _CLOSING)
        if self._service is not None:
            self._service.close()
        self._engine.stop(timeout=_CLOSING)
        self._socket.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._engine.close_doors()
        if self._signals > 1:
            self._drain = 0.0
            self._server.config.timeout_graceful_shutdown = 1
            raise KeyboardInterrupt

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:  # uvicorn leaves with SystemExit when it cannot start
            self._failure = error
            log.error("the server has died", exc_info=error)


def server_config(app: Any, *, head_timeout: float) -> uvicorn.Config:
    """Uvicorn's settings for an app, which starts and stops nothing itself (no lifespan).

    `head_timeout`: seconds after which a connection whose next request's head is not complete is closed.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=_CLOSING,
        lifespan="off",
        proxy_headers=False,
        http=cast("type[asyncio.Protocol]", functools.partial(_Protocol, head_timeout=head_timeout)),
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Of an answer that is broken off because its client took nothing, uvicorn says that the app has a bug."""
    return not record.getMessage().startswith("ASGI callable returned without completing response")


class _Protocol(H11Protocol):
    """A connection does not stay open for a client that takes nothing while it is closed, nor for one that asks nothing."""

    def __init__(self, *args: Any, head_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timeout = head_timeout
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(cast("asyncio.Transport", _Transport(transport, self.loop)))
        self._time_head()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        self._time_head()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        super().connection_lost(exc)
        self._stop_timer()

    def _time_head(self) -> None:
        """The time for a head runs from the connection's beginning, or the answer before, until the head is complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._head_timeout, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Transport:
    """A transport whose `close` waits for the peer for a bounded time."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self.write = inner.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        """Send what is buffered, for a while; then leave it."""
        self._inner.close()
        if self._inner.get_write_buffer_size():
            self._loop.call_later(_CLOSING, self._inner.abort)
