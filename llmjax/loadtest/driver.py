"""`drive`: sends a workload to a target as its load says, and writes down what came back and when.

Knows no clock but the target's, and judges nothing: the figures are made of its records elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
from collections.abc import Callable, Sequence

from llmjax.errors import EngineError, LlmjaxError
from llmjax.loadtest.arrivals import Load
from llmjax.loadtest.target import Gauge, Target, TokenEvent, TrafficRequest

MAX_GAUGES = 2000  # kept of a run; of more, every other one is dropped
COMPLETE = ("stop", "length")


@dataclasses.dataclass(slots=True)
class Record:
    """One request's life as its client saw it; times are seconds of the target's clock.

    Attributes:
        due: when it came: latencies count from here, whoever kept it waiting.
        sent: when the target got it.
        wanted: output tokens after which the client has enough.
        times, counts: of events with new tokens: when, and how many tokens (those beyond `wanted` are not counted).
        ended: when it was over, None while it goes on.
        error: why it failed, "" if it did not.
        prompt_tokens, queue_seconds, preemptions: as the target told; the queue without the time before `sent`.
    """

    due: float
    wanted: int
    sent: float | None = None
    times: list[float] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    ended: float | None = None
    error: str = ""
    prompt_tokens: int | None = None
    queue_seconds: float | None = None
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens the client has."""
        return sum(self.counts)

    @property
    def completed(self) -> bool:
        """It has ended, and not in error."""
        return self.ended is not None and not self.error


@dataclasses.dataclass
class Trace:
    """What a run left: records in order of arrival, the target's states, and the time from start to the last end."""

    records: list[Record] = dataclasses.field(default_factory=list)
    gauges: list[Gauge] = dataclasses.field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    peak_used: int = 0
    peak_reserved: int = 0
    interrupted: bool = False


def drive(
    target: Target,
    requests: Sequence[TrafficRequest],
    load: Load,
    *,
    batch: int | None = None,
    duration: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Send `requests` as `load` says and wait for all of them.

    Args:
        batch: static batches: at most so many are sent together, and the next only when all of them have ended.
        duration: seconds after which nothing new is sent.
        progress: called with requests ended and requests in all.

    An interrupt ends the run: what it has is returned, with `interrupted`, and nothing is left in the target. Raises what
    the target raises, but for refusals, which are records.

    What this process had made before is left aside when Python looks for garbage meanwhile: looking through all that an engine's
    start leaves behind takes tens of milliseconds, and a service does the same.
    """
    run = _Run(target, requests, load, batch, duration, progress)
    gc.freeze()
    try:
        run.all()
    except KeyboardInterrupt:
        run.trace.interrupted = True
    finally:
        gc.unfreeze()
        run.leave()
    return run.trace


class _Run:
    """The state of one run."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[TrafficRequest],
        load: Load,
        batch: int | None,
        duration: float | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        assert load.concurrency is not None or len(load.times) >= len(requests)
        self._target = target
        self._requests = requests
        self._load = load
        self._batch = batch
        self._duration = duration
        self._progress = progress
        self._held: collections.deque[tuple[TrafficRequest, Record]] = collections.deque()  # came, not sent
        self._live: dict[str, Record] = {}
        self._stopped: dict[str, Record] = {}  # by their clients, when they had enough; the last event is still to come
        self._next = 0
        self._done = 0
        self._every = 1  # of the target's states, so many are passed over for one that is kept
        self._polls = 0
        self.trace = Trace()

    def all(self) -> None:
        self.trace.started = self.trace.ended = self._target.now()
        while True:
            self._arrive()
            self._send()
            until = self._next_arrival()
            if not self._live and not self._held and until is None:
                return
            for event in self._target.poll(until):
                self._take(event)
            self._watch()

    def leave(self) -> None:
        """Nothing of the run stays behind in the target."""
        for request_id in list(self._live):
            self._target.abort(request_id)
        self._target.settle()

    def _arrive(self) -> None:
        now, trace = self._target.now(), self.trace
        if self._duration is not None and now - trace.started >= self._duration:
            self._requests = self._requests[: self._next]
        if self._load.concurrency is None:
            while self._next < len(self._requests) and trace.started + self._load.times[self._next] <= now:
                self._hold(trace.started + self._load.times[self._next])
        else:
            while self._next < len(self._requests) and len(self._held) + len(self._live) < self._load.concurrency:
                self._hold(now)

    def _hold(self, due: float) -> None:
        request = self._requests[self._next]
        record = Record(due, request.output_tokens)
        self.trace.records.append(record)
        self._held.append((request, record))
        self._next += 1

    def _next_arrival(self) -> float | None:
        """When the next request comes by itself; now, for a client that is free because its request was refused."""
        if self._next >= len(self._requests):
            return None
        if self._load.concurrency is not None:
            return None if self._live or self._held else self._target.now()
        return self.trace.started + self._load.times[self._next]

    def _send(self) -> None:
        if self._batch is not None and self._live:
            return
        while self._held and (self._batch is None or len(self._live) < self._batch):
            request, record = self._held.popleft()
            record.sent = self._target.now()
            try:
                self._live[self._target.submit(request)] = record
            except EngineError:
                raise
            except LlmjaxError as error:
                self._end(record, record.sent, f"{type(error).__name__}: {error}")

    def _take(self, event: TokenEvent) -> None:
        record = self._live.get(event.request_id)
        if record is None:
            if event.finish_reason is not None and event.request_id in self._stopped:
                self._stopped.pop(event.request_id).queue_seconds = event.queue_seconds
            return
        if tokens := min(event.tokens, record.wanted - record.output_tokens):
            record.times.append(event.time)
            record.counts.append(tokens)
        record.prompt_tokens = event.prompt_tokens if event.prompt_tokens is not None else record.prompt_tokens
        record.preemptions = event.preemptions
        if event.total_tokens is not None and record.counts:  # of events that did not tell, the last one has the rest
            record.counts[-1] = max(1, record.counts[-1] + min(event.total_tokens, record.wanted) - record.output_tokens)
        if event.finish_reason is not None:
            record.queue_seconds = event.queue_seconds
            del self._live[event.request_id]
            failed = event.finish_reason not in COMPLETE
            self._end(record, event.time, f"{event.finish_reason}: {event.error or 'no reason told'}" if failed else "")
        elif record.output_tokens >= record.wanted:
            self._stopped[event.request_id] = self._live.pop(event.request_id)
            self._target.abort(event.request_id)
            self._end(record, event.time, "")

    def _end(self, record: Record, when: float, error: str) -> None:
        record.ended, record.error = when, error
        self.trace.ended = max(self.trace.ended, when)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, len(self._requests))

    def _watch(self) -> None:
        gauge = self._target.gauge()
        if gauge is None:
            return
        trace = self.trace
        trace.peak_used = max(trace.peak_used, gauge.pages_used)
        trace.peak_reserved = max(trace.peak_reserved, gauge.pages_reserved)
        self._polls += 1
        if self._polls % self._every == 0:
            trace.gauges.append(gauge)
            if len(trace.gauges) >= MAX_GAUGES:
                del trace.gauges[::2]
                self._every *= 2
