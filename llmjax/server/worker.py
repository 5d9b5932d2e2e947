"""A process of the HTTP side: the app on a listening socket that it shares with others, over an engine in another process.

Until the engine has told what it is, only the probes answer. Ends with its supervisor, and is started again by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from llmjax.engine.health import Health
from llmjax.engine.remote_engine import RemoteEngine
from llmjax.errors import UnavailableError
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig, WorkerJob
from llmjax.server.control import Control, leave_signals_to_the_supervisor
from llmjax.server.http_errors import UNAVAILABLE_RETRY_AFTER, error_response
from llmjax.server.http_server import server_config
from llmjax.server.middleware import PROBES
from llmjax.server.recalibration_series import recalibration_registry
from llmjax.server.service import Service
from llmjax.telemetry.logs import configure_logging

log = logging.getLogger(__name__)

_ORPHANED = _FAILED = 1  # exit codes
_PATIENCE = 5.0  # seconds for an engine that serves to say what it is; then the probes are answered without it


def main(handle: int) -> None:
    """Work for the supervisor at the other end of this file descriptor."""
    leave_signals_to_the_supervisor()
    control = Control.inherited(handle)
    received = control.receive()
    if received is None:
        os._exit(_ORPHANED)
    (_, job), (listener,) = received
    configure_logging(job.log, verbose=True)
    worker = _Worker(control, job, listener)
    asyncio.run(worker.run(), loop_factory=worker.config.get_loop_factory())


class _Worker:
    """The process. Is itself the app, because the real one needs to know the engine."""

    def __init__(self, control: Control, job: WorkerJob, listener: socket.socket) -> None:
        self._control = control
        self._job = job
        self._listener = listener
        self._engine = RemoteEngine(self._on_hello, alone=job.alone)
        self._app: ASGIApp | None = None
        self._service: Service | None = None
        self._may_start = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self.config = server_config(self, head_timeout=job.options.get("send_timeout", ServerConfig.send_timeout))
        self._server = _Server(self.config)

    async def run(self) -> None:
        """Serve until told to stop."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._on_control)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._may_start.wait()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._control.send("up")
        await serving
        if self._service is not None:
            await asyncio.to_thread(self._service.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await (self._app or self._before_the_engine)(scope, receive, send)

    def _on_control(self) -> None:
        received = self._control.receive()
        if received is None:
            os._exit(_ORPHANED)
        (what, *rest), sockets = received
        if what == "engine":
            self._connecting = asyncio.create_task(self._connect(sockets[0], self._connecting))
            if not rest[0]:  # it is being loaded, so that answers are not to be expected anyway
                self._may_start.set()
        elif what == "expect":
            self._engine.expect(rest[0])
            self._may_start.set()
        elif what == "stop":
            self.config.timeout_graceful_shutdown = rest[0]
            self._server.should_exit = True
            self._may_start.set()

    async def _connect(self, connection: socket.socket, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            await self._engine.connect(connection)
        except Exception as error:  # a bug of ours; the supervisor starts another worker, or tells that it does not help
            log.error("the connection to the engine failed", exc_info=error)
            os._exit(_FAILED)

    def _on_hello(self) -> None:
        options = dict(self._job.options)
        options["served_names"] = names = options.get("served_names") or (self._engine.name,)
        if self._service is None or self._service.config.served_names != names:  # the engine was replaced by another model's
            if self._service is not None:
                self._service.close()
            registries = [] if self._job.recalibration is None else [recalibration_registry(Path(self._job.recalibration))]
            app = create_app(self._engine, ServerConfig(**options), registries=registries)
            self._service = app.state.service
            self._engine.registries = [app.state.service.metrics.registry]
            self._app = app
            gc.unfreeze()  # an app that this one replaces
            gc.collect()
            gc.freeze()  # the app stays: to look through all of it for garbage takes milliseconds, between two tokens
        self._may_start.set()

    async def _before_the_engine(self, scope: Scope, receive: Receive, send: Send) -> None:
        health: Health = self._engine.health
        if scope["path"] in PROBES:
            alive = scope["path"] == "/livez" and not health.gone
            headers = None if alive else {"retry-after": str(UNAVAILABLE_RETRY_AFTER)}
            response = JSONResponse({"status": health.state, "reason": health.reason}, 200 if alive else 503, headers)
        else:
            response = error_response(UnavailableError(f"{health.reason}: try again later"), 0)
        await response(scope, receive, send)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The supervisor has the signals."""
        yield
