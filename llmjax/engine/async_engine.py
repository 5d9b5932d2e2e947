"""`AsyncEngine`: one `Engine` behind asyncio. Many tasks ask, one thread steps.

Owns the engine thread, the way into it (a queue of calls, run between two steps) and the way out (one `call_soon_threadsafe` a
step and event loop). Nobody else may touch the engine while it runs. Knows no HTTP, and imports no JAX itself.

    async with AsyncEngine(llm.engine) as engine:
        async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.new_text[0], end="")

A consumer that stops (its task is cancelled, it breaks out of the loop) ends its request between two steps: whether it is queued,
in its prefill or decoding, its pages go back at once. The engine never waits for a reader: what a slow one has not taken is
merged, so that a request keeps at most its own output waiting.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from llmjax.engine.engine_client import EngineClient
from llmjax.engine.engine_state import EngineState
from llmjax.engine.health import Health
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.request_stream import Ask, Part, RequestStream
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import EngineError, LlmjaxError, QueueFullError, RequestError, UnavailableError
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.metrics import ANY_LANE

if TYPE_CHECKING:
    from llmjax.engine.engine import Engine

log = logging.getLogger(__name__)

MAX_RETRY_AFTER = 60
_MOST_ABORTS = 1024  # that are remembered for requests which have come and are not here yet


class AsyncEngine(EngineClient):
    """Requests from any number of tasks and event loops to one engine.

    Args:
        engine: owned from `start` to `stop`: nothing else may call it.
        max_waiting: choices beyond the engine's rows that may wait; one more is a `QueueFullError`.
        watchdog: seconds that one step may take. After them the engine counts as stuck: every stream ends with an error and no
            request is taken, until the step returns.
        model_name: label of its metrics.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024, watchdog: float = 60.0, model_name: str = "model") -> None:
        self._engine = engine
        self._capacity = engine.config.max_sequences + max_waiting
        self._watchdog_seconds = watchdog
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[RequestStream, None] = {}  # not ended, known to the engine or not; guarded by the lock
        self._aborts: dict[str | None, int] = {}  # groups and when, the latest last; guarded by the lock
        self._lock = threading.Lock()
        self._streams: dict[str, RequestStream | None] = {}  # None: aborted, nobody reads its last output
        self._choices = 0  # the engine thread's: theirs
        self._finish_times: collections.deque[float] = collections.deque(maxlen=64)
        self._ids = itertools.count()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._busy_since: float | None = None  # monotonic; None while the engine thread waits for something to do
        self._draining = False
        self._death: str | None = None
        self._state = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._state.register(EngineState(self, self._labels))

    @property
    def engine(self) -> Engine:
        """For what does not change (config, tokenizer) and for reading counters; `call` is for everything else."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See `EngineClient`."""
        return self._engine.tokenizer

    @property
    def max_context(self) -> int:
        """See `EngineClient`."""
        return int(self._engine.config.max_context or 0)

    @property
    def capacity(self) -> int:
        """See `EngineClient`."""
        return self._capacity

    @property
    def model_name(self) -> str:
        """Label of its metrics."""
        return self._labels["model_name"]

    @property
    def watchdog(self) -> float:
        """Seconds that one step may take."""
        return self._watchdog_seconds

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._open)

    # -- life

    def start(self) -> None:
        """Start the engine thread; the first request does it too. Does nothing when it runs."""
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="llmjax-engine", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch, name="llmjax-watchdog", daemon=True).start()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def health(self) -> Health:
        """The state at this moment."""
        if self._death is not None:
            return Health("dead", self._death)
        if self._thread is None:
            return Health("draining", "the engine takes no more requests") if self._draining else Health("new")
        if self._ended.is_set():
            return Health("stopped", "the engine was stopped")
        if self._is_stuck():
            return Health("stuck", f"the engine has not finished a step for {self._watchdog_seconds:g} s")
        if self._draining:
            return Health("draining", "the engine takes no more requests and finishes those it has")
        return Health("ready")

    def close_doors(self) -> None:
        """Take no more requests; those taken go on. May be called from any thread."""
        self._draining = True

    async def drain(self, timeout: float) -> bool:
        """`close_doors`, then wait until every stream has ended, at most `timeout` seconds; then end the rest with an error.

        Returns whether none had to be ended.
        """
        self.close_doors()
        deadline = time.monotonic() + timeout
        with self._lock:  # whoever looked at the doors before they were closed is through
            pass
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._fail_all(UnavailableError, "the server is shutting down, and the request took longer than it waits")

    def stop(self, timeout: float | None = None) -> bool:
        """End every stream with an error, and the engine thread after its step. Whether it has ended within `timeout` seconds.

        The engine itself is left as it is, without requests, for others to use. May be called from any thread but the engine's.
        """
        self._draining = True
        self._fail_all(UnavailableError, "the engine was stopped")
        if self._thread is None:
            return True
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- requests

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish reason "abort". Unknown and finished ids are ignored."""

        def abort() -> None:
            if request_id in self._streams:
                self._engine.abort(request_id)

        self._calls.put(abort)

    async def abort_group(self, group: str | None) -> int:
        """See `EngineClient`."""
        with self._lock:
            found = [stream for stream in self._open if stream.group is not None and group in (None, stream.group)]
            self._aborts.pop(group, None)
            self._aborts[group] = time.monotonic_ns()
            if len(self._aborts) > _MOST_ABORTS:
                del self._aborts[next(iter(self._aborts))]
        for stream in found:
            self.abort(stream.request_id)
        return len({stream.group for stream in found})

    async def call[T](self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread between two steps, e.g. `lambda: engine.update_params(params)`; its result.

        It must be quick: no request advances meanwhile. What it raises is raised here, and the engine goes on.
        """
        self._check_open()
        return await self._call(function)

    async def _call[T](self, function: Callable[[], T]) -> T:
        self._check_not_ended()
        self.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(method: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                method(value)

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self._post(loop, functools.partial(settle, future.set_exception, error))
            else:
                self._post(loop, functools.partial(settle, future.set_result, result))

        self._calls.put(run)
        while not future.done():
            await asyncio.wait((future,), timeout=1.0)
            if not future.done():
                self._check_not_ended()
        return future.result()

    def _check_not_ended(self) -> None:
        if self._ended.is_set():
            raise EngineError(self._death or "the engine was stopped")

    async def update_params(self, params: Any) -> None:
        """See `Engine.update_params`."""
        await self.call(lambda: self._engine.update_params(params))

    async def snapshot(self) -> dict[str, Any]:
        """See `EngineClient`."""
        from llmjax.engine.engine_view import picture_json, read_engine, take_picture  # needs numpy, which an HTTP worker lacks

        engine = self._engine
        picture = await self._call(lambda: take_picture(engine))
        return await asyncio.to_thread(lambda: picture_json(picture, read_engine(engine)))

    async def memory_map(self) -> dict[str, Any]:
        """See `EngineClient`."""
        found = await self._call(self._engine.memory_map)
        return await asyncio.to_thread(found.to_json)

    def retry_after(self) -> int:
        """Whole seconds in which a place is likely to become free, from the pace at which requests ended of late."""
        times = list(self._finish_times)
        if not times:
            return 1
        return min(MAX_RETRY_AFTER, max(1, math.ceil((time.monotonic() - times[0]) / len(times))))

    async def metrics(self, own: Sequence[CollectorRegistry]) -> bytes:
        """See `EngineClient`."""
        return b"".join(map(generate_latest, (*own, self._state))) + self._engine.metrics.text(self._labels)

    # -- the callers' side

    async def submit_ids(self, ids: Sequence[int], params: SamplingParams, ask: Ask) -> RequestStream:
        """`submit` for a caller who has tokenised the prompt and made the `Ask` itself."""
        self._check_open()
        return await self._submit(None, ids, params, ask)

    async def _submit(self, text: str | None, ids: Sequence[int], params: SamplingParams, ask: Ask) -> RequestStream:
        stream = RequestStream(ask.request_id or f"async-{next(self._ids)}", text, ids, params, ask, self._close)
        grammar = None  # held until the engine has found it
        if params.structured is not None:
            grammar = await asyncio.wrap_future(self._engine.grammars.start(params.structured))
        with self._lock:  # the doors may be closed by now; who closes them finds it among the open ones, or it is refused
            self._check_open()
            if stream.group is not None:  # aborted while its prompt was tokenised, perhaps, or its form compiled
                stream.aborted = any(self._aborts.get(group, 0) > stream.arrival_ns for group in (stream.group, None))
            self._open[stream] = None
            self._calls.put(functools.partial(self._add, stream))
        self.start()
        if self._ended.is_set():  # it died in between, and will not look into the queue again
            self._fail_all(EngineError, self._death or "the engine was stopped")
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        del grammar
        return stream

    def _close(self, stream: RequestStream, *, ended: bool) -> None:
        """Called on the stream's loop, once: it has been read to its end, or nobody reads on."""
        with self._lock:
            self._open.pop(stream, None)
        if not ended:
            self._calls.put(functools.partial(self._drop, stream))

    # -- the engine's thread

    def _run(self) -> None:
        try:
            while self._take_calls():
                if self._engine.has_unfinished:
                    self._busy_since = time.monotonic()
                    self._hand_out(self._engine.step())
            for request_id in list(self._streams):
                self._engine.abort(request_id)
            while self._engine.has_unfinished:  # launches in flight: the engine is left without requests
                self._hand_out(self._engine.step())
        except BaseException as error:
            reason = str(error) if isinstance(error, LlmjaxError) else f"{type(error).__name__}: {error}"
            self._death = f"the engine has died ({reason.splitlines()[0] if reason else 'no message'})"
            log.error("%s", self._death, exc_info=error)
        finally:
            self._busy_since = None
            self._ended.set()
            self._fail_all(EngineError, self._death or "the engine was stopped")

    def _take_calls(self) -> bool:
        """Run the calls that wait, or wait for one if there is nothing else to do. False: stop."""
        wait = not self._engine.has_unfinished
        while True:
            if wait:
                self._busy_since = None
            try:
                call = self._calls.get(wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            self._busy_since = time.monotonic()
            call()
            wait = False

    def _add(self, stream: RequestStream) -> None:
        if stream.closed:
            return
        try:
            if stream.request_id in self._streams:  # also one that was aborted, until its last output has been handed out
                raise RequestError(f"request id {stream.request_id!r} is in use by an unfinished request", "request_id")
            self._check_room(stream.params.n)
            self._engine.add_request(stream.prompt_ids, stream.params, request_id=stream.request_id, arrival_ns=stream.arrival_ns)
        except Exception as error:
            if not isinstance(error, LlmjaxError):
                log.error("request %s could not be added", stream.request_id, exc_info=error)
            self._post(stream.loop, functools.partial(stream.fail, error))
            return
        self._streams[stream.request_id] = stream
        self._choices += stream.params.n
        if stream.aborted:
            self._engine.abort(stream.request_id)
        if not self._post(stream.loop, stream.accept):
            self._drop(stream)

    def _check_room(self, choices: int) -> None:
        if choices > self._capacity:
            raise RequestError(f"n is {choices}, and at most {self._capacity} choices may run and wait: ask for fewer", "n")
        if self._choices + choices > self._capacity:
            self._engine.metrics.refused(ANY_LANE)
            raise QueueFullError(
                f"the queue is full: {self._choices} choices run or wait, at most {self._capacity} may; try again later", ANY_LANE
            )

    def _drop(self, stream: RequestStream) -> None:
        """Nobody reads it any more. Its place is free, its id when its last output is out."""
        if self._streams.get(stream.request_id) is stream:
            self._engine.abort(stream.request_id)
            self._forget(stream)
            self._streams[stream.request_id] = None

    def _forget(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._choices -= stream.params.n
        self._finish_times.append(time.monotonic())

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Give a step's outputs to their streams: one call for each event loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Part]]] = collections.defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                if output.finished:
                    self._streams.pop(output.request_id, None)
                continue
            if output.finished:
                self._forget(stream)
            if (part := stream.cut(output)) is not None:
                batches[stream.loop].append((stream, part))
        for loop, batch in batches.items():
            if not self._post(loop, functools.partial(_deliver, batch)):
                for stream, _ in batch:  # its loop is closed: nobody can read on
                    self._drop(stream)

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
        """Run `call` on a loop; False when that is closed."""
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    def _fail_all(self, kind: type[LlmjaxError], message: str) -> int:
        """End every open stream with an error of its own; how many there were. From any thread."""
        with self._lock:
            streams = list(self._open)
            self._open.clear()
        for stream in streams:
            self._post(stream.loop, functools.partial(stream.fail, kind(message)))
            self._calls.put(functools.partial(self._drop, stream))
        return len(streams)

    # -- the watchdog's thread

    def _is_stuck(self) -> bool:
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._watchdog_seconds

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._watchdog_seconds / 4)):
            if not self._is_stuck():
                continue
            why = f"the engine is stuck: a step takes longer than {self._watchdog_seconds:g} s"
            if ended := self._fail_all(EngineError, why):
                log.error("%s; %d requests were ended", why, ended)


def _deliver(batch: Sequence[tuple[RequestStream, Part]]) -> None:
    for stream, part in batch:
        stream.put(part)
