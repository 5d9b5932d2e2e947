"""`EngineFront`: an engine's process as seen from its supervisor; and how an engine serves HTTP workers from there.

A thread listens to the supervisor: new workers' sockets, the word to stop, and the end of the supervisor itself, with which this
process ends at once. Knows no HTTP and no pipelines.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine_socket import EngineSocket
from llmjax.errors import EngineError, LlmjaxError
from llmjax.server.control import Control, leave_signals_to_the_supervisor

log = logging.getLogger(__name__)

ORPHANED = 1  # exit code without a supervisor
_CLOSING = 5.0  # seconds for what has been said to reach the workers
_WORKERS_START = 60.0
_SWITCH = 0.0005
"""Seconds that the clients' thread waits at most for the interpreter, which the engine's thread holds for milliseconds while it
prepares a launch: a request or a first token would wait as long, and be late for the launch after it."""
_INTERRUPT = signal.SIGUSR1  # from the listening thread to the main one


class EngineFront:
    """Made on the main thread before anything is loaded. Until it serves, the word to stop raises `KeyboardInterrupt` there.

    Args:
        control: to the supervisor.
        url: where clients find the server.
    """

    def __init__(self, control: Control, url: str) -> None:
        self.url = url
        self._control = control
        self._lock = threading.Lock()
        self._early: list[socket.socket] = []  # workers that came before the engine
        self._clients: EngineSocket | None = None
        self._engine: AsyncEngine | None = None
        self._drain = 0.0
        self._stop = threading.Event()
        leave_signals_to_the_supervisor()
        signal.signal(_INTERRUPT, _interrupted)
        self._main = threading.main_thread()
        threading.Thread(target=self._listen, name="llmjax-control", daemon=True).start()

    def serve(self, engine: AsyncEngine, *, name: str, drain: float) -> EngineFront:
        """Serve the workers. Returns when each that is there could answer a request; then `wait` and `close`.

        Args:
            engine: started here and stopped by `close`.
            name: the model's own.
            drain: seconds that running requests get at the end.
        """
        self._engine, self._drain = engine, drain
        # What was made by now stays. To look through all of it for garbage takes tens of milliseconds, between two tokens.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH)
        clients = EngineSocket(engine, name)
        clients.start()
        with self._lock:
            self._clients, early = clients, self._early
        for connection in early:
            clients.add(connection)
        deadline = time.monotonic() + _WORKERS_START
        while not clients.ready and not self._stop.wait(0.01):
            if time.monotonic() > deadline:
                raise LlmjaxError("the HTTP workers did not start: see the log")
        self._control.send("ready")
        return self

    def wait(self) -> None:
        """Until the supervisor says stop, then `close`. Raises `EngineError` when the engine dies."""
        assert self._engine is not None
        while not self._stop.wait(0.1):
            if self._engine.health.state == "dead":
                raise EngineError(self._engine.health.reason)
        log.info("stopping: no new requests, %d run; a second signal ends them at once", self._engine.num_open)
        self.close()

    def close(self) -> None:
        """Drain, tell the workers the rest, and stop the engine's thread. May be called again."""
        if self._engine is not None and self._clients is not None:
            asyncio.run(self._engine.drain(self._drain))
            self._clients.close(_CLOSING)
            self._engine.stop(timeout=_CLOSING)

    def _listen(self) -> None:
        while (received := self._control.receive()) is not None:
            (what, *_), sockets = received
            if what == "worker":
                self._add(sockets[0])
            elif what == "stop":
                self._told_to_stop()
        os._exit(ORPHANED)

    def _add(self, connection: socket.socket) -> None:
        with self._lock:
            if self._clients is None:
                self._early.append(connection)
                return
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._clients.add(connection)

    def _told_to_stop(self) -> None:
        if self._engine is not None:
            self._engine.close_doors()
        with self._lock:
            first = self._clients is not None and not self._stop.is_set()
            self._stop.set()
            if not first:
                self._drain = 0.0
        if not first:
            assert self._main.ident is not None
            signal.pthread_kill(self._main.ident, _INTERRUPT)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
