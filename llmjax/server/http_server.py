"""`HttpServer`: an app on a port, run by uvicorn on a thread of its own; and how it ends.

The end, at SIGTERM or Ctrl-C: `/readyz` says 503 and new work is refused, while streams go on. Those that run at the deadline
end with an error event. Then connections are closed and the engine's thread ends. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

import uvicorn

from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import LlmjaxError

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
        self._socket = _listen(host, port)
        port = self._socket.getsockname()[1]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=_CLOSING, lifespan="on"
        )
        self._server = uvicorn.Server(config)
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


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LlmjaxError(f"cannot listen on {host} port {port}: {reason}; choose another host or port") from None
