"""Formulas against event logs made by hand: reports B80 and B81, percentiles, goodput, throughput, errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmjax.loadtest.driver import Record, Trace
from llmjax.loadtest.measure import FORMULAS, METRICS, Distribution, ServiceLevels, measure, missed


def record(due: float, events: list[tuple[float, int]], **fields: object) -> Record:
    """A request that came at `due`; events are (seconds after that, tokens)."""
    made = Record(due, sum(count for _, count in events), sent=due)
    made.times, made.counts = [due + time for time, _ in events], [count for _, count in events]
    made.ended = made.times[-1] if events else due
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def trace(*records: Record) -> Trace:
    ended = [r.ended for r in records if r.ended is not None]
    return Trace(records=list(records), started=0.0, ended=max(ended, default=0.0))


def test_the_first_token_is_no_inter_token_latency() -> None:
    """Report B80: 1 s to the first token, then 10 ms gaps, 20 tokens."""
    found = measure(trace(record(5.0, [(1.0 + 0.01 * i, 1) for i in range(20)])), ServiceLevels()).latencies
    assert found["ttft"].max == pytest.approx(1.0)
    assert (found["itl"].count, found["itl"].p50, found["itl"].max) == (19, pytest.approx(0.01), pytest.approx(0.01))
    assert found["tpot"].mean == pytest.approx(0.01)
    assert found["e2e"].p99 == pytest.approx(1.19)


def test_events_with_several_tokens() -> None:
    """Report B81: three tokens at once, then one each 10 ms; then five at once after 100 ms."""
    figures = measure(trace(record(0.0, [(1.0, 3), (1.01, 1), (1.02, 1), (1.12, 5)])), ServiceLevels())
    found = figures.latencies
    assert found["ttft"].p50 == pytest.approx(1.0)
    assert found["itl"].count == 3
    assert found["itl"].max == pytest.approx(0.1)
    assert found["itl_token"].count == 7  # the first event's tokens have no gap
    assert found["itl_token"].max == pytest.approx(0.02)
    assert found["itl_token"].mean == pytest.approx((0.01 + 0.01 + 5 * 0.02) / 7)
    assert found["tpot"].mean == pytest.approx(0.12 / 9)
    assert figures.output_tokens["sum"] == 10


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng().exponential(1.0, 57)
    found = Distribution.of(values)
    ordered = np.sort(values)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        at = share * 56
        low = int(at)
        assert getattr(found, name) == pytest.approx(ordered[low] + (at - low) * (ordered[min(low + 1, 56)] - ordered[low]))
    assert (found.count, found.max) == (57, values.max())
    assert Distribution.of([]) == Distribution(0)


def test_one_token_has_no_time_per_output_token() -> None:
    found = measure(trace(record(0.0, [(1.0, 1)])), ServiceLevels()).latencies
    assert (found["tpot"].count, found["itl"].count, found["ttft"].count) == (0, 0, 1)


def test_rates_count_completed_requests_only() -> None:
    good = record(0.0, [(1.0, 2), (2.0, 2)], prompt_tokens=6)
    refused = record(0.0, [], error="QueueFullError: full")
    broken = record(1.0, [(1.0, 1)], error="error: NaN", ended=4.0)
    open_ = record(3.0, [(0.5, 1)], ended=None)
    figures = measure(trace(good, refused, broken, open_), ServiceLevels())
    assert (figures.sent, figures.completed, figures.unfinished, figures.duration) == (4, 1, 1, 4.0)
    assert figures.errors == {"QueueFullError": 1, "error": 1}
    assert figures.failed == 2
    assert figures.requests_per_second == pytest.approx(0.25)
    assert figures.output_tokens_per_second == pytest.approx(1.0)
    assert figures.total_tokens_per_second == pytest.approx(2.5)
    assert figures.latencies["ttft"].count == 1
    assert figures.goodput is None


def test_allocation_success_is_without_preemption_and_refusal() -> None:
    records = [record(0.0, [(1.0, 1)]) for _ in range(7)]
    records += [record(0.0, [(1.0, 1)], preemptions=2), record(0.0, [], error="ContextLengthError: x")]
    figures = measure(trace(*records, record(0.0, [], ended=None)), ServiceLevels())
    assert figures.allocation_success == pytest.approx(7 / 9)
    assert figures.preemptions == 2


def test_the_queue_counts_what_the_client_held_back() -> None:
    figures = measure(trace(record(1.0, [(3.0, 1)], sent=2.5, queue_seconds=0.25), record(1.0, [(3.0, 1)])), ServiceLevels())
    assert (figures.latencies["queue"].count, figures.latencies["queue"].mean) == (1, pytest.approx(1.75))


def test_peak_concurrency_of_touching_requests() -> None:
    a, b, c = record(0.0, [(2.0, 1)]), record(2.0, [(2.0, 1)]), record(1.0, [(2.0, 1)])
    assert measure(trace(a, b), ServiceLevels()).peak_concurrency == 1
    assert measure(trace(a, b, c), ServiceLevels()).peak_concurrency == 2
    assert measure(trace(a, record(1.5, [], ended=None)), ServiceLevels()).peak_concurrency == 2


def test_goodput_needs_every_level() -> None:
    fast = record(0.0, [(0.1, 1), (0.11, 1), (0.12, 1)])
    slow_start = record(0.0, [(0.9, 1), (0.91, 1)])
    stutters = record(0.0, [(0.1, 1), (0.5, 1), (0.51, 1)])
    run = trace(fast, slow_start, stutters)
    assert measure(run, ServiceLevels(ttft_p95=0.2)).goodput == pytest.approx(2 / run.ended)
    assert measure(run, ServiceLevels(ttft_p95=0.2, itl_p95=0.1)).goodput == pytest.approx(1 / run.ended)
    assert measure(run, ServiceLevels(e2e_p95=0.6)).goodput == pytest.approx(2 / run.ended)
    assert measure(run, ServiceLevels(tpot_p95=0.02)).goodput == pytest.approx(2 / run.ended)


def test_missed_levels_say_by_how_much() -> None:
    levels = ServiceLevels(ttft_p95=0.5, itl_p95=1.0, errors=0)
    figures = measure(trace(record(0.0, [(0.6, 1), (0.7, 1)]), record(0.0, [], error="abort: x")), levels)
    assert missed(figures, levels) == ["ttft P95 600.0 ms is above 500 ms", "1 requests failed, at most 0 may"]
    assert missed(figures, ServiceLevels()) == []
    assert not ServiceLevels()
    assert ServiceLevels(errors=0)
    nothing = measure(trace(), levels)
    assert "no request was completed" in missed(nothing, levels)[0]


def test_every_metric_has_its_formula() -> None:
    assert set(METRICS) <= set(FORMULAS)
