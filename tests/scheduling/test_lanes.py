"""The queue alone: order in a lane, shares between lanes, the bound on a wait, what is refused and what ends waiting."""

from __future__ import annotations

import random

import pytest
from fakes_scheduling import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.engine.config import EngineConfig
from llmjax.errors import ConfigError, QueueFullError
from llmjax.scheduling.lane_config import FIFO, LaneConfig
from llmjax.scheduling.lanes import QUANTUM, Lanes
from llmjax.scheduling.output_lengths import ENOUGH, PRIOR, WINDOW, OutputLengths
from llmjax.scheduling.request import RequestState

SHORT, LONG = LaneConfig(name="short", max_tokens=100, weight=3), LaneConfig(name="long", weight=1)
MAX_WAIT = 10.0


def queued(lanes, name="r", prompt=5, limit=8, *, at=0.0, priority=0, choice=0):
    request = make_request(name, prompt, limit)
    request.arrival_time, request.priority, request.choice = at, priority, choice
    lanes.push(request)
    return request


def let_in(lanes, now=0.0, which=0):
    """Take the candidate number `which`, as the scheduler does with the first that fits."""
    request = [candidate for candidate, _ in lanes.candidates(now)][which]
    lanes.take(request, now)
    request.state = RequestState.RUNNING
    lanes.check_integrity()
    return request


def preempt(lanes, request, now=0.0):
    request.state = RequestState.PREEMPTED
    request.num_preemptions += 1
    lanes.push_front(request, now)
    lanes.check_integrity()


# In a lane


@given(st.lists(st.tuples(st.sampled_from(["push", "push", "take", "remove", "preempt"]), st.integers(0, 10**6)), max_size=60))
def test_one_lane_is_first_come_first_served(actions):
    lanes, waiting, running = Lanes(), [], []
    for number, (action, draw) in enumerate(actions):
        if action == "push":
            waiting.append(queued(lanes, str(number)))
        elif action == "take" and waiting:
            assert let_in(lanes) is waiting[0]
            running.append(waiting.pop(0))
        elif action == "remove" and waiting:
            lanes.remove(waiting.pop(draw % len(waiting)))
        elif action == "preempt" and running:
            waiting.insert(0, running.pop())  # the last one let in
            preempt(lanes, waiting[0])
        assert list(lanes) == waiting
        lanes.check_integrity()


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=30), st.data())
def test_lower_priorities_first_then_by_arrival_and_a_preempted_one_keeps_its_place(priorities, data):
    lanes = Lanes()
    order = sorted(
        (queued(lanes, str(i), priority=priority) for i, priority in enumerate(priorities)), key=lambda r: (r.priority, r.ticket)
    )
    taken = [let_in(lanes) for _ in range(data.draw(st.integers(1, len(order))))]
    assert taken == order[: len(taken)]
    for request in data.draw(st.permutations(taken)):
        preempt(lanes, request)
    assert [let_in(lanes) for _ in order] == order


# Which lane


def test_the_lane_is_chosen_by_prompt_and_expected_output():
    lanes = Lanes((SHORT, LONG), MAX_WAIT)
    made = [
        queued(lanes, str(i), prompt, limit) for i, (prompt, limit) in enumerate([(5, 8), (92, 8), (93, 8), (5, 95), (5, 96)])
    ]
    assert [request.lane for request in made] == [0, 0, 1, 0, 1]
    assert [request.expected_tokens for request in made] == [13, 100, 101, 100, 101]
    assert lanes.counts() == {"short": 3, "long": 2}


def test_expected_output_is_learned_and_never_above_the_limit():
    lengths = OutputLengths()
    assert lengths.expect(10, 4000) == PRIOR
    assert lengths.expect(10, 30) == 30
    for _ in range(ENOUGH - 1):
        lengths.learn(10, 4000, 900)
    assert lengths.expect(10, 4000) == PRIOR  # not yet enough
    lengths.learn(10, 4000, 900)
    assert lengths.expect(12, 3000) == 900  # the same powers of two
    assert lengths.expect(10, 2100) == 900
    assert lengths.expect(10, 4) == 4
    assert lengths.expect(100, 4000) == PRIOR  # another class of prompts
    for output in range(WINDOW):
        lengths.learn(10, 4000, output)
    assert abs(lengths.expect(10, 4000) - 0.75 * WINDOW) <= 1  # the old ones are forgotten


def test_a_long_limit_that_is_seldom_used_lands_in_the_short_lane():
    lanes = Lanes((SHORT, LONG), MAX_WAIT)
    first = queued(lanes, limit=1000)
    for index in range(ENOUGH):
        done = queued(lanes, f"done{index}", limit=1000)
        done.output_ids = [1] * 20
        lanes.learn(done)
    later = queued(lanes, "later", limit=1000)
    assert (first.lane, later.lane, later.limit) == (1, 0, 1000)


# Between lanes


@given(
    weights=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.lists(st.tuples(st.integers(30, 99), st.integers(101, 1500)), min_size=10, max_size=30),
)
@settings(max_examples=30)
def test_token_shares_follow_the_weights_to_within_a_quantum_and_a_request(weights, sizes):
    """The bound of deficit round robin: a lane's credit lies between nothing and its longest request."""
    lanes = Lanes(
        (LaneConfig(name="short", max_tokens=100, weight=weights[0]), LaneConfig(name="long", weight=weights[1])), MAX_WAIT
    )
    for index, (short, long) in enumerate(sizes):
        for prompt in [short] * (1 + long * weights[0] // (short * weights[1])) + [long]:
            queued(lanes, f"{index}.{prompt}", prompt, limit=0)
    served = [0, 0]
    slack = QUANTUM + sum(max(lane) / weight for lane, weight in zip(zip(*sizes, strict=True), weights, strict=True))
    while all(lanes.counts().values()):
        request, _ = next(lanes.candidates(0.0))
        lanes.take(request, 0.0)
        served[request.lane] += request.expected_tokens
        assert abs(served[0] / weights[0] - served[1] / weights[1]) <= slack


def test_b59_three_of_four_tokens_for_the_short_lane_in_the_long_run():
    lanes, rng = Lanes((SHORT, LONG), MAX_WAIT), random.Random()
    served = [0, 0]
    for index in range(3000):
        while lanes.counts()["short"] < 3:
            queued(lanes, f"s{index}", rng.randint(1, 90), limit=0)
        while lanes.counts()["long"] < 3:
            queued(lanes, f"l{index}", rng.randint(200, 4000), limit=0)
        request = let_in(lanes)
        served[request.lane] += request.expected_tokens
    assert abs(served[0] - 3 * served[1]) <= 3 * QUANTUM + 90 + 3 * 4000


def test_a_lane_that_was_idle_has_saved_nothing():
    lanes = Lanes((SHORT, LONG), MAX_WAIT)
    for index in range(200):
        queued(lanes, f"l{index}", 1000, limit=0)
    for _ in range(100):
        let_in(lanes)
    for index in range(400):
        queued(lanes, f"s{index}", 50, limit=0)
    tokens = [0, 0]
    for _ in range(100):
        request = let_in(lanes)
        tokens[request.lane] += request.expected_tokens
    assert tokens[1] >= tokens[0] / 3 - 2 * QUANTUM  # and the long lane owes nothing for what it had alone


def order_of(lanes):
    """Names in the order in which they would all be let in."""
    return [let_in(lanes).request_id for _ in range(len(lanes))]


def fill(lanes, shorts=200, longs=6):
    for index in range(shorts):
        queued(lanes, f"s{index}", 90, limit=0)
    for index in range(longs):
        queued(lanes, f"l{index}", 700, limit=0)


def test_what_a_lane_let_in_alone_is_not_held_against_it():
    fresh, used = Lanes((SHORT, LONG), MAX_WAIT), Lanes((SHORT, LONG), MAX_WAIT)
    for index in range(4):
        queued(used, f"alone{index}", 3000, limit=0)
    for _ in range(3):
        let_in(used)
    last = queued(used, "bridge", 700, limit=0)  # the lane never ran empty
    let_in(used)
    fill(fresh), fill(used)
    used.remove(last)
    assert order_of(used) == order_of(fresh)


def test_a_preempted_request_is_not_charged_twice():
    def after_the_first_long(preempted):
        lanes = Lanes((SHORT, LONG), MAX_WAIT)
        fill(lanes)
        while (request := let_in(lanes)).lane == 0:
            pass
        if preempted:
            preempt(lanes, request)
            lanes.take(request, 0.0)
        return order_of(lanes)

    assert after_the_first_long(True) == after_the_first_long(False)


def test_looking_at_the_candidates_changes_nothing():
    lanes = Lanes((SHORT, LONG), MAX_WAIT)
    for index in range(10):
        queued(lanes, f"s{index}", 50)
        queued(lanes, f"l{index}", 500)
    for _ in range(20):
        seen = list(lanes.candidates(0.0))
        assert all(list(lanes.candidates(0.0)) == seen for _ in range(5))
        assert {request.lane for request, _ in seen} == {r.lane for r in lanes}
        let_in(lanes)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 3), st.integers(0, 1)), min_size=10, max_size=40))
@settings(max_examples=30)
def test_a_waiting_lane_is_served_once_in_max_wait_whatever_fits(steps):
    """Also when the head whose turn it is never fits, and the other lane's is let in out of turn for ever."""
    lanes, now, served = Lanes((SHORT, LONG), MAX_WAIT), 0.0, [0.0, 0.0]
    for index in range(125):
        queued(lanes, f"s{index}", 50)
        queued(lanes, f"l{index}", 500)
    for passed, count, prefer in steps:
        now += passed
        for _ in range(count):
            offered = list(lanes.candidates(now))
            late = [lane for lane in (0, 1) if now - served[lane] >= MAX_WAIT]
            if late:
                assert [(request.lane, overdue) for request, overdue in offered] == [(min(late, key=served.__getitem__), True)]
            else:
                assert len(offered) == 2
                assert not any(overdue for _, overdue in offered)
            request = next((r for r, _ in offered if r.lane == prefer), offered[0][0])
            lanes.take(request, now)
            served[request.lane] = now


def test_a_head_waits_from_its_arrival_not_from_when_its_lane_was_last_used():
    lanes = Lanes((SHORT, LONG), MAX_WAIT)
    queued(lanes, "old", 500, at=0.0)
    let_in(lanes, now=1.0)
    queued(lanes, "short", 50, at=100.0)
    queued(lanes, "long", 500, at=100.0)
    assert not any(overdue for _, overdue in lanes.candidates(105.0))
    assert all(overdue for _, overdue in lanes.candidates(110.0))


# Limits


def test_a_full_lane_refuses_and_the_other_does_not():
    lanes = Lanes((LaneConfig(name="short", max_tokens=100, depth=2), LONG), MAX_WAIT)
    queued(lanes, "a"), queued(lanes, "b")
    with pytest.raises(QueueFullError, match="2 requests wait in lane 'short', as many as may: try again later") as caught:
        queued(lanes, "c")
    assert caught.value.lane == "short"
    queued(lanes, "long", 500)
    let_in(lanes)
    queued(lanes, "d")
    assert lanes.counts() == {"short": 2, "long": 1}
    lanes.check_integrity()


def test_the_choices_of_a_prompt_come_in_together():
    lanes = Lanes((LaneConfig(name="all", depth=2),))
    queued(lanes, "a")
    for choice in range(3):
        queued(lanes, f"b{choice}", choice=choice)
    assert len(lanes) == 4
    with pytest.raises(QueueFullError):
        queued(lanes, "c")


def test_only_those_that_never_had_a_row_expire():
    lanes = Lanes((LaneConfig(name="short", max_tokens=100, timeout=5.0), LONG), MAX_WAIT)
    begun = queued(lanes, "begun", at=0.0)
    assert let_in(lanes) is begun
    preempt(lanes, begun)
    aborted, late, fresh = queued(lanes, "aborted", at=1.0), queued(lanes, "late", at=1.0), queued(lanes, "fresh", at=3.0)
    queued(lanes, "patient", 500, at=0.0)
    lanes.remove(aborted)
    aborted.state = RequestState.FINISHED
    assert lanes.expired(6.0) == []
    assert lanes.expired(6.5) == [late]
    lanes.remove(late)
    late.state = RequestState.FINISHED
    assert lanes.expired(100.0) == [fresh]


def test_who_arrived_first_expires_first_whatever_was_tokenised_first():
    """Arrival is at the server's door, so that requests come to the queue a little out of order."""
    lanes = Lanes((LaneConfig(name="all", timeout=5.0),))
    arrivals = random.sample(range(100), 20)
    requests = {at: queued(lanes, str(at), at=float(at)) for at in arrivals}
    for now in range(0, 120, 7):
        expected = [at for at in sorted(requests) if now - at > 5.0]
        assert lanes.expired(float(now)) == [requests.pop(at) for at in expected]


# A launch's tokens


@given(
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    budget=st.integers(0, 3000),
)
def test_shares_of_a_launch(weights, data, budget):
    sizes = [*range(10, 10 * len(weights), 10), None]
    configs = [LaneConfig(name=str(size), max_tokens=size, weight=w) for size, w in zip(sizes, weights, strict=True)]
    lanes = Lanes(configs, MAX_WAIT)
    wants = data.draw(st.lists(st.integers(0, 2000), min_size=len(weights), max_size=len(weights)))
    shares = lanes.share_out(wants, budget)
    assert sum(shares) == min(budget, sum(wants))  # nothing is left idle
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    for share, want, weight in zip(shares, wants, weights, strict=True):  # whoever goes short has its part of what another gets
        if share < want:
            assert all((share + 2) / weight >= (other - 2) / w for other, w in zip(shares, weights, strict=True))


def test_one_chunk_a_launch_goes_by_weight():
    lanes = Lanes((SHORT, LONG), MAX_WAIT)
    short, long = queued(lanes, "s", 50), queued(lanes, "l", 500)
    turns = [lanes.next_chunk([long, short]) for _ in range(400)]
    assert (turns.count(short), turns.count(long)) == (300, 100)
    assert all(long in turns[i : i + 4] for i in range(0, 396, 4))
    assert lanes.next_chunk([long]) is long


# Configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": ()}, "lanes must be one or more"),
        ({"lanes": (SHORT,)}, "none in the last"),
        ({"lanes": (LONG, LONG)}, "names of their own"),
        ({"lanes": (LaneConfig(name="a"), LONG)}, "rises from lane to lane"),
        ({"lanes": (LaneConfig(name="a", max_tokens=9), SHORT.__class__(name="b", max_tokens=9), LONG)}, "rises"),
        ({"lanes": (LaneConfig(name="a", weight=0),)}, "weight and depth"),
        ({"lanes": (LaneConfig(name="a", depth=0),)}, "weight and depth"),
        ({"lanes": (LaneConfig(name="a", timeout=0.0),)}, "timeout above 0"),
        ({"max_wait": -1.0}, "max_wait must be at least 0"),
        ({"max_wait": float("nan")}, "max_wait must be at least 0"),
    ],
)
def test_lanes_that_make_no_queue_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_a_resolved_config_keeps_its_lanes():
    config = EngineConfig(lanes=(SHORT, LONG)).resolved(gpu=False, model_max_context=64)
    assert config.lanes == (SHORT, LONG)
    assert EngineConfig().lanes == FIFO
