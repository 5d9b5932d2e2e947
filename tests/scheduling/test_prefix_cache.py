"""The prefix cache, one claim a test, on a simulated device that knows what every slot holds (`fakes_scheduling`)."""

from __future__ import annotations

import random

import pytest
from fakes_scheduling import NAN_ID, Simulation, make_request

PAGE = 4


def simulation(**options):
    return Simulation(**{"page_size": PAGE, "num_pages": 60, "prefill_chunk": 12, "prefix_cache": True, "ahead": 0} | options)


def sound(start=0):
    """The first seed from `start` on whose requests never meet NaN."""
    return next(seed for seed in range(start, start + 20) if seed % 7 != 3)


def ids(length):
    """Tokens of many kinds, so that no two pages are alike by chance."""
    return [random.randrange(100, 2**31) for _ in range(length)]


def run(sim, name, prompt, limit=1, **options):
    request = sim.add(make_request(name, prompt, limit, **{"seed": sound()} | options))
    sim.drain()
    return request


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (32, 28)])
def test_b55_full_pages_before_the_last_token_are_found(length, found):
    sim = simulation()
    prompt = ids(length)
    first, again = run(sim, "a", prompt), run(sim, "b", prompt)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, found)
    assert sim.device.tokens_computed == {"a": length, "b": length - found}
    assert sim.scheduler.prefix_tokens == (2 * length, found)


@pytest.mark.parametrize("same", [0, 3, 4, 11, 20])
def test_only_what_begins_alike_is_found(same):
    sim = simulation()
    prompt = ids(24)
    run(sim, "a", prompt)
    other = prompt[:same] + [token - 1 for token in prompt[same:]]
    assert run(sim, "b", other).num_cached_tokens == same // PAGE * PAGE
    assert run(sim, "c", prompt[PAGE:]).num_cached_tokens == 0, "the same tokens at other positions are another content"


def test_salts_do_not_mix():
    sim = simulation()
    prompt = ids(20)
    run(sim, "a", prompt, salt="x")
    found = [run(sim, f"b{i}", prompt, salt=salt).num_cached_tokens for i, salt in enumerate([None, "y", "x", None, "y"])]
    assert found == [0, 0, 16, 16, 16]


def test_the_answer_is_found_by_the_next_turn():
    sim = simulation(decode_steps=4)
    first = run(sim, "a", ids(6), 31)
    history = first.prompt_ids + first.output_ids
    assert run(sim, "b", [*history, 1, 2]).num_cached_tokens == 36, "the last of 37 tokens was sampled but never computed"


def test_nothing_is_found_before_its_launch_has_been_read():
    sim = simulation()
    prompt = ids(21)
    sim.add(make_request("a", prompt, 1, seed=sound()))
    sim.launch()
    early = sim.add(make_request("b", prompt, 1, seed=sound()))
    sim.launch()
    assert early.num_cached_tokens == 0
    sim.read()
    late = sim.add(make_request("c", prompt, 1, seed=sound()))
    sim.launch()
    assert late.num_cached_tokens == 12, "the first chunk has been read, the second has not"
    sim.drain()


def test_b32_an_aborted_request_leaves_what_was_read_and_no_more():
    sim = simulation(ahead=1)
    prompt = ids(21)
    victim = sim.add(make_request("a", prompt, 9, seed=sound()))
    sim.launch(), sim.launch()
    sim.read()
    sim.scheduler.abort(victim.request_id)
    sim.drain()
    assert run(sim, "b", prompt).num_cached_tokens == 12
    late = sim.add(make_request("c", prompt, 30, seed=sound()))
    while len(late.output_ids) < 10:
        sim.step()
    sim.scheduler.abort("c")
    sim.drain()
    text_so_far = prompt + late.output_ids
    assert run(sim, "d", [*text_so_far, 1, 2, 3]).num_cached_tokens >= (len(text_so_far) - 1) // PAGE * PAGE


def test_running_requests_share_pages_and_each_gives_up_its_own():
    sim = simulation()
    prompt = ids(17)
    run(sim, "a", prompt)
    b, c = (sim.add(make_request(name, prompt, 9, seed=sound(i))) for i, name in enumerate("bc"))
    sim.step()
    assert b.pages[:4] == c.pages[:4]
    assert b.pages[4] != c.pages[4]
    assert [sim.pool.holders(page) for page in b.pages] == [2] * 4 + [1]
    assert sim.pool.num_used == 6
    sim.scheduler.abort("b")
    assert [sim.pool.holders(page) for page in c.pages] == [1] * 5
    sim.drain()


def test_pages_are_lost_the_longest_unused_first_and_a_sequence_from_its_end():
    sim = simulation(num_pages=13, max_sequences=1)
    old, new = ids(17), ids(17)
    run(sim, "a", old), run(sim, "b", new)
    run(sim, "c", ids(21))  # 6 pages: 4 that are empty, and the last two of `old`
    assert sim.pool.num_kept == 11
    assert run(sim, "d", new).num_cached_tokens == 16
    assert run(sim, "e", old).num_cached_tokens == 8


def test_a_waiting_request_needs_room_for_what_it_does_not_find_only():
    """Two of ten pages in a pool of fourteen, nine of them shared."""
    sim = simulation(num_pages=15, ahead=0)
    prompt = ids(37)
    run(sim, "a", prompt)
    b, c = (sim.add(make_request(name, prompt, 3, seed=sound(i))) for i, name in enumerate("bc"))
    sim.step()
    assert (b.num_cached_tokens, c.num_cached_tokens) == (36, 36)
    assert sim.scheduler.num_running == 2
    sim.drain()


def test_a_preempted_request_finds_itself():
    prompts, computed = [ids(5), ids(5)], {}
    for on in (False, True):
        sim = simulation(num_pages=13, max_sequences=2, ahead=1, prefix_cache=on)
        a, b = (sim.add(make_request(name, prompt, 30, seed=sound())) for name, prompt in zip("ab", prompts, strict=True))
        sim.drain()
        assert b.num_preemptions > 0
        assert a.num_cached_tokens == b.num_cached_tokens == 0, "its own tokens are no hit"
        computed[on] = sim.device.tokens_computed["b"]
    assert computed[True] < computed[False]
    assert sim.scheduler.prefix_tokens == (10, 0)


def test_a_prompt_to_be_scored_is_computed_and_then_found_by_others():
    sim = simulation()
    prompt = ids(21)
    run(sim, "a", prompt)
    assert run(sim, "b", prompt, prompt_logprobs=1).num_cached_tokens == 0
    assert sim.device.tokens_computed["b"] == 21
    assert sim.scheduler.prefix_tokens == (21, 0), "it was not looked up"
    fresh = ids(21)
    run(sim, "c", fresh, prompt_logprobs=1)
    assert run(sim, "d", fresh).num_cached_tokens == 20


def test_new_weights_forget_everything_also_what_running_requests_go_on_with():
    sim = simulation()
    prompt = ids(13)
    sim.add(make_request("a", prompt, 20, seed=sound()))
    for _ in range(5):
        sim.step()
    sim.new_weights()
    assert run(sim, "b", prompt).num_cached_tokens == 0
    text = sim.requests[0].prompt_ids + sim.requests[0].output_ids
    assert run(sim, "c", text).num_cached_tokens == 12, "from b"
    assert run(sim, "d", text).num_cached_tokens == 32, "from c, not what a made of both"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_pages_of_a_row_with_nan_are_zeroed_before_anyone_gets_them_and_found_by_nobody(ahead):
    sim = simulation(num_pages=8, ahead=ahead, max_sequences=2)
    prompt = [*ids(14), NAN_ID, *ids(6)]
    bad = sim.add(make_request("a", prompt, 3))
    sim.drain()
    assert (bad.finish_reason, bad.output_ids) == ("error", [])
    assert run(sim, "b", [*prompt[:14], *ids(7)]).num_cached_tokens == 0, "its pages before the NaN are not trusted either"
    assert sum(len(batch.dirty_pages) for batch in sim.batches) == 6
    assert sim.device.tokens_computed["a"] <= 21


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nan_that_comes_after_the_request_was_aborted_is_zeroed_too(prefix_cache):
    sim = simulation(num_pages=8, max_sequences=1, ahead=1, prefix_cache=prefix_cache)
    sim.add(make_request("a", [*ids(9), NAN_ID, 1, 2], 3))
    sim.launch()
    sim.scheduler.abort("a")
    sim.drain()
    run(sim, "b", ids(27))  # gets every page: the device looks at what it holds
    assert sum(len(batch.dirty_pages) for batch in sim.batches) == 3


def test_a_page_shared_with_a_row_that_met_nan_is_left_to_its_reader():
    sim = simulation(ahead=0)
    start = ids(12)
    run(sim, "a", start)
    sim.add(make_request("b", [*start, 1, 2], 20, seed=sound()))
    sim.step()
    bad = sim.add(make_request("c", [*start[:8], NAN_ID], 3))
    sim.step()
    assert (bad.finish_reason, bad.num_cached_tokens) == ("error", 8)
    sim.drain()
    run(sim, "d", ids(5))
    zeroed = [page for batch in sim.batches for page in batch.dirty_pages]
    assert len(zeroed) == len(set(zeroed)) == 3, "two shared ones once their reader was done, and one of its own"


def test_deterministic_hits_end_where_a_chunk_does():
    sim = simulation(deterministic=True, max_tokens_per_step=32, prefill_chunk=10, decode_steps=2)
    prompt = ids(45)
    assert run(sim, "a", prompt, 3).num_cached_tokens == 0
    again = run(sim, "b", prompt, 3)
    assert again.num_cached_tokens == 40  # chunks of 10 and pages of 4 meet every 20 tokens; 4 whole chunks were committed
    assert [row.start for batch in sim.batches for row in batch.rows if row.request is again][:1] == [40]
    exact = run(sim, "c", prompt[:40], 3)
    assert exact.num_cached_tokens == 20, "the last token is computed, in the chunk it would be in"
    turn = run(sim, "d", [*prompt, *again.output_ids, *ids(30)], 1)
    assert turn.num_cached_tokens == 40, "what was decoded has another last bit"


def test_off_means_off():
    sim = simulation(prefix_cache=False)
    prompt = ids(21)
    run(sim, "a", prompt)
    assert run(sim, "b", prompt).num_cached_tokens == 0
    assert sim.pool.num_kept == 0
    assert sim.scheduler.prefix_tokens == (0, 0)


def test_a_page_is_hashed_once():
    sim = simulation()
    request = run(sim, "a", ids(9), 40)
    assert len(request.page_keys) == len(set(request.page_keys)) == (9 + 40 - 1) // PAGE


def test_crowds_with_common_beginnings_compute_less_and_the_same():
    rng = random.Random()
    systems = [ids(length) for length in (8, 19, 40)]
    sim = simulation(num_pages=80, max_sequences=4, decode_steps=4, ahead=1)
    total = 0
    for index in range(60):
        prompt = [*rng.choice(systems), *ids(rng.randint(1, 9))]
        total += len(prompt)
        sim.add(make_request(f"r{index}", prompt, rng.randint(1, 12), seed=rng.randrange(2000)))
        for _ in range(rng.randint(0, 3)):
            sim.step()
    sim.drain()  # compares every output with the solo run
    queried, found = sim.scheduler.prefix_tokens
    assert queried == total
    assert found > total / 4
