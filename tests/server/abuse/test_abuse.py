"""Hostile clients over real sockets: nothing breaks, nothing stays behind, and who behaves gets what he would get alone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from hostile_clients import Client, Told
from scripted_model import CONTEXT, Scripted
from served import Served, parse_events

from llmjax.engine.request_stream import RequestStream
from llmjax.server.http_server import HttpServer
from llmjax.server.protocol import ApiRequest
from llmjax.server.streaming import EventWriter

NEIGHBOUR = {"prompt": "a", "max_tokens": CONTEXT - 2, "ignore_eos": True, "temperature": 0}
QUEUE = 64


class Target:
    """A server on a port, and what it holds."""

    def __init__(self, scripted: Scripted) -> None:
        self.engine = scripted.engine
        self.served = Served(scripted.engine, max_waiting=QUEUE)
        self.loop: asyncio.AbstractEventLoop | None = None
        app = self.served.app

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            self.loop = asyncio.get_running_loop()
            await app(scope, receive, send)

        self.server = HttpServer(watched, self.served.engine, host="127.0.0.1", port=0, drain=1.0)
        self.server.start()
        self.port = int(self.server.url.rsplit(":", 1)[1])

    def held(self) -> dict[str, int]:
        """Everything that must come back to what it was."""
        assert self.loop is not None
        gc.collect()
        kinds = Counter(type(one) for one in gc.get_objects())
        return {
            "tasks": len(asyncio.all_tasks(self.loop)),
            "file descriptors": len(os.listdir("/proc/self/fd")),
            "open requests": self.served.engine.num_open,
            "pages": self.engine.pool.num_used,
            **{kind.__name__: kinds[kind] for kind in (RequestStream, ApiRequest, EventWriter)},
        }

    def answers(self) -> Counter[str]:
        """Answers so far by status, as the server counts them."""
        found: Counter[str] = Counter()
        for status, count in re.findall(r'^http_requests_total\{.*status="(\d+)"\} (\S+)$', self.metrics(), re.MULTILINE):
            found[status] += int(float(count))
        return found

    def metrics(self) -> str:
        return httpx2.get(f"{self.server.url}/metrics", timeout=60).text


@pytest.fixture
def target(scripted: Scripted) -> Iterator[Target]:
    one = Target(scripted)
    one.metrics()
    yield one
    one.server.close()
    while scripted.engine.has_unfinished:
        scripted.engine.step()
    scripted.engine.scheduler.check_integrity()
    assert scripted.engine.pool.num_used == 0


def settle(read: Callable[[], dict[str, int]], expected: dict[str, int]) -> None:
    deadline = time.monotonic() + 60
    while (found := read()) != expected:
        assert time.monotonic() < deadline, (found, expected)
        time.sleep(0.05)


async def stream(url: str) -> str | None:
    """The neighbour's text; None when there was no place for it."""
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{url}/v1/completions", json={**NEIGHBOUR, "stream": True})
    if answer.status_code == 429:
        return None
    assert answer.status_code == 200, answer.text
    return "".join(event["choices"][0]["text"] for event in parse_events(answer.content))


def besiege(target: Target, told: Told, *, clients: int, seconds: float, seed: int) -> int:
    """`clients` at a time for so long, beside a neighbour who streams again and again; how often he could."""
    alone = asyncio.run(stream(target.server.url))
    assert alone is not None
    assert len(alone) > CONTEXT / 2
    over = time.monotonic() + seconds

    async def come_and_go(number: int) -> None:
        visits = 0
        while not visits or time.monotonic() < over:
            await Client(target.port, hash((seed, number, visits)), told).misbehave()
            visits += 1

    async def neighbour(crowd: asyncio.Future[Any]) -> int:
        streams = 0
        while not crowd.done():
            if (text := await stream(target.server.url)) is not None:
                assert text == alone
                streams += 1
        return streams

    async def both() -> int:
        crowd = asyncio.gather(*(come_and_go(number) for number in range(clients)))
        streams = await neighbour(crowd)
        await crowd
        return streams

    return asyncio.run(both())


def write_script(target: Target, scripted: Scripted, seed: int) -> None:
    letters = random.Random(seed).choices(range(97, 123), k=CONTEXT - 1)
    asyncio.run(target.served.engine.call(lambda: scripted.script(letters)))


@pytest.mark.parametrize(
    ("clients", "seconds"), [(40, 4.0), pytest.param(200, 120.0, marks=pytest.mark.slow)], ids=["brief", "two minutes"]
)
def test_a_siege_leaves_nothing_behind_and_no_neighbour_changed(
    target: Target, scripted: Scripted, clients: int, seconds: float
) -> None:
    seed, told = random.randrange(2**32), Told()
    write_script(target, scripted, seed)
    before = target.held()
    streams = besiege(target, told, clients=clients, seconds=seconds, seed=seed)
    settle(target.held, before)
    resident = memory()
    besiege(target, told, clients=clients, seconds=seconds / 4, seed=seed + 1)
    settle(target.held, before)
    assert not told.wrong, (seed, told.wrong[:3])
    assert streams
    assert {200, 400, 413} <= told.statuses.keys(), (seed, told.statuses)
    answers = target.answers()
    assert answers["200"], answers
    assert not [status for status in answers if status.startswith("5")], answers
    assert memory() - resident < 100 * 2**20, seed
    assert httpx2.get(f"{target.server.url}/readyz").status_code == 200


@pytest.mark.parametrize("crowd", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_crowd_beyond_the_queue_is_sent_away_and_told_when_to_come_back(target: Target, scripted: Scripted, crowd: int) -> None:
    write_script(target, scripted, random.randrange(2**32))
    before, told = target.held(), Told()
    body = json.dumps({**NEIGHBOUR, "max_tokens": 20}).encode()

    async def all_at_once() -> None:
        clients = [Client(target.port, number, told) for number in range(crowd)]
        go = asyncio.Event()

        async def one(client: Client) -> None:
            reader, writer = await client.connect()
            await go.wait()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n")
            writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
            client.note(await client.answer(reader), {200, 429})
            writer.close()

        tasks = [asyncio.ensure_future(one(client)) for client in clients]
        go.set()
        await asyncio.gather(*tasks)

    release = hold(target)
    try:
        asyncio.run(all_at_once())
    finally:
        release()
    settle(target.held, before)
    assert not told.wrong, told.wrong[:3]
    assert told.statuses.total() == crowd
    assert told.statuses[200] >= QUEUE
    assert told.statuses[429] > 0


def hold(target: Target) -> Callable[[], None]:
    """The engine takes its time for a step, so that the crowd is there before the first of it has gone."""
    step = target.engine.step

    def slow_step(**options: Any) -> Any:
        time.sleep(0.02)
        return step(**options)

    target.engine.step = slow_step  # type: ignore[method-assign]

    def release() -> None:
        del target.engine.step

    return release


def memory() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
