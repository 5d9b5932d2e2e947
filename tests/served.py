"""A server in this process, without sockets: bodies in, answers and events out; and exchanges driven step by step.

With `Served.far` set, app and engine speak as those of two processes do, over a socket pair.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

import httpx2

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine_socket import EngineSocket
from llmjax.engine.remote_engine import RemoteEngine
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


class Served:
    """An app over an engine. `options` are `ServerConfig`'s; the model is called "tiny"."""

    far: ClassVar[bool] = False

    def __init__(self, engine: Any, *, max_waiting: int = 64, watchdog: float = 60.0, **options: Any) -> None:
        self.engine = AsyncEngine(engine, max_waiting=max_waiting, watchdog=watchdog, model_name="tiny")
        self.clients = EngineSocket(self.engine, "tiny") if self.far else None
        if self.clients is not None:
            self.clients.start()
        self.app = self._app(options)

    def _app(self, options: dict[str, Any]) -> Any:
        config = ServerConfig(**{"served_names": ("tiny", "alias")} | options)
        return create_app(self.engine, config) if self.clients is None else FarApp(self.clients, config)

    def with_options(self, **options: Any) -> Served:
        """Another app over the same engine."""
        other = Served.__new__(Served)
        other.engine, other.clients = self.engine, self.clients
        other.app = self._app(options)
        return other

    def stop(self) -> None:
        """The end of all."""
        if self.clients is not None:
            self.clients.close(10)
        self.engine.stop()

    async def request(self, method: str, path: str, body: Any = None, *, data: bytes | None = None, **headers: str) -> Any:
        """An httpx response."""
        content = data if data is not None else None if body is None else json.dumps(body).encode()
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://test") as client:
            return await client.request(method, path, content=content, headers=named)

    def get(self, path: str, **headers: str) -> Any:
        return run(self.request("GET", path, **headers))

    def post(self, path: str, body: Any = None, *, data: bytes | None = None, **headers: str) -> Any:
        return run(self.request("POST", path, body, data=data, **headers))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, checked in form; without the end mark."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(response.content)


class FarApp:
    """An app that is connected to its engine anew in each event loop that calls it."""

    def __init__(self, clients: EngineSocket, config: ServerConfig) -> None:
        self._clients = clients
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._lock = loop, asyncio.Lock()
            self._app: Any = None
        async with self._lock:
            if self._app is None:
                self._app = await self._connect()
        await self._app(scope, receive, send)

    async def _connect(self) -> Any:
        hello = asyncio.Event()
        engine = RemoteEngine(hello.set)
        ours, theirs = socket.socketpair()
        self._connection = asyncio.create_task(engine.connect(ours))
        await asyncio.to_thread(self._clients.add, theirs)
        await asyncio.wait_for(hello.wait(), 30)
        app = create_app(engine, self._config)
        engine.registries = [app.state.service.metrics.registry]
        return app


def parse_events(data: bytes) -> list[dict[str, Any]]:
    blocks = data.decode("ascii").split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if block != ": keep-alive"]
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def run[T](work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


class Exchange:
    """One exchange as an ASGI server sees it. The client leaves when told to, and reads only while `reading` is set."""

    def __init__(
        self, app: Any, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = (), *, method: str = "POST"
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self._left = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": list(headers), "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        self.sent.append(message)

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)
