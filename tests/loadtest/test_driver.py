"""The driver in virtual time: who is sent when, what is written down, and what an interrupt leaves. All times are exact."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest
from simulated_engine import SimulatedEngine

from llmjax.errors import EngineError
from llmjax.loadtest import arrivals, driver
from llmjax.loadtest.arrivals import Load
from llmjax.loadtest.driver import Trace, drive
from llmjax.loadtest.measure import ServiceLevels, measure
from llmjax.loadtest.suite import Report, Run, System, run_suite
from llmjax.loadtest.target import EngineTarget, TrafficRequest
from llmjax.loadtest.workload import Lengths, Synthetic
from llmjax.scheduling.lane_config import LaneConfig

STEP = 0.01  # seconds of a launch


def run(engine: SimulatedEngine, requests: list[TrafficRequest], load: Load, **options: Any) -> Trace:
    trace = drive(EngineTarget(engine, clock=engine.clock, sleep=engine.sleep), requests, load, **options)
    assert not engine.has_unfinished
    assert engine.pool.num_used == 0
    return trace


def alike(count: int, prompt: int = 5, output: int = 3, *, asks: int | None = None) -> list[TrafficRequest]:
    return [TrafficRequest([1] * prompt, output, asks or output) for _ in range(count)]


def mixed(count: int = 60, *, asks: int | None = None) -> list[TrafficRequest]:
    return Synthetic(Lengths(30, 1.0, 4, 150), Lengths(20, 0.8, 2, 100), max_tokens=asks, seed=5).requests(count, 100)


def test_one_request_is_timed_to_the_launch() -> None:
    (record,) = run(SimulatedEngine(), alike(1, output=4), arrivals.closed_loop(1)).records
    assert [round((time - record.due) / STEP) for time in record.times] == [1, 2, 3, 4]
    assert record.counts == [1, 1, 1, 1]
    assert (record.queue_seconds, record.prompt_tokens, record.preemptions, record.completed) == (0.0, 5, 0, True)


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    trace = run(SimulatedEngine(), alike(11), arrivals.closed_loop(3))
    figures = measure(trace, ServiceLevels())
    assert (figures.completed, figures.peak_concurrency) == (11, 3)
    for number, record in enumerate(trace.records[3:], 3):
        ended = sorted(r.ended for r in trace.records[:number] if r.ended is not None)
        assert record.due == pytest.approx(ended[number - 3])


def test_an_open_loop_sends_on_time_whatever_became_of_the_others() -> None:
    load = arrivals.poisson(40.0, 30)
    trace = run(SimulatedEngine(max_sequences=2), alike(30, output=9), load)
    for record, time in zip(trace.records, load.times, strict=True):
        assert record.due == pytest.approx(trace.started + time)
        assert record.sent is not None
        assert 0 <= record.sent - record.due <= STEP + 1e-9  # a launch is not cut short
    assert measure(trace, ServiceLevels()).peak_concurrency > 2


def test_the_clock_passes_between_arrivals() -> None:
    trace = run(SimulatedEngine(), alike(6), arrivals.bursts(3, 5.0, 6))
    assert [round(record.due - trace.started, 6) for record in trace.records] == [0, 0, 0, 5, 5, 5]
    assert 5.0 < trace.ended - trace.started < 5.2


def test_a_static_batch_waits_for_its_slowest() -> None:
    requests = [TrafficRequest([1] * 5, output, output) for output in (2, 30, 4, 2, 2, 8, 2)]
    trace = run(SimulatedEngine(), requests, arrivals.closed_loop(7), batch=3)
    batches = [trace.records[0:3], trace.records[3:6], trace.records[6:]]
    for before, after in itertools.pairwise(batches):
        assert {r.sent for r in after} == {max(r.ended for r in before if r.ended is not None)}
    queue = measure(trace, ServiceLevels()).latencies["queue"]
    sent = [r.sent for r in trace.records if r.sent is not None]
    assert queue.mean == pytest.approx(np.mean(sent) - trace.started)  # held by the client, not by the engine


def test_continuous_batching_beats_static_batches_in_the_same_traffic() -> None:
    load = arrivals.poisson(12.0, 60)
    continuous = measure(run(SimulatedEngine(max_sequences=8), mixed(), load), ServiceLevels())
    static = measure(run(SimulatedEngine(max_sequences=8), mixed(), load, batch=8), ServiceLevels())
    assert continuous.completed == static.completed == 60
    assert continuous.output_tokens == static.output_tokens
    for metric, which in (("queue", "mean"), ("ttft", "p95"), ("e2e", "p99")):
        assert getattr(continuous.latencies[metric], which) < 0.7 * getattr(static.latencies[metric], which)


def test_pages_on_demand_beat_full_lengths_reserved() -> None:
    """Requests ask for 100 tokens and use a fifth: what is reserved for the rest keeps others out."""
    engine = SimulatedEngine(num_pages=30, max_sequences=8)
    on_demand = run(engine, mixed(asks=100), arrivals.closed_loop(16))
    most = engine.most_running
    engine.set_policy(reserve_full_length=True)
    engine.most_running = 0
    reserved = run(engine, mixed(asks=100), arrivals.closed_loop(16))
    assert engine.most_running < most
    assert on_demand.peak_reserved == on_demand.peak_used
    assert reserved.peak_used < reserved.peak_reserved <= engine.pool.capacity
    fast, slow = (measure(trace, ServiceLevels()) for trace in (on_demand, reserved))
    assert fast.completed == slow.completed == 60
    assert fast.requests_per_second > 1.2 * slow.requests_per_second
    assert slow.preemptions == 0  # whoever starts has all it can need
    assert slow.allocation_success == 1.0


def test_a_client_stops_when_it_has_enough() -> None:
    engine = SimulatedEngine(decode_steps=4)
    trace = run(engine, alike(5, output=6, asks=200), arrivals.closed_loop(2))
    assert [record.output_tokens for record in trace.records] == [6] * 5
    assert all(record.completed for record in trace.records)
    assert all(record.queue_seconds is not None for record in trace.records[:-1])  # told by the event after the stop


def test_refusals_are_records_and_the_others_go_on() -> None:
    requests = [*alike(2), TrafficRequest([1] * 600, 1, 1), *alike(2)]
    for load in (arrivals.closed_loop(1), arrivals.bursts(5, 1.0, 5)):
        trace = run(SimulatedEngine(), requests, load)
        figures = measure(trace, ServiceLevels())
        assert (figures.completed, figures.errors) == (4, {"ContextLengthError": 1})
        assert "600 tokens" in trace.records[2].error


def test_requests_that_wait_too_long_for_their_lane_are_errors_of_their_own() -> None:
    lanes = (LaneConfig(name="short", max_tokens=20, timeout=0.05), LaneConfig(name="long"))
    requests = [TrafficRequest([1] * 5, 12, 12) for _ in range(6)]
    figures = measure(run(SimulatedEngine(max_sequences=2, lanes=lanes), requests, arrivals.bursts(6, 1.0, 6)), ServiceLevels())
    assert (figures.completed, figures.errors) == (2, {"timeout": 4})
    longer = [TrafficRequest([1] * 5, 30, 30) for _ in range(6)]
    figures = measure(run(SimulatedEngine(max_sequences=2, lanes=lanes), longer, arrivals.bursts(6, 1.0, 6)), ServiceLevels())
    assert (figures.completed, figures.errors) == (6, {})


def test_only_refused_requests_end_too() -> None:
    for load in (arrivals.closed_loop(2), arrivals.bursts(1, 1.0, 3)):
        assert measure(run(SimulatedEngine(), alike(3, prompt=600), load), ServiceLevels()).failed == 3


def test_a_duration_ends_the_sending_and_waits_for_the_rest() -> None:
    trace = run(SimulatedEngine(), alike(100, output=10), arrivals.closed_loop(2), duration=0.5)
    assert 0.5 <= trace.ended - trace.started < 0.5 + 12 * STEP
    assert 5 < len(trace.records) < 12
    assert all(record.completed for record in trace.records)


def test_an_interrupt_keeps_what_was_done_and_leaves_nothing_behind() -> None:
    trace = run(SimulatedEngine(interrupt_at=101.0), alike(100, output=10), arrivals.closed_loop(4))
    assert trace.interrupted
    figures = measure(trace, ServiceLevels())
    assert figures.completed > 10
    assert figures.unfinished == 4
    assert figures.requests_per_second > 0


def test_what_the_engine_raises_is_raised_with_nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine()
    monkeypatch.setattr(engine, "add_request", lambda *args: (_ for _ in ()).throw(EngineError("lost")))
    with pytest.raises(EngineError, match="lost"):
        run(engine, alike(2), arrivals.closed_loop(1))


def test_progress_counts_every_end() -> None:
    seen: list[tuple[int, int]] = []
    run(SimulatedEngine(), alike(4), arrivals.closed_loop(2), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_long_run_keeps_a_bounded_number_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MAX_GAUGES", 20)
    trace = run(SimulatedEngine(), alike(15, output=8), arrivals.closed_loop(1))
    assert 5 < len(trace.gauges) <= 20
    gaps = np.diff([gauge.time for gauge in trace.gauges])
    assert (gaps > 0).all()
    assert trace.peak_used == 1


def test_the_same_seed_is_the_same_run() -> None:
    one, two = (run(SimulatedEngine(), mixed(), arrivals.poisson(20.0, 60)) for _ in range(2))
    assert one.records == two.records


def suite(engine: SimulatedEngine, loads: list[Load], **options: Any) -> Report:
    def target_for(system: System) -> EngineTarget:
        engine.set_policy(reserve_full_length=bool(system.policy))
        return EngineTarget(engine, clock=engine.clock, sleep=engine.sleep)

    systems = [
        System("engine", "as it is"),
        System("static", "batches", batch=4),
        System("fifo", "the same", same_as="engine"),
        System("whole_length", "reserved", {"reserve_full_length": True}),
    ]
    options = {"levels": ServiceLevels()} | options
    return run_suite(target_for, lambda index: mixed(12), title="t", facts={}, systems=systems, loads=loads, **options)


def test_a_suite_runs_every_system_that_differs_under_every_load() -> None:
    told: list[Run] = []
    report = suite(SimulatedEngine(), [arrivals.closed_loop(n) for n in (1, 4)], tell=told.append)
    order = [(found.load, found.system) for found in report.runs]
    assert order == [(load, name) for load in ("closed 1", "closed 4") for name in ("engine", "static", "whole_length")]
    assert told == report.runs
    assert not report.interrupted
    assert all("12 of 12 requests" in found.line() for found in report.runs)


def test_levels_are_asked_of_the_first_system_where_demanded() -> None:
    levels = ServiceLevels(ttft_p95=1e-6)
    loads = [arrivals.closed_loop(n) for n in (1, 4)]
    report = suite(SimulatedEngine(), loads, levels=levels, demanded=lambda load: load.concurrency == 1)
    assert [bool(found.missed) for found in report.runs] == [True, False, False, False, False, False]
    assert len(report.missed) == 1
    assert report.missed[0].startswith("closed 1: ttft P95")


def test_an_interrupted_suite_ends_with_the_part_it_has() -> None:
    report = suite(SimulatedEngine(interrupt_at=100.9), [arrivals.closed_loop(n) for n in (1, 4)], levels=ServiceLevels(errors=0))
    assert report.interrupted
    assert report.runs[-1].interrupted
    assert len(report.runs) < 6
    assert "(interrupted)" in report.runs[-1].line()
    assert not report.missed


def test_a_signal_waits_for_the_end_of_a_step() -> None:
    """A launch that was interrupted is lost, and the engine with it; so is the report, if the engine cannot be left tidy."""

    class Interrupted(SimulatedEngine):
        whole = 0

        def step(self) -> Any:
            if self.whole == 3:
                os.kill(os.getpid(), signal.SIGINT)
            outputs = super().step()
            self.whole += 1
            return outputs

    engine = Interrupted()
    target = EngineTarget(engine, clock=engine.clock, sleep=engine.sleep)
    requests = [TrafficRequest([1, 2, 3], 40, 40) for _ in range(3)]
    before = signal.getsignal(signal.SIGINT)
    trace = drive(target, requests, arrivals.closed_loop(3))
    assert trace.interrupted
    assert engine.whole >= 4
    assert not engine.has_unfinished
    assert signal.getsignal(signal.SIGINT) is before


def test_what_was_made_before_is_no_garbage_to_look_through_meanwhile() -> None:
    engine, seen = SimulatedEngine(), []
    step = engine.step
    engine.step = lambda **options: (seen.append(gc.get_freeze_count()), step(**options))[1]  # type: ignore[method-assign]
    before = gc.get_freeze_count()
    run(engine, alike(2), arrivals.closed_loop(2))
    assert min(seen) > before + 1000
    assert gc.get_freeze_count() == 0
