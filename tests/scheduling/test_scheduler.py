"""The scheduler, one claim a test, on a simulated device that checks each launch (`fakes_scheduling`)."""

from __future__ import annotations

import pytest
from fakes_scheduling import Simulation, make_request, solo

from llmjax.errors import ContextLengthError, RequestError
from llmjax.scheduling.request import RequestState


def seed_where(condition, **request):
    """The first seed whose solo output fulfils `condition(tokens, reason)`."""
    for seed in range(5000):
        made = make_request("probe", seed=seed, **request)
        if condition(*solo(made, made.limit)):
            return seed
    raise AssertionError("no such seed")


def chunks(sim, request):
    return [(row.start, row.num_tokens) for batch in sim.batches for row in batch.rows if row.request is request]


# What a launch holds


def test_a_prompt_is_computed_in_chunks_and_sampled_at_its_end():
    sim = Simulation(prefill_chunk=4, max_tokens_per_step=16, ahead=0)
    request = sim.add(make_request("a", 10, 3))
    sim.drain()
    assert chunks(sim, request) == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]  # the third new token is never computed
    rows = [batch.rows[0] for batch in sim.batches]
    assert [batch.kind for batch in sim.batches] == ["extend"] * 3 + ["decode"] * 2
    assert [row.samples for row in rows] == [0, 0, 1, 1, 1]
    assert [row.is_new for row in rows] == [True, False, False, False, False]
    assert [list(row.new_pages) for row in rows] == [[(0, 1)], [], [], [], []]
    assert rows[2].token_ids == request.prompt_ids[8:]
    assert not rows[3].token_ids  # the device has it


def test_one_step_ahead_of_the_results():
    sim = Simulation()
    sim.add(make_request("a", 4, 3))
    first, second, third = sim.launch(), sim.launch(), sim.launch()
    assert [b.kind for b in (first, second, third)] == ["extend", "decode", "decode"]
    assert [b.rows[0].start for b in (second, third)] == [4, 5]
    assert sim.launch() is None  # all three tokens are promised
    sim.drain()


def test_the_last_chunk_of_one_token_is_no_decode():
    sim = Simulation(prefill_chunk=4)
    sim.add(make_request("a", 5, 2))
    sim.launch()
    batch = sim.launch()
    assert (batch.kind, batch.rows[0].num_tokens, len(batch.rows[0].token_ids)) == ("extend", 1, 1)
    sim.drain()


def test_a_finished_row_leaves_and_a_waiting_request_enters_with_the_next_launch():
    sim = Simulation(max_sequences=2, ahead=0)
    short, long = sim.add(make_request("short", 3, 2)), sim.add(make_request("long", 3, 6))
    late = sim.add(make_request("late", 3, 2))
    sim.step()
    sim.step()
    assert (short.finished, late.state) == (True, RequestState.WAITING)
    batch = sim.launch()
    assert [row.request for row in batch.rows] == [long, late]
    assert late.row == 0  # the lowest free row
    sim.drain()


def test_the_budget_is_shared_in_order_of_arrival():
    sim = Simulation(max_tokens_per_step=16, prefill_chunk=12)
    a, b, c = (sim.add(make_request(name, 14, 1)) for name in "abc")
    held = [[(row.request.request_id, row.num_tokens) for row in sim.launch().rows] for _ in range(3)]
    assert held == [[("a", 12), ("b", 4)], [("a", 2), ("b", 10), ("c", 4)], [("c", 10)]]
    sim.drain()
    assert all(r.finished for r in (a, b, c))


def test_k_steps_when_nothing_waits_and_most_steps_have_work():
    sim = Simulation(decode_steps=4, ahead=0)
    sim.add(make_request("a", 3, 10))
    sim.add(make_request("b", 3, 4))
    sim.drain()
    assert [(b.kind, b.num_steps, [row.samples for row in b.rows]) for b in sim.batches] == [
        ("extend", 1, [1, 1]),
        ("decode", 4, [4, 3]),
        ("decode", 4, [4]),
        ("decode", 1, [1]),  # one token is left: three steps of four would be idle
    ]


def launches(sim):
    return [(batch.kind, batch.num_steps) for batch in sim.batches]


def test_a_backlog_decodes_k_steps_a_launch():
    """More requests than rows: K steps until only idle steps would be left, one extend launch for each request let in."""
    sim = Simulation(decode_steps=4, max_sequences=1, ahead=0)
    sim.add(make_request("a", 3, 10))
    sim.add(make_request("b", 3, 10))
    sim.drain()
    assert launches(sim) == [("extend", 1), ("decode", 4), ("decode", 4), ("decode", 1)] * 2


def test_a_backlog_goes_one_step_when_rows_are_certain_to_end_and_lie_idle():
    """One of two rows ends after two of four steps: a quarter of the launch would be idle while c waits."""
    sim = Simulation(decode_steps=4, max_sequences=2, ahead=0)
    short, long = sim.add(make_request("a", 3, 7)), sim.add(make_request("b", 3, 30))
    sim.launch(), sim.read()
    sim.launch(), sim.read()
    late = sim.add(make_request("c", 3, 2))
    for steps_left in (2, 1):
        assert short.num_left == steps_left
        assert (sim.launch().num_steps, late.state) == (1, RequestState.WAITING)
        sim.read()
    assert [row.request for row in sim.launch().rows] == [long, late]
    sim.drain()


def test_a_backlog_bears_a_few_idle_rows():
    """One of eight rows ends in the middle of the launch: 2 of 32 row steps are idle."""
    sim = Simulation(decode_steps=4, max_sequences=8, ahead=0)
    for i in range(8):
        sim.add(make_request(f"r{i}", 3, 7 if i == 0 else 40))
    sim.add(make_request("late", 3, 40))
    for _ in range(3):
        sim.step()
    assert launches(sim) == [("extend", 1), ("decode", 4), ("decode", 4)]
    sim.drain()


def test_a_backlog_that_waits_for_pages_decodes_k_steps_a_launch():
    """Rows are free, but the pool has no room for the head of the queue."""
    sim = Simulation(num_pages=13, page_size=4, decode_steps=4, ahead=0)
    a = sim.add(make_request("a", 4, 17))
    big = sim.add(make_request("big", 40, 5))
    sim.drain()
    assert launches(sim)[:4] == [("extend", 1), *[("decode", 4)] * 3]
    assert a.num_preemptions == big.num_preemptions == 0


def test_one_step_for_a_request_that_can_come_in():
    sim = Simulation(decode_steps=4, max_sequences=2, ahead=1)
    running = sim.add(make_request("a", 3, 40))
    sim.launch(), sim.launch()
    late = sim.add(make_request("b", 3, 4))
    batch = sim.launch()
    assert (batch.kind, [row.request for row in batch.rows]) == ("extend", [running, late])
    sim.drain()


def test_too_few_pages_for_k_steps_means_one_step_not_a_preemption():
    sim = Simulation(num_pages=8, page_size=4, decode_steps=8, ahead=0)
    a, b = sim.add(make_request("a", 3, 17)), sim.add(make_request("b", 4, 17))
    for _ in range(3):
        sim.step()
    assert [(batch.kind, batch.num_steps) for batch in sim.batches] == [("extend", 1), ("decode", 8), ("decode", 1)]
    assert a.num_preemptions == b.num_preemptions == 0
    assert sim.pool.num_free == 0  # eight steps more would have taken four pages, and one was left
    sim.drain()


def test_rows_decode_in_every_launch_while_long_prompts_come_in():
    """B59: one answer running, 4 prompts of 4000 tokens and 20 of 20."""
    sim = Simulation(num_pages=1100, max_sequences=32, max_tokens_per_step=256, prefill_chunk=128)
    running = sim.add(make_request("running", 4, 100))
    sim.step()
    for i in range(4):
        sim.add(make_request(f"long{i}", 4000, 2))
    for i in range(20):
        sim.add(make_request(f"short{i}", 20, 2))
    while not running.finished:
        before = len(sim.batches)
        sim.step()
        for batch in sim.batches[before:]:
            promised = len(running.output_ids) + running.num_in_flight
            assert running in [row.request for row in batch.rows] or promised == running.limit
    sim.drain()
    begun = [min(i for i, b in enumerate(sim.batches) if r in [row.request for row in b.rows]) for r in sim.requests]
    assert begun == sorted(begun)  # first come, first served


# How a request ends


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_b13_reasons(decode_steps, ahead):
    def stopped_at(count):
        return lambda tokens, reason: reason == "stop" and len(tokens) == count

    sim = Simulation(decode_steps=decode_steps, ahead=ahead)
    never = seed_where(lambda tokens, reason: reason == "length", limit=6, stop_ids=[1])
    early = seed_where(stopped_at(3), limit=6, stop_ids=[1])
    last = seed_where(stopped_at(6), limit=6, stop_ids=[1])
    length = sim.add(make_request("length", limit=6, seed=never, stop_ids=[1]))
    stop = sim.add(make_request("stop", limit=6, seed=early, stop_ids=[1]))
    both = sim.add(make_request("both", limit=6, seed=last, stop_ids=[1]))
    eos = sim.add(make_request("eos", limit=6, seed=early, eos_ids=(1,)))
    sim.drain()
    assert [r.finish_reason for r in (length, stop, both, eos)] == ["length", "stop", "stop", "stop"]
    assert [r.stop_token for r in (length, stop, both, eos)] == [None, 1, 1, 1]
    assert [len(r.output_ids) for r in (length, stop, both)] == [6, 3, 6]


def test_min_tokens_is_the_first_number_of_tokens_a_stop_may_follow():
    # Stop ids have no effect among the first two tokens, so the third is the first that may stop.
    request = {"limit": 6, "stop_ids": [1, 2, 3, 4], "min_tokens": 2}
    seed = seed_where(lambda tokens, reason: reason == "stop" and len(tokens) == 3, **request)
    sim = Simulation()
    done = sim.add(make_request("a", seed=seed, **request))
    sim.drain()
    assert (done.finish_reason, len(done.output_ids)) == ("stop", 3)


def test_limit_zero_ends_with_the_prompt_and_samples_nothing():
    sim = Simulation(prefill_chunk=4)
    request = sim.add(make_request("a", 10, 0))
    other = sim.add(make_request("b", 10, 3))
    sim.drain()
    assert (request.output_ids, request.finish_reason) == ([], "length")
    rows = [row for batch in sim.batches for row in batch.rows if row.request is request]
    assert sum(row.num_tokens for row in rows) == 10
    assert {(row.samples, row.wants_prompt_logprobs) for row in rows} == {(0, True)}
    assert not any(row.wants_prompt_logprobs for batch in sim.batches for row in batch.rows if row.request is other)


def test_prompt_logprobs_are_wanted_for_prompt_tokens_only():
    sim = Simulation(prefill_chunk=4)
    request = sim.add(make_request("a", 6, 3, prompt_logprobs=2))
    sim.drain()
    rows = [row for batch in sim.batches for row in batch.rows if row.request is request]
    assert [row.wants_prompt_logprobs for row in rows] == [True, True, False, False]


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_non_finite_logits_end_one_request_and_no_other(decode_steps):
    sim = Simulation(decode_steps=decode_steps)
    bad = seed_where(lambda tokens, reason: reason == "error" and len(tokens) == 3)
    broken = sim.add(make_request("broken", seed=bad))
    fine = [sim.add(make_request(f"fine{i}", seed=7 * i)) for i in range(4)]
    sim.drain()  # compares all with the oracle
    assert (broken.finish_reason, len(broken.output_ids)) == ("error", 3)
    assert all(r.finish_reason == "length" for r in fine)


def test_finish_from_outside_with_launches_in_flight():
    sim = Simulation(decode_steps=4, ahead=2)
    request = sim.add(make_request("a", 5, 30))
    other = sim.add(make_request("b", 5, 30))
    sim.launch()
    sim.launch()
    sim.read()
    free = sim.pool.num_free
    sim.scheduler.finish(request, "stop")  # a stop string
    sim.check()
    assert sim.pool.num_free == free  # a launch in flight writes to its pages
    reused = sim.add(make_request("c", 5, 2))
    batch = sim.launch()
    assert reused.row == 0  # but the row is free at once
    assert len({row.row for row in batch.rows}) == len(batch.rows)
    sim.read()
    assert request.output_ids == sim.expected["a"][0][:1]  # later tokens are dropped
    sim.expected["a"] = (request.output_ids, "stop")
    request.stop_token = request.output_ids[-1]
    sim.drain()
    assert other.finish_reason == "length"


def test_finish_after_the_last_token_changes_the_reason_only():
    sim = Simulation()
    request = sim.add(make_request("a", 3, 2))
    sim.drain()
    sim.scheduler.finish(request, "stop")
    assert (request.finish_reason, sim.pool.num_used) == ("stop", 0)


def test_abort_with_launches_in_flight_frees_pages_after_the_last_result():
    sim = Simulation(ahead=3)
    request = sim.add(make_request("a", 20, 30))
    for _ in range(3):
        sim.launch()
    assert sim.scheduler.abort("a") is request
    assert (request.finish_reason, sim.scheduler.has_unfinished) == ("abort", False)
    used = []
    while sim.device.launches:
        used.append(sim.pool.num_used)
        sim.read()
    assert used == [2, 2, 2]
    assert sim.pool.num_used == 0
    assert request.output_ids == []
    assert sim.scheduler.abort("a") is None
    assert sim.scheduler.abort("never seen") is None


def test_b28_cancelled_while_waiting_is_never_computed():
    sim = Simulation(max_sequences=1, num_pages=200)
    for i in range(20):
        sim.add(make_request(f"r{i}", 100, 4))
    sim.step()
    for i in range(1, 19):
        sim.scheduler.abort(f"r{i}")
    sim.check()
    assert sim.scheduler.num_waiting == 1
    sim.drain()
    assert set(sim.device.tokens_computed) == {"r0", "r19"}
    assert sim.device.tokens_computed["r19"] == 103


def test_b16_seats_are_freed_by_aborted_prefills():
    sim = Simulation(max_sequences=2, prefill_chunk=1, num_pages=200)
    for i in range(4):
        sim.add(make_request(f"slow{i}", 300, 4))
    for _ in range(5):
        sim.step()
    for i in range(4):
        sim.scheduler.abort(f"slow{i}")
    normal = [sim.add(make_request(f"n{i}", 5, 4)) for i in range(5)]
    sim.drain(max_steps=100)
    assert all(r.finish_reason == "length" for r in normal)


# What is refused


def test_an_id_in_use_is_refused_and_may_be_used_again_later():
    sim = Simulation()
    sim.add(make_request("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        sim.scheduler.add(make_request("a"))
    sim.drain()
    again = make_request("a")
    sim.scheduler.add(again)
    assert (sim.scheduler.num_waiting, again.state) == (1, RequestState.WAITING)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_prompt_must_fit_the_pool_with_one_new_token(page_size):
    largest = 3 * page_size
    sim = Simulation(num_pages=4, page_size=page_size)
    for prompt in (largest, largest + 1):
        with pytest.raises(ContextLengthError, match=f"{prompt} tokens .* pool of {largest} tokens .3 pages of {page_size}"):
            sim.scheduler.add(make_request(f"r{prompt}", prompt))
    assert not sim.scheduler.has_unfinished
    fits = sim.add(make_request("fits", largest - 1, 50))
    sim.drain()
    assert (fits.limit, len(fits.output_ids), fits.finish_reason) == (1, 1, "length")
