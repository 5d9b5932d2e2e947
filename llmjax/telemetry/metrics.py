"""`EngineMetrics`: what an engine counts, as Prometheus series with vLLM's names and meaning under `llmjax:`.

Every series of finished requests is fed by one call with one set of `Timings`, whatever ended the request, so that their counts
agree (`request_success` over all reasons = the count of each histogram, but for requests without a token, which have no time to
one). One thread feeds them, the engine's; any thread may read. Owns no clock and knows no requests. The registry is the engine's:
two engines of a process do not share numbers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmjax.telemetry.histogram import SECONDS, SHOWN_SECONDS, SIZES, Histogram
from llmjax.telemetry.reading import EngineReading
from llmjax.telemetry.speculation_series import speculation_series
from llmjax.telemetry.timings import SEGMENTS, Timings

PREFIX = "llmjax:"
ANY_LANE = "any"  # of a request that was refused before it was known which lane it would wait in

_OF_SECONDS = {
    "time_to_first_token_seconds": "From arrival to the first token on the host, told when it is there.",
    "request_time_per_output_token_seconds": "Of the tokens after the first launch's, on average over the request.",
    "e2e_request_latency_seconds": "From arrival to the last byte.",
    "request_queue_time_seconds": "From being queued to the row in which the first token was made.",
    "request_prefill_time_seconds": "From that row to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From that row to the last token.",
}
_OF_SIZES = {
    "request_prompt_tokens": "Prompt tokens of a finished request.",
    "request_generation_tokens": "Tokens sampled for a finished request, of all its choices.",
    "request_max_num_generation_tokens": "Tokens of its longest choice.",
    "request_params_n": "Choices that a finished request asked for.",
    "request_params_max_tokens": "Tokens that it allowed, where it said so.",
    "request_chunks": "Launches that computed known tokens of a request.",
    "request_steps": "Decode steps launched for a request.",
}


class EngineMetrics(Collector):
    """The series of one engine, by lane of its queue.

    Args:
        lanes: names of the lanes, in order.

    Attributes:
        registry: to be read with `registry.get_sample_value`, or exposed.
        time_to_first: by lane. between_tokens: of all requests, each token once; those of one launch share its time out evenly.
        prompt_tokens, output_tokens: of finished requests, by lane.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lanes: list[str] = []
        self._seconds: dict[str, dict[str, Histogram]] = {name: {} for name in _OF_SECONDS}
        self._sizes: dict[str, dict[str, Histogram]] = {name: {} for name in _OF_SIZES}
        self._segments: dict[tuple[str, str], Histogram] = {}
        self._finished: dict[tuple[str, str], int] = {}
        self._refused: dict[str, int] = {ANY_LANE: 0}
        self._read: Callable[[], EngineReading] | None = None
        self.between_tokens = Histogram(SECONDS)
        self._iterations = Histogram(SIZES)
        self._compilations = Histogram(SECONDS)
        self._compiling = threading.Lock()
        self.time_to_first = self._seconds["time_to_first_token_seconds"]
        self.prompt_tokens = self._sizes["request_prompt_tokens"]
        self.output_tokens = self._sizes["request_generation_tokens"]
        self.add_lanes(lanes)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def add_lanes(self, lanes: Sequence[str]) -> None:
        """Have series for these lanes too; what was counted stays."""
        for lane in lanes:
            if lane not in self._lanes:
                for series in self._seconds.values():
                    series[lane] = Histogram(SECONDS)
                for series in self._sizes.values():
                    series[lane] = Histogram(SIZES)
                for segment in SEGMENTS:
                    self._segments[lane, segment] = Histogram(SECONDS)
                self._refused[lane] = 0
                self._lanes.append(lane)

    def watch(self, read: Callable[[], EngineReading]) -> None:
        """Ask `read` for the state of the engine whenever the series are read, on the thread that reads them."""
        self._read = read

    # -- the engine's thread

    def launched(self, num_tokens: int, num_steps: int) -> None:
        """Count a launch of so many steps, each of so many tokens."""
        self._iterations.add(num_tokens, num_steps)

    def first_token(self, lane: str, seconds: float) -> None:
        """Count the first token of a request."""
        self.time_to_first[lane].add(seconds)

    def finished(self, timings: Timings, *, lane: str, reason: str, n: int, max_tokens: int | None, longest: int) -> None:
        """Count a request that has ended, however it ended. `longest` is the number of tokens of its longest choice."""
        for segment in SEGMENTS:
            self._segments[lane, segment].add(timings.seconds(segment))
        seconds: dict[str, float | None] = {
            "request_time_per_output_token_seconds": timings.time_per_output_token,
            "e2e_request_latency_seconds": timings.total_ns * 1e-9,
            "request_queue_time_seconds": timings.until_row_ns * 1e-9,
            "request_prefill_time_seconds": timings.prefill_ns * 1e-9,
            "request_decode_time_seconds": timings.decode_ns * 1e-9,
            "request_inference_time_seconds": (timings.prefill_ns + timings.decode_ns) * 1e-9,
        }
        sizes: dict[str, int | None] = {
            "request_prompt_tokens": timings.prompt_tokens,
            "request_generation_tokens": timings.output_tokens,
            "request_max_num_generation_tokens": longest,
            "request_params_n": n,
            "request_params_max_tokens": max_tokens,
            "request_chunks": timings.chunks,
            "request_steps": timings.steps,
        }
        for series, values in ((self._seconds, seconds), (self._sizes, sizes)):
            for name, value in values.items():
                if value is not None:
                    series[name][lane].add(value)
        self._finished[lane, reason] = self._finished.get((lane, reason), 0) + 1

    def grammar_compiled(self, seconds: float) -> None:
        """Count the compilation of a structured output's form. From any thread."""
        with self._compiling:
            self._compilations.add(seconds)

    def refused(self, lane: str) -> None:
        """Count a request that found its lane full, or the queue (`ANY_LANE`)."""
        self._refused[lane] += 1

    # -- whoever looks

    @property
    def finished_by_reason(self) -> dict[str, int]:
        """Finished requests of all lanes."""
        found: dict[str, int] = {}
        for (_, reason), count in list(self._finished.items()):
            found[reason] = found.get(reason, 0) + count
        return found

    @property
    def num_refused(self) -> int:
        """Requests that found a queue full."""
        return sum(list(self._refused.values()))

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        return self.families({})

    def text(self, labels: Mapping[str, str]) -> bytes:
        """Every series in Prometheus' text form, with these labels on each."""
        registry = CollectorRegistry()
        registry.register(_Labelled(self, labels))
        return generate_latest(registry)

    def families(self, labels: Mapping[str, str]) -> Iterable[Metric]:
        """Every series, with these labels on each."""
        names, values = list(labels), list(labels.values())

        def histograms(
            name: str, text: str, shown: Sequence[float], series: Iterable[tuple[Sequence[str], Histogram]], *more: str
        ) -> Metric:
            family = HistogramMetricFamily(PREFIX + name, text, labels=[*names, *more])
            for extra, one in series:
                buckets = [(_bound_text(bound), float(count)) for bound, count in one.cumulative(shown)]
                family.add_metric([*values, *extra], buckets, one.total)
            return family

        for series, texts, shown in ((self._seconds, _OF_SECONDS, SHOWN_SECONDS), (self._sizes, _OF_SIZES, SIZES)):
            for name, text in texts.items():
                lanes = [((lane,), one) for lane, one in list(series[name].items())]
                yield histograms(name, text, shown, lanes, "lane")
        text = "From one token of a choice to its next; tokens of one launch share its time out evenly."
        yield histograms("inter_token_latency_seconds", text, SHOWN_SECONDS, [((), self.between_tokens)])
        text = "Tokens computed in one step of the model."
        yield histograms("iteration_tokens_total", text, SIZES, [((), self._iterations)])
        text = "Compiling the form of a structured output; those known already are not counted."
        yield histograms("grammar_compilation_seconds", text, SHOWN_SECONDS, [((), self._compilations)])
        text = "A request's life by segment; the segments sum to it."
        yield histograms("request_segment_seconds", text, SHOWN_SECONDS, list(self._segments.items()), "lane", "segment")
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Finished requests, whatever ended them.", labels=[*names, "lane", "finished_reason"]
        )
        for key, count in list(self._finished.items()):
            finished.add_metric([*values, *key], count)
        yield finished
        refused = CounterMetricFamily(
            PREFIX + "queue_full", "Requests refused because a queue was full.", labels=[*names, "lane"]
        )
        for lane, count in list(self._refused.items()):
            refused.add_metric([*values, lane], count)
        yield refused
        if self._read is not None:
            yield from _state(self._read(), names, values)


class _Labelled(Collector):
    def __init__(self, metrics: EngineMetrics, labels: Mapping[str, str]) -> None:
        self._metrics, self._labels = metrics, labels

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families(self._labels)


def _state(now: EngineReading, names: Sequence[str], values: Sequence[str]) -> Iterable[Metric]:
    """The engine's own gauges and counters."""

    def gauge(name: str, text: str, by: Mapping[str, float] | float, label: str = "") -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=[*names, *([label] if label else [])])
        for extra, value in _items(by):
            family.add_metric([*values, *extra], value)
        return family

    def counter(name: str, text: str, by: Mapping[str, float] | float, label: str = "") -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*names, *([label] if label else [])])
        for extra, value in _items(by):
            family.add_metric([*values, *extra], value)
        return family

    fresh = max(0, sum(now.waiting.values()) - now.preempted)
    own = max(0, now.held - now.shared)
    empty = max(0, now.pages - now.held - now.cached)  # the numbers are not of one step
    pages = {"own": own, "shared": now.shared, "cached": now.cached, "empty": empty}
    sources = {"local_compute": now.prompt_tokens_first_computed, "local_cache_hit": now.prompt_tokens_cached}
    yield gauge("num_requests_running", "Choices with a row of the batch.", now.running, "lane")
    yield gauge("num_requests_waiting", "Choices without one.", now.waiting, "lane")
    yield gauge(
        "num_requests_waiting_by_reason",
        "The same by what they wait for: room for the first time, or again after a preemption.",
        {"capacity": fresh, "preempted": now.preempted},
        "reason",
    )
    yield gauge("kv_cache_usage_perc", "Share of the pages that choices hold, 0 to 1.", now.held / now.pages)
    yield gauge(
        "kv_pages", "Pages: held by one choice, by several, free and found by the prefix cache, free and empty.", pages, "state"
    )
    yield gauge(
        "kv_page_contiguity", "Share of the steps along page tables that lead to the next page of the pool.", now.contiguity
    )
    info = GaugeMetricFamily(PREFIX + "cache_config_info", "What was configured.", labels=[*names, *now.config])
    info.add_metric([*values, *now.config.values()], 1.0)
    yield info
    yield counter("prompt_tokens", "Prompt tokens of choices, computed or found.", sum(sources.values()))
    yield counter("prompt_tokens_by_source", "The same by where their keys and values came from.", sources, "source")
    yield counter("recomputed_tokens", "Tokens computed again after preemptions.", now.tokens_recomputed)
    yield counter("generation_tokens", "Tokens sampled.", now.output_tokens)
    yield counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prompt_tokens_queried)
    yield counter("prefix_cache_hits", "Those of them that were found.", now.prompt_tokens_cached)
    yield counter("num_preemptions", "Times that a choice lost its row.", now.preemptions)
    yield counter("corrupted_requests", "Requests that ended because their logits were not finite.", now.corrupted)
    yield counter("launches", "Launches of the device.", now.launches)
    yield counter(
        "compiles_after_ready", "Programs that a launch had to compile; there should be none.", now.compiles_after_ready
    )
    if now.speculation is not None:
        yield from speculation_series(PREFIX, now.speculation, names, values)


def _bound_text(bound: float) -> str:
    return str(float(bound)) if math.isfinite(bound) else "+Inf"


def _items(by: Mapping[str, float] | float) -> list[tuple[tuple[str, ...], float]]:
    return [((label,), value) for label, value in by.items()] if isinstance(by, Mapping) else [((), by)]
