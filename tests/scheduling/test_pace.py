"""Long launches are for when nobody is likely to come: measured step times, arrivals, and the scheduler's choice."""

from __future__ import annotations

import pytest
from fakes_scheduling import Simulation, make_request

from llmjax.scheduling.pace import LAUNCH_SECONDS, QUIET_LAUNCHES, Pace


def paced(step: float, *, launches: int = 4, steps: int = 1) -> tuple[Pace, float]:
    pace, now = Pace(), 100.0
    for _ in range(launches):
        pace.launched(steps, now)
        now += step * steps
    return pace, now


def test_a_step_is_the_time_between_two_decode_launches_over_their_steps() -> None:
    pace = Pace()
    assert pace.step_seconds is None
    pace.launched(8, 1.0)
    assert pace.step_seconds is None
    pace.launched(1, 1.4)
    assert pace.step_seconds == pytest.approx(0.05)
    pace.launched(0, 9.0)  # prompts: neither the time before nor the time behind is a decode step's
    pace.launched(1, 20.0)
    assert pace.step_seconds == pytest.approx(0.05)


def test_a_pause_is_not_a_long_step() -> None:
    pace, now = paced(0.002)
    pace.launched(1, now + 3600)
    pace.launched(1, now + 3600.002)
    assert pace.step_seconds == pytest.approx(0.002, rel=0.01)


def test_a_long_launch_hurries_while_somebody_came_lately() -> None:
    pace, now = paced(0.004)
    assert not pace.hurries(8, now)  # nobody ever came
    pace.came(now)
    assert pace.hurries(8, now)
    length = 8 * 0.004
    assert pace.hurries(8, now + 0.99 * QUIET_LAUNCHES * length)
    assert not pace.hurries(8, now + 1.01 * QUIET_LAUNCHES * length)
    pace.came(now - 5)  # told late: the last one counts
    assert pace.hurries(8, now)


def test_a_short_launch_never_hurries() -> None:
    pace, now = paced(0.9 * LAUNCH_SECONDS / 8)
    pace.came(now)
    assert not pace.hurries(8, now)


def kinds(sim: Simulation, launches: int, step: float, **options: bool) -> list[int]:
    """Steps of the next launches of a device that takes `step` seconds for each."""
    found = []
    for _ in range(launches):
        batch = sim.launch(**options)
        assert batch is not None
        found.append(batch.num_steps)
        sim.read()
        sim.now += step * batch.num_steps
    return found


def test_the_scheduler_decodes_step_by_step_while_requests_come_and_k_steps_when_they_have_stopped() -> None:
    sim = Simulation(decode_steps=8, max_sequences=4, num_pages=400)
    sim.now = 50.0
    sim.add(make_request("a", 4, 900))
    assert kinds(sim, 1, 0.01) == [1]  # the prompt
    assert 8 in kinds(sim, 3, 0.01)  # before a step was measured
    assert kinds(sim, 20, 0.01) == [1] * 20
    sim.now += QUIET_LAUNCHES * 0.08
    assert kinds(sim, 3, 0.01) == [8] * 3
    sim.add(make_request("b", 4, 900))
    assert set(kinds(sim, 20, 0.01)) == {1}
    assert kinds(sim, 3, 0.01, closed=True) == [8] * 3  # nobody can come: the caller says so


def test_full_rows_make_nobody_hurry() -> None:
    """Who comes now waits for a row, not for the end of a launch."""
    sim = Simulation(decode_steps=8, max_sequences=1, num_pages=400)
    sim.add(make_request("a", 4, 600))
    kinds(sim, 4, 0.01)
    assert kinds(sim, 5, 0.01) == [8] * 5
