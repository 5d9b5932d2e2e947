"""`EngineState`: whether an engine takes requests, and how many it has, read when they are asked for.

What it has done and holds is told by `telemetry/metrics.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmjax.telemetry.metrics import PREFIX

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine


class EngineState(Collector):
    """Numbers of one moment, with `labels` on each. Time counts from when this is made."""

    def __init__(self, engine: AsyncEngine, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._labels = labels
        self._started = time.time()

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        for name, text, value in (
            ("engine_ready", "1 while requests are taken.", float(self._engine.health.ready)),
            ("open_requests", "Prompts under way, unread output included.", float(self._engine.num_open)),
            ("engine_start_time_seconds", "When the engine was started, in Unix time; changes are restarts.", self._started),
        ):
            family = GaugeMetricFamily(PREFIX + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
