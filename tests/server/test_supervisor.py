"""The supervisor's parts by themselves: what is said between processes, and workers that cannot be started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import pytest

from llmjax.errors import LlmjaxError
from llmjax.server import supervisor
from llmjax.server.control import Control
from llmjax.server.listener import listen
from llmjax.server.supervisor import Program, Supervisor, _ending


@pytest.mark.parametrize("size", [10, 2**15, 2**18, 2**22])
def test_a_message_of_any_size_arrives_with_its_sockets(size: int) -> None:
    ours, theirs = Control.pair()
    other = Control(theirs)
    one, two = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    ours.send("job", "x" * size, sockets=[one])
    received = other.receive()
    assert received is not None
    (what, text), (copy,) = received
    assert (what, len(text)) == ("job", size)
    assert not copy.get_inheritable()
    copy.send(b"hi")
    assert two.recv(10) == b"hi"
    copy.close()
    assert len(os.listdir("/proc/self/fd")) == before
    other.close()
    ours.send("nobody", "x" * size)
    for end in (ours, one, two):
        end.close()


def test_every_signal_has_a_name() -> None:
    assert _ending(-signal.SIGKILL).startswith("was killed by SIGKILL")
    assert _ending(-(signal.SIGRTMIN + 1)) == f"was killed by signal {signal.SIGRTMIN + 1}"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            BlockingIOError(11, "Resource temporarily unavailable"),
            "could not be started .Resource temporarily unavailable., 5 times",
        ),
        (ZeroDivisionError("a bug"), "cannot be looked after: ZeroDivisionError: a bug"),
    ],
)
def test_workers_that_cannot_be_started_end_the_service_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    real = asyncio.create_subprocess_exec

    async def start(program: str, *args: Any, **options: Any) -> Any:
        if "a_worker" in args[1]:
            raise error
        return await real("/bin/sleep", "60", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(supervisor, "GRACE", 0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(LlmjaxError, match=told):
            Supervisor(listen("127.0.0.1", 0), engine=Program("an_engine", None), worker=Program("a_worker", None)).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
