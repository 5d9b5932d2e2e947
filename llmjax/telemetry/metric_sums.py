"""Adding up the Prometheus series of several processes: counters and histograms, by name and labels. Plain data in and out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Series = list[Metric]


def read_series(registries: Iterable[CollectorRegistry]) -> Series:
    """All series as they are now; may be pickled."""
    return [family for registry in registries for family in registry.collect()]


def sum_series(parts: Iterable[Sequence[Metric]]) -> Series:
    """One series for each name and set of labels. Times of creation are not added: the earliest is taken."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for part in parts for family in part):
        families.setdefault(family.name, family)
        sums = values.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            before = sums.get(key)
            if before is None:
                sums[key] = sample.value
            else:
                sums[key] = min(before, sample.value) if sample.name.endswith("_created") else before + sample.value
    summed = []
    for name, family in families.items():
        one = Metric(family.name, family.documentation, family.type, family.unit)
        for (sample_name, labels), value in values[name].items():
            one.add_sample(sample_name, dict(labels), value)
        summed.append(one)
    return summed


class SummedSeries(Collector):
    """Series for a registry, made elsewhere."""

    def __init__(self, series: Sequence[Metric]) -> None:
        self._series = series

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        return self._series
