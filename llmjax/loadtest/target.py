"""What a load test talks to: `Target`, and the engine of this process as one.

A target is asked for tokens and told the time by its own clock, so that the same driver runs against an engine, a server or a
simulation in virtual time. It must not know profiles, percentiles or reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from llmjax.engine.outputs import RequestOutput
from llmjax.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a conversation."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrafficRequest:
    """One request of a workload.

    Attributes:
        prompt: what is asked.
        output_tokens: tokens after which the client has enough; it then stops the request, if it goes on.
        max_tokens: tokens it asks for, at least `output_tokens`: what whoever reserves memory ahead must reckon with.
        ignore_eos: go on after the model's own end, so that outputs have the lengths the workload says.
        arrival: seconds after the first request's, where the traffic was recorded; else None.
    """

    prompt: Prompt
    output_tokens: int
    max_tokens: int
    ignore_eos: bool = True
    arrival: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """Something came back for a request.

    Attributes:
        request_id: as `submit` gave it.
        time: seconds of the target's clock at which the client had it.
        tokens: new output tokens; 0 for a message without any, which is no token event to anybody.
        finish_reason: set with the last event: "stop", "length", "abort", "error", ...
        error: why, for an end in error.
        prompt_tokens: of the prompt; None where the target does not tell.
        queue_seconds: time the target let it wait; with the last event, None where the target does not tell.
        preemptions: how often it lost its memory and was computed again, so far.
        total_tokens: output tokens in all, with the last event, where events do not tell theirs; else None.
    """

    request_id: str
    time: float
    tokens: int
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    queue_seconds: float | None = None
    preemptions: int = 0
    total_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Gauge:
    """The state of a target at one moment: requests with and without a row, and pages of its pool.

    `pages_reserved` are those nobody else may have, `pages_used` those of them that hold tokens.
    """

    time: float
    running: int
    waiting: int
    pages_used: int
    pages_reserved: int
    num_pages: int


class Target(Protocol):
    """What `drive` needs. One thread calls everything."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""

    def submit(self, request: TrafficRequest) -> str:
        """Send a request; returns its id. Raises `LlmjaxError` when it is refused."""

    def abort(self, request_id: str) -> None:
        """Stop a request; events may still come for it."""

    def poll(self, until: float | None) -> Sequence[TokenEvent]:
        """Let it work, and return what came back. Returns early and empty-handed as it likes, and no later than the end of
        the step during which the clock reached `until`; None: there is no such time."""

    def settle(self) -> None:
        """Return once nothing is left of requests that were aborted."""

    def gauge(self) -> Gauge | None:
        """Its state now; None where it does not tell."""


@contextlib.contextmanager
def _whole_step() -> Iterator[None]:
    """Inside, on the main thread, a first Ctrl-C waits until the end: an engine that is interrupted in a launch is lost. A second
    one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def on_interrupt(number: int, frame: types.FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if came:
        raise KeyboardInterrupt


class EngineTarget:
    """An engine of this process; its loop runs inside `poll`. Nobody else may use the engine meanwhile.

    Args:
        engine: an `Engine`, or what has its methods.
        clock, sleep: `sleep(seconds)` passes time of `clock()`.
    """

    def __init__(
        self, engine: Any, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._sleep = sleep

    def now(self) -> float:
        """See `Target`."""
        return self._clock()

    def submit(self, request: TrafficRequest) -> str:
        """See `Target`. Tokenising is part of it, and so of the time to the first token."""
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=request.ignore_eos)
        prompt = request.prompt
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return str(self._engine.add_chat(list(prompt), params))
        return str(self._engine.add_request(prompt, params))

    def abort(self, request_id: str) -> None:
        """See `Target`."""
        self._engine.abort(request_id)

    def poll(self, until: float | None) -> Sequence[TokenEvent]:
        """See `Target`: one step of the engine, or a rest until `until`."""
        if not self._engine.has_unfinished:
            if until is not None:
                self._sleep(max(0.0, until - self._clock()))
            return ()
        with _whole_step():
            outputs = self._engine.step()
        now = self._clock()
        return [_event(output, now) for output in outputs]

    def settle(self) -> None:
        """See `Target`."""
        while self._engine.has_unfinished:
            with _whole_step():
                self._engine.step()

    def gauge(self) -> Gauge | None:
        """See `Target`."""
        scheduler, pool = self._engine.scheduler, self._engine.pool
        return Gauge(
            time=self._clock(),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_used=pool.num_used,
            pages_reserved=scheduler.num_reserved_pages,
            num_pages=pool.capacity,
        )


def _event(output: RequestOutput, now: float) -> TokenEvent:
    reason: str | None = None
    if output.finished:
        reasons = [str(choice.finish_reason) for choice in output.outputs]
        reason = next((r for r in reasons if r not in ("stop", "length")), reasons[0])
    timings = output.timings  # with the last output
    return TokenEvent(
        request_id=output.request_id,
        time=now,
        tokens=sum(len(new) for new in output.new_token_ids),
        finish_reason=reason,
        error=next((choice.error for choice in output.outputs if choice.error is not None), None),
        prompt_tokens=len(output.prompt_token_ids),
        queue_seconds=None if timings is None else timings.queue_ns * 1e-9,
        preemptions=output.num_preemptions,
    )
