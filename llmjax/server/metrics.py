"""`ServerMetrics`: what the HTTP side counts, in a registry of its own, and whether requests are taken.

The HTTP series have the names that Python web services usually give them; the others begin with `llmjax:`. Series of the engine
(requests, times, tokens, pages) are its own business, not this module's.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmjax.engine.async_engine import AsyncEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BYTES = tuple(float(4**power) for power in range(3, 13))


class ServerMetrics:
    """Series of one app.

    Args:
        engine: asked for its health.
        model_name: label of the series that are not of HTTP.

    Attributes:
        registry: to be exposed.
        requests: HTTP answers by handler, method and status; 499 is a client that left before the answer was complete.
        seconds: from the request's first byte to the answer's last, by handler.
        request_bytes, response_bytes: sizes of bodies, by handler.
        slow_readers: streams dropped because the client did not take what was sent.
    """

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("handler",), buckets=buckets, registry=registry)

        self.requests = Counter("http_requests", "HTTP answers.", ("handler", "method", "status"), registry=registry)
        self.seconds = histogram("http_request_duration_seconds", "From the request's first byte to the answer's last.", _SECONDS)
        self.request_bytes = histogram("http_request_size_bytes", "Bodies of requests, as far as they were read.", _BYTES)
        self.response_bytes = histogram("http_response_size_bytes", "Bodies of answers, as far as they were sent.", _BYTES)
        slow_readers = Counter(
            "llmjax:slow_readers",
            "Streams dropped because the client did not take what was sent.",
            ("model_name",),
            registry=registry,
        )
        self.slow_readers = slow_readers.labels(model_name)
        registry.register(_EngineHealth(engine, model_name))


class _EngineHealth(Collector):
    """The engine as this side sees it, at the moment it is asked for."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        for name, text, value in (
            ("engine_ready", "1 while requests are taken.", float(self._engine.health.ready)),
            ("open_requests", "Prompts under way, unread output included.", float(self._engine.num_open)),
        ):
            family = GaugeMetricFamily(f"llmjax:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
