"""The server on a real port: sockets that close, ports that are taken, and the process that users start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_checkpoints import random_weights, tiny_config, write_hf
from fakes_engine import FakeEngine
from fakes_text import write_byte_tokenizer
from served import TEMPLATE, parse_events

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import LlmjaxError
from llmjax.server import http_server
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig
from llmjax.server.http_server import HttpServer
from llmjax.server.listener import listen
from llmjax.server.traffic_log import TrafficConfig, TrafficLog


class SlowEngine(FakeEngine):
    """A millisecond a token."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(max_context=8192, max_sequences=8))

    def step(self) -> list[RequestOutput]:
        time.sleep(0.001)
        return super().step()


@pytest.fixture
def server() -> Iterator[HttpServer]:
    engine = AsyncEngine(SlowEngine())
    one = HttpServer(create_app(engine, ServerConfig(served_names=("tiny",))), engine, host="127.0.0.1", port=0, drain=0.2)
    one.start()
    yield one
    one.close()
    assert engine.health.state == "stopped"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def connection_with_small_buffer(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket that nobody reads, so that the server's writes soon find no room."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def post_raw(url: str, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, which may then be closed at any moment."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_socket_that_closes_ends_its_request(server: HttpServer, stream: bool) -> None:
    """B29."""
    engine = server._engine
    connection = post_raw(server.url, {"prompt": "a", "max_tokens": 8000, "stream": stream})
    until(lambda: engine.num_open == 1)
    if stream:
        assert connection.recv(10)
    connection.close()
    until(lambda: engine.num_open == 0 and not engine.engine.has_unfinished)


def test_streams_arrive_while_they_are_made_and_end_with_the_server(server: HttpServer) -> None:
    body = {"prompt": "ab", "max_tokens": 8000, "stream": True}
    with httpx2.Client(base_url=server.url) as client, client.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_bytes()
        first = next(chunks)
        assert b'"text":' in first
        assert server._engine.num_open == 1
        server.close()
        events = parse_events(first + b"".join(chunks))
    assert events[-1]["error"]["code"] == "unavailable"


def test_a_reader_that_takes_nothing_is_dropped_without_a_word_of_a_bug(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is closed too, although what was sent to it has not been taken."""
    monkeypatch.setattr(http_server, "_CLOSING", 0.5)
    engine = AsyncEngine(SlowEngine())
    app = create_app(engine, ServerConfig(served_names=("tiny",), send_timeout=0.2))
    server = HttpServer(app, engine, host="127.0.0.1", port=0, drain=0.2)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the connections too
    server.start()
    body = {"prompt": "a" * 100, "max_tokens": 8000, "stream": True, "logprobs": 5}
    with connection_with_small_buffer(server.url, body) as connection:
        until(lambda: engine.num_open == 1)
        until(lambda: engine.num_open == 0)
        until(lambda: not server._server.server_state.connections)
        while connection.recv(2**16):
            pass
    server.close()
    assert [record.levelname for record in caplog.records if "took nothing" in record.getMessage()] == ["WARNING"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_port_that_is_taken_is_one_clear_line(server: HttpServer) -> None:
    engine = AsyncEngine(SlowEngine())
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(LlmjaxError, match=f"cannot listen on 127.0.0.1 port {port}: .*choose another"):
        HttpServer(create_app(engine, ServerConfig(served_names=("a",))), engine, host="127.0.0.1", port=port, drain=0)


@pytest.mark.parametrize("host", ["a\0b", "ä" * 100, "a..b"])
def test_a_host_that_is_none_is_one_clear_line(host: str) -> None:
    with pytest.raises(LlmjaxError, match=r"cannot listen on .*choose another"):
        listen(host, 0)


def test_a_connection_that_asks_nothing_is_closed_and_one_that_waits_for_its_answer_is_not() -> None:
    engine = AsyncEngine(SlowEngine())
    app = create_app(engine, ServerConfig(served_names=("tiny",), send_timeout=0.3))
    server = HttpServer(app, engine, host="127.0.0.1", port=0, drain=0.2)
    server.start()
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    head = b"GET /livez HTTP/1.1\r\nhost: x\r\n"
    with post_raw(server.url, {"prompt": "a", "max_tokens": 1500}) as working:
        for said in (b"", head, head + b"\r\n" + head):
            with socket.create_connection(address, timeout=20) as idle:
                idle.sendall(said)
                while idle.recv(2**16):
                    pass
        assert working.recv(2**16).startswith(b"HTTP/1.1 200")
    server.close()


def test_what_waits_for_the_traffic_log_is_written_at_the_end(tmp_path: Path) -> None:
    """And the file is given back, so that the next server takes it."""
    path = tmp_path / "traffic.jsonl"
    engine = AsyncEngine(SlowEngine())
    app = create_app(engine, ServerConfig(served_names=("tiny",), traffic=TrafficConfig(path=str(path))))
    log = app.state.service.traffic
    write, may_write = log._write, threading.Event()

    def slow_write(line: Any) -> None:
        assert may_write.wait(20)
        write(line)

    log._write = slow_write
    server = HttpServer(app, engine, host="127.0.0.1", port=0, drain=0.2)
    server.start()
    for _ in range(5):
        assert httpx2.post(server.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 2}).status_code == 200
    threading.Timer(0.2, may_write.set).start()
    server.close()
    assert len(path.read_text().splitlines()) == 5
    after = TrafficLog(TrafficConfig(path=str(path)), lambda ids: "")
    assert after._file.path == path
    after.close()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_drains_and_a_second_one_does_not_wait(signals: int) -> None:
    """B33: what runs has the time that was set; with a second signal it has none."""
    engine = AsyncEngine(SlowEngine())
    app = create_app(engine, ServerConfig(served_names=("tiny",)))
    server = HttpServer(app, engine, host="127.0.0.1", port=0, drain=0.2 if signals == 1 else 60.0)
    server.start()
    connection = post_raw(server.url, {"prompt": "a", "max_tokens": 8000, "stream": True})
    assert connection.recv(10)
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        until(lambda: signal.getsignal(signal.SIGTERM) != before)
        os.kill(os.getpid(), signal.SIGTERM)
        if signals == 2:
            until(lambda: engine.health.state == "draining")
            time.sleep(0.1)  # two signals at once are one
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    if signals == 1:
        server.wait()
    else:
        with pytest.raises(KeyboardInterrupt):
            server.wait()
        server.close()
    thread.join()
    assert engine.health.state == "stopped"
    assert signal.getsignal(signal.SIGTERM) == before
    data = b""
    while piece := connection.recv(2**16):
        data += piece
    connection.close()
    assert b'"code":"unavailable"' in data
    assert b"data: [DONE]" in data


def test_the_process_serves_drains_and_exits_with_0(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """B33, B43, B70: `llmjax serve MODEL` answers when it is warm, and at SIGTERM finishes what runs."""
    config = tiny_config(max_position_embeddings=4096)
    model = write_hf(tmp_path / "模型", config, random_weights(config))
    write_byte_tokenizer(model, chat_template=TEMPLATE)
    cache = request.config.cache.mkdir("serve")  # compiled once
    (tmp_path / "keys").write_text("# ours\nsecret-key\n")
    command = [sys.executable, "-c", "from llmjax.cli import main; main()", "serve", str(model), "--port", "0", "--log", "json"]
    command += ["--host", "127.0.0.1", "--platform", "cpu", "--api-key-file", "keys", "--set", f"artifacts={cache}"]
    command += ["--set", "stages.engine.batching={max_sequences: 2, max_tokens_per_step: 64, buckets: {rows: [2], tokens: [64]}}"]
    environ = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "LC_ALL": "C"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            url, lines = "", []
            while not url:
                assert process.stderr is not None
                line = process.stderr.readline()
                assert line, "".join(lines)
                lines.append(line)
                url = json.loads(line).get("url", "") if line.startswith("{") else ""
            asyncio.run(_use_and_stop(url, process))
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "secret-key" not in "".join(lines) + err
    assert "Traceback" not in err


async def _use_and_stop(url: str, process: subprocess.Popen[str]) -> None:
    headers = {"authorization": "Bearer secret-key"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": "Bearer no"})).status_code == 401
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "模型"
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=chat) for _ in range(3)))
        assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {4}
        body = {"prompt": "hi", "max_tokens": 800, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.aiter_bytes()
            data = await anext(chunks)
            process.send_signal(signal.SIGTERM)
            while (ready := await client.get("/readyz")).status_code == 200:
                await asyncio.sleep(0.01)
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            refused = await client.post("/v1/chat/completions", json=chat)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            data += b"".join([chunk async for chunk in chunks])
        assert parse_events(data)[-1]["usage"]["completion_tokens"] == 800
