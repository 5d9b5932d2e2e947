"""Series of `/metrics` about recalibrations, from the file in which the process that does them keeps its state.

That process has no HTTP, and its counts outlive every other: they are read when somebody asks, by the worker that is asked. Of
the file these fields are known: `passed`, `refused`, `failed`, `drift` (name to number) and `noise`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

RESULTS = ("passed", "refused", "failed")


def recalibration_registry(path: Path) -> CollectorRegistry:
    """A registry with what the file says at each time."""
    registry = CollectorRegistry()
    registry.register(_FromFile(path))
    return registry


class _FromFile(Collector):
    def __init__(self, path: Path) -> None:
        self._path = path

    def collect(self) -> Iterable[Metric]:
        """Counters are 0 while there is no file; one that cannot be read gives no series: a smaller counter would be a reset."""
        try:
            state = json.loads(self._path.read_text("utf-8"))
            counts = {name: float(state[name]) for name in RESULTS}
            drift = {str(name): float(value) for name, value in state["drift"].items()}
            noise = float(state["noise"])
        except FileNotFoundError:
            counts, drift, noise = dict.fromkeys(RESULTS, 0.0), {}, 0.0
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
        runs = CounterMetricFamily("llmjax:recalibrations", "Candidates made from live traffic.", labels=["result"])
        for name, count in counts.items():
            runs.add_metric([name], count)
        yield runs
        if drift:
            text = "Largest difference of two cumulative distributions, live traffic and calibration, 0 to 1."
            gauge = GaugeMetricFamily("llmjax:calibration_drift", text, labels=["of"])
            for name, value in drift.items():
                gauge.add_metric([name], value)
            yield gauge
            text = "What that exceeds by chance once in a hundred times."
            yield GaugeMetricFamily("llmjax:calibration_drift_noise", text, value=noise)
