"""What launches take, and how long the next one is put off: whoever comes meanwhile is in it, and the device never waits long."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from scripted_model import Scripted

from llmjax.engine import engine as engine_module
from llmjax.engine.launch_timer import MARGIN_NS, SAMPLES, LaunchTimer, Took
from llmjax.sampling_params import SamplingParams

MS = 1_000_000
PROGRAM = ("decode", 8, 1)


def launch(timer: LaunchTimer, now_ns: int, program: Any = PROGRAM, *, late: bool = False) -> None:
    timer.launched(program, now_ns, late=late)


def test_launches_are_timed_where_they_follow_one_another() -> None:
    timer = LaunchTimer()
    launch(timer, 0)
    assert timer.read(1000 * MS) is None  # the first
    launch(timer, 1500 * MS)
    assert timer.read(2000 * MS) is None  # nothing was in flight when it was made
    launch(timer, 2500 * MS)
    launch(timer, 2600 * MS)
    assert timer.read(5000 * MS) is None
    launch(timer, 5100 * MS)
    assert timer.read(5250 * MS) == Took(pytest.approx(0.25), waited=False)
    launch(timer, 5800 * MS, late=True)
    assert timer.read(5750 * MS) == Took(pytest.approx(0.5), waited=False)
    assert timer.read(6000 * MS) is None  # the device had waited for it


def test_a_host_that_is_slower_than_the_device_is_timed_by_the_longer_of_two_launches() -> None:
    """A pause while one is made lengthens its predecessor's time and shortens its own."""
    timer = LaunchTimer()
    now, found = 0, []
    launch(timer, now)
    for milliseconds in (6, 6, 6, 30, 1, 6, 6):
        launch(timer, now + (milliseconds - 1) * MS, late=True)
        found.append(timer.read(now := now + milliseconds * MS))
    assert found == [None, None, *(Took(pytest.approx(ms * 1e-3), waited=True) for ms in (6, 30, 30, 6, 6))]
    launch(timer, now + 4 * MS, "other", late=True)
    assert timer.read(now + 5 * MS) == Took(pytest.approx(0.006), waited=True)
    assert timer.read(now + 9 * MS) is None  # the only one of its program


def test_the_next_launch_is_put_off_until_the_device_is_about_to_want_it() -> None:
    timer, now = LaunchTimer(), 0
    launch(timer, now)
    assert timer.put_off_ns(now) == 0  # nothing is known yet
    for milliseconds in (9, 9, 9, 14, 9):  # one of them read late
        launch(timer, now)
        now += milliseconds * MS
        timer.read(now)
    launch(timer, now + MS, ("extend", 512, 1))
    assert timer.put_off_ns(now + MS) == 0  # two in flight
    timer.read(now := now + 9 * MS)
    assert timer.put_off_ns(now) == 0  # of the one that runs nothing is known
    launch(timer, now + MS)
    timer.read(now := now + 20 * MS)
    left = 9 * MS - MARGIN_NS[0]
    assert timer.put_off_ns(now) == left
    assert timer.put_off_ns(now + 3 * MS) == left - 3 * MS
    assert timer.put_off_ns(now + 30 * MS) == 0


def test_programs_become_slower_and_are_followed() -> None:
    timer, now = LaunchTimer(), 0
    launch(timer, now)
    for milliseconds in [5] * 20 + [8] * SAMPLES:
        launch(timer, now)
        timer.read(now := now + milliseconds * MS)
    assert timer.put_off_ns(now) == 8 * MS - MARGIN_NS[0]


@pytest.mark.parametrize("host_ms", [0.3, 2.0, 6.0])
def test_how_long_before_the_end_it_is_decided_is_learned(host_ms: float) -> None:
    """A device of 10 ms, and a host that takes `host_ms` and sometimes twice as long: it waits seldom, and newcomers little."""
    timer, host = LaunchTimer(), random.Random(4)
    now, end, waited, idle = 0, 10 * MS, [], 0
    launch(timer, now)
    for _ in range(2000):
        now += put_off if (put_off := timer.put_off_ns(now)) else 0
        now += int(host_ms * MS * (2 if host.random() < 0.02 else 1))
        late = now > end
        launch(timer, now, late=late)
        idle += max(0, now - end)
        began = max(now, end)
        waited.append(end - now)
        now = max(now, end)
        timer.read(now)
        end = began + 10 * MS
    assert idle < 0.02 * end
    assert sum(waited) / len(waited) < (host_ms + 2.5) * MS


def test_whoever_comes_while_a_launch_runs_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(None)
    engine = scripted.engine
    left = [3 * MS, 2 * MS, MS]
    naps: list[float] = []
    monkeypatch.setattr(engine_module.time, "sleep", naps.append)
    monkeypatch.setattr(engine._timer, "put_off_ns", lambda now_ns: left.pop(0) if left else 0)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first = engine.add_request([1, 2, 3], params)
    for _ in range(3):
        assert engine.step() == []
        assert not engine._pending
    second = engine.add_request([4, 5], params)
    engine.step()
    assert naps == [engine_module.NAP_SECONDS] * 3
    assert {row.request.request_id.split("/")[0] for row in engine._pending[-1].batch.rows} == {first, second}
    left += [3 * MS] * 5
    launches = engine.stats.launches
    engine.step(closed=True)  # nobody will come
    assert engine.stats.launches == launches + 1
    left.clear()
    while engine.has_unfinished:
        engine.step()
    assert engine.pool.num_used == 0


def test_a_launch_that_ended_sooner_than_expected_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted(None).engine
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    engine.step()
    monkeypatch.setattr(engine._timer, "put_off_ns", lambda now_ns: 10**12)
    launches = engine.stats.launches
    while not engine._pending[0].ended:
        time.sleep(0.001)
    engine.step()
    assert engine.stats.launches == launches + 1
    while engine.has_unfinished:
        engine.step(closed=True)


def test_nothing_is_put_off_when_no_row_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(None)
    engine = scripted.engine
    monkeypatch.setattr(engine._timer, "put_off_ns", lambda now_ns: pytest.fail("asked") if full else 0)
    full = False
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for _ in range(engine.config.max_sequences + 1):
        engine.add_request([1, 2], params)
    engine.step()
    full = engine.scheduler.num_running == engine.config.max_sequences
    assert full
    engine.step()
    full = False
    while engine.has_unfinished:
        engine.step()
