"""Lanes in the scheduler: short prompts beside long ones, room that is kept, who loses a row, and nothing lost in a burst."""

from __future__ import annotations

import random

import pytest
from fakes_scheduling import Simulation, make_request

from bench.scheduler_cost import Loop
from llmjax.engine.config import EngineConfig
from llmjax.errors import QueueFullError
from llmjax.scheduling.lane_config import LaneConfig
from llmjax.scheduling.policy import choose_victim
from llmjax.scheduling.request import RequestState


def two_lanes(size=100, **options):
    return LaneConfig(name="short", max_tokens=size, weight=3, **options), LaneConfig(name="long", **options)


def simulation(**options):
    return Simulation(**{"num_pages": 1300, "max_sequences": 32, "max_tokens_per_step": 256, "prefill_chunk": 128,
                         "lanes": two_lanes()} | options)  # fmt: skip


def first_launch(sim, request):
    return next(i for i, batch in enumerate(sim.batches) if any(row.request is request for row in batch.rows))


def prompt_tokens(batch):
    """Known tokens in a launch, by lane."""
    tokens = [0, 0]
    for row in batch.rows:
        tokens[row.request.lane] += len(row.token_ids)
    return tokens


def test_b59_short_prompts_do_not_wait_for_long_ones():
    """One answer running, 4 prompts of 4000 tokens, then 20 of 20: these begin with the next launch and all are through
    before the first long one is; every row decodes in every launch."""
    sim = simulation()
    running = sim.add(make_request("running", 4, 100))
    sim.step()
    long = [sim.add(make_request(f"long{i}", 4000, 2)) for i in range(4)]
    sim.step()
    begun = len(sim.batches)
    short = [sim.add(make_request(f"short{i}", 20, 2)) for i in range(20)]
    while not all(r.finished for r in short):
        before = len(sim.batches)
        sim.step()
        for batch in sim.batches[before:]:
            promised = len(running.output_ids) + running.num_in_flight
            assert running in [row.request for row in batch.rows] or promised == running.limit
    assert not any(r.output_ids for r in long)
    # 400 tokens, at least three quarters of each launch: done in three launches.
    assert max(first_launch(sim, r) for r in short) <= begun + 2
    contended = [prompt_tokens(batch) for batch in sim.batches[begun : begun + 2]]
    assert all(tokens[1] > 0 for tokens in contended), "the long lane must go on"
    assert all(tokens[0] >= 3 * tokens[1] for tokens in contended)
    sim.drain()


def test_a_launch_with_one_lane_only_is_all_its():
    sim = simulation(ahead=0)
    sim.add(make_request("a", 4000, 2))
    sim.add(make_request("b", 4000, 2))
    for _ in range(3):
        sim.step()
    assert [prompt_tokens(batch) for batch in sim.batches] == [[0, 256]] * 3
    sim.drain()


def test_a_short_prompt_takes_only_what_it_needs_of_its_share():
    sim = simulation(ahead=0, max_tokens_per_step=512, prefill_chunk=512)
    sim.add(make_request("long", 4000, 2))
    sim.step()
    sim.add(make_request("short", 20, 2))
    assert prompt_tokens(sim.launch()) == [20, 492]
    sim.read()
    sim.drain()


def test_a_long_head_that_does_not_fit_holds_up_no_short_one_until_it_is_overdue():
    """The pool is held by two long answers; the third long prompt waits for pages, short ones pass it, for ten seconds."""
    sim = simulation(num_pages=80, max_sequences=8, max_tokens_per_step=1024, prefill_chunk=1024, ahead=0)
    holders = [sim.add(make_request(f"h{i}", 480, 120, seed=7 * i)) for i in range(2)]
    sim.step()
    blocked = sim.add(make_request("blocked", 480, 20, seed=14))
    early = sim.add(make_request("early", 20, 3, seed=21))
    sim.step()
    assert (early.state, blocked.state) == (RequestState.RUNNING, RequestState.WAITING)
    sim.now = 10.0
    late = sim.add(make_request("late", 20, 3, seed=28))
    for _ in range(20):
        sim.step()
        assert late.state is RequestState.WAITING
    while not blocked.finished:
        sim.step()
    assert first_launch(sim, blocked) <= first_launch(sim, late)
    assert any(h.finished for h in holders)
    sim.drain()


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_requests_leave_the_first_lane_a_sixteenth(deterministic):
    """Thirty-two rows: two stay free for short requests, and are theirs at once; also pages."""
    sim = simulation(ahead=0, num_pages=1300, deterministic=deterministic)
    for i in range(40):
        sim.add(make_request(f"l{i}", 101, 60, seed=7 * i))
    while sim.scheduler.num_running < 30:
        sim.step()
    sim.step(), sim.step()
    assert sim.scheduler.num_running == 30
    short = sim.add(make_request("s", 10, 4))
    sim.step(), sim.step()
    assert short.state is RequestState.RUNNING
    sim.drain()


@pytest.mark.parametrize("kept", [0, 8])
def test_long_requests_leave_the_first_lane_pages(kept):
    """Of 128 pages 8 are kept: of requests that take ten pages and may grow by one, ten run and not eleven."""
    lanes = two_lanes() if kept else (LaneConfig(name="all"),)
    sim = simulation(ahead=0, num_pages=129, max_tokens_per_step=2048, prefill_chunk=256, lanes=lanes)
    for i in range(20):
        sim.add(make_request(f"l{i}", 150, 60, seed=7 * i))
    sim.step()
    assert sim.scheduler.num_running == (10 if kept else 11)
    short = sim.add(make_request("s", 40, 4))
    sim.step()
    assert (short.state is RequestState.RUNNING) == bool(kept)
    sim.drain()


def test_the_victim_is_the_last_of_a_lane_and_the_one_whose_lost_work_weighs_least():
    lanes = two_lanes()

    def running(name, lane, ticket, computed, priority=0):
        request = make_request(name)
        request.lane, request.ticket, request.num_computed_tokens, request.priority = lane, ticket, computed, priority
        return request

    long_old, short_old = running("lo", 1, 0, 3000), running("so", 0, 1, 10)
    long_new, short_new = running("ln", 1, 2, 200), running("sn", 0, 3, 50)
    assert choose_victim([long_old, short_old, long_new, short_new], lanes) is short_new  # 150 against 200
    short_new.num_computed_tokens = 90
    assert choose_victim([long_old, short_old, long_new, short_new], lanes) is long_new
    assert choose_victim([long_old, short_old], lanes) is short_old  # never the oldest of all
    assert choose_victim([long_old], lanes) is long_old
    urgent = running("urgent", 0, 9, 10, priority=-1)
    assert choose_victim([long_old, short_old, urgent], lanes) is short_old


def test_a_burst_of_ten_times_the_pool_drains_without_thrash():
    rng = random.Random(5)
    sim = simulation(num_pages=33, max_sequences=16, max_tokens_per_step=256, prefill_chunk=256)
    held = 0
    for i in range(70):
        prompt, limit = rng.choice([(10, 30), (10, 30), (150, 100)])
        sim.add(make_request(f"r{i}", prompt, limit, seed=7 * i))
        held += prompt + limit
    assert held > 10 * 32 * 16
    sim.drain()
    needed = sum(r.num_prompt_tokens + len(r.output_ids) - 1 for r in sim.requests)
    assert sum(sim.device.tokens_computed.values()) < 1.5 * needed
    assert max(r.num_preemptions for r in sim.requests) <= 4


def test_a_request_that_waited_too_long_ends_and_its_neighbours_do_not():
    sim = simulation(max_sequences=1, lanes=two_lanes(timeout=5.0), ahead=0)
    running = sim.add(make_request("running", 4, 30))
    sim.step()
    late, long = sim.add(make_request("late", 4, 3)), sim.add(make_request("long", 400, 3))
    sim.now = 4.0
    fresh = sim.add(make_request("fresh", 4, 3))
    sim.now = 5.5
    assert sim.expire() == [late, long]
    assert [r.finish_reason for r in (late, long)] == ["timeout"] * 2
    assert sim.scheduler.waiting_by_lane == {"short": 1, "long": 0}
    sim.drain()
    assert (running.finish_reason, fresh.finish_reason) == ("length", "length")
    assert set(sim.device.tokens_computed) == {"running", "fresh"}  # B28: nothing was computed for the others


def test_a_refused_request_leaves_no_trace():
    sim = simulation(max_sequences=1, lanes=two_lanes(depth=1))
    sim.add(make_request("a", 4, 3))
    sim.step()
    sim.add(make_request("b", 4, 3))
    with pytest.raises(QueueFullError, match="lane 'short'"):
        sim.scheduler.add(make_request("c", 4, 3))
    sim.check()
    sim.drain()
    sim.add(make_request("c", 4, 3))
    sim.drain()


def churn(requests, *, lanes, seed):
    """Random traffic through the scheduler alone: bursts, aborts, stops, time-outs, preemption, and integrity every 1000 steps.

    Returns the ends by reason, "full" for those that were refused, and the preemptions of each request that had some.
    """
    config = EngineConfig(
        max_sequences=32, max_tokens_per_step=512, prefill_chunk=256, decode_steps=8, lanes=lanes, prefix_cache=False
    )
    loop = Loop(config, num_pages=100, stop_share=0.005, seed=seed)
    rng = random.Random(seed)
    arrivals = [0] * 120 + [1, 1, 2, 60]
    added, live, reasons, preemptions, steps = 0, {}, {}, [], 0
    while added < requests or live or loop.scheduler.num_running:
        for _ in range(min(requests - added, rng.choice(arrivals) if len(live) < 200 else 0)):
            long = rng.random() < 0.15
            try:
                request = loop.add(
                    rng.randint(200, 600) if long else rng.randint(1, 60), rng.choice((4, 4, 40, 200)), priority=rng.randint(0, 1)
                )
                live[request.request_id] = request
            except QueueFullError:
                reasons["full"] = reasons.get("full", 0) + 1
            added += 1
        loop.now += rng.random() * 0.03
        ended = loop.scheduler.expire(loop.now)
        if live and rng.random() < 0.05:
            aborted = loop.scheduler.abort(rng.choice(list(live)))
            ended += [] if aborted is None else [aborted]  # it may just have expired
        ended += [update.request for update in loop.step() if update.finished]
        for request in ended:
            reasons[request.finish_reason] = reasons.get(request.finish_reason, 0) + 1
            preemptions += [request.num_preemptions] if request.num_preemptions else []
            del live[request.request_id]
        steps += 1
        if steps % 1000 == 0:
            loop.scheduler.check_integrity()
    assert not list(loop.drain())
    loop.scheduler.check_integrity()
    assert loop.pool.num_free == loop.pool.capacity
    assert sum(reasons.values()) == requests
    return reasons, preemptions


def behind_documents(lanes, num_pages):
    """60 documents of 3000 tokens at once, then a short request behind every third launch; times in launches of 70 ms.

    Returns how long each short request waited for its first token, and when the last document had ended.
    """
    config = EngineConfig(
        max_sequences=32, max_tokens_per_step=2048, prefill_chunk=1024, decode_steps=1, lanes=lanes, prefix_cache=False
    )
    loop = Loop(config, num_pages)
    documents = {loop.add(3000, 16).request_id for _ in range(60)}
    arrived, waits, due, last_document = {}, [], 2, 0
    while loop.scheduler.has_unfinished:
        if loop.launches >= due and due < 150:
            arrived[loop.add(100, 8).request_id] = loop.launches
            due += 3
        before = loop.launches
        updates = loop.step()
        loop.now += 0.07 * (loop.launches - before)
        for update in updates:
            name = update.request.request_id
            if update.tokens and name in arrived:
                waits.append(loop.launches - arrived.pop(name))
            if update.finished and name in documents:
                last_document = loop.launches
    assert len(waits) == 50
    return waits, last_document


@pytest.mark.parametrize("num_pages", [10_000, 1500], ids=["rows are scarce", "pages are scarce"])
def test_short_requests_behind_a_burst_of_documents(num_pages):
    """A first token waits for the rest of the launch that is on and its own one; documents take no more than a ninth longer."""
    waits, last = behind_documents(two_lanes(640), num_pages)
    fifo_waits, fifo_last = behind_documents((LaneConfig(name="all"),), num_pages)
    assert max(waits) <= 2
    assert max(fifo_waits) > 40
    assert last <= fifo_last / 0.9


LIMITS = (
    LaneConfig(name="short", max_tokens=100, weight=3, depth=100, timeout=2.0),
    LaneConfig(name="long", depth=20, timeout=6.0),
)


@pytest.mark.parametrize("lanes", [(LaneConfig(name="all", depth=150, timeout=20.0),), LIMITS], ids=["one", "two"])
def test_churn_loses_nothing(lanes):
    reasons, _ = churn(2000, lanes=lanes, seed=random.randrange(10**6))
    assert {"length", "stop", "abort"} <= set(reasons)


@pytest.mark.slow
def test_churn_of_a_hundred_thousand_requests():
    reasons, preemptions = churn(100_000, lanes=LIMITS, seed=random.randrange(10**6))
    assert {"length", "stop", "abort", "timeout", "full"} == set(reasons)
    assert reasons["length"] + reasons["stop"] > 60_000
    assert len(preemptions) > 50
    assert max(preemptions) < 20


def test_long_prompts_alone_are_launched_ahead() -> None:
    """A launch of theirs that waited for the one before would leave the device idle; who comes late is the engine's to see."""
    sim = Simulation(num_pages=300, max_tokens_per_step=64, prefill_chunk=64, lanes=two_lanes())
    sim.add(make_request("long", 2000, 2))
    for _ in range(5):
        assert sim.launch() is not None
        assert sim.launch() is not None
        sim.now += 10.0
        sim.read()
        sim.read()
    sim.drain()
