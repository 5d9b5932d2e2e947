"""Metrics count what they are told, each end of a request in every series, and say so in Prometheus' form."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmjax.telemetry.metrics import ANY_LANE, EngineMetrics
from llmjax.telemetry.reading import EngineReading, SpeculationReading
from llmjax.telemetry.timings import SEGMENTS, RequestTimeline, Timings

MS = 1_000_000
OF_REQUESTS = (
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_n", "request_chunks", "request_steps",
)  # fmt: skip
READING = EngineReading(
    running={"short": 3, "long": 1}, waiting={"short": 4, "long": 2}, preempted=1, pages=100, held=40, shared=10, cached=25,
    contiguity=0.75, launches=9, prompt_tokens_computed=70, tokens_recomputed=20, prompt_tokens_queried=80,
    prompt_tokens_cached=30, output_tokens=500, preemptions=2, corrupted=1, compiles_after_ready=0, config={"page_size": "16"},
)  # fmt: skip


def timings(**changes: Any) -> Timings:
    plain = Timings(
        arrival_ns=0, ingress_ns=MS, queue_ns=2 * MS, batch_ns=3 * MS, compute_ns=4 * MS, egress_ns=5 * MS, row_ns=3 * MS,
        first_token_ns=7 * MS, last_token_ns=10 * MS, first_tokens=1, prompt_tokens=9, output_tokens=4,
        preemptions=1, chunks=2, steps=3,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"llmjax:{name}", labels)


def finish(metrics: EngineMetrics, lane: str, reason: str, made: Timings, *, max_tokens: int | None = 16) -> None:
    metrics.finished(made, lane=lane, reason=reason, n=2, max_tokens=max_tokens, longest=3)


def test_b31_every_series_counts_every_finished_request() -> None:
    metrics = EngineMetrics(("short", "long"))
    for reason in ("stop", "length", "abort", "abort", "timeout", "error"):
        metrics.first_token("short", 0.007)
        finish(metrics, "short", reason, timings())
    without = timings(row_ns=None, first_token_ns=None, last_token_ns=None, output_tokens=0)
    finish(metrics, "long", "abort", without, max_tokens=None)
    metrics.refused("long")
    metrics.refused(ANY_LANE)
    ends = [
        sample.value
        for family in metrics.registry.collect()
        if family.name == "llmjax:request_success"
        for sample in family.samples
    ]
    assert sum(ends) == 7
    for name in OF_REQUESTS:
        assert [value(metrics, f"{name}_count", lane=lane) for lane in ("short", "long")] == [6, 1], name
    for segment in SEGMENTS:
        assert value(metrics, "request_segment_seconds_count", lane="short", segment=segment) == 6
    assert value(metrics, "time_to_first_token_seconds_count", lane="long") == 0  # it has no token
    assert value(metrics, "request_params_max_tokens_count", lane="long") == 0  # it set no limit
    assert value(metrics, "request_success_total", lane="short", finished_reason="abort") == 2
    assert value(metrics, "request_prompt_tokens_sum", lane="short") == 54
    assert value(metrics, "request_queue_time_seconds_sum", lane="long") == pytest.approx(0.002)
    assert [value(metrics, "queue_full_total", lane=lane) for lane in ("short", "long", ANY_LANE)] == [0, 1, 1]
    seconds = [value(metrics, "request_segment_seconds_sum", lane="short", segment=name) for name in SEGMENTS]
    assert sum(seconds) == pytest.approx(value(metrics, "e2e_request_latency_seconds_sum", lane="short"))


def test_queue_prefill_and_decode_meet_end_to_end() -> None:
    """vLLM's intervals: queued, the last row before the first token, first token, last token; a preemption after the first token
    is part of decoding, one before it of waiting."""
    timeline = RequestTimeline(0)
    timeline.enqueued(5)
    timeline.scheduled(10), timeline.dispatched(11)
    timeline.left_row(30)
    timeline.scheduled(40), timeline.dispatched(41)
    assert timeline.tokens(1, 100) is None
    timeline.left_row(110)
    timeline.scheduled(150), timeline.dispatched(151)
    assert timeline.tokens(2, 200) == 100
    assert timeline.tokens(1, 200) == 100, "another choice in the same launch"
    assert timeline.tokens(1, 230) == 200
    timeline.left_row(230), timeline.ended(230)
    made = timeline.close(240, prompt_tokens=3, cached_tokens=0, output_tokens=5, preemptions=2, chunks=3, steps=3)
    assert (made.row_ns, made.until_row_ns, made.prefill_ns, made.decode_ns) == (40, 35, 60, 130)
    assert made.until_row_ns + made.prefill_ns + made.decode_ns == made.last_token_ns - made.ingress_ns  # type: ignore[operator]


def test_a_request_without_a_token_has_a_prefill_up_to_its_end() -> None:
    timeline = RequestTimeline(0)
    timeline.enqueued(5), timeline.scheduled(10), timeline.dispatched(11), timeline.left_row(30), timeline.ended(30)
    made = timeline.close(33, prompt_tokens=3, cached_tokens=0, output_tokens=0, preemptions=0, chunks=1, steps=0)
    assert (made.until_row_ns, made.prefill_ns, made.decode_ns) == (5, 20, 0)


def test_the_state_of_the_engine_is_asked_for_when_it_is_read() -> None:
    metrics = EngineMetrics(("short", "long"))
    assert value(metrics, "kv_cache_usage_perc") is None
    metrics.watch(lambda: READING)
    assert value(metrics, "num_requests_running", lane="short") == 3
    assert value(metrics, "num_requests_waiting", lane="long") == 2
    assert [value(metrics, "num_requests_waiting_by_reason", reason=r) for r in ("capacity", "preempted")] == [5, 1]
    assert value(metrics, "kv_cache_usage_perc") == 0.4
    assert [value(metrics, "kv_pages", state=s) for s in ("own", "shared", "cached", "empty")] == [30, 10, 25, 35]
    assert value(metrics, "cache_config_info", page_size="16") == 1
    assert value(metrics, "prompt_tokens_total") == 80  # found and computed, what was computed again left out
    assert value(metrics, "prompt_tokens_by_source_total", source="local_cache_hit") == 30
    assert value(metrics, "generation_tokens_total") == 500


def test_lanes_that_come_later_leave_what_was_counted() -> None:
    metrics = EngineMetrics(("all",))
    finish(metrics, "all", "stop", timings())
    metrics.add_lanes(("all", "short"))
    finish(metrics, "short", "stop", timings())
    assert [value(metrics, "request_success_total", lane=lane, finished_reason="stop") for lane in ("all", "short")] == [1, 1]


def test_the_text_is_prometheus_with_the_labels_of_the_server() -> None:
    """B43: names of models may hold anything."""
    metrics = EngineMetrics(("all",))
    metrics.watch(lambda: READING)
    metrics.between_tokens.add(0.02, 7)
    metrics.launched(64, 8)
    finish(metrics, "all", "stop", timings())
    name = 'a "model"\\with\nall/模型'
    found = {family.name: family for family in text_string_to_metric_families(metrics.text({"model_name": name}).decode())}
    assert all(sample.labels["model_name"] == name for family in found.values() for sample in family.samples)
    samples = found["llmjax:inter_token_latency_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0, 7, 7)
    steps = {sample.name: sample.value for sample in found["llmjax:iteration_tokens_total"].samples}
    assert (steps["llmjax:iteration_tokens_total_count"], steps["llmjax:iteration_tokens_total_sum"]) == (8, 512)


def test_two_engines_do_not_share_numbers() -> None:
    one, other = EngineMetrics(("all",)), EngineMetrics(("all",))
    finish(one, "all", "stop", timings())
    assert value(other, "e2e_request_latency_seconds_count", lane="all") == 0


def test_speculation_has_series_where_there_is_some() -> None:
    metrics = EngineMetrics(("all",))
    metrics.watch(lambda: READING)
    assert value(metrics, "spec_decode_num_drafts_total") is None
    speculation = SpeculationReading(
        rounds=10, drafted=30, accepted=18, accepted_at=[9, 6, 3], switches=[("off", "acceptance", 2), ("on", "batch", 1)],
        off=None, acceptance=0.75, by_lane={"all": 0.75}, by_class={"code": 0.9, "prose": 0.5},
    )  # fmt: skip
    metrics.watch(lambda: dataclasses.replace(READING, speculation=speculation))
    assert value(metrics, "spec_decode_num_drafts_total") == 10
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 30
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 18
    places = [value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) for place in range(3)]
    assert places == [9, 6, 3]
    assert value(metrics, "spec_decode_switches_total", to="off", reason="acceptance") == 2
    assert value(metrics, "spec_decode_active") == 1
    assert value(metrics, "spec_decode_acceptance") == 0.75
    assert value(metrics, "spec_decode_acceptance_by_class", prompt_class="prose") == 0.5
    undrafted = dataclasses.replace(speculation, off="cost", acceptance=None, by_lane={}, by_class={})
    metrics.watch(lambda: dataclasses.replace(READING, speculation=undrafted))
    assert value(metrics, "spec_decode_active") == 0
    assert value(metrics, "spec_decode_acceptance") is None
