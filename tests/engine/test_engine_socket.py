"""An engine at the other end of a socket: what comes through it, who waits for whom, and what is left when one side goes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes_engine import FakeEngine, fake_logprob
from prometheus_client import CollectorRegistry, Counter

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine_messages import frame, pack_error, pack_part, read_frame, unpack_error, unpack_part
from llmjax.engine.engine_socket import EngineSocket
from llmjax.engine.health import Health
from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, SpeculationOutput
from llmjax.engine.remote_engine import RemoteEngine
from llmjax.engine.request_stream import Part
from llmjax.errors import ContextLengthError, EngineError, LlmjaxError, QueueFullError, RequestError, UnavailableError
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.timings import RequestTimeline

LONG = SamplingParams(max_tokens=3000)


class SteppingEngine(FakeEngine):
    """A fake whose steps wait for `go`; `steps` counts those begun. Keeps the arrivals it was told."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__(EngineConfig(max_context=4096, max_sequences=rows))
        self.stats: Any = SimpleNamespace(num_pages=64, peak_pages_used=0, launches=0, output_tokens=0)
        self.scheduler, self.pool = self, SimpleNamespace(num_used=0)
        self.go = threading.Event()
        self.go.set()
        self.steps = 0
        self.arrivals: list[int | None] = []

    def add_request(self, *args: Any, arrival_ns: int | None = None, **options: Any) -> str:
        self.arrivals.append(arrival_ns)
        return super().add_request(*args, **options)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        assert self.go.wait(60)
        time.sleep(0.0003)
        return super().step()


@contextlib.asynccontextmanager
async def serving(fake: FakeEngine, **options: Any) -> AsyncIterator[tuple[AsyncEngine, EngineSocket]]:
    engine = AsyncEngine(fake, **options)  # type: ignore[arg-type]
    clients = EngineSocket(engine, "fake")
    clients.start()
    try:
        yield engine, clients
    finally:
        await asyncio.to_thread(clients.close, 10)
        await asyncio.to_thread(engine.stop)


async def connect(clients: EngineSocket, remote: RemoteEngine | None = None) -> tuple[RemoteEngine, asyncio.Task[None]]:
    """A client that has heard from the engine, and its connection."""
    ours, theirs = socket.socketpair()
    hello = asyncio.Event()
    remote = remote or RemoteEngine()
    remote._on_hello = hello.set
    connection = asyncio.create_task(remote.connect(ours))
    await asyncio.to_thread(clients.add, theirs)
    await asyncio.wait_for(hello.wait(), 30)
    return remote, connection


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await main()

    asyncio.run(bounded())


# -- what is said


def test_a_part_comes_out_as_it_went_in() -> None:
    """Every field, so that none that is added can be forgotten."""
    timeline = RequestTimeline(1)
    timeline.ended(2)
    counts = {"prompt_tokens": 1, "cached_tokens": 2, "output_tokens": 3, "preemptions": 4, "chunks": 5, "steps": 6}
    timings = timeline.close(3, **counts)
    position = PositionLogprobs(fake_logprob(7), (fake_logprob(7), fake_logprob(8, 2)))
    choices = [
        CompletionOutput(0, "é", [1, 2], -1.5, [position, PositionLogprobs(fake_logprob(9))], "stop", "x", "why"),
        CompletionOutput(1),
    ]
    part = Part(choices, [5, 6], [None, position], 2, 3, True, timings, SpeculationOutput(1, 3, 2, "cost"))
    for one in (part, choices[0]):
        for field in dataclasses.fields(one):
            assert getattr(one, field.name) not in (None, "", [], 0) or field.name == "index", f"{field.name} is not tried"
    assert unpack_part(pickle.loads(pickle.dumps(pack_part(part))), [5, 6]) == part


@pytest.mark.parametrize(
    "error",
    [RequestError("wrong", "n"), ContextLengthError("long", "prompt"), QueueFullError("full", "short"), EngineError("dead")],
)
def test_an_error_comes_out_as_it_went_in(error: LlmjaxError) -> None:
    found = unpack_error(pickle.loads(pickle.dumps(pack_error(error))))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_a_bug_tells_nothing_of_its_inside() -> None:
    assert "secret" not in str(unpack_error(pack_error(ValueError("secret"))))


# -- who talks


def test_readers_far_away_get_what_those_beside_the_engine_get() -> None:
    texts = ["".join(random.choices("abcdef é漢", k=random.randint(1, 30))) for _ in range(12)]
    params = SamplingParams(max_tokens=40, logprobs=2, prompt_logprobs=0, n=2)

    async def read(engine: Any, text: str) -> tuple[RequestOutput, list[list[int]]]:
        ids: list[list[int]] = [[], []]
        async for output in engine.generate(text, params):
            for index, new in enumerate(output.new_token_ids):
                ids[index] += new
                assert output.outputs[index].token_ids == ids[index]
            await asyncio.sleep(random.choice([0, 0, 0.003]))
        return output, ids

    async def main() -> None:
        async with serving(SteppingEngine()) as (near, clients):
            far, _ = await connect(clients)
            assert (far.name, far.max_context, far.capacity) == ("fake", near.max_context, near.capacity)
            for text in texts:
                (one, ids), (other, others) = await asyncio.gather(read(near, text), read(far, text))
                assert ids == others
                assert dataclasses.replace(one, request_id="") == dataclasses.replace(
                    other, request_id="", new_text=one.new_text, new_token_ids=one.new_token_ids
                )
            assert (near.num_open, far.num_open) == (0, 0)

    run(main)


def test_what_is_wrong_comes_back_and_harms_nobody() -> None:
    async def main() -> None:
        fake = SteppingEngine()
        async with serving(fake, max_waiting=1) as (engine, clients):
            far, _ = await connect(clients)
            with pytest.raises(RequestError) as wrong:
                await far.submit([999], LONG)
            assert wrong.value.param == "prompt"
            with pytest.raises(ContextLengthError):
                await far.submit("x" * 5000, LONG)
            with pytest.raises(RequestError) as never:
                await far.submit("a", SamplingParams(n=6))
            assert never.value.param == "n"
            fake.go.clear()
            neighbour = await far.submit("ok", SamplingParams(max_tokens=300))
            await until(lambda: fake.steps == 1)  # so that it takes the others at once, when all have come
            waiting = [asyncio.create_task(far.submit("a", LONG)) for _ in range(5)]
            await until(lambda: engine.num_open == 6)
            fake.go.set()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            full = [one for one in results if isinstance(one, QueueFullError)]
            assert len(full) == 1
            assert full[0].lane == "any"
            assert fake.metrics.registry.get_sample_value("llmjax:queue_full_total", {"lane": "any"}) == 1
            assert far.retry_after() >= 1
            assert [output async for output in neighbour][-1].outputs[0].text == "ok" * 150

    run(main)


def test_a_client_that_does_not_read_holds_up_nobody_and_finds_everything_merged() -> None:
    async def main() -> None:
        fake = SteppingEngine()
        async with serving(fake) as (_, clients):
            ours, theirs = socket.socketpair()
            for one in (ours, theirs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            clients.add(theirs)
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=4096)
            await read_frame(reader)
            params = SamplingParams(max_tokens=3000, logprobs=20)
            writer.write(frame(("submit", 1, "slow", None, [97, 98], params, time.monotonic_ns())))
            far, _ = await connect(clients)
            outputs = [output async for output in far.generate("xyz", SamplingParams(max_tokens=3500))]
            assert outputs[-1].outputs[0].text == ("xyz" * 1200)[:3500]
            await until(lambda: not fake.has_unfinished)
            parts = []
            while not parts or not parts[-1].finished:
                parts += [unpack_part(packed, [97, 98]) for _, packed in (await read_frame(reader)).parts]
            assert len(parts) < 1500
            assert "".join(part.choices[0].text for part in parts) == "ab" * 1500
            assert sum(len(part.choices[0].logprobs or ()) for part in parts) == 3000
            writer.close()

    run(main)


@pytest.mark.parametrize("how", ["stream", "task", "client"])
def test_whoever_leaves_leaves_nothing_in_the_engine(how: str) -> None:
    """One request decodes and one waits."""

    async def main() -> None:
        fake = SteppingEngine(rows=1)
        async with serving(fake) as (engine, clients):
            far, connection = await connect(clients)
            streams = [await far.submit("a", LONG) for _ in range(2)]
            fake.go.clear()
            late = asyncio.create_task(far.submit("b", LONG))
            await until(lambda: engine.num_open == 3)
            if how == "stream":
                for stream in streams:
                    stream.close()
            if how != "client":
                late.cancel()
            if how == "client":
                connection.cancel()
            (taken,) = await asyncio.gather(late, return_exceptions=True)  # it may have been taken just before
            for stream in (*streams, *([] if isinstance(taken, BaseException) else [taken])):
                stream.close()  # more than once does no harm
            await until(lambda: engine.num_open == 0)
            fake.go.set()
            await until(lambda: not fake.has_unfinished)
            assert far.num_open == 0

    run(main)


def test_clients_share_ids_groups_and_counts() -> None:
    """Two chose the same request id: both are served. A group is ended from anywhere; series are sums over all, gone ones too."""

    async def main() -> None:
        async with serving(SteppingEngine(rows=8)) as (engine, clients):
            both = [await connect(clients) for _ in range(2)]
            (one, connection), (other, _) = both
            own = []
            for remote, _ in both:
                registry = CollectorRegistry()
                Counter("llmjax_tried", "Tries.", ("how",), registry=registry).labels("here").inc(2)
                remote.registries = [registry]
                own.append(registry)
            streams = [await remote.submit("a", LONG, request_id="mine-0", group="mine") for remote in (one, other)]
            third = await one.submit("a", LONG, request_id="third", group="third")
            free = await engine.submit("a", LONG)
            assert await other.abort_group("nobody") == 0
            assert await other.abort_group("mine") == 1
            for stream in streams:
                assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
            assert await other.abort_group(None) == 1
            assert [output async for output in third][-1].outputs[0].finish_reason == "abort"
            assert engine.num_open == 1, "who has no group is left alone"
            free.close()

            async def tries() -> str:
                lines = (await other.metrics([own[1]])).decode().splitlines()
                assert 'llmjax:engine_ready{model_name="model"} 1.0' in lines
                return next(line for line in lines if line.startswith("llmjax_tried_total"))

            async def all_counted() -> None:
                async with asyncio.timeout(60):
                    while await tries() != 'llmjax_tried_total{how="here"} 4.0':
                        await asyncio.sleep(0.01)

            await all_counted()
            connection.cancel()
            await until(lambda: len(clients._clients) == 1)
            await all_counted()

    run(main)


QUESTIONS = [("metrics", b"found"), ("snapshot", {"found": 1}), ("memory_map", {"found": 1}), ("abort", 1)]


@pytest.mark.parametrize(("question", "found"), QUESTIONS)
def test_an_answer_that_takes_longer_than_the_next_news_is_not_lost(
    question: str, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step has brought goes out while the question is looked into."""

    async def main() -> None:
        async with serving(SteppingEngine()) as (engine, clients):
            far, _ = await connect(clients)

            async def slow(_: Any = None) -> Any:
                for client in clients._clients:
                    client.wake.set()
                await until(lambda: not any(client.wake.is_set() for client in clients._clients))
                return found

            monkeypatch.setattr(engine, "abort_group" if question == "abort" else question, slow)
            asked = {"metrics": lambda: far.metrics(()), "abort": lambda: far.abort_group(None)}
            asked |= {"snapshot": far.snapshot, "memory_map": far.memory_map}
            async with asyncio.timeout(60):
                assert await asked[question]() == found

    run(main)


def test_an_arrival_is_when_the_client_says_it_was() -> None:
    async def main() -> None:
        fake = SteppingEngine()
        async with serving(fake) as (engine, clients):
            far, _ = await connect(clients)
            for client in (far, engine):
                stream = await client.submit("a", SamplingParams(max_tokens=1), arrival_ns=12345)
                assert [output async for output in stream][-1].finished
            before = time.monotonic_ns()
            stream = await far.submit("a", SamplingParams(max_tokens=1))
            assert [output async for output in stream][-1].finished
            assert fake.arrivals[:2] == [12345, 12345]
            assert before <= (fake.arrivals[2] or 0) <= time.monotonic_ns()

    run(main)


# -- who goes


def test_an_engine_that_goes_ends_streams_and_another_one_is_used_after_it() -> None:
    async def main() -> None:
        far = RemoteEngine()
        assert far.health.state == "starting"
        with pytest.raises(UnavailableError):
            await far.submit("a", LONG)
        assert b'llmjax:engine_ready{model_name=""} 0.0' in await far.metrics([])
        async with serving(SteppingEngine()) as (_, clients):
            _, connection = await connect(clients, far)
            stream = await far.submit("a", LONG)
            for client in list(clients._clients):
                client._writer.transport.abort()  # as when its process is killed
            await connection
        with pytest.raises(EngineError, match="has ended"):
            async for _ in stream:
                pass
        assert not far.health.ready
        async with serving(SteppingEngine()) as (engine, clients):
            await connect(clients, far)
            assert [output async for output in far.generate("ab", SamplingParams(max_tokens=3))][-1].outputs[0].text == "aba"
            engine.close_doors()
            await until(lambda: far.health.state == "draining")

    run(main)


def test_an_engine_that_says_nothing_is_stuck() -> None:
    """Its process may be stopped, or have no memory to run in: nothing is heard of its own watchdog."""

    async def main() -> None:
        fake = SteppingEngine()
        engine = AsyncEngine(fake, watchdog=1.0)  # type: ignore[arg-type]
        clients = EngineSocket(engine, "fake")
        clients.start()
        far, connection = await connect(clients)
        stream = await far.submit("a", LONG)
        free = threading.Event()
        fake.go.clear()  # so that the stream has not ended by itself
        clients._loop.call_soon_threadsafe(free.wait, 60)
        questions = [asyncio.create_task(far.abort_group("nobody")), asyncio.create_task(far.metrics([]))]
        await until(lambda: far.health.state == "stuck")
        with pytest.raises(EngineError, match="said nothing for 1 s"):
            async for _ in stream:
                pass
        stream.close()
        with pytest.raises(EngineError, match="said nothing for 1 s"):
            await questions[0]
        alone = b'llmjax:engine_ready{model_name="model"} 0.0'
        assert alone in await questions[1]
        assert alone in await far.metrics([]), "nobody is asked"
        fake.go.set()
        free.set()
        await until(lambda: far.health.ready and engine.num_open == 0)
        await until(lambda: not fake.has_unfinished)
        assert not connection.done(), "answers to questions that were given up do no harm"
        await asyncio.to_thread(clients.close, 10)
        engine.stop()

    run(main)


def test_a_client_that_never_reads_does_not_hold_up_the_end() -> None:
    async def main() -> None:
        engine = AsyncEngine(SteppingEngine())  # type: ignore[arg-type]
        clients = EngineSocket(engine, "fake")
        clients.start()
        ours, theirs = socket.socketpair()
        with ours:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await asyncio.to_thread(clients.add, theirs)
            params = SamplingParams(max_tokens=3000, logprobs=5)
            ours.sendall(frame(("submit", 1, "slow", None, [97, 98], params, time.monotonic_ns())))
            client = next(iter(clients._clients))
            await until(lambda: client._writer.transport.get_write_buffer_size() > 0)
            await asyncio.wait_for(asyncio.to_thread(clients.close, 0.2), 60)
        await asyncio.to_thread(engine.stop)

    run(main)


def test_what_the_supervisor_said_outlasts_the_connection_and_counts_come_before_the_rest() -> None:
    async def main() -> None:
        registry = CollectorRegistry()
        Counter("llmjax_tried", "Tries.", registry=registry).inc(2)
        far = RemoteEngine()
        far.registries = [registry]
        async with serving(SteppingEngine()) as (_, clients):
            _, connection = await connect(clients, far)
            await until(lambda: clients.ready)
            assert next(iter(clients._clients)).series, "told with the first word"
            unpicklable: Any = threading.Lock()
            with pytest.raises(TypeError):
                await far.submit([97], unpicklable)
            assert far.num_open == 0
            far.expect(Health("dead", "it was killed"))
        await connection
        assert far.health == Health("dead", "it was killed")
        assert b"llmjax_tried" not in await far.metrics([registry]), "there may be other parts of the sum"

    run(main)
