"""`ServerMetrics`: what the HTTP side counts, in a registry of its own.

With several HTTP workers the series are summed by name and labels, so that they must be sums: counters and histograms. What
the engine counts and what state it is in are the engine's own business, not this module's.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Series of one app.

    Attributes:
        registry: to be exposed.
        requests: HTTP answers by route, method and status; 499 is a client that left before the answer was complete.
        seconds: from the request's first byte to the answer's last, by route.
        slow_readers: streams dropped because the client did not take what was sent.
    """

    def __init__(self) -> None:
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
