"""Pages run out: preemption by recompute, admission by pages, and nothing lost for good."""

from __future__ import annotations

import random

import pytest
from fakes_scheduling import Simulation, make_request

from llmjax.scheduling.request import RequestState


def test_a_lone_request_fills_the_whole_pool():
    sim = Simulation(num_pages=5, page_size=16, decode_steps=4)
    request = sim.add(make_request("a", 3, 1000))
    sim.drain()
    assert (len(request.output_ids), request.num_preemptions) == (61, 0)


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_b57_preempted_request_comes_back_complete(page_size, decode_steps):
    """A pool for one and a half requests, two of equal length: both equal their solo outputs, without gap or repeat."""
    sim = Simulation(num_pages=7, page_size=page_size, decode_steps=decode_steps)
    first = sim.add(make_request("first", page_size, 3 * page_size))
    second = sim.add(make_request("second", page_size, 3 * page_size, seed=1))
    sim.drain()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)


def test_preemption_waits_for_the_results_in_flight():
    sim = Simulation(num_pages=7, page_size=16, ahead=1)
    sim.add(make_request("first", 16, 48))
    second = sim.add(make_request("second", 16, 48, seed=1))
    while second.state is not RequestState.PREEMPTED:
        in_flight = len(sim.device.launches)
        batch = sim.launch()
        if second.state is RequestState.PREEMPTED:
            assert in_flight == 0  # so no sampled token is lost
            assert second.epoch == second.num_preemptions == 1
            assert [row.request.request_id for row in batch.rows] == ["first"]
        if batch is None or len(sim.device.launches) > 1:
            sim.read()
    assert second.output_ids == sim.expected["second"][0][: len(second.output_ids)]
    sim.drain()
    again = [row for batch in sim.batches for row in batch.rows if row.epoch == 1]
    assert again[0].is_new
    assert again[0].token_ids == (second.prompt_ids + second.output_ids)[: again[0].num_tokens]


def test_the_latest_request_is_preempted_and_keeps_its_place():
    sim = Simulation(num_pages=8, page_size=4, max_sequences=3, ahead=0)
    a, b, c = (sim.add(make_request(name, 4, 12, seed=i)) for i, name in enumerate("abc"))
    d = sim.add(make_request("d", 1, 2))
    while not d.finished:
        sim.step()  # checks that no waiting request came before a running one
        assert d.state is RequestState.WAITING or RequestState.PREEMPTED not in (b.state, c.state)
    sim.drain()
    assert a.num_preemptions == 0
    assert b.num_preemptions <= c.num_preemptions
    assert c.num_preemptions > 0


def test_no_ping_pong_under_pressure():
    """Sixteen rows want four times the pool: less than half of the work is done twice, nobody is thrown out for ever."""
    sim = Simulation(num_pages=65, page_size=16, max_sequences=16, max_tokens_per_step=256, prefill_chunk=256)
    for i in range(40):
        sim.add(make_request(f"r{i}", 30, 200, seed=7 * i))
    sim.drain()
    needed = sum(r.num_prompt_tokens + len(r.output_ids) - 1 for r in sim.requests)
    assert sum(sim.device.tokens_computed.values()) < 1.5 * needed
    assert max(r.num_preemptions for r in sim.requests) <= 2
    assert sum(r.num_preemptions for r in sim.requests) > 5


def test_a_preempted_request_comes_back_only_with_room_to_grow():
    """After n preemptions every row can grow by 1 + n pages when the request is admitted (or to its limit, if that is less)."""
    sim = Simulation(num_pages=43, page_size=4, max_sequences=8, ahead=0)
    for i in range(12):
        sim.add(make_request(f"r{i}", 8, 100, seed=7 * i))
    seen = set()
    while sim.scheduler.has_unfinished:
        batch = sim.launch()
        new = [row.request for row in batch.rows if row.is_new]
        if len(new) == 1 and new[0].num_preemptions:
            pages = 1 + new[0].num_preemptions
            running = [r for r in sim.requests if r.state is RequestState.RUNNING]
            assert sim.pool.num_free >= sum(min(pages, 27 - len(r.pages)) for r in running)  # 107 tokens fill 27 pages
            seen.add(pages)
        sim.read()
    assert max(seen) > 2
    sim.drain()


def test_b58_admission_counts_pages():
    """Requests of 17 tokens take two pages of 16 each: four of eight pages' worth run, however many tokens that leaves unused."""
    sim = Simulation(num_pages=9, max_sequences=8, max_tokens_per_step=200, prefill_chunk=20)
    for i in range(12):
        sim.add(make_request(f"r{i}", 17, 8, seed=7 * i))
    sim.launch()
    assert (sim.scheduler.num_running, sim.pool.num_free) == (4, 0)
    sim.drain()
    assert sum(r.num_preemptions for r in sim.requests) == 0


@pytest.mark.parametrize(("ahead", "decode_steps"), [(0, 1), (1, 4), (2, 2)])
def test_b30_at_rest_every_page_is_free(ahead, decode_steps):
    """2000 short requests in all: finish, stop, abort, error, preemption."""
    rng = random.Random(ahead)
    sim = Simulation(
        num_pages=13,
        page_size=4,
        max_sequences=6,
        max_tokens_per_step=24,
        prefill_chunk=7,
        decode_steps=decode_steps,
        ahead=ahead,
    )
    reasons: dict[str | None, int] = {}
    preempted = 0
    for lot in range(34):  # in lots, because the checks look at every request ever seen
        sim.requests = []
        for i in range(20):
            sim.add(
                make_request(
                    f"{lot}.{i}",
                    rng.randint(1, 24),
                    rng.choice([0, 1, 3, 8, 20]),
                    seed=rng.randint(0, 10**6),
                    stop_ids=rng.choice([[], [1]]),
                    min_tokens=rng.choice([0, 2]),
                )
            )
            sim.step()
            live = [r for r in sim.requests if not r.finished]
            if live and rng.random() < 0.15:
                sim.scheduler.abort(rng.choice(live).request_id)
                sim.check()
        sim.drain()
        sim.batches.clear()
        preempted += sum(r.num_preemptions for r in sim.requests)
        for request in sim.requests:
            reasons[request.finish_reason] = reasons.get(request.finish_reason, 0) + 1
    assert sum(reasons.values()) == 680
    assert set(reasons) == {"length", "stop", "abort", "error"}
    assert preempted > 10
