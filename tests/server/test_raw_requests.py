"""Requests as careless and hostile clients write them, byte for byte, on real sockets: one answer each, and nothing after it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fakes_engine import FakeEngine

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig
from llmjax.server.http_server import HttpServer

BODY = b'{"prompt":"ab","max_tokens":3}'
LAST = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    engine = AsyncEngine(FakeEngine(EngineConfig(max_context=512, max_sequences=4)))  # type: ignore[arg-type]
    one = HttpServer(create_app(engine, ServerConfig(served_names=("tiny",))), engine, host="127.0.0.1", port=0, drain=0.2)
    one.start()
    yield one
    one.close()


def talk(server: HttpServer, data: bytes) -> bytes:
    """All that the server says to this, until it closes the connection."""
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
    return answer


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*headers: bytes) -> bytes:
    """The body a byte at a time, with an extension and a trailer."""
    lines = [b"POST /v1/completions HTTP/1.1", b"host: a", *headers, b"transfer-encoding: chunked"]
    chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in BODY)
    return b"\r\n".join(lines) + b"\r\n\r\n" + chunks + b"0\r\nx: y\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d+)", answer)]


def texts(answer: bytes) -> list[str]:
    return [json.loads(found) for found in re.findall(rb'"text":("[^"]*")', answer)]


def test_requests_that_come_at_once_are_answered_in_their_order(server: HttpServer) -> None:
    stream = BODY[:-1] + b',"stream":true}'
    answer = talk(server, post(BODY) + post(b"{") + post(stream) + chunked() + LAST)
    assert statuses(answer) == [200, 400, 200, 200, 200]
    whole = texts(answer)
    assert (whole[0], "".join(whole[1:-1]), whole[-1]) == ("aba", "aba", "aba")
    assert answer.endswith(b"}")


@pytest.mark.parametrize("request_line", [b"POST /v1/completions", b"GET /livez", b"POST /nowhere"])
def test_a_body_with_two_lengths_is_the_last_thing_that_is_read(server: HttpServer, request_line: bytes) -> None:
    """To a proxy that goes by the other length what follows may be a part of it: it must not become a request of its own."""
    data = chunked(b"content-length: 5").replace(b"POST /v1/completions", request_line, 1)
    answer = talk(server, data + LAST)
    assert len(statuses(answer)) == 1
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert texts(answer) == (["aba"] if b"completions" in request_line else [])


@pytest.mark.parametrize(
    "headers",
    [(b"content-length: 3",), (b"content-length: x",), (b"content-length: -1",), (b"transfer-encoding: gzip, chunked",)],
)
def test_a_length_that_cannot_be_meant_is_refused(server: HttpServer, headers: tuple[bytes, ...]) -> None:
    answer = talk(server, post(BODY, *headers) + LAST)
    assert len(statuses(answer)) == 1
    assert statuses(answer)[0] in (400, 501)


@pytest.mark.parametrize(
    "path",
    [
        "/livez",
        "/readyz",
        "/metrics",
        "/version",
        "/v1/models",
        "/v1/models/tiny",
        "/openapi.json",
        "/dashboard",
        "/dashboard/events",
    ],
)
def test_a_head_has_an_end_and_no_body(server: HttpServer, path: str) -> None:
    answer = talk(server, f"HEAD {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    assert statuses(answer) == [200]
    assert answer.endswith(b"\r\n\r\n")
    assert answer.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_old_clients_get_streams_that_end_with_the_connection(server: HttpServer, version: str) -> None:
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 3, "stream": True}
    data = post(json.dumps(body).encode(), b"connection: close").replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
    answer = talk(server, data)
    assert "".join(texts(answer)) == "aba"
    assert (b"transfer-encoding: chunked" in answer.lower()) == (version == "1.1")
    assert b"data: [DONE]\n\n" in answer
