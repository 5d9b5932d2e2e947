"""`ServerMetrics`: what the HTTP side counts, in a registry of its own.

The HTTP series have the names that Python web services usually give them. With several HTTP workers the series are summed by
name and labels, so that they must be sums: counters and histograms. What the engine counts and what state it is in are its own
business, not this module's.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BYTES = tuple(float(4**power) for power in range(3, 13))


class ServerMetrics:
    """Series of one app.

    Args:
        model_name: label of the series that are not of HTTP.

    Attributes:
        registry: to be exposed.
        requests: HTTP answers by handler, method and status; 499 is a client that left before the answer was complete.
        seconds: from the request's first byte to the answer's last, by handler.
        request_bytes, response_bytes: sizes of bodies, by handler.
        slow_readers: streams dropped because the client did not take what was sent.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("handler",), buckets=buckets, registry=registry)

        self.requests = Counter("http_requests", "HTTP answers.", ("handler", "method", "status"), registry=registry)
        self.seconds = histogram("http_request_duration_seconds", "From the request's first byte to the answer's last.", _SECONDS)
        self.request_bytes = histogram("http_request_size_bytes", "Bodies of requests, as far as they were read.", _BYTES)
        self.response_bytes = histogram("http_response_size_bytes", "Bodies of answers, as far as they were sent.", _BYTES)
        text = "Streams dropped because the client did not take what was sent."
        slow_readers = Counter("llmjax:slow_readers", text, ("model_name",), registry=registry)
        self.slow_readers = slow_readers.labels(model_name)
