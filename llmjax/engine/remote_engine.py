"""`RemoteEngine`: an engine of another process, at the other end of a socket pair. The other end is `EngineSocket`.

Everything happens on one event loop. Outlives its engine: when the socket closes all streams end with an error, and the next
`connect` may bring another engine of the same model. Knows no processes: who runs them says what to expect (`expect`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest

from llmjax.engine.engine_client import EngineClient
from llmjax.engine.engine_messages import Hello, News, frame, read_frame, unpack_error, unpack_part
from llmjax.engine.health import Health
from llmjax.engine.request_stream import Ask, RequestStream
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import EngineError, UnavailableError
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.metric_sums import Series, read_series

_SERIES_EVERY = 0.5  # seconds between two looks at whether this client's own series have changed


class RemoteEngine(EngineClient):
    """A client of whatever engine is connected.

    Args:
        on_hello: called when an engine has told what it is, before it hears that this client is ready.
        alone: whether no other clients of the engine count series.

    Attributes:
        registries: this client's own series; told to the engine from time to time, so that another client's `metrics` has them.
    """

    def __init__(self, on_hello: Callable[[], None] = lambda: None, *, alone: bool = False) -> None:
        self._on_hello = on_hello
        self._alone = alone
        self.registries: Sequence[CollectorRegistry] = ()
        self._expected: Health | None = Health("starting", "the engine is starting")  # None: nothing but what the engine says
        self._hello: Hello | None = None
        self._tokenizer: Tokenizer | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._said = Health("starting", "the engine is starting")
        self._retry_after = 1
        self._heard = 0.0  # monotonic, the last message
        self._streams: dict[int, RequestStream] = {}
        self._numbers: dict[RequestStream, int] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._next = itertools.count()

    # -- the connection

    async def connect(self, connection: socket.socket) -> None:
        """Talk to the engine at the other end, until the socket closes. Then every stream has ended."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        tasks: list[asyncio.Task[None]] = []
        try:
            hello = await read_frame(reader)
            assert isinstance(hello, Hello)
            self._hello = dataclasses.replace(hello, tokenizer=b"")  # megabytes
            self._tokenizer = pickle.loads(hello.tokenizer)
            self._said, self._heard = Health("ready"), time.monotonic()
            self._on_hello()
            self._writer, self._expected = writer, None
            self._send("series", read_series(self.registries))  # first, so that sums over all clients never lack them
            self._send("ready")
            tasks = [asyncio.create_task(self._tell_series()), asyncio.create_task(self._watch(self._hello.watchdog))]
            while True:
                self._take(await read_frame(reader))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for task in tasks:
                task.cancel()
            self._writer = None
            writer.transport.abort()  # what was not taken need not be: the engine ends the requests of a closed socket
            ended = "the engine's process has ended"
            if self._expected is None:  # else it has been told already what becomes of it
                self._expected = self._said if self._said.state == "draining" else Health("starting", ended)
            self._end_all(ended)

    @property
    def name(self) -> str:
        """The model's own name. Only once an engine has been connected."""
        return self._told.name

    def expect(self, health: Health) -> None:
        """What holds while no engine is connected."""
        self._expected = health

    def _send(self, *message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def _take(self, news: News) -> None:
        self._said, self._retry_after, self._heard = news.state, news.retry_after, time.monotonic()
        streams = self._streams
        for number in news.accepted:
            if (stream := streams.get(number)) is not None:
                stream.accept()
        for number, packed in news.parts:
            if (stream := streams.get(number)) is not None:
                stream.put(unpack_part(packed, cast("list[int]", stream.prompt_ids)))  # made by _submit
        for number, packed in news.failures:
            if (stream := streams.get(number)) is not None:
                stream.fail(unpack_error(packed))
        for number, answer in news.answers:  # to a question that was given up in a silence as well
            if (future := self._questions.pop(number, None)) is not None and not future.done():
                future.set_result(answer)
        for number, packed in news.refusals:
            if (future := self._questions.pop(number, None)) is not None and not future.done():
                future.set_exception(unpack_error(packed))

    def _end_all(self, why: str) -> None:
        for stream in list(self._streams.values()):
            stream.fail(EngineError(why))
        for future in self._questions.values():
            if not future.done():
                future.set_exception(EngineError(why))
        self._questions.clear()

    async def _watch(self, silence: float) -> None:
        """A process that says nothing (stopped, or thrashing) cannot be waited for."""
        while True:
            await asyncio.sleep(min(1.0, silence / 4))
            if self._is_silent():
                for number, stream in self._streams.items():
                    if not stream.ends:
                        self._send("close", number)  # nobody reads on when it is heard of again
                self._end_all(self.health.reason)

    async def _tell_series(self) -> None:
        told: Series = []
        while True:
            await asyncio.sleep(_SERIES_EVERY)
            if (series := read_series(self.registries)) != told:
                told = series
                self._send("series", series)

    # -- EngineClient

    @property
    def health(self) -> Health:
        """See `EngineClient`."""
        if self._writer is None:
            return self._expected or self._said
        if self._is_silent():
            return Health("stuck", f"the engine's process has said nothing for {self._told.watchdog:g} s")
        # One that has died may be started again: only whoever runs its process can say that it is gone.
        return Health("starting", self._said.reason) if self._said.gone else self._said

    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard > self._told.watchdog + 2.0  # its heartbeat comes on top

    @property
    def _told(self) -> Hello:
        if self._hello is None:
            raise UnavailableError(f"{self.health.reason}: try again later, or elsewhere")
        return self._hello

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See `EngineClient`."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """See `EngineClient`."""
        return self._told.max_context

    @property
    def capacity(self) -> int:
        """See `EngineClient`."""
        return self._told.capacity

    @property
    def num_open(self) -> int:
        """See `EngineClient`."""
        return len(self._streams)

    def start(self) -> None:
        """The engine runs by itself."""

    def retry_after(self) -> int:
        """See `EngineClient`."""
        return self._retry_after

    async def abort_group(self, group: str | None) -> int:
        """See `EngineClient`."""
        return int(await self._question("abort", group))

    async def metrics(self, own: Sequence[CollectorRegistry]) -> bytes:
        """See `EngineClient`. Without an answer of the engine `own` is left out where it may be a part of a sum only.

        A series that is missing for a while is no reset of a counter; one that is smaller would be.
        """
        if self._writer is not None and not self._is_silent():
            with contextlib.suppress(EngineError):  # it fell silent, or ended
                answer = await self._question("metrics", read_series(own))
                assert isinstance(answer, bytes)
                return answer
        state = CollectorRegistry()
        name = "" if self._hello is None else self._hello.model_name
        Gauge("llmjax:engine_ready", "1 while requests are taken.", ["model_name"], registry=state).labels(name)
        whole = own if self._alone and self._writer is None else ()
        return b"".join(map(generate_latest, (*whole, state)))

    async def snapshot(self) -> dict[str, Any]:
        """See `EngineClient`."""
        return dict(await self._question("snapshot", None))

    async def memory_map(self) -> dict[str, Any]:
        """See `EngineClient`."""
        return dict(await self._question("memory", None))

    async def _question(self, what: str, argument: Any) -> Any:
        if self._writer is None:
            raise UnavailableError(f"{self.health.reason}: try again later, or elsewhere")
        number = next(self._next)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(what, number, argument)
            return await future
        finally:
            self._questions.pop(number, None)

    async def _submit(self, text: str | None, ids: Sequence[int], params: SamplingParams, ask: Ask) -> RequestStream:
        self._check_open()  # it may have gone while the prompt was tokenised
        number, ids = next(self._next), list(ids)
        stream = RequestStream(ask.request_id or f"remote-{number}", text, ids, params, ask, self._close)
        self._streams[number], self._numbers[stream] = stream, number
        try:
            self._send("submit", number, stream.request_id, ask.group, ids, params, ask.arrival_ns)
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def _close(self, stream: RequestStream, *, ended: bool) -> None:
        number = self._numbers.pop(stream)
        del self._streams[number]
        if not ended:
            self._send("close", number)
