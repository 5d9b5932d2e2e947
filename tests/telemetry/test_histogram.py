"""Counts by size, and percentiles out of them, against the sorted values themselves."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from llmjax.telemetry.histogram import SECONDS, SHOWN_SECONDS, SIZES, Histogram, percentile


def test_the_steps_are_fine_enough_and_what_is_shown_is_among_them() -> None:
    assert all(1.1 < after / before < 1.15 for before, after in itertools.pairwise(SECONDS))
    assert set(SHOWN_SECONDS) <= set(SECONDS)
    assert list(SIZES) == sorted(SIZES)


@given(st.lists(st.tuples(st.floats(0, 2000), st.integers(1, 9)), max_size=50))
def test_what_is_shown_counts_the_values_up_to_each_bound(values: list[tuple[float, int]]) -> None:
    one = Histogram(SECONDS)
    for value, count in values:
        one.add(value, count)
    for bound, found in one.cumulative(SHOWN_SECONDS):
        assert found == sum(count for value, count in values if value <= bound)
    assert math.isclose(one.total, sum(value * count for value, count in values), abs_tol=1e-9)


def test_percentiles_are_those_of_the_values_to_within_a_step() -> None:
    values = [random.lognormvariate(-3, 1) for _ in range(5000)]
    one = Histogram(SECONDS)
    for value in values:
        one.add(value)
    values.sort()
    for share in (0.01, 0.5, 0.95, 0.99):
        found = percentile(SECONDS, one.counts, share)
        assert found is not None
        assert abs(found / values[round(share * 5000)] - 1) < 0.15


def test_percentiles_of_nothing_and_of_what_is_out_of_range() -> None:
    one = Histogram(SECONDS)
    assert percentile(SECONDS, one.counts, 0.5) is None
    one.add(1e9)
    assert percentile(SECONDS, one.counts, 0.5) == SECONDS[-1]
    one = Histogram(SIZES)
    one.add(0)
    assert percentile(SIZES, one.counts, 0.99) is not None
