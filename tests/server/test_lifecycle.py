"""The life of a request: clients that leave, wait, read slowly; an engine that is slow, full, stuck, dead or draining."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes_engine import FakeEngine
from scripted_model import Scripted, paced
from served import ENDPOINTS, Exchange, Served, parse_events, run

from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import RequestOutput
from llmjax.server import generation

LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **LONG, "max_tokens": 100},
}


@pytest.fixture(autouse=True, params=["one process", "two"])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds too when the engine is at the other end of a socket."""
    monkeypatch.setattr(Served, "far", request.param == "two")


class HeldEngine(FakeEngine):
    """A fake of one row whose steps wait for `go`; `steps` counts those begun."""

    def __init__(self, fail_on: str | None = None) -> None:
        super().__init__(EngineConfig(max_context=2048, max_sequences=1), fail_on=fail_on)
        self.go = threading.Event()
        self.go.set()
        self.steps = 0
        self.broken = False

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        assert self.go.wait(60)
        if self.broken:
            raise ValueError("boom")
        time.sleep(0.0005)
        return super().step()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def error_of(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(exchange.data)["error"]
    return found


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_everything_at_once(served: Served, scripted: Scripted, path: str, stream: bool) -> None:
    """B28, B29: four of nine decode, the others queue; the one that stays gets what it would have got alone."""

    async def main() -> None:
        await served.engine.call(lambda: scripted.script([98] * 127))
        body = {**BODIES[path], "stream": stream}
        stays = Exchange(served.app, path, body)
        await until(lambda: served.engine.num_open == 1)
        leave = [Exchange(served.app, path, body) for _ in range(8)]
        scheduler = scripted.engine.scheduler
        await until(lambda: (served.engine.num_open, scheduler.num_running, scheduler.num_waiting) == (9, 4, 5))
        aborted = scripted.engine.stats.finished["abort"]
        for exchange in leave:
            exchange.leave()
        await until(lambda: served.engine.num_open == 1)
        await served.engine.call(lambda: None)
        assert scripted.engine.scheduler.num_running <= 1
        assert scripted.engine.scheduler.num_waiting == 0
        assert scripted.engine.stats.finished["abort"] == aborted + 8
        at_full_speed.set()
        await stays.task
        await asyncio.gather(*(exchange.task for exchange in leave))
        assert all(not exchange.data.endswith(b"[DONE]\n\n") for exchange in leave)
        if stream:
            events = parse_events(stays.data)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        else:
            assert json.loads(stays.data)["usage"]["completion_tokens"] == body["max_tokens"]

    with paced(scripted.engine) as at_full_speed:
        run(main())


def test_a_client_that_leaves_during_the_prefill_ends_it(served: Served, scripted: Scripted) -> None:
    """The prompt fills two launches; the client leaves as soon as the first is out."""

    async def main() -> None:
        exchange = Exchange(served.app, "/v1/completions", {"prompt": [97] * 120, "max_tokens": 8, "stream": True})
        await until(lambda: served.engine.num_open == 1)
        exchange.leave()
        await exchange.task
        await until(lambda: served.engine.num_open == 0)
        await served.engine.call(lambda: None)
        assert not scripted.engine.scheduler.has_unfinished

    with paced(scripted.engine):
        run(main())


def test_headers_wait_for_the_first_token_or_one_interval_of_silence() -> None:
    """B68: comments while silent, none after the end mark."""

    async def main() -> None:
        held = HeldEngine()
        served = Served(held, keep_alive=0.05)
        held.go.clear()
        exchange = Exchange(served.app, "/v1/completions", {"prompt": "ab", "max_tokens": 4, "stream": True})
        await asyncio.sleep(0.01)
        assert exchange.sent == []
        await until(lambda: exchange.data.count(b": keep-alive\n\n") >= 2)
        assert exchange.status == 200
        held.go.set()
        await exchange.task
        assert "".join(event["choices"][0]["text"] for event in parse_events(exchange.data)) == "abab"
        assert exchange.data.endswith(b"data: [DONE]\n\n")
        served.stop()

    run(main())


def test_a_full_queue_is_429_at_once_and_harms_nobody() -> None:
    """B71: one row and four places; n counts."""

    async def main() -> None:
        held = HeldEngine()
        served = Served(held, max_waiting=4)
        held.go.clear()
        first = Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 3, "n": 3})
        await until(lambda: held.steps == 1)  # so that it takes the others at once, when all have come
        many = [
            Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": i % 2 == 0}) for i in range(20)
        ]
        batch = Exchange(served.app, "/v1/completions", {"prompt": ["a"] * 5, "max_tokens": 3})
        await until(lambda: served.engine.num_open == 26)
        held.go.set()
        await asyncio.gather(*(exchange.task for exchange in (first, *many, batch)))
        statuses = [exchange.status for exchange in many]
        assert first.status == 200
        assert 429 in statuses
        assert batch.status == 429
        assert set(statuses) <= {200, 429}
        refused = many[statuses.index(429)]
        headers = dict(refused.sent[0]["headers"])
        assert 1 <= int(headers[b"retry-after"]) <= 60
        assert error_of(refused)["code"] == "queue_full"
        await until(lambda: served.engine.num_open == 0)
        refusals = held.metrics.registry.get_sample_value("llmjax:queue_full_total", {"lane": "any"})
        assert refusals is not None
        assert refusals > statuses.count(429), "every prompt of the batch that was refused counts too"
        for wrong, param in (({"prompt": ["a"] * 6}, "prompt"), ({"prompt": "a", "n": 6}, "n")):
            never = await served.request("POST", "/v1/completions", wrong)
            assert (never.status_code, never.json()["error"]["param"]) == (400, param), "there will never be room"
        again = await served.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
        assert again.json()["choices"][0]["text"] == "aaa"
        served.stop()

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_dead_engine_ends_streams_with_an_error_and_shows(stream: bool) -> None:
    """B69."""

    async def main() -> None:
        held = HeldEngine()
        served = Served(held)
        exchange = Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": stream})
        await until(lambda: served.engine.num_open == 1 and (exchange.status == 200 or not stream))
        held.broken = True
        await exchange.task
        if stream:
            assert "boom" in parse_events(exchange.data)[-1]["error"]["message"]
        else:
            assert exchange.status == 503
            assert "boom" in error_of(exchange)["message"]
        for path in ("/livez", "/readyz", "/health"):
            response = await served.request("GET", path)
            if Served.far:  # whether another one is started is for the supervisor to say
                assert (response.status_code, response.json()["status"]) == (200 if path == "/livez" else 503, "starting")
            else:
                assert (response.status_code, response.json()["status"]) == (503, "dead")
            assert "boom" in response.json()["reason"]
        refused = await served.request("POST", "/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert (await served.request("GET", "/v1/models")).status_code == 200

    run(main())


def test_a_stuck_engine_is_not_ready_but_alive_and_comes_back() -> None:
    async def main() -> None:
        held = HeldEngine()
        served = Served(held, watchdog=0.5, keep_alive=0.02)
        held.go.clear()
        exchange = Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 20, "stream": True})
        await exchange.task
        assert "stuck" in parse_events(exchange.data)[-1]["error"]["message"]
        assert (await served.request("GET", "/readyz")).status_code == 503
        assert (await served.request("GET", "/livez")).status_code == 200
        held.go.set()
        async with asyncio.timeout(30):
            while (await served.request("GET", "/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
        again = await served.request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 3})
        assert again.json()["choices"][0]["text"] == "aba"
        served.stop()

    run(main())


def test_draining_lets_streams_end_and_refuses_the_rest() -> None:
    """B33."""

    async def main() -> None:
        held = HeldEngine()
        served = Served(held)
        exchange = Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 200, "stream": True})
        await until(lambda: exchange.status == 200)
        served.engine.close_doors()
        refused = await served.request("POST", "/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert (await served.request("GET", "/readyz")).json()["status"] == "draining"
        assert (await served.request("GET", "/livez")).status_code == 200
        assert await served.engine.drain(10)
        await exchange.task
        assert parse_events(exchange.data)[-1]["choices"][0]["finish_reason"] == "length"
        served.stop()

    run(main())


def test_the_deadline_of_draining_is_an_error_in_the_stream() -> None:
    async def main() -> None:
        served = Served(HeldEngine())
        exchange = Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True})
        await until(lambda: exchange.status == 200)
        assert not await served.engine.drain(0.05)
        await exchange.task
        assert parse_events(exchange.data)[-1]["error"]["code"] == "unavailable"
        served.stop()

    run(main())


def test_a_failed_request_is_an_error_alone() -> None:
    """Logits that are not finite: 500, or an event when the headers are out; a neighbour goes on."""

    async def main() -> None:
        held = HeldEngine(fail_on="bad")
        served = Served(held, keep_alive=0.02)
        held.go.clear()
        stream = Exchange(served.app, "/v1/completions", {"prompt": "bad", "max_tokens": 5, "stream": True})
        await until(lambda: stream.status == 200)
        whole, good = (Exchange(served.app, "/v1/completions", {"prompt": prompt, "max_tokens": 5}) for prompt in ("bad", "ok"))
        held.go.set()
        await asyncio.gather(whole.task, stream.task, good.task)
        assert (whole.status, error_of(whole)["type"]) == (500, "server_error")
        assert "NaN" in parse_events(stream.data)[-1]["error"]["message"]
        assert json.loads(good.data)["choices"][0]["text"] == "okoko"
        served.stop()

    run(main())


def test_a_reader_that_takes_nothing_is_dropped_and_one_that_is_slow_gets_merged_events() -> None:
    async def main() -> None:
        held = HeldEngine()
        served = Served(held, send_timeout=0.1)
        gone = Exchange(served.app, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True})
        await until(lambda: gone.status == 200)
        gone.reading.clear()
        await gone.task
        await until(lambda: served.engine.num_open == 0)
        assert not gone.data.endswith(b"[DONE]\n\n")
        patient = served.with_options(send_timeout=10.0)
        slow = Exchange(patient.app, "/v1/completions", {"prompt": "abc", "max_tokens": 300, "stream": True})
        await until(lambda: slow.status == 200)
        slow.reading.clear()
        await until(lambda: not held.has_unfinished)
        slow.reading.set()
        await slow.task
        events = parse_events(slow.data)
        assert "".join(event["choices"][0]["text"] for event in events) == "abc" * 100
        assert len(events) < 300
        served.stop()

    run(main())


def test_a_request_has_arrived_when_its_body_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenising and waiting for the engine count as the server's time, however long they take."""
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic_ns=lambda: 12345, time=time.time))
    arrivals: list[int | None] = []

    class Noting(HeldEngine):
        def add_request(self, *args: Any, arrival_ns: int | None = None, **options: Any) -> str:
            arrivals.append(arrival_ns)
            return super().add_request(*args, **options)

    served = Served(Noting())
    for path in ENDPOINTS:
        assert served.post(path, {**BODIES[path], "max_tokens": 1}).status_code == 200
    assert served.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
    assert arrivals == [12345] * 4
    served.stop()


def test_an_answer_can_be_aborted_by_its_id(served: Served, scripted: Scripted) -> None:
    async def main() -> None:
        await served.engine.call(lambda: scripted.script([98] * 127))
        body = {"prompt": ["a", "b"], **LONG, "stream": True}
        named = Exchange(served.app, "/v1/completions", body, [(b"x-request-id", b"mine")])
        other = Exchange(served.app, "/v1/completions", body)
        await until(lambda: served.engine.num_open == 4)
        nothing = await served.request("POST", "/abort", {"request_id": "cmpl-other"})
        assert nothing.json() == {"aborted": 0}
        response = await served.request("POST", "/abort", {"request_id": "cmpl-mine"})
        assert response.json() == {"aborted": 1}
        await named.task
        reasons = [event["choices"][0]["finish_reason"] for event in parse_events(named.data)]
        assert reasons.count("abort") == 2
        await served.request("POST", "/abort", {"abort_all": True})
        await asyncio.gather(named.task, other.task)
        await until(lambda: served.engine.num_open == 0)
        assert other.data.endswith(b"data: [DONE]\n\n")

    with paced(scripted.engine):
        run(main())


def test_aborted_requests_are_counted_alike_in_every_series(served: Served, scripted: Scripted) -> None:
    """B31."""

    async def series() -> dict[str, float]:
        lines = (await served.request("GET", "/metrics")).text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in found}

    async def main() -> None:
        await served.engine.call(lambda: scripted.script([98] * 127))
        before = await series()
        exchanges = [Exchange(served.app, "/v1/completions", {**BODIES["/v1/completions"], "stream": True}) for _ in range(5)]
        await until(lambda: exchanges[0].status == 200)
        for exchange in exchanges:
            exchange.leave()
        await asyncio.gather(*(exchange.task for exchange in exchanges))
        await until(lambda: served.engine.num_open == 0)
        await served.engine.call(lambda: None)
        after = await series()
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        assert grown['llmjax:request_success_total{finished_reason="abort",lane="all",model_name="tiny"}'] == 5
        assert grown['llmjax:e2e_request_latency_seconds_count{lane="all",model_name="tiny"}'] == 5
        assert grown['llmjax:request_segment_seconds_count{lane="all",model_name="tiny",segment="queue"}'] == 5
        assert grown['llmjax:request_prompt_tokens_sum{lane="all",model_name="tiny"}'] == 5

    with paced(scripted.engine):
        run(main())


def test_an_interrupted_turn_keeps_its_prefix(served: Served, scripted: Scripted) -> None:
    """B32: what was computed before the client left is found again by its next turn."""

    async def main() -> None:
        await served.engine.call(lambda: scripted.script([98] * 127))
        prompt = [97 + index % 7 for index in range(50)]
        first = Exchange(served.app, "/v1/completions", {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True})
        await until(lambda: first.status == 200)
        first.leave()
        await first.task
        await until(lambda: served.engine.num_open == 0)
        answer = await served.request("POST", "/v1/completions", {"prompt": [*prompt, 98, 99], "max_tokens": 2})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48

    with paced(scripted.engine):
        run(main())


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(served: Served, scripted: Scripted) -> None:
    """Clients of every kind leave at random points, some bodies are wrong; a neighbour's stream is what it is alone."""

    async def client(seed: int) -> None:
        draw = random.Random(seed)
        await asyncio.sleep(draw.random() * 0.5)
        path = draw.choice(ENDPOINTS)
        body: dict[str, Any] = {**BODIES[path], "stream": draw.random() < 0.5, "max_tokens": draw.randint(1, 60)}
        body |= draw.choice([{}, {}, {"n": 2}, {"stop": ["c"]}, {"logprobs": 1} if "chat" not in path else {}, {"top_p": 7}])
        exchange = Exchange(served.app, path, body)
        if draw.random() < 0.7:
            await asyncio.sleep(draw.random() * 0.2)
            exchange.leave()
        await exchange.task
        assert exchange.status in (None, 200, 400, 429), exchange.data

    async def main() -> None:
        await served.engine.call(lambda: scripted.script([98] * 127))
        alone = Exchange(served.app, "/v1/completions", BODIES["/v1/completions"])
        await alone.task
        beside = Exchange(served.app, "/v1/completions", {**BODIES["/v1/completions"], "stream": True})
        seeds = [random.randrange(2**32) for _ in range(120)]
        await asyncio.gather(*map(client, seeds), beside.task)
        text = "".join(event["choices"][0]["text"] for event in parse_events(beside.data))
        assert text == json.loads(alone.data)["choices"][0]["text"]
        await until(lambda: served.engine.num_open == 0)

    run(main())


def test_two_apps_over_one_engine_may_hear_the_same_id() -> None:
    one = Served(FakeEngine(EngineConfig(max_context=2048, max_sequences=4)))
    body = {"prompt": "ab", "max_tokens": 1500}

    async def ask() -> None:
        asked = [app.request("POST", "/v1/completions", body, x_request_id="same") for app in (one, one.with_options())]
        answers = await asyncio.gather(*asked)
        assert [(answer.status_code, answer.json()["id"]) for answer in answers] == [(200, "cmpl-same")] * 2, answers[-1].text

    run(ask())
    one.stop()
