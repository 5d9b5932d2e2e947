"""Clients that do what clients do at their worst, each over a socket of its own and drawn from a seed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

WORDS = ("a", "hé", "漢字", "x" * 40)
DEEP = b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
BROKEN = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"prompt": "a",}',
    b'{"prompt": "a", "n": ' + b"9" * 6000 + b"}",
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}",
    b'{"prompt": "a", "max_tokens": -1e308}',
    b'{"prompt": "a\\ud83d"}',
    b'{"prompt": [' + b"99999999999999999999," * 50 + b"1]}",
    b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"prompt": "a", "stop": ["", 1, null]}',
    DEEP,
)


@dataclasses.dataclass
class Told:
    """What the clients saw, by status; and the status lines and bodies that nobody should see."""

    statuses: Counter[int] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


class Client:
    """One client. `told` collects what all of them see."""

    def __init__(self, port: int, seed: int, told: Told) -> None:
        self.draw = random.Random(seed)
        self._port = port
        self._told = told

    async def misbehave(self) -> None:
        """One visit of a random kind."""
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.vanish, self.vanish, self.vanish, self.read_slowly, self.stay_half_open, self.close_one_way,
            self.send_much, self.send_nonsense, self.send_no_http, self.ask,
        ]  # fmt: skip
        kind = self.draw.choice(kinds)
        try:
            async with asyncio.timeout(60):
                await kind()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # refused or cut: that is the server's right

    # -- kinds

    async def vanish(self) -> None:
        """Leave at any moment: within the request, in the queue, in the middle of the answer; perhaps with a reset."""
        data = self.request(self.body())
        cut = len(data) if self.draw.random() < 0.8 else self.draw.randrange(len(data))
        reader, writer = await self.connect()
        try:
            writer.write(data[:cut])
            await writer.drain()
            if self.draw.random() < 0.5:
                await self.briefly(reader.read(self.draw.randrange(1, 2000)))
            else:
                await asyncio.sleep(self.draw.random() * 0.2)
        finally:
            if self.draw.random() < 0.5:
                reset = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            writer.transport.abort() if self.draw.random() < 0.5 else writer.close()

    async def read_slowly(self) -> None:
        """Take a byte now and then, for a while, through a small buffer; then leave."""
        reader, writer = await self.connect(buffer=2048)
        try:
            writer.write(self.request({**self.body(), "stream": True, "logprobs": None}))
            for _ in range(self.draw.randrange(1, 20)):
                await self.briefly(reader.read(1))
                await asyncio.sleep(self.draw.random() * 0.05)
        finally:
            writer.close()

    async def stay_half_open(self) -> None:
        """Send a part of the head or of the body and say no more."""
        data = self.request(self.body())
        _, writer = await self.connect()
        try:
            writer.write(data[: self.draw.randrange(len(data))])
            await asyncio.sleep(self.draw.random())
        finally:
            writer.transport.abort()

    async def close_one_way(self) -> None:
        """Ask, and close the sending side before the answer."""
        reader, writer = await self.connect()
        try:
            writer.write(self.request(self.body()))
            writer.write_eof()
            await self.briefly(reader.read(100))
        finally:
            writer.close()

    async def send_much(self) -> None:
        """Ten megabytes, with or without saying so before."""
        chunked = self.draw.random() < 0.5
        length = 10 * 2**20
        head = "transfer-encoding: chunked" if chunked else f"content-length: {length}"
        reader, writer = await self.connect()
        try:
            writer.write(f"POST {self.path()} HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n".encode())
            piece = b'{"prompt": "' + b"a" * (2**16 - 12)
            for _ in range(length // len(piece)):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await writer.drain()
            if chunked:
                writer.write(b"0\r\n\r\n")
            self.note(await self.answer(reader), {413})
        finally:
            writer.close()

    async def send_nonsense(self) -> None:
        """A body that is no request."""
        await self.exchange(self.draw.choice(BROKEN), {400})

    async def send_no_http(self) -> None:
        """Bytes that are no HTTP."""
        reader, writer = await self.connect()
        try:
            writer.write(
                self.draw.choice((b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"hello\r\n\r\n", b"\0" * 5000)) + b"\r\n\r\n"
            )
            await self.briefly(reader.read(200))
        finally:
            writer.close()

    async def ask(self) -> None:
        """A request as it should be."""
        await self.exchange({**self.body(), "max_tokens": self.draw.randrange(1, 20)}, {200, 429})

    # -- what they are made of

    async def exchange(self, body: bytes | dict[str, Any], expected: set[int]) -> None:
        """A request with this body, and its answer."""
        reader, writer = await self.connect()
        try:
            writer.write(self.request(body))
            await writer.drain()
            self.note(await self.answer(reader), expected)
        finally:
            writer.close()

    def path(self) -> str:
        """One of the two endpoints."""
        return self.draw.choice(("/v1/completions", "/v1/chat/completions"))

    def body(self) -> dict[str, Any]:
        """A request that would run for long."""
        draw = self.draw
        body: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "stream": draw.random() < 0.6, "temperature": 0}
        return body | draw.choice(
            [{}, {}, {"n": 3, "temperature": 1}, {"stop": ["zz"]}, {"top_k": 5, "temperature": 1, "seed": 4}]
        )

    def request(self, body: bytes | dict[str, Any]) -> bytes:
        """The bytes of an HTTP request."""
        path = self.path()
        if isinstance(body, dict):
            word = self.draw.choice(WORDS)
            asked = {"messages": [{"role": "user", "content": word}]} if "chat" in path else {"prompt": word}
            body = json.dumps({**body, **asked}).encode()
        return f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def connect(self, buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A socket of its own; `buffer` bounds what the kernel takes in for it."""
        connection = socket.socket()
        connection.setblocking(False)
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        return await asyncio.open_connection(sock=connection, limit=2**12 if buffer else 2**16)

    async def answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Status and everything after the status line, to the end of the connection."""
        head = await reader.readline()
        if not head:
            raise ConnectionResetError
        return int(head.split()[1]), await reader.read()

    async def briefly(self, reading: Coroutine[Any, Any, bytes]) -> None:
        """Wait for an answer, but not for long."""
        try:
            async with asyncio.timeout(0.3):
                data = await reading
        except TimeoutError:
            return
        if data.startswith(b"HTTP/1.1 5"):
            self._told.wrong.append(data.decode("latin-1"))

    def note(self, answer: tuple[int, bytes], expected: set[int]) -> None:
        """Count an answer."""
        status, rest = answer
        self._told.statuses[status] += 1
        if status not in expected or (status == 429 and b"retry-after" not in rest.lower()):
            self._told.wrong.append(f"{status}: {rest[:500].decode('latin-1')}")
