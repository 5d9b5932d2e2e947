"""The supervisor's parts by themselves: what is said between processes, and workers that cannot be started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
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


class FakeProcess:
    """An engine's process that a test plays: `said` is its end of the control socket."""

    def __init__(self, handle: int) -> None:
        self.said = Control(socket.socket(fileno=os.dup(handle)))
        self.said._socket.settimeout(60)
        self.life: asyncio.Task[Any]
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def kill(self) -> None:
        self._ended.set()

    def told(self) -> Any:
        received = self.said.receive()
        assert received is not None
        return received[0]


async def started(monkeypatch: pytest.MonkeyPatch, one: Supervisor, meanwhile: Callable[[], None]) -> FakeProcess:
    """The engine's process, started by `one`; `meanwhile` happens while it is."""
    processes: list[FakeProcess] = []

    async def start(program: str, *args: Any, pass_fds: tuple[int, ...], **options: Any) -> Any:
        processes.append(FakeProcess(*pass_fds))
        meanwhile()
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    life = asyncio.create_task(one._run_engine())
    while one._engine is None:
        await asyncio.sleep(0)
    (process,) = processes
    process.life = life
    return process


@pytest.mark.parametrize("when", ["while it is started", "later"])
def test_an_engine_that_is_to_be_replaced_leaves_and_does_not_pass_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It says that it is ready before it hears that it has to go."""

    async def main() -> None:
        one = Supervisor(listen("127.0.0.1", 0), engine=Program("an_engine", "old"), worker=Program("a_worker", None))
        process = await started(monkeypatch, one, lambda: one._beside_said("replace", "new") if when != "later" else None)
        if when == "later":
            one._beside_said("replace", "new")
        assert [process.told(), process.told()] == [("job", "old"), ("stop",)]
        child = one._engine
        assert child is not None
        process.said.send("ready")
        while not child.up:
            await asyncio.sleep(0.001)
        assert one._before is not None, "if the next one never serves, the one before is started again"
        assert one._before.job == "old"
        process.kill()
        await process.life
        process.said.close()
        after = await started(monkeypatch, one, lambda: None)
        assert after.told() == ("job", "new")
        after.said.send("ready")
        while one._before is not None:
            await asyncio.sleep(0.001)
        after.kill()
        await after.life
        after.said.close()
        one._listener.close()

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize("serves", [False, True])
def test_an_engine_that_never_comes_to_serve_in_anothers_place_is_ended(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    monkeypatch.setattr(supervisor, "REPLACEMENT_STARTS", 0.3)

    async def main() -> None:
        one = Supervisor(listen("127.0.0.1", 0), engine=Program("an_engine", "old"), worker=Program("a_worker", None))
        one._beside_said("replace", "new")
        process = await started(monkeypatch, one, lambda: None)
        assert process.told() == ("job", "new")
        if serves:
            process.said.send("ready")
        done, _ = await asyncio.wait([process.life], timeout=1.0 if serves else 20.0)
        assert bool(done) is not serves
        assert (one._before is None) is serves
        process.kill()
        await process.life
        process.said.close()
        one._listener.close()

    asyncio.run(main())
