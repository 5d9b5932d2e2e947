"""What the scheduler promises for launches with drafts, and what it takes back; the simulated device takes drafts by chance."""

from __future__ import annotations

import random

from fakes_scheduling import RandomSpeculation, Simulation, make_request, solo

from llmjax.scheduling.request import Request
from llmjax.scheduling.speculation import Drafting
from llmjax.scheduling.speculation_config import SpeculationConfig


class Eager(RandomSpeculation):
    """Every row drafts as much as there is."""

    def plan(self, decoding: list[Request], *rest: object) -> Drafting | None:
        length = self._config.tokens
        return Drafting(length, [length] * len(decoding))


def simulate(*, tokens: int = 3, eager: bool = True, method: str = "draft", **options: object) -> Simulation:
    config = SpeculationConfig(method=method, tokens=tokens)  # type: ignore[arg-type]
    speculation = Eager(config, 0) if eager else None
    return Simulation(speculative=config, speculation=speculation, seed=random.randrange(2**30), **options)  # type: ignore[arg-type]


def test_what_was_promised_and_not_given_comes_back() -> None:
    """Counts are upper bounds while launches are in flight, and exact when all are read; no page is lost on the way."""
    sim = simulate(ahead=2)
    request = sim.add(make_request("a", 20, 60))
    while not request.finished:
        sim.launch()
        decodes = request.num_computed_tokens >= request.num_prefill_tokens > 0
        if decodes and request.num_in_flight:
            assert request.num_computed_tokens == request.num_tokens - 1 + request.num_in_flight
        while len(sim.device.launches) > random.randint(0, 2):
            sim.read()
        if not sim.device.launches and not request.finished:
            assert request.num_computed_tokens == request.num_tokens - 1 == sim.device.rows[request.row].length
            assert request.num_left == request.limit - len(request.output_ids)
    sim.drain()
    assert 0 < sim.speculation.seen[1] < sim.speculation.seen[0]
    launches = [batch for batch in sim.batches if batch.kind == "speculate"]
    assert len(launches) < 60
    assert request.num_steps == len(launches) + sum(batch.num_steps for batch in sim.batches if batch.kind == "decode")


def test_drafts_end_where_the_limit_does() -> None:
    for limit in range(1, 9):
        sim = simulate(ahead=1, tokens=8)
        sim.add(make_request("a", 5, limit))
        sim.drain()
        for batch in sim.batches:
            assert all(row.samples == row.drafts + 1 <= limit for row in batch.rows if batch.kind == "speculate")


def test_without_pages_for_all_drafts_a_launch_is_plain() -> None:
    """No row is preempted for drafts that may come to nothing."""
    sim = simulate(tokens=8, num_pages=3, page_size=4, max_sequences=1)
    request = sim.add(make_request("a", 5, 3))
    sim.drain()
    assert request.num_preemptions == 0
    assert {batch.kind for batch in sim.batches} <= {"extend", "decode", "speculate"}
    full = simulate(tokens=8, num_pages=4, page_size=4, max_sequences=2)
    full.add(make_request("a", 3, 9))
    full.add(make_request("b", 3, 2))
    full.drain()
    assert "decode" in {batch.kind for batch in full.batches}


def test_prompts_come_first_and_rows_that_draft_join_them() -> None:
    sim = simulate(prefill_chunk=8)
    sim.add(make_request("a", 5, 40))
    for _ in range(4):
        sim.step()
    assert sim.batches[-1].kind == "speculate"
    sim.add(make_request("b", 30, 5))
    sim.step()
    assert sim.batches[-1].kind == "extend"
    assert [row.request.request_id for row in sim.batches[-1].rows] == ["a", "b"]
    sim.drain()


def test_a_draft_model_catches_up_after_plain_launches() -> None:
    """The device asserts that it has all tokens of a row that drafts."""
    sim = simulate(eager=False, decode_steps=4, prefix_cache=True)
    for index in range(4):
        sim.add(make_request(str(index), 3 + index, 50))
    sim.drain()
    caught = [row for batch in sim.batches for row in batch.rows if row.catch_up != (0, 0)]
    assert caught
    assert all(row.drafts and row.catch_up[0] < row.catch_up[1] < row.start for row in caught)
    lookup = simulate(eager=False, method="ngram", decode_steps=4)
    lookup.add(make_request("a", 5, 50))
    lookup.drain()
    assert not any(row.catch_up != (0, 0) for batch in lookup.batches for row in batch.rows)


def test_a_page_whose_last_token_the_draft_model_never_saw_is_not_taken_for_seen() -> None:
    """All drafts of a round are right, the token behind them ends the row and the page: the launch behind it, which was to show
    the last draft to the draft model, does nothing. Who finds the page has to catch up; the device asserts that it does."""
    prompt = make_request("a", 4, 40).prompt_ids
    for drafts in (1, 2, 3):
        for place in range(1, 24):
            sim = simulate(tokens=drafts, page_size=4, prefix_cache=True)
            sim.device.random = AllOf()
            stop = solo(make_request("a", prompt, 40), 40)[0][place]
            first = sim.add(make_request("a", prompt, 40, stop_ids=[stop]))
            sim.drain()
            sim.add(make_request("b", [*prompt, *first.output_ids, 1, 2, 3], 8))
            sim.drain()


def test_a_round_is_not_taken_for_a_step() -> None:
    """It takes longer, and would make launches of several steps look long."""
    sim = simulate()
    sim.add(make_request("a", 5, 30))
    for _ in range(6):
        sim.now += 1.0
        sim.step()
    assert [batch.kind for batch in sim.batches[1:]] == ["speculate"] * 5
    assert sim.scheduler._pace.step_seconds is None


def test_rows_with_a_form_draft_beside_others_once_their_tokens_are_read() -> None:
    """The draft model is not asked for them, and computes nothing that it has not seen of them."""
    sim = simulate(ahead=2)
    sim.add(make_request("a", 5, 60))
    form = make_request("b", 5, 40)
    form.stepwise = True
    sim.add(form)
    sim.drain()
    rows = [row for batch in sim.batches if batch.kind == "speculate" for row in batch.rows]
    of_form = [row for row in rows if row.request is form]
    assert max(row.drafts for row in of_form) == 3
    assert all(row.catch_up == (0, 0) for row in of_form)
    assert len(form.output_ids) > len(of_form)
    assert len(of_form) < len(rows) / 2  # it waits for its tokens, and the other goes on


def test_deterministic_launches_of_a_request_depend_on_it_alone() -> None:
    def launches(sim: Simulation) -> dict[str, list[tuple[int, int]]]:
        of: dict[str, list[tuple[int, int]]] = {}
        for batch in sim.batches:
            assert batch.kind != "decode"
            for row in batch.rows:
                of.setdefault(row.request.request_id, []).append((row.num_tokens, row.drafts))
        return of

    limits = {"a": 30, "b": 7, "c": 1, "d": 12}
    for tokens in (1, 4):
        crowd = simulate(tokens=tokens, deterministic=True, eager=False)
        crowd.device.random = HalfOf()
        for seed, (name, limit) in enumerate(limits.items()):
            crowd.add(make_request(name, 5 + seed, limit, seed=7 * seed))
        crowd.drain()
        for seed, (name, limit) in enumerate(limits.items()):
            alone = simulate(tokens=tokens, deterministic=True, eager=False)
            alone.device.random = HalfOf()
            alone.add(make_request(name, 5 + seed, limit, seed=7 * seed))
            alone.drain()
            assert launches(alone)[name] == launches(crowd)[name]


class HalfOf(random.Random):
    """Takes the first half of every row's drafts."""

    def randint(self, a: int, b: int) -> int:
        return b // 2


class AllOf(random.Random):
    """Takes them all."""

    def randint(self, a: int, b: int) -> int:
        return b
