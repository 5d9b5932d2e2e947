"""Timings, lanes and metrics through the whole engine, on a clock that the test moves."""

from __future__ import annotations

import collections
import itertools
import json
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scripted_model import CONTEXT, Scripted, ScriptedConfig

from llmjax.engine import engine as engine_module
from llmjax.engine.config import LaneConfig
from llmjax.engine.engine import Engine
from llmjax.engine.engine_trace import EngineTrace
from llmjax.engine.llm import LLM
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.runner import PendingStep
from llmjax.errors import QueueFullError, RequestError
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.timings import SEGMENTS, Timings
from llmjax.telemetry.trace import TraceWriter

LANES = (LaneConfig(name="short", max_tokens=40, weight=3, depth=3, timeout=5.0), LaneConfig(name="long", timeout=60.0))


class Clock:
    """Each look takes a nanosecond, so that no mark is at the same time as another."""

    def __init__(self) -> None:
        self.now = self.looks = 1000

    def monotonic_ns(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = types.SimpleNamespace(monotonic_ns=made.monotonic_ns, perf_counter=time.perf_counter)
    monkeypatch.setattr(engine_module, "time", fake)
    return made


@pytest.fixture(scope="module")
def shared() -> Engine:
    # Eight pages of 16 tokens: one long request at a time.
    pool = 9 * 16 * 2 * 2 * 4
    return Scripted(
        None, lanes=LANES, max_wait=2.0, max_sequences=2, row_buckets=(2,), kv_cache_bytes=pool, prefix_cache=False
    ).engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    while shared.has_unfinished:
        shared.step()
    assert shared.pool.num_used == 0


def params(limit: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=limit, temperature=0.0, **more)  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        for output in engine.step(closed=True):
            assert (output.timings is not None) == output.finished
            if output.finished:
                done[output.request_id] = output
    return done


def timings(output: RequestOutput) -> Timings:
    assert output.timings is not None
    return output.timings


def test_the_segments_sum_to_the_life_of_each_request(engine: Engine, clock: Clock) -> None:
    began = {}
    for _ in range(2):
        before = clock.now
        began[engine.add_request([1] * 5, params(7, n=2))] = before
        clock.now += 1000
    for request_id, output in finish(engine).items():
        made = timings(output)
        assert sum(getattr(made, f"{name}_ns") for name in SEGMENTS) == made.total_ns
        assert made.arrival_ns == began[request_id] + 1
        assert made.arrival_ns + made.total_ns <= clock.now
        assert made.first_token_ns is not None
        assert made.last_token_ns is not None
        assert made.ingress_ns + made.queue_ns + made.batch_ns < made.first_token_ns <= made.last_token_ns < made.total_ns
        assert (made.prompt_tokens, made.output_tokens, made.chunks, made.preemptions) == (5, 14, 2, 0)
        assert made.steps >= 12
        assert made.queue_ns >= 1000  # nothing was launched before the clock had moved
    assert made.cached_tokens == 0


def test_each_segment_is_where_the_time_went(engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    second = 10**9
    dispatch, process, result = engine.runner.dispatch, engine._process, PendingStep.result

    def slow_dispatch(batch: Any, masks: Any) -> object:
        clock.now += 3 * second
        return dispatch(batch, masks)

    def slow_processing(output: object, read_ns: int) -> object:
        clock.now += second  # the text
        return process(output, read_ns)  # type: ignore[arg-type]

    def slow_device(pending: PendingStep) -> object:
        clock.now += 4 * second
        return result(pending)

    monkeypatch.setattr(engine.runner, "dispatch", slow_dispatch)
    monkeypatch.setattr(engine, "_process", slow_processing)
    monkeypatch.setattr(PendingStep, "result", slow_device)
    engine.add_request([1, 2], params(1))
    clock.now += 2 * second
    (output,) = finish(engine).values()
    made = timings(output)
    assert [round(made.seconds(name)) for name in SEGMENTS] == [0, 2, 3, 4, 1]


def test_time_without_a_row_after_a_preemption_is_queue_time(engine: Engine, clock: Clock) -> None:
    """Two long requests outgrow eight pages: one loses its row while the other goes on."""
    ids = [engine.add_request([1] * 40, params(40)) for _ in range(2)]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        clock.now += 10**6
        outputs |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
    first, second = (timings(outputs[name]) for name in ids)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.queue_ns > 5 * 10**6 > first.queue_ns
    assert (first.chunks, second.chunks) == (1, 3)  # 40 tokens, 24 and 16, and once more all that was known
    assert second.total_ns == sum(getattr(second, f"{name}_ns") for name in SEGMENTS)


def test_a_request_that_waits_too_long_is_told_so(engine: Engine, clock: Clock) -> None:
    running = [engine.add_request([1] * 3, params(30)) for _ in range(2)]
    engine.step(closed=True)
    late = engine.add_request([1] * 3, params(5))
    before, timeouts = engine.stats.prompt_tokens_computed, engine.stats.finished["timeout"]
    clock.now += 6 * 10**9
    done = finish(engine)
    choice = done[late].outputs[0]
    assert choice.finish_reason == "timeout"
    assert choice.error == "the request waited longer than 5 s for its turn in lane 'short'"
    made = timings(done[late])
    assert (made.chunks, made.output_tokens, made.first_token_ns) == (0, 0, None)
    assert made.queue_ns > 5 * 10**9
    assert [done[name].outputs[0].finish_reason for name in running] == ["length", "length"]
    assert engine.stats.prompt_tokens_computed == before
    assert engine.stats.finished["timeout"] == timeouts + 1


def test_a_full_lane_refuses_at_once_and_offline_generation_waits(engine: Engine, clock: Clock) -> None:
    read = engine.metrics.registry.get_sample_value
    for _ in range(2):
        engine.add_request([1] * 3, params(20, n=2))
        engine.step(closed=True)
    engine.add_request([1] * 3, params(3))
    assert engine.scheduler.waiting_by_lane == {"short": 3, "long": 0}
    refused = read("llmjax:queue_full_total", {"lane": "short"})
    with pytest.raises(QueueFullError, match="wait in lane 'short'"):
        engine.add_request([1] * 3, params(3), request_id="again")
    assert read("llmjax:queue_full_total", {"lane": "short"}) == refused + 1  # type: ignore[operator]
    assert read("llmjax:num_requests_waiting", {"lane": "short"}) == 3
    finish(engine)
    engine.add_request([1] * 3, params(3), request_id="again")
    finish(engine)
    llm = LLM.__new__(LLM)
    llm.engine = engine
    outputs = llm.generate([[1] * (1 + i) for i in range(9)], params(3))  # seven more than may wait
    assert [len(output.prompt_token_ids) for output in outputs] == list(range(1, 10))
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_a_lower_priority_number_goes_first(engine: Engine, clock: Clock) -> None:
    for _ in range(2):
        engine.add_request([1] * 3, params(20))
    engine.step(closed=True)
    later = engine.add_request([1] * 3, params(3))
    urgent = engine.add_request([1] * 3, params(3), priority=-1)
    order = list(finish(engine))
    assert order.index(urgent) < order.index(later)


def test_b31_aborts_and_refusals_are_counted_like_all_other_ends(engine: Engine, clock: Clock) -> None:
    read = engine.metrics.registry.get_sample_value

    def totals() -> list[float]:
        reasons = ("length", "stop", "abort", "timeout", "error")
        ended = [
            read("llmjax:request_success_total", {"lane": lane, "finished_reason": r}) or 0
            for lane in ("short", "long")
            for r in reasons
        ]
        counted = [read("llmjax:e2e_request_latency_seconds_count", {"lane": lane}) or 0 for lane in ("short", "long")]
        return [sum(ended), sum(counted), float(sum(engine.stats.finished.values()))]

    before = totals()
    ids = [engine.add_request([1] * 3, params(10)) for _ in range(2)]
    engine.step(closed=True), engine.step(closed=True)
    waiting = engine.add_request([1] * 60, params(10))
    for request_id in (ids[0], waiting):
        engine.abort(request_id)
    with pytest.raises(RequestError):
        engine.add_request([1], params(3), request_id=ids[1])  # in use: it never was a request
    done = finish(engine)
    assert {done[name].outputs[0].finish_reason for name in (ids[0], waiting)} == {"abort"}
    assert timings(done[waiting]).chunks == 0
    assert all(after - earlier == 3 for after, earlier in zip(totals(), before, strict=True))


def test_lanes_change_no_token(engine: Engine, clock: Clock) -> None:
    """The token after position p is p + 100, whatever the order they are begun in."""
    table = np.zeros((CONTEXT, ScriptedConfig.vocab_size), np.float32)
    table[np.arange(CONTEXT), 100 + np.arange(CONTEXT)] = 9.0
    engine.update_params({"table": jnp.asarray(table)})
    ids = {engine.add_request([1] * length, params(4)): length for length in (60, 2, 5, 50)}
    done = finish(engine)
    assert len(done) == 4
    for request_id, output in done.items():
        assert output.outputs[0].token_ids == [99 + ids[request_id] + i for i in range(4)]


def test_the_trace_holds_every_launch_and_every_request(engine: Engine, clock: Clock, tmp_path: Path) -> None:
    launches = engine.stats.launches
    with TraceWriter(tmp_path / "trace.json") as writer:
        engine.trace = EngineTrace(writer, "engine")
        ids = [engine.add_request([1] * 40, params(40)) for _ in range(2)]  # one loses its row
        done = finish(engine)
        engine.trace = None
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    for track in ("host", "device"):
        spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X" and e["tid"] == tracks[track])
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans)), "spans overlap"
        assert collections.Counter(name for *_, name in spans) == (
            dict.fromkeys(("schedule", "dispatch", "wait", "update"), engine.stats.launches - launches)
            if track == "host"
            else collections.Counter(name for *_, name in spans if name in ("extend", "decode"))
        )
    for request_id in ids:
        own = [event for event in events if event.get("id") == request_id]
        assert own[0]["args"]["queue_ns"] == timings(done[request_id]).queue_ns
        lengths = collections.Counter[str]()
        for begin, end in zip(own[1:-1:2], own[2:-1:2], strict=True):
            assert (begin["ph"], end["ph"], begin["name"]) == ("b", "e", end["name"])
            lengths[begin["name"]] += round(1000 * (end["ts"] - begin["ts"]))
        assert lengths == collections.Counter({name: getattr(timings(done[request_id]), f"{name}_ns") for name in SEGMENTS})
    assert max(event["args"]["used"] for event in events if event["name"] == "pages") == 8
