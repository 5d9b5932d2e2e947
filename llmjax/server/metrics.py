"""`ServerMetrics`: what the HTTP side counts, and the engine's state at the moment it is asked. A registry of its own.

Series of finished requests (times, tokens, reasons) are the engine's own business, not this module's.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmjax.engine.async_engine import AsyncEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Series of one app.

    Attributes:
        registry: to be exposed.
        requests: HTTP answers by route, method and status; 499 is a client that left before the answer was complete.
        seconds: from the request's first byte to the answer's last, by route.
        slow_readers: streams dropped because the client did not take what was sent.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        labels = ("route", "method", "status")
        self.requests = Counter("llmjax_http_requests", "HTTP answers.", labels, registry=self.registry)
        self.seconds = Histogram(
            "llmjax_http_request_seconds",
            "From the request's first byte to the answer's last.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.slow_readers = Counter(
            "llmjax_slow_readers", "Streams dropped because the client did not take what was sent.", registry=self.registry
        )
        self.registry.register(_EngineState(engine))


class _EngineState(Collector):
    """Gauges and counters of the engine, read when they are asked for. Numbers of one moment, but not of one step."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        engine = self._engine.engine
        health = GaugeMetricFamily("llmjax_engine_ready", "1 while requests are taken.")
        health.add_metric([], float(self._engine.health.ready))
        yield health
        yield GaugeMetricFamily("llmjax_open_requests", "Prompts under way, unread output included.", self._engine.num_open)
        yield GaugeMetricFamily("llmjax_requests_running", "Choices with a row of the batch.", engine.scheduler.num_running)
        yield GaugeMetricFamily("llmjax_kv_pages", "Pages of the pool.", engine.stats.num_pages)
        yield GaugeMetricFamily("llmjax_kv_pages_used", "Pages in use.", engine.pool.num_used)
        yield CounterMetricFamily("llmjax_launches", "Launches of the device.", engine.stats.launches)
        yield CounterMetricFamily(
            "llmjax_sampled_tokens", "Tokens sampled, of unfinished requests too.", engine.stats.output_tokens
        )
