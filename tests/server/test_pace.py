"""When events go out, in virtual time: at once while a stream keeps up, merged and apart when it is behind. Times are exact."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.errors import LlmjaxError
from llmjax.server.exchange import EventSender, SlowReaderError
from llmjax.server.generation import Generation
from llmjax.server.pace import APART, LATE, Pace, Wake
from llmjax.server.protocol import parse_request

STEP = 0.004
SEND_TIMEOUT = 3.0
KEEP_ALIVE = 2.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when there is nothing else to do, and at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def pass_time(timeout: float | None) -> Any:
            assert timeout is not None, "nothing would ever happen"
            self.now += timeout + 1e-9  # a timer is due when it is past
            return select(0)

        self._selector.select = pass_time  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Script:
    """A stream as `Generation` sees it: `put` is a step of one word."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._words: list[str] = []
        self._ids: list[int] = []
        self._error: Exception | None = None
        self._finished = False

    def put(self, word: str, *, finished: bool = False) -> None:
        self._words.append(word)
        self._finished = finished
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    @property
    def ends(self) -> bool:
        return self._error is not None or self._finished

    def take(self) -> RequestOutput | None:
        if not self._words:
            if self._error is not None:
                raise self._error
            return None
        words, self._words = self._words, []
        self._ids += [1] * len(words)
        choice = CompletionOutput(0, finish_reason="length" if self._finished else None)
        return RequestOutput(
            "r", "p", [1], [choice], new_text=["".join(words)], new_token_ids=[[1] * len(words)], finished=self._finished
        )


class Client:
    """Notes what it gets and when, in seconds from the start, and reads while `reads` is set."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop, self._started = loop, loop.now
        self.reads = asyncio.Event()
        self.reads.set()
        self.got: list[tuple[float, str]] = []

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            for event in message["body"].decode().split("\n\n")[:-1]:
                shown = event.removeprefix("data: ")
                text = json.loads(shown)["choices"][0]["text"] if shown.startswith("{") else shown
                self.got.append((round(self._loop.now - self._started, 4), text))
        await self.reads.wait()


Plan = Callable[[VirtualLoop, Script, Client], None]


def stream(plan: Plan) -> list[tuple[float, str]]:
    """What a client gets when `plan` has set its timers."""
    clients: list[Client] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        wake = Wake()
        script, client = Script(wake), Client(loop)
        clients.append(client)
        plan(loop, script, client)
        service: Any = types.SimpleNamespace(config=types.SimpleNamespace(keep_alive=KEEP_ALIVE), decode=lambda ids: "")
        request = parse_request("completions", {"prompt": [1], "stream": True})
        sender = EventSender(client.send, SEND_TIMEOUT, {})
        async with sender.watched():
            streams: Any = [script]
            await Generation(service, "completions")._stream(request, streams, wake, sender, "id", "m", {})

    in_virtual_time(run())
    (client,) = clients
    assert client.got.pop()[1] == "[DONE]"
    return client.got


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def steps(loop: VirtualLoop, script: Script, words: str, *, first: float = STEP) -> None:
    """A word a step; the last one ends the stream."""
    for index, word in enumerate(words):
        loop.call_at(loop.now + first + index * STEP, lambda w=word, i=index: script.put(w, finished=i == len(words) - 1))


def test_a_stream_that_keeps_up_has_an_event_a_step_at_once() -> None:
    got = stream(lambda loop, script, client: steps(loop, script, "abcdefgh"))
    assert got == [(round(STEP * (i + 1), 4), word) for i, word in enumerate("abcdefgh")]


def test_a_client_that_was_slow_gets_merged_events_apart_until_it_has_caught_up() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        steps(loop, script, "abcdefghijklmnopqrstuvwxyz")
        loop.call_at(loop.now + 0.005, client.reads.clear)
        loop.call_at(loop.now + 0.018, client.reads.set)  # b is stuck so long, and meanwhile c and d come

    got = stream(plan)
    assert got[:4] == [(0.004, "a"), (0.008, "b"), (0.018, "cd"), (0.038, "efghi")]
    assert got[4:] == [(round(STEP * (i + 1), 4), word) for i, word in enumerate("abcdefghijklmnopqrstuvwxyz") if word > "i"]


def test_a_loop_that_is_behind_merges_too() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        def late() -> None:
            script.put("a")
            script.put("b")

        loop.call_at(loop.now + 0.001, late)
        steps(loop, script, "cdefghij", first=0.004)

    got = stream(plan)
    assert got[:2] == [(0.001, "ab"), (0.021, "cdefg")]
    assert got[2:] == [(0.024, "h"), (0.028, "i"), (0.032, "j")]


def test_the_end_does_not_wait() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        loop.call_at(loop.now + 0.001, lambda: (script.put("a"), script.put("b")))
        loop.call_at(loop.now + 0.003, lambda: script.put("c"))
        loop.call_at(loop.now + 0.005, lambda: script.put("d", finished=True))

    assert stream(plan) == [(0.001, "ab"), (0.005, "cd")]


def test_an_error_does_not_wait_and_comes_after_what_there_was() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        clients.append(client)
        loop.call_at(loop.now + 0.001, lambda: (script.put("a"), script.put("b")))
        loop.call_at(loop.now + 0.003, lambda: (script.put("c"), script.fail(LlmjaxError("gone"))))

    clients: list[Client] = []
    with pytest.raises(LlmjaxError, match="gone"):
        stream(plan)
    assert clients[0].got == [(0.001, "ab"), (0.003, "c")]


def test_silence_is_broken_by_comments() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        loop.call_at(loop.now + 1.0, lambda: script.put("a"))
        loop.call_at(loop.now + 5.5, lambda: script.put("b", finished=True))

    assert stream(plan) == [(1.0, "a"), (3.0, ": keep-alive"), (5.0, ": keep-alive"), (5.5, "b")]


def test_text_that_is_held_back_is_silence() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        for second in range(1, 7):
            loop.call_at(loop.now + second - 0.5, lambda: script.put(""))
        loop.call_at(loop.now + 6.5, lambda: script.put("a", finished=True))

    assert stream(plan) == [(2.0, ": keep-alive"), (4.0, ": keep-alive"), (6.0, ": keep-alive"), (6.5, "a")]


def test_a_client_that_takes_nothing_is_dropped_after_its_time() -> None:
    def plan(loop: VirtualLoop, script: Script, client: Client) -> None:
        loops.append(loop)
        loop.call_at(loop.now + 1.0, client.reads.clear)
        loop.call_at(loop.now + 1.5, lambda: script.put("a"))

    loops: list[VirtualLoop] = []
    with pytest.raises(SlowReaderError):
        stream(plan)
    assert loops[0].now - 1000.0 == pytest.approx(1.5 + SEND_TIMEOUT)


def test_a_stream_that_stays_late_stays_apart() -> None:
    pace = Pace()
    pace.went(1.0, 1)
    assert pace.until is None
    pace.went(2.0, 2)
    assert pace.until == 2.0 + APART
    pace.went(2.0 + APART + 2 * LATE, 9)
    assert pace.until == 2.0 + 2 * APART + 2 * LATE
    pace.went(pace.until + LATE / 2, 9)  # on time: that steps gathered meanwhile was meant
    assert pace.until is None
