"""`EngineState`: gauges and counters of an engine that runs, read when they are asked for.

Series of finished requests (times, tokens, reasons) are `telemetry/metrics.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine


class EngineState(Collector):
    """Numbers of one moment, but not of one step."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
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
