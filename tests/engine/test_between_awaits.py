"""What others do while a request waits for something: nothing that was looked at before is taken for granted after."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fakes_engine import FakeEngine, FakeTokenizer
from prometheus_client import CollectorRegistry, Counter

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine_messages import frame, read_frame
from llmjax.engine.engine_socket import EngineSocket
from llmjax.engine.remote_engine import RemoteEngine
from llmjax.errors import UnavailableError
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput
from llmjax.telemetry.metric_sums import Series, read_series

FORM = SamplingParams(max_tokens=2000, structured=StructuredOutput(regex="a+"))


class CompilingEngine(FakeEngine):
    """A fake whose forms are compiled when a test says so."""

    def __init__(self) -> None:
        super().__init__(EngineConfig(max_context=4096, max_sequences=2))
        self.compiling: list[concurrent.futures.Future[object]] = []
        self.grammars = SimpleNamespace(start=self._start)

    def _start(self, wanted: StructuredOutput) -> concurrent.futures.Future[object]:
        self.compiling.append(concurrent.futures.Future())
        return self.compiling[-1]


class SlowTokenizer(FakeTokenizer):
    """Takes until `go` for a text."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        assert self.go.wait(20)
        return super().encode(text)[:10]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def last(stream: Any) -> tuple[str | None, Sequence[int]]:
    async with stream:
        async for output in stream:
            (choice,) = output.outputs
    return choice.finish_reason, choice.token_ids


def test_doors_that_close_while_a_prompt_is_tokenised_are_closed_for_it() -> None:
    """Or it would come after a drain has told that nothing is under way any more."""

    async def main() -> None:
        fake = FakeEngine(EngineConfig(max_context=4096, max_sequences=2))
        fake.tokenizer = tokenizer = SlowTokenizer()
        async with AsyncEngine(fake) as engine:  # type: ignore[arg-type]
            asked = asyncio.create_task(engine.submit("a" * 10_000, SamplingParams(max_tokens=4)))
            await until(tokenizer.begun.is_set)
            assert await engine.drain(10)
            tokenizer.go.set()
            with pytest.raises(UnavailableError):
                await asked
            assert (fake.added, engine.num_open) == (0, 0)

    run(main)


@pytest.mark.parametrize("group", ["mine", None])
def test_a_request_whose_form_is_still_compiled_can_be_aborted(group: str | None) -> None:
    async def main() -> None:
        fake = CompilingEngine()
        async with AsyncEngine(fake) as engine:  # type: ignore[arg-type]
            mine = asyncio.create_task(engine.submit([97], FORM, group="mine"))
            other = asyncio.create_task(engine.submit([98], FORM, group="other"))
            await until(lambda: len(fake.compiling) == 2)
            assert await engine.abort_group(group) == 0
            later = asyncio.create_task(engine.submit([99], FORM, group="mine"))
            await until(lambda: len(fake.compiling) == 3)
            for one in fake.compiling:
                one.set_result(object())
            assert await last(await mine) == ("abort", [])
            assert await last(await other) == (("abort", []) if group is None else ("length", [98] * 2000))
            assert await last(await later) == ("length", [99] * 2000), "it came after"

    run(main)


def test_an_answer_of_several_prompts_can_be_aborted_while_one_is_tokenised() -> None:
    """The engine is at the other end of a socket, where the abort arrives before that prompt does."""

    async def main() -> None:
        fake = FakeEngine(EngineConfig(max_context=4096, max_sequences=2))
        engine = AsyncEngine(fake)  # type: ignore[arg-type]
        clients = EngineSocket(engine, "fake")
        clients.start()
        ours, theirs = socket.socketpair()
        hello = asyncio.Event()
        far = RemoteEngine(hello.set)
        connection = asyncio.create_task(far.connect(ours))
        await asyncio.to_thread(clients.add, theirs)
        await hello.wait()
        far._tokenizer = tokenizer = SlowTokenizer()  # type: ignore[assignment]
        slow = asyncio.create_task(far.submit("a" * 10_000, SamplingParams(max_tokens=2000), group="mine"))
        await until(tokenizer.begun.is_set)
        await far.abort_group("mine")
        tokenizer.go.set()
        assert await last(await slow) == ("abort", [])
        await asyncio.to_thread(clients.close, 10)
        await connection
        await asyncio.to_thread(engine.stop)

    run(main)


def test_the_aborts_of_long_ago_are_forgotten() -> None:
    async def main() -> None:
        async with AsyncEngine(FakeEngine()) as engine:  # type: ignore[arg-type]
            for number in range(3000):
                await engine.abort_group(f"{number}")
            assert len(engine._aborts) < 2000
            assert "2999" in engine._aborts

    run(main)


def test_counts_that_a_client_tells_after_a_question_are_not_replaced_by_those_before_it() -> None:
    """Both have come at once: a series that goes down is a reset to whoever reads it."""

    def series(count: int) -> Series:
        registry = CollectorRegistry()
        Counter("llmjax_tried", "Tries.", registry=registry).inc(count)
        return read_series([registry])

    async def main() -> None:
        engine = AsyncEngine(FakeEngine())  # type: ignore[arg-type]
        clients = EngineSocket(engine, "fake")
        clients.start()
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        await asyncio.to_thread(clients.add, theirs)
        await read_frame(reader)
        writer.write(frame(("ready",)) + frame(("metrics", 7, series(1))) + frame(("series", series(2))))
        while not (news := await read_frame(reader)).answers:
            pass
        ((question, text),) = news.answers
        assert question == 7
        assert b"llmjax_tried_total 2.0" in text
        writer.close()
        await asyncio.to_thread(clients.close, 10)
        await asyncio.to_thread(engine.stop)

    run(main)
