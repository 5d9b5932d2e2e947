"""Series of several processes, added up."""

from __future__ import annotations

import pickle

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from llmjax.telemetry.metric_sums import SummedSeries, read_series, sum_series


def counted(*events: tuple[str, float]) -> CollectorRegistry:
    """A registry that has seen these routes and seconds."""
    registry = CollectorRegistry()
    counter = Counter("llmjax_answers", "Answers.", ("route",), registry=registry)
    histogram = Histogram("llmjax_seconds", "Seconds.", ("route",), buckets=(1.0, 2.0), registry=registry)
    for route, seconds in events:
        counter.labels(route).inc()
        histogram.labels(route).observe(seconds)
    return registry


def values(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


def test_sums_are_what_one_process_would_have_counted() -> None:
    parts = [[("a", 0.5), ("b", 1.5)], [("a", 9.0)], [], [("c", 0.1), ("a", 1.1)]]
    series = [pickle.loads(pickle.dumps(read_series([counted(*part)]))) for part in parts]
    series.append(sum_series(series.pop() for _ in range(2)))  # in any order, a sum of sums too
    total = CollectorRegistry()
    total.register(SummedSeries(sum_series(series)))
    assert values(total) == values(counted(*(event for part in parts for event in part)))
