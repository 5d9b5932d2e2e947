"""The startup timeline: phases beside each other, phases that fail, and what is said of them."""

from __future__ import annotations

import threading
import time

import pytest

from llmjax.telemetry.startup import Phase, Timeline


def test_phases_beside_each_other_are_told_by_their_beginnings_and_ends() -> None:
    timeline = Timeline(origin=100.0)
    timeline.add("compile", 101.0, 104.0)
    timeline.add("load weights", 100.5, 102.0)
    timeline.add("compile", 103.0, 109.0)
    assert timeline.phases == [Phase("load weights", 0.5, 2.0), Phase("compile", 1.0, 4.0), Phase("compile", 3.0, 9.0)]
    assert timeline.seconds() == {"load weights": 1.5, "compile": 9.0}
    assert timeline.text() == "load weights 0.5-2.0 s, compile 1.0-9.0 s"


def test_a_phase_that_fails_was_one_too() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="no"), timeline.phase("allocate"):
        raise ValueError("no")
    (phase,) = timeline.phases
    assert phase.name == "allocate"
    assert 0 <= phase.start <= phase.end <= timeline.elapsed


def test_threads_may_add_at_the_same_time() -> None:
    timeline = Timeline()

    def add() -> None:
        for _ in range(200):
            with timeline.phase("lower"):
                pass

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.phases) == 800
    assert timeline.seconds()["lower"] <= 4 * (time.perf_counter() - timeline._origin)
