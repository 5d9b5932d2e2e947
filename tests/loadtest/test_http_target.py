"""The HTTP target: what it sends, what it makes of answers that are whole, cut up, refused, broken or never come."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from fakes_engine import FakeEngine
from raw_server import DONE, HEAD, LAST, chunk, event, raw_server, text, usage, whole

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.errors import ConfigError, LlmjaxError
from llmjax.loadtest import arrivals
from llmjax.loadtest.driver import Record, Trace, drive
from llmjax.loadtest.event_stream import StreamedAnswer
from llmjax.loadtest.http_target import HttpTarget, ServerAddress, find_model
from llmjax.loadtest.measure import ServiceLevels, measure
from llmjax.loadtest.target import Gauge, TokenEvent, TrafficRequest
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig
from llmjax.server.http_server import HttpServer

GOOD = HEAD + b"".join(map(chunk, (text("a", tokens=1), text("b", reason="length", tokens=2), usage(2), DONE))) + LAST


def load(url: str, requests: Sequence[TrafficRequest], *, clients: int = 1, **options: object) -> Trace:
    """A closed loop; nothing stays open."""
    address = ServerAddress(url, **options)  # type: ignore[arg-type]
    target = HttpTarget(address, find_model(address))
    trace = drive(target, requests, arrivals.closed_loop(clients))
    target.close()
    assert not target._calls
    assert not target._owners
    return trace


def ask(count: int = 1, tokens: int = 2) -> list[TrafficRequest]:
    return [TrafficRequest([5, 6, 7], tokens, tokens) for _ in range(count)]


def one(answer: bytes, **options: object) -> Record:
    with raw_server(answer) as server:
        (record,) = load(server.url, ask(), **options).records
    return record


# -- bytes to counts


class Replay:
    """A target whose events were written down."""

    def __init__(self, events: Sequence[TokenEvent]) -> None:
        self._events = list(events)
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def submit(self, request: TrafficRequest) -> str:
        return "r"

    def abort(self, request_id: str) -> None:
        self._events.clear()

    def poll(self, until: float | None) -> Sequence[TokenEvent]:
        event = self._events.pop(0)
        self._now = event.time
        return [event]

    def settle(self) -> None:
        return

    def gauge(self) -> Gauge | None:
        return None


LOG = [  # seconds, bytes, tokens of it
    (0.2, event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}}), 0),
    (1.0, event({"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}), 1),
    (1.5, b": keep-alive\n\n", 0),
    (2.0, event({"choices": [{"delta": {"content": "yz"}}], "usage": {"completion_tokens": 5}}), 4),
    (2.1, event({"choices": [{"delta": {"content": "!"}}], "usage": {"completion_tokens": 6}}), 1),
    (2.1, event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 6}}), 0),
    (2.2, DONE, 0),
]


def test_a_written_log_has_the_figures_of_the_formulas() -> None:
    answer = StreamedAnswer("r")
    events = [made for when, data, _ in LOG for made in answer.feed(data, when)]
    assert [(made.time, made.tokens) for made in events[:-1]] == [(when, tokens) for when, _, tokens in LOG if tokens]
    assert (events[-1].finish_reason, events[-1].time) == ("stop", 2.2)
    trace = drive(Replay(events), [TrafficRequest("p", 100, 100)], arrivals.closed_loop(1))
    figures = measure(trace, ServiceLevels())
    found = figures.latencies
    assert found["ttft"].p50 == 1.0
    assert (found["itl"].count, found["itl"].max) == (2, 1.0)
    assert found["itl_token"].count == 5
    assert found["itl_token"].mean == pytest.approx((4 * 0.25 + 0.1) / 5)
    assert found["tpot"].p50 == pytest.approx(1.1 / 5)
    assert found["e2e"].p50 == 2.1
    assert (figures.output_tokens["sum"], figures.completed, figures.duration) == (6, 1, 2.2)


def test_frames_of_any_size_give_the_same_events() -> None:
    data = b"".join(data for _, data, _ in LOG).replace(b"\n", b"\r\n", 3)
    whole_answer = list(StreamedAnswer("r").feed(data, 0.0))
    random = np.random.default_rng()
    for _ in range(20):
        cuts = sorted(random.integers(0, len(data), 30).tolist())
        answer = StreamedAnswer("r")
        pieces = [data[i:j] for i, j in itertools.pairwise([0, *cuts, len(data)])]
        assert [made for piece in pieces for made in answer.feed(piece, 0.0)] == whole_answer


def test_without_usage_an_event_is_a_token_and_the_last_has_the_rest() -> None:
    record = one(HEAD + b"".join(map(chunk, (text("a"), text("bcd", reason="stop"), usage(5), DONE))) + LAST)
    assert record.counts == [1, 1]  # two were wanted
    with raw_server(HEAD + b"".join(map(chunk, (text("a"), text("bcd", reason="stop"), usage(5), DONE))) + LAST) as server:
        (record,) = load(server.url, ask(tokens=8)).records
    assert (record.counts, record.prompt_tokens, record.error) == ([1, 4], 3, "")


# -- what is sent


def test_what_a_request_says() -> None:
    requests = [
        TrafficRequest([1, 2], 2, 2),
        TrafficRequest("hi", 2, 9, ignore_eos=False),
        TrafficRequest([{"role": "user", "content": "yo"}], 2, 2),
    ]
    with raw_server(GOOD) as server:
        assert measure(load(server.url, requests, api_key="k"), ServiceLevels()).completed == 3
        first, second, third = server.bodies
        assert first["prompt"] == [1, 2]
        assert first["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert (first["model"], first["max_tokens"], first["temperature"], first["ignore_eos"]) == ("m", 2, 0.0, True)
        assert (second["prompt"], "ignore_eos" in second) == ("hi", False)
        assert third["messages"] == [{"role": "user", "content": "yo"}]
        assert [head.split()[1] for head in server.heads] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
        assert all("authorization: Bearer k" in head for head in server.heads)
        load(f"{server.url}/v1/", [TrafficRequest("hi", 2, 2)], endpoint="chat", usage_per_event=False)
        assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hi"}]
        assert server.bodies[-1]["stream_options"] == {"include_usage": True}


def test_a_client_that_has_enough_leaves() -> None:
    left = threading.Event()

    def endless(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        try:
            for count in itertools.count(1):
                connection.sendall(chunk(text("x", tokens=count)))
                time.sleep(0.001)
        except OSError:
            left.set()

    with raw_server(endless) as server:
        (record,) = load(server.url, ask(tokens=4)).records
        assert left.wait(30)
    assert (record.output_tokens, record.error) == (4, "")


# -- what goes wrong


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (whole(b'{"error":{"message":"too\\nlong"}}', "400 Bad Request"), "HTTP 400: too long"),
        (whole(b"<html>", "502 Bad Gateway", kind="text/html"), "HTTP 502: <html>"),
        (whole(b'{"error":{"message":"full"}}', "429 Too Many Requests", "retry-after: 0"), "HTTP 429: full"),
        (whole(b'{"choices":[]}'), "invalid: the answer is no event stream"),
        (HEAD + chunk(text("a", tokens=1)) + chunk(event({"error": {"message": "boom"}})) + chunk(DONE) + LAST, "error: boom"),
        (HEAD + chunk(text("a", tokens=1)) + chunk(DONE) + LAST, "incomplete: the stream ended without a finish reason"),
        (HEAD + chunk(b"data: {nonsense\n\n") + LAST, "invalid: an event is no JSON object"),
        *(
            (HEAD + chunk(event(wrong)) + LAST, "invalid: an event is no completion")
            for wrong in (
                {"choices": [None]},
                {"choices": 5},
                {"choices": [{"delta": "x"}]},
                {"choices": [{"finish_reason": ["x"]}]},
                {"choices": [{"text": "a"}], "usage": [1]},
                {"choices": [], "usage": {"completion_tokens": "3"}},
            )
        ),
        (HEAD + chunk(text("a", tokens=1)), "connection: the connection was lost"),
        (HEAD + chunk(text("a", tokens=1)) + b"zz\r\n", "connection: this is no HTTP"),
        (b"", "connection: the connection was lost"),
    ],
)
def test_what_goes_wrong_is_a_record_and_not_retried(answer: bytes, error: str) -> None:
    with raw_server(answer, GOOD) as server:
        trace = load(server.url, ask(2))
        assert len(server.bodies) == 2
    assert trace.records[0].error.startswith(error)
    assert measure(trace, ServiceLevels()).errors == {error.partition(":")[0]: 1}
    assert trace.records[1].completed  # the others go on


def test_what_came_before_a_server_died_is_kept() -> None:
    record = one(HEAD + chunk(text("a", tokens=1)))
    assert (record.counts, record.error) == ([1], "connection: the connection was lost")


def test_a_stream_without_an_end_mark_is_complete_when_it_says_so() -> None:
    assert one(HEAD + chunk(text("ab", reason="stop", tokens=2)) + LAST).completed
    assert one(HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + text("ab", reason="stop", tokens=2)).completed


def test_a_full_queue_is_asked_again_when_that_is_wanted() -> None:
    full = whole(b'{"error":{"message":"full"}}', "429 Too Many Requests", "retry-after: 0")
    with raw_server(full, full, GOOD) as server:
        (record,) = load(server.url, ask(), retries=2).records
        assert (record.completed, len(server.bodies)) == (True, 3)
    with raw_server(full) as server:
        (record,) = load(server.url, ask(), retries=2).records
        assert (record.error, len(server.bodies)) == ("HTTP 429: full", 3)


def test_silence_is_a_failure() -> None:
    with raw_server(lambda connection: connection.recv(1) and None) as server:
        (record,) = load(server.url, ask(), silence=0.05).records
    assert record.error == "timeout: the server sent nothing for 0.05 s"


def test_a_server_that_is_gone_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(LlmjaxError, match=f"{url} does not answer .*start the server"):
        find_model(ServerAddress(url))
    with raw_server(GOOD) as server:
        address = ServerAddress(server.url)
        model = find_model(address)
        assert (model.name, model.max_context) == ("m", 128)
        with pytest.raises(ConfigError, match="does not serve 'other'; it serves m"):
            find_model(ServerAddress(server.url, model="other"))
    target = HttpTarget(ServerAddress(url), model)
    (record,) = drive(target, ask(), arrivals.closed_loop(1)).records
    target.close()
    assert record.error.startswith("connection: ")
    for wrong in ("localhost:8000", "ftp://x", "http://", "http://x:port", "http://a..b"):
        with pytest.raises(ConfigError, match="is no URL"):
            find_model(ServerAddress(wrong))
    for key in ("secret\n", "schlüssel–secret"):
        with pytest.raises(ConfigError, match="the API key has") as caught:
            find_model(ServerAddress(url, api_key=key))
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="user or password") as caught:
        find_model(ServerAddress("http://me:secret@localhost:1"))
    assert "secret" not in str(caught.value)
    with pytest.raises(LlmjaxError, match="does not answer"):
        find_model(ServerAddress(f"{url}/ü"))


def test_an_interrupt_leaves_no_connection_behind() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(HEAD + chunk(text("x", tokens=1)))
        connection.recv(1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with raw_server(whole(b"{}", "500 Oops"), endless) as server:
        address = ServerAddress(server.url)
        target = HttpTarget(address, find_model(address))
        trace = drive(target, ask(2), arrivals.closed_loop(2), progress=interrupt)
        target.close()
        assert trace.interrupted
        assert not target._calls


def test_a_real_server() -> None:
    """Ids, texts and conversations over sockets: as many tokens as were asked for, and a full queue is counted."""
    engine = AsyncEngine(FakeEngine(EngineConfig(max_context=64, max_sequences=4)), max_waiting=2)
    server = HttpServer(create_app(engine, ServerConfig(served_names=("m",))), engine, host="127.0.0.1", port=0, drain=1.0)
    server.start()
    try:
        prompts = ([1, 2, 3], "hello", [{"role": "user", "content": "hi"}])
        requests = [TrafficRequest(prompts[i % 3], 5 + i, 5 + i) for i in range(12)]
        for usage_per_event in (True, False):
            figures = measure(load(server.url, requests, clients=5, usage_per_event=usage_per_event), ServiceLevels())
            assert (figures.completed, figures.errors) == (12, {})
            assert figures.output_tokens["sum"] == sum(request.output_tokens for request in requests)
            assert figures.latencies["ttft"].count == 12
        address = ServerAddress(server.url)
        target = HttpTarget(address, find_model(address))
        with paused(engine):
            names = [target.submit(TrafficRequest([1], 3, 3)) for _ in range(9)]
            events: list[TokenEvent] = []
            while sum(event.finish_reason is not None for event in events) < 3:
                events += target.poll(target.now() + 30.0)
        while len({event.request_id for event in events if event.finish_reason is not None}) < 9:
            events += target.poll(target.now() + 30.0)
        target.close()
        reasons = Counter(event.finish_reason for event in events if event.finish_reason is not None)
        assert reasons == {"HTTP 429": 3, "length": 6}
        assert {event.request_id for event in events} == set(names)
    finally:
        server.close()


@contextlib.contextmanager
def paused(engine: AsyncEngine) -> Iterator[None]:
    """Steps bring nothing inside, while requests are taken and refused."""
    fake, go = engine.engine, threading.Event()
    step = fake.step
    fake.step = lambda: step() if go.is_set() else (go.wait(0.001), [])[1]  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        go.set()
        del fake.step  # type: ignore[method-assign]
