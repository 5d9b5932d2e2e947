"""Speculative decoding as Prometheus series: vLLM's where it has them, and what was switched, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmjax.telemetry.reading import SpeculationReading


def speculation_series(prefix: str, now: SpeculationReading, names: Sequence[str], values: Sequence[str]) -> Iterable[Metric]:
    """The series; `names` and `values` are labels of each."""

    def counter(name: str, text: str, items: Iterable[tuple[Sequence[str], float]], *more: str) -> Metric:
        family = CounterMetricFamily(f"{prefix}spec_decode_{name}", text, labels=[*names, *more])
        for extra, value in items:
            family.add_metric([*values, *extra], value)
        return family

    def gauge(name: str, text: str, items: Iterable[tuple[Sequence[str], float]], *more: str) -> Metric:
        family = GaugeMetricFamily(f"{prefix}spec_decode_{name}", text, labels=[*names, *more])
        for extra, value in items:
            family.add_metric([*values, *extra], value)
        return family

    yield counter("num_drafts", "Rounds of drafts; each choice of a launch counts.", [((), now.rounds)])
    yield counter("num_draft_tokens", "Tokens drafted.", [((), now.drafted)])
    yield counter("num_accepted_tokens", "Those of them that were accepted.", [((), now.accepted)])
    places = [((str(place),), count) for place, count in enumerate(now.accepted_at)]
    yield counter("num_accepted_tokens_per_pos", "The same by place in the round.", places, "position")
    switches = [((to, reason), count) for to, reason, count in now.switches]
    yield counter("switches", "Times that a choice, or all, stopped or began to draft.", switches, "to", "reason")
    yield gauge("active", "1 while launches speculate where it pays, 0 while none does.", [((), float(now.off is None))])
    share = [] if now.acceptance is None else [((), now.acceptance)]
    yield gauge("acceptance", "Share of the drafts tested lately that were accepted, 0 to 1.", share)
    lanes = [((lane,), value) for lane, value in now.by_lane.items()]
    yield gauge("acceptance_by_lane", "The same by lane.", lanes, "lane")
    classes = [((name,), value) for name, value in now.by_class.items()]
    yield gauge("acceptance_by_class", "The same by class of prompt.", classes, "prompt_class")
