"""`EngineSocket`: an `AsyncEngine` for clients in other processes, each at the other end of a socket pair.

Runs an event loop on a thread of its own, which is one more reader of the engine: the engine's thread does for it what it does
for any loop, one call a step. All that a step brings to one client goes out in one message. A client that does not read is not
waited for: its streams' parts are merged until it does (`RequestStream`). When its socket closes, its requests are aborted.

The series that clients count (`EngineClient.metrics`) are summed here. Knows no HTTP and no processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pickle
import socket
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine_messages import Hello, News, frame, pack_error, pack_part, read_frame
from llmjax.engine.request_stream import Ask, RequestStream
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.metric_sums import Series, SummedSeries, sum_series

log = logging.getLogger(__name__)

HEALTH_EVERY = 0.1  # seconds between two looks at the engine's health
_CLOSING = 1.0  # seconds for the last of what was said to a client, once nobody waits for it any more
_JOINING = 0.5  # seconds in which a client that has just come tells what it has counted
HEARTBEAT = 1.0  # seconds after which a client hears something in any case


class EngineSocket:
    """Serves clients until it is closed.

    Args:
        engine: started, and stopped by its owner after this is closed.
        name: the model's own.
    """

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self._engine = engine
        tokenizer = pickle.dumps(engine.tokenizer, protocol=5)
        self._hello = frame(
            Hello(name, engine.model_name, engine.max_context, engine.capacity, engine.watchdog, tokenizer=tokenizer)
        )
        self._clients: dict[_Client, asyncio.Task[None]] = {}
        self._retired: Series = []  # counted by clients that are gone
        self._added = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmjax-clients", daemon=True)

    def start(self) -> None:
        """Start engine and thread."""
        self._engine.start()
        self._thread.start()
        self._on_loop(self._begin())

    async def _begin(self) -> None:
        self._ticker = asyncio.create_task(self._tick())

    def add(self, connection: socket.socket) -> None:
        """Serve the client at the other end, from now on. The socket is this object's. From any thread."""
        self._on_loop(self._add(connection))

    @property
    def ready(self) -> bool:
        """Whether every client that is there, one at least, has understood the engine."""
        clients = list(self._clients)
        return bool(clients) and all(client.ready for client in clients)

    def close(self, timeout: float) -> None:
        """Send what is still to be said, at most for `timeout` seconds, and close the sockets. May be called again."""
        if not self._loop.is_closed():
            self._on_loop(self._end(timeout))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- on the loop

    async def _add(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        self._added += 1
        client = _Client(self, self._engine, self._added, reader, writer)
        writer.write(self._hello)
        self._clients[client] = asyncio.create_task(self._serve(client))

    async def _serve(self, client: _Client) -> None:
        try:
            await client.serve()
        finally:
            del self._clients[client]
            self._retired = sum_series([self._retired, client.series])

    async def _tick(self) -> None:
        """Tell clients when the engine's health changes."""
        before = self._engine.health
        while True:
            await asyncio.sleep(HEALTH_EVERY)
            health = self._engine.health
            if health != before:
                before = health
                for client in self._clients:
                    client.wake.set()

    async def _end(self, timeout: float) -> None:
        self._ticker.cancel()
        tasks = list(self._clients.values())
        for client in list(self._clients):
            client.finish()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def metrics(self) -> bytes:
        """The engine's series, and the sum of those of all clients."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOINING):
                while not self.ready:
                    await asyncio.sleep(0.005)
        total = CollectorRegistry()
        total.register(SummedSeries(sum_series([self._retired, *(client.series for client in self._clients)])))
        return await self._engine.metrics([total])


class _Client:
    """One client and its streams. Everything happens on the socket's loop."""

    def __init__(
        self, owner: EngineSocket, engine: AsyncEngine, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.series: Series = []
        self.ready = False
        self.wake = asyncio.Event()
        self._owner = owner
        self._engine = engine
        self._number = number
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, RequestStream] = {}
        self._submitting: dict[int, asyncio.Task[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._accepted: list[int] = []
        self._failures: list[tuple[int, Any]] = []
        self._answers: list[tuple[int, Any]] = []
        self._refusals: list[tuple[int, Any]] = []
        self._finishing = False

    async def serve(self) -> None:
        """Until the socket closes; then nobody reads its streams any more."""
        reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write())
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [reading, writing, *self._submitting.values(), *self._asking]
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, OSError | asyncio.IncompleteReadError):
                    log.error("a client of the engine failed", exc_info=result)
            for stream in self._streams.values():
                stream.close()
            self._writer.close()
            try:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_CLOSING):
                        await self._writer.wait_closed()
            finally:
                self._writer.transport.abort()  # of a client that does not read, also when nobody waits for it any more

    def finish(self) -> None:
        """Send what is left, then close."""
        self._finishing = True
        self.wake.set()

    # -- what the client says

    async def _read(self) -> None:
        while True:
            what, *rest = await read_frame(self._reader)
            match what:
                case "submit":
                    number, *request = rest
                    self._submitting[number] = task = asyncio.create_task(self._submit(number, *request))
                    task.add_done_callback(functools.partial(self._submitted, number))
                case "close":
                    self._forget(rest[0])
                case "series":
                    self.series = rest[0]
                case "ready":
                    self.ready = True
                case "metrics" | "abort" | "snapshot" | "memory":
                    if what == "metrics":
                        self.series = rest[1]  # now: what is said next may be newer, and is read before a task begins
                    task = asyncio.create_task(self._answer(what, *rest))
                    self._asking.add(task)
                    task.add_done_callback(self._asking.discard)

    async def _submit(
        self, number: int, request_id: str, group: str | None, ids: Sequence[int], params: SamplingParams, arrival_ns: int
    ) -> None:
        ask = Ask(
            request_id=f"{self._number}:{request_id}",  # several clients may choose the same
            group=group, arrival_ns=arrival_ns, wake=self.wake,
        )  # fmt: skip
        try:
            self._streams[number] = await self._engine.submit_ids(ids, params, ask)
            self._accepted.append(number)
        except Exception as error:  # told to whoever asked
            self._failures.append((number, pack_error(error)))

    def _submitted(self, number: int, task: asyncio.Task[None]) -> None:
        del self._submitting[number]
        self.wake.set()

    def _forget(self, number: int) -> None:
        if (task := self._submitting.get(number)) is not None:
            task.cancel()
        if (stream := self._streams.pop(number, None)) is not None:
            stream.close()

    async def _answer(self, what: str, question: int, argument: Any) -> None:
        try:
            answer: Any
            if what == "metrics":
                answer = await self._owner.metrics()
            elif what == "snapshot":
                answer = await self._engine.snapshot()
            elif what == "memory":
                answer = await self._engine.memory_map()
            else:
                answer = await self._engine.abort_group(argument)
            self._answers.append((question, answer))  # only now is it known which list goes out next
        except Exception as error:  # told to whoever asked
            log.error("a question could not be answered", exc_info=error)
            self._refusals.append((question, pack_error(error)))
        self.wake.set()

    # -- what it is told

    async def _write(self) -> None:
        while not self._finishing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self.wake.wait()
            self.wake.clear()
            self._writer.write(frame(self._news()))
            await self._writer.drain()
        while self._submitting:  # refused by now, and to be told so
            await asyncio.wait(self._submitting.values())
        self._writer.write(frame(self._news()))
        await self._writer.drain()

    def _news(self) -> News:
        parts: list[tuple[int, Any]] = []
        failures, self._failures = self._failures, []
        accepted, self._accepted = self._accepted, []
        answers, self._answers = self._answers, []
        refusals, self._refusals = self._refusals, []
        ended = []
        for number, stream in self._streams.items():
            try:
                while (part := stream.take_part()) is not None:  # behind the last part there may be an error
                    parts.append((number, pack_part(part)))
                    if part.finished:
                        ended.append(number)
            except Exception as error:  # told to whoever reads the stream
                failures.append((number, pack_error(error)))
                ended.append(number)
        for number in ended:
            del self._streams[number]
        health = self._engine.health
        return News((health.state, health.reason), self._engine.retry_after(), accepted, parts, failures, answers, refusals)
