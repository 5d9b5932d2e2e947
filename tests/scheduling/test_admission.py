"""Shares of a launch are worked out only where they matter, and admission decides the same by its short cut."""

from __future__ import annotations

import random

import pytest
from fakes_scheduling import Simulation, make_request

from llmjax.scheduling.lane_config import LaneConfig
from llmjax.scheduling.policy import full_launch, may_be_cut
from llmjax.scheduling.prefix_cache import PrefixCache

TWO = (LaneConfig(name="short", max_tokens=100, weight=3), LaneConfig(name="long"))


@pytest.mark.parametrize("buckets", [(), (64,), (512,), (32, 128), (256, 1024), (128, 512, 2048)])
@pytest.mark.parametrize("decoding", [0, 1, 31, 127, 128, 129, 255, 256, 257, 511])
def test_a_launch_that_may_not_be_cut_never_is(decoding: int, buckets: tuple[int, ...]) -> None:
    last = buckets[-1] if buckets else 512
    cut = any(full_launch(decoding, prompts, buckets) < decoding + prompts for prompts in range(1, last - decoding + 1))
    assert cut <= may_be_cut(decoding, buckets)
    assert may_be_cut(decoding, buckets) <= (cut or decoding >= last)


@pytest.mark.parametrize(("token_buckets", "looks"), [((64,), False), ((32, 64), False), ((256, 1024), True)])
def test_a_lone_lane_is_walked_only_where_a_launch_could_be_cut(
    token_buckets: tuple[int, ...], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = PrefixCache.num_found
    monkeypatch.setattr(PrefixCache, "num_found", lambda self, request: seen.append(request.request_id) or real(self, request))
    sim = Simulation(max_tokens_per_step=token_buckets[-1], token_buckets=token_buckets, prefix_cache=True)
    for index in range(6):
        sim.add(make_request(f"r{index}", 20, 3, seed=index))
    sim.drain()
    assert bool(seen) == looks


def test_a_prompt_that_fills_the_launch_leaves_nobody_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one begun prompt are all there are: who waits behind it in the lane is not asked what it would compute."""
    seen: list[str] = []
    sim = Simulation(
        num_pages=200, max_tokens_per_step=256, token_buckets=(256,), prefill_chunk=256, lanes=TWO, prefix_cache=True, ahead=0
    )
    sim.add(make_request("begun", 1000, 2))
    sim.step()
    monkeypatch.setattr(PrefixCache, "num_found", lambda self, request: seen.append(request.request_id) or 0)
    sim.add(make_request("behind", 1000, 2, seed=1))
    sim.step()
    assert seen == []
    monkeypatch.undo()
    sim.drain()


@pytest.mark.parametrize("lanes", [(LaneConfig(name="all"),), TWO], ids=["one", "two"])
def test_the_short_cut_admits_whom_the_rows_growth_would(lanes: tuple[LaneConfig, ...]) -> None:
    """Whoever is admitted leaves every running row and itself a page to grow by, as far as they can use one; and whoever is
    not would not have. Between little and ample room."""
    rng = random.Random(3)
    for num_pages in (20, 40, 80, 160):
        sim = Simulation(num_pages=num_pages, max_sequences=16, ahead=0, lanes=lanes)
        for index in range(30):
            sim.add(make_request(f"r{index}", rng.randint(1, 90), rng.randint(1, 60), seed=index))
        while sim.scheduler.has_unfinished:
            admission, running, free_rows = sim.scheduler._admission, sim.scheduler.running, sim.scheduler._seats.num_free
            for request, overdue in sim.scheduler._lanes.candidates(sim.now):
                known, free = sim.pool.pages_for(request.num_tokens), sim.pool.num_free
                kept = request.lane > 0 and running and not overdue
                per_row = 1 + request.num_preemptions
                growth = sum(min(r.full_pages - len(r.pages), per_row) for r in running)
                growth += min(request.full_pages - known, per_row)
                room = known + growth <= free - (sim.pool.capacity // 16 if kept else 0)
                room = room and not (kept and free_rows <= 1)
                assert admission._fits(request, running, free_rows, overdue, promised=0) == room
            sim.step()
