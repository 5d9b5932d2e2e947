"""The profile of a list of intervals: union, gaps and names. (That a trace can be recorded and read is one run, on a CPU.)"""

from __future__ import annotations

import random
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench.step_profile import Gap, Interval, KernelTime, analyse, family, read_trace


def test_kernels_of_two_streams_at_once_count_once() -> None:
    profile = analyse(
        [
            Interval("b_2", 130, 200),
            Interval("a_1", 100, 150),
            Interval("a_7", 140, 145),
            Interval("c", 205, 210),
            Interval("b_3", 240, 300),
        ]
    )
    assert profile.window == 200
    assert profile.busy == 200 - 5 - 30
    assert profile.idle == pytest.approx(35 / 200)
    assert profile.kernels == [KernelTime("b", 2, 130), KernelTime("a", 2, 55), KernelTime("c", 1, 5)]
    assert profile.gaps == [Gap("c", "b", 1, 30, 30), Gap("b", "c", 1, 5, 5)]


def test_a_gap_is_named_by_the_kernel_that_ended_last() -> None:
    profile = analyse([Interval("long", 0, 100), Interval("short", 10, 20), Interval("next", 110, 120)])
    assert profile.gaps == [Gap("long", "next", 1, 10, 10)]


def test_copies_to_the_host_are_listed_but_not_busy() -> None:
    profile = analyse(
        [Interval("MemcpyH2D", 0, 50), Interval("k", 50, 60), Interval("MemcpyD2H", 61, 80), Interval("MemcpyD2D", 90, 95)]
    )
    assert (profile.window, profile.busy) == (45, 15)
    assert [k.name for k in profile.kernels] == ["MemcpyH2D", "MemcpyD2H", "k", "MemcpyD2D"]
    assert profile.gaps == [Gap("k", "MemcpyD2D", 1, 30, 30)]


def test_gap_classes_hold_every_gap_once() -> None:
    starts = [0, 1_500, 4_000, 9_000, 200_000]  # kernels of 100 ns: gaps of 1.4, 2.4, 4.9 and 190.9 us
    profile = analyse([Interval("k", start, start + 100) for start in starts])
    assert [(high, count) for high, count, _ in profile.gap_classes if count] == [(2.0, 1), (5.0, 2), (float("inf"), 1)]
    assert sum(total for _, _, total in profile.gap_classes) == pytest.approx(profile.window - profile.busy)


def test_no_kernels() -> None:
    assert analyse([]).idle == 0.0
    assert analyse([Interval("MemcpyD2H", 0, 10)]).busy == 0.0


def test_busy_is_the_measure_of_the_union() -> None:
    rng = random.Random()
    intervals = []
    for _ in range(60):
        start = rng.randrange(400)
        intervals.append(Interval(f"k_{rng.randrange(3)}", start, start + rng.randrange(1, 20)))
    covered = {t for i in intervals for t in range(int(i.start), int(i.end))}
    profile = analyse(intervals)
    assert profile.busy == len(covered)
    assert profile.window == max(covered) + 1 - min(covered)
    assert sum(gap.total for gap in profile.gaps) == profile.window - profile.busy


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loop_fusion_12", "loop_fusion"),
        ("dot.5.1", "dot"),
        ("nvjet_tst_64x8_2x4_TNT", "nvjet_tst_64x8_2x4_TNT"),
        ("12", "12"),
        ("_3", "_3"),
    ],
)
def test_family(name: str, expected: str) -> None:
    assert family(name) == expected


def test_a_recorded_trace_is_read_back(tmp_path: Path) -> None:
    step = jax.jit(lambda x: jnp.sin(x @ x))
    x = jnp.ones((64, 64))
    step(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        step(x).block_until_ready()
    names = {family(i.name) for i in read_trace(tmp_path)}
    assert any("sin" in name for name in names), names


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no xplane file"):
        read_trace(tmp_path)
