"""The five segments share a request's life out exactly, whatever happens to it."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from llmjax.telemetry.timings import SEGMENTS, RequestTimeline, Timings

NONE = {"prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "preemptions": 0, "chunks": 0, "steps": 0}
MS = 1_000_000


def test_the_segments_of_a_plain_life() -> None:
    timeline = RequestTimeline(5)
    timeline.enqueued(8)
    timeline.scheduled(20)
    timeline.dispatched(21)
    timeline.tokens(1, 60)
    timeline.tokens(4, 100)
    timeline.left_row(100)
    timeline.ended(100)
    made = timeline.close(107, **NONE | {"output_tokens": 5})
    assert [getattr(made, f"{name}_ns") for name in SEGMENTS] == [3, 12, 1, 79, 7]
    assert (made.total_ns, made.first_token_ns, made.last_token_ns, made.arrival_ns) == (102, 55, 95, 5)


def test_time_without_a_row_is_queue_time() -> None:
    timeline = RequestTimeline(0)
    timeline.enqueued(0)
    timeline.scheduled(10)
    timeline.dispatched(12)
    timeline.left_row(50)  # preempted
    timeline.scheduled(80)
    timeline.dispatched(81)
    timeline.left_row(90)
    timeline.ended(90)
    made = timeline.close(90, **NONE)
    assert [getattr(made, f"{name}_ns") for name in SEGMENTS] == [0, 40, 3, 47, 0]


def test_a_prompt_with_several_choices_waits_only_while_none_has_a_row() -> None:
    timeline = RequestTimeline(0)
    timeline.enqueued(0)
    timeline.scheduled(10), timeline.dispatched(10)
    timeline.scheduled(20), timeline.dispatched(20)
    timeline.left_row(30)
    timeline.left_row(40)  # the third choice waits
    timeline.scheduled(70), timeline.dispatched(70)
    timeline.left_row(75)
    timeline.ended(75)
    made = timeline.close(75, **NONE)
    assert (made.queue_ns, made.compute_ns) == (40, 35)


@given(marks=st.lists(st.integers(0, 2**62), min_size=12, max_size=12), preempted=st.booleans(), aborted=st.integers(0, 8))
def test_the_segments_sum_to_the_whole_to_the_nanosecond(marks: list[int], preempted: bool, aborted: int) -> None:
    """Floats would not: two marks of an hour-old clock do not subtract exactly."""
    marks = sorted(marks)
    arrival, last = marks[0], marks[-1]
    timeline = RequestTimeline(arrival)
    calls = [timeline.enqueued, timeline.scheduled, timeline.dispatched]
    if preempted:
        calls += [timeline.left_row, timeline.scheduled, timeline.dispatched]
    calls.append(timeline.left_row)
    for call, mark in list(zip(calls, marks[1:], strict=False))[:aborted]:  # an abort may come at any point
        call(mark)
    timeline.ended(marks[-2])
    made = timeline.close(last, **NONE)
    assert made.total_ns == last - arrival
    assert sum(getattr(made, f"{name}_ns") for name in SEGMENTS) == made.total_ns
    assert all(getattr(made, f"{name}_ns") >= 0 for name in SEGMENTS)


def finished(**changes: object) -> Timings:
    plain = Timings(
        arrival_ns=0, ingress_ns=MS, queue_ns=2 * MS, batch_ns=3 * MS, compute_ns=4 * MS, egress_ns=5 * MS,
        first_token_ns=7 * MS, last_token_ns=10 * MS, first_tokens=1, prompt_tokens=9, output_tokens=4,
        preemptions=1, chunks=2, steps=3,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_b80_the_time_to_the_first_token_is_not_mixed_into_the_others() -> None:
    """One second to the first token, then nineteen more at 10 ms."""
    timeline = RequestTimeline(0)
    timeline.enqueued(0)
    for index in range(20):
        timeline.tokens(1, (1000 + 10 * index) * MS)
    timeline.ended(1190 * MS)
    made = timeline.close(1190 * MS, **NONE | {"output_tokens": 20})
    assert (made.first_token_ns, made.total_ns) == (1000 * MS, 1190 * MS)
    assert made.time_per_output_token == 0.01


def test_b81_tokens_that_come_together_are_counted_as_tokens() -> None:
    """Three tokens at one second (two choices at once, say), then one each 10 ms: later tokens share the later time."""
    timeline = RequestTimeline(0)
    timeline.enqueued(0)
    timeline.tokens(1, 1000 * MS), timeline.tokens(2, 1000 * MS)
    for index in range(1, 5):
        timeline.tokens(1, (1000 + 10 * index) * MS)
    timeline.ended(1040 * MS)
    made = timeline.close(1040 * MS, **NONE | {"output_tokens": 7})
    assert (made.first_tokens, made.time_per_output_token) == (3, 0.01)
    alone = finished(output_tokens=3, first_tokens=3)
    assert alone.time_per_output_token is None
    assert finished(first_token_ns=None, last_token_ns=None, output_tokens=0).time_per_output_token is None
