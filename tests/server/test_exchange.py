"""Reading a body: within its size and its time, and to its end also when it is refused, so that the answer can be seen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from served import run

from llmjax.server.exchange import read_body
from llmjax.server.http_errors import HttpError


class Sender:
    """A client that has sent these pieces of a body; `ends` says whether the last one is the end."""

    def __init__(self, *pieces: bytes, ends: bool = True, headers: dict[str, str] | None = None) -> None:
        self.left = list(pieces)
        self._ends = ends
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.scope = {"type": "http", "headers": raw}

    async def receive(self) -> dict[str, Any]:
        if not self.left:
            await asyncio.Event().wait()
        body = self.left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self.left) or not self._ends}

    def read(self, limit: int, timeout: float = 60.0) -> bytes:
        return run(read_body(self.scope, self.receive, limit, timeout))


def refused(sender: Sender, limit: int, timeout: float = 60.0) -> HttpError:
    with pytest.raises(HttpError) as caught:
        sender.read(limit, timeout)
    assert caught.value.headers["connection"] == "close"
    return caught.value


def test_pieces_are_joined_up_to_the_limit() -> None:
    assert Sender(b"ab", b"", b"cd").read(4) == b"abcd"


@pytest.mark.parametrize("headers", [None, {"content-length": "7"}, {"content-length": "9" * 30}])
@pytest.mark.parametrize("pieces", [(b"abcdefg",), (b"abc", b"defg"), (b"a",) * 7])
def test_too_large_a_body_is_read_to_its_end_and_refused(headers: dict[str, str] | None, pieces: tuple[bytes, ...]) -> None:
    sender = Sender(*pieces, headers=headers)
    assert refused(sender, 4).status == 413
    assert sender.left == []


def test_a_length_that_is_no_number_is_not_looked_at() -> None:
    assert Sender(b"ab", headers={"content-length": "²"}).read(2) == b"ab"


def test_a_client_that_waits_to_be_told_is_refused_at_once() -> None:
    sender = Sender(b"abcdefg", headers={"content-length": "7", "expect": "100-continue"})
    assert refused(sender, 4).status == 413
    assert sender.left == [b"abcdefg"]


def test_an_endless_body_is_not_read_for_ever() -> None:
    sender = Sender(*[b"x" * 2**20] * 200, ends=False)
    assert refused(sender, 2**20).status == 413
    assert 100 < len(sender.left) < 200


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    assert refused(Sender(b"ab", ends=False), 10, timeout=0.05).status == 408
    assert refused(Sender(b"abcdef", ends=False), 4, timeout=0.05).status == 413


def test_a_compressed_body_is_read_and_refused() -> None:
    sender = Sender(b"\x1f", b"\x8b", headers={"content-encoding": "gzip"})
    assert refused(sender, 10).status == 415
    assert sender.left == []


def test_a_client_that_leaves_is_no_error_of_its_own() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(HttpError) as caught:
        run(read_body({"type": "http", "headers": []}, gone, 10, 60.0))
    assert caught.value.status == 499
