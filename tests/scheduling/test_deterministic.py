"""A deterministic engine's schedule: what is launched for a request depends on the request alone."""

from __future__ import annotations

import random

import pytest
from fakes_scheduling import Simulation, make_request

from llmjax.scheduling.lane_config import FIFO, LaneConfig


def simulation(**options):
    return Simulation(**{"page_size": 4, "num_pages": 60, "max_sequences": 4, "max_tokens_per_step": 32, "prefill_chunk": 12,
                         "decode_steps": 4, "deterministic": True} | options)  # fmt: skip


def launches(sim, request_id):
    """Everything of its launches that the device's arithmetic could depend on."""
    return [
        (batch.kind, batch.num_steps, row.start, row.num_tokens, row.samples, len(batch.rows) if batch.kind == "extend" else None)
        for batch in sim.batches
        for row in batch.rows
        if row.request.request_id == request_id
    ]


def fresh(rng, index):
    return {
        "request_id": f"r{index}", "prompt": rng.randint(1, 50), "limit": rng.randint(0, 40), "seed": rng.randrange(2000),
        "stop_ids": [1] if rng.random() < 0.3 else [],
    }  # fmt: skip


LANES = (LaneConfig(name="short", max_tokens=30, weight=3), LaneConfig(name="long"))


@pytest.mark.parametrize(("decode_steps", "ahead", "lanes"), [(1, 0, FIFO), (4, 1, FIFO), (4, 2, LANES), (1, 1, LANES)])
def test_random_arrivals_change_nothing_of_a_request(decode_steps, ahead, lanes):
    rng = random.Random()
    requests = [fresh(rng, i) for i in range(25)]
    crowd = simulation(decode_steps=decode_steps, ahead=ahead, lanes=lanes)
    for request in requests:
        crowd.add(make_request(**request))
        for _ in range(rng.choice([0, 0, 1, 3, 20])):
            crowd.step()
    crowd.drain()
    for made, request in zip(crowd.requests, requests, strict=True):
        alone = simulation(decode_steps=decode_steps, ahead=ahead, lanes=lanes)
        alone.add(make_request(**request))
        alone.drain()
        want = launches(alone, made.request_id)
        # Once it has ended by a stop id, launches in flight may still hold it: the device ignores them.
        got = launches(crowd, made.request_id)
        shared = min(len(want), len(got))
        assert got[:shared] == want[:shared]
        assert abs(len(got) - len(want)) <= (ahead if request["stop_ids"] or made.finish_reason == "error" else 0)
        assert made.num_preemptions == 0


def test_prompts_and_decoding_rows_take_turns():
    sim = simulation(ahead=0)
    sim.add(make_request("a", 5, 17))
    sim.step()
    sim.add(make_request("b", 30, 9))
    sim.add(make_request("c", 5, 9))
    for _ in range(7):
        sim.step()
    held = [(batch.kind, [row.request.request_id for row in batch.rows]) for batch in sim.batches]
    assert held == [
        ("extend", ["a"]), ("decode", ["a"]), ("extend", ["b"]), ("decode", ["a"]), ("extend", ["b"]), ("decode", ["a"]),
        ("extend", ["b"]), ("decode", ["a", "b"]),
    ]  # fmt: skip
    assert [row.start for batch in sim.batches for row in batch.rows if row.request.request_id == "b"] == [0, 12, 24, 30]
    sim.drain()


def test_a_short_prompt_takes_turns_with_a_long_one():
    sim = simulation(ahead=0, lanes=LANES)
    sim.add(make_request("long", 100, 2))
    sim.step()
    sim.add(make_request("short", 5, 5))
    sim.step()
    assert [[row.request.request_id for row in batch.rows] for batch in sim.batches] == [["long"], ["short"]]
    sim.drain()
    assert [entry[2:4] for entry in launches(sim, "long")][:3] == [(0, 12), (12, 12), (24, 12)]


def test_the_chunk_does_not_depend_on_the_room_that_decoding_rows_leave():
    sim = simulation(max_tokens_per_step=13, prefill_chunk=12, ahead=0)
    for i in range(3):
        sim.add(make_request(f"r{i}", 3, 30))
        sim.step(), sim.step()
    sim.add(make_request("long", 40, 2))
    sim.drain()
    assert [entry[2:4] for entry in launches(sim, "long")][:4] == [(0, 12), (12, 12), (24, 12), (36, 4)]


def test_a_request_is_admitted_with_its_full_length_only():
    """Two requests of ten pages at full length, a pool of nineteen: the second waits for the first, which is never preempted."""
    sim = simulation(num_pages=20, ahead=0)
    first, second = sim.add(make_request("a", 4, 37)), sim.add(make_request("b", 4, 37))
    while not first.finished:
        sim.step()
        assert sim.scheduler.num_waiting == 1 or first.finished
    sim.drain()
    assert second.num_preemptions == 0
    roomy = simulation(num_pages=21, ahead=0)
    roomy.add(make_request("a", 4, 37)), roomy.add(make_request("b", 4, 37))
    for _ in range(3):
        roomy.step()
    assert roomy.scheduler.num_running == 2
    roomy.drain()
