"""A server that says what a test wrote down, byte for byte, on real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Handler = Callable[[socket.socket], None]
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":128}]}'


class RawServer:
    """Answers `/v1/models`; the n-th POST is answered by the n-th of `answers` (the last one again and again): bytes to be sent
    before the connection is closed, or a function that does what it likes with the socket.

    Attributes:
        url: where it is.
        bodies: of the POSTs, in the order they came; `heads` likewise.
    """

    def __init__(self, answers: Sequence[bytes | Handler]) -> None:
        self._answers = list(answers)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.heads: list[str] = []
        self.bodies: list[Any] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(60)
        with connection, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(2**16)
            head, _, body = data.partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                connection.sendall(whole(MODELS))
                return
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            while len(body) < length:
                body += connection.recv(2**16)
            with self._lock:
                answer = self._answers[min(len(self.bodies), len(self._answers) - 1)]
                self.heads.append(head.decode())
                self.bodies.append(json.loads(body))
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                answer(connection)


@contextlib.contextmanager
def raw_server(*answers: bytes | Handler) -> Iterator[RawServer]:
    server = RawServer(answers)
    try:
        yield server
    finally:
        server.close()


def whole(body: bytes, status: str = "200 OK", *headers: str, kind: str = "application/json") -> bytes:
    """An answer with a length."""
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def text(word: str, *, reason: str | None = None, tokens: int | None = None) -> bytes:
    """An event of a completion; with `tokens`, the usage so far."""
    made: dict[str, Any] = {"choices": [{"index": 0, "text": word, "finish_reason": reason}]}
    if tokens is not None:
        made["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens}
    return event(made)


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})


DONE = b"data: [DONE]\n\n"
