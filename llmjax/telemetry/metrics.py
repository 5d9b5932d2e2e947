"""`EngineMetrics`: what an engine counts, as Prometheus series in a registry of its own.

Every series of finished requests is fed by one call with one set of `Timings`, whatever ended the request, so that their counts
agree (`requests_total` over all reasons = the count of each histogram, but for requests without a token, which have no time to
one). Owns no clock and knows no requests. The registry is the engine's: two engines of a process do not share numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from llmjax.telemetry.timings import SEGMENTS, Timings

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
ANY_LANE = "any"  # of a request that was refused before it was known which lane it would wait in
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class EngineMetrics:
    """The series of one engine, by lane of its queue.

    Args:
        lanes: names of the lanes, in order.

    Attributes:
        registry: to be exposed, or read with `registry.get_sample_value`.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"llmjax_{name}", text, ("lane", *labels), buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"llmjax_{name}", text, ("lane", *labels), registry=registry)

        segments = histogram(
            "request_segment_seconds", "A request's life by segment; the segments sum to it.", _SECONDS, "segment"
        )
        whole = histogram("request_seconds", "From arrival to the last byte.", _SECONDS)
        first = histogram("time_to_first_token_seconds", "From arrival to the first token on the host.", _SECONDS)
        each = histogram("time_per_output_token_seconds", "Of the tokens after the first launch's, on average.", _SECONDS)
        chunks = histogram("request_chunks", "Launches that computed known tokens of a request.", _COUNTS)
        steps = histogram("request_steps", "Decode steps launched for a request.", _COUNTS)
        self._finished = counter("requests", "Finished requests by reason.", "reason")
        refused = counter("queue_full", "Requests refused because their lane, or the whole queue, was full.")
        prompt = counter("prompt_tokens", "Prompt tokens of finished requests.")
        cached = counter("cached_tokens", "Those of them that were found in the cache.")
        output = counter("output_tokens", "Tokens sampled for finished requests.")
        preemptions = counter("preemptions", "Times that finished requests had lost a row.")
        self._compilations = Histogram(
            "llmjax_grammar_compilation_seconds",
            "Compiling the form of a structured output; those known already are not counted.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._waiting = Gauge("llmjax_requests_waiting", "Requests without a row.", ("lane",), registry=registry)
        self._segments = {lane: [segments.labels(lane, segment) for segment in SEGMENTS] for lane in lanes}
        self._histograms = {lane: [h.labels(lane) for h in (whole, chunks, steps)] for lane in lanes}
        self._first = {lane: first.labels(lane) for lane in lanes}
        self._each = {lane: each.labels(lane) for lane in lanes}
        self._counters = {lane: [c.labels(lane) for c in (prompt, cached, output, preemptions)] for lane in lanes}
        self._refused = {lane: refused.labels(lane) for lane in (*lanes, ANY_LANE)}

    def watch_waiting(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Ask `counts` for the waiting requests of each lane whenever the registry is read."""
        for lane in self._segments:
            self._waiting.labels(lane).set_function(lambda lane=lane: counts()[lane])  # type: ignore[misc]

    def finished(self, timings: Timings, *, lane: str, reason: str) -> None:
        """Count a request that has ended, however it ended."""
        for segment, series in zip(SEGMENTS, self._segments[lane], strict=True):
            series.observe(timings.seconds(segment))
        for series, value in zip(self._histograms[lane], (timings.total_ns * 1e-9, timings.chunks, timings.steps), strict=True):
            series.observe(value)
        if timings.first_token_ns is not None:
            self._first[lane].observe(timings.first_token_ns * 1e-9)
        if (seconds := timings.time_per_output_token) is not None:
            self._each[lane].observe(seconds)
        counts = (timings.prompt_tokens, timings.cached_tokens, timings.output_tokens, timings.preemptions)
        for counter, count in zip(self._counters[lane], counts, strict=True):
            counter.inc(count)
        self._finished.labels(lane, reason).inc()

    def grammar_compiled(self, seconds: float) -> None:
        """Count a compilation. From any thread."""
        self._compilations.observe(seconds)

    def refused(self, lane: str) -> None:
        """Count a request that found its lane full, or the queue (`ANY_LANE`)."""
        self._refused[lane].inc()
