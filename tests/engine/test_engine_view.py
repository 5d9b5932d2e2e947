"""How an engine looks from outside: numbers that add up whatever happened, and a map of its pages."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import pytest
from scripted_model import Scripted

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine import Engine
from llmjax.engine.engine_socket import EngineSocket
from llmjax.engine.engine_view import (
    MAP_CELLS,
    MAP_SYMBOLS,
    OWNED,
    EnginePicture,
    colour_of,
    contiguity,
    page_cells,
    picture_json,
    read_engine,
    take_picture,
)  # fmt: skip
from llmjax.engine.remote_engine import RemoteEngine
from llmjax.errors import EngineError, UnavailableError
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.lane_config import LaneConfig


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Scripted(None, kv_cache_bytes=2304).engine  # 8 pages of 16 tokens


def params(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, **options)


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step(closed=True)


def value(engine: Engine, name: str, **labels: str) -> float:
    found = engine.metrics.registry.get_sample_value(f"llmjax:{name}", labels)
    assert found is not None, name
    return found


def test_counters_tell_what_happened_also_of_preemptions_and_cached_prompts(engine: Engine) -> None:
    before = read_engine(engine)
    gaps = value(engine, "inter_token_latency_seconds_count")
    firsts = value(engine, "time_to_first_token_seconds_count", lane="all")
    prompts = [[random.randrange(1, 200) for _ in range(33)] for _ in range(2)]
    for prompt in prompts:
        engine.add_request(prompt, params(40))
    engine.step(closed=True)
    running = read_engine(engine)
    assert (sum(running.running.values()), running.held) == (2, 6)
    finish(engine)
    engine.add_request(prompts[1], params(1))
    finish(engine)
    now = read_engine(engine)
    preemptions = now.preemptions - before.preemptions
    assert preemptions >= 1, "eight pages are too few for both"
    assert now.output_tokens - before.output_tokens == 81
    assert now.prompt_tokens_queried - before.prompt_tokens_queried == 99
    assert now.prompt_tokens_cached - before.prompt_tokens_cached == 32
    assert now.prompt_tokens_first_computed - before.prompt_tokens_first_computed == 33 + 33 + 1
    assert now.tokens_recomputed > before.tokens_recomputed
    assert (now.held, now.preempted, now.compiles_after_ready) == (0, 0, 0)
    assert value(engine, "time_to_first_token_seconds_count", lane="all") - firsts == 3
    # Every token has a time to the one before it, but for those that came with a request's first launch.
    assert value(engine, "inter_token_latency_seconds_count") - gaps == 81 - 3


def test_no_counter_goes_back_when_the_policy_changes(engine: Engine) -> None:
    prompt = [random.randrange(1, 200) for _ in range(40)]
    for _ in range(2):
        engine.add_request(prompt, params(2))
        finish(engine)
    before, ended = read_engine(engine), value(engine, "request_success_total", lane="all", finished_reason="length")
    lanes = engine.config.lanes
    engine.set_policy(lanes=(LaneConfig(name="short", max_tokens=20), LaneConfig(name="all")))
    assert read_engine(engine).prompt_tokens_cached == before.prompt_tokens_cached
    engine.add_request(prompt, params(2))
    engine.add_request(prompt[:5], params(2))
    finish(engine)
    now = read_engine(engine)
    engine.set_policy(lanes=lanes)
    assert now.prompt_tokens_queried - before.prompt_tokens_queried == 45
    assert now.prompt_tokens_cached == before.prompt_tokens_cached, "the cache was emptied"
    assert now.running == {"short": 0, "all": 0}
    assert value(engine, "request_success_total", lane="all", finished_reason="length") == ended + 1
    assert value(engine, "request_success_total", lane="short", finished_reason="length") == 1


def test_a_picture_shows_who_holds_which_page(engine: Engine) -> None:
    shared = [random.randrange(1, 200) for _ in range(17)]
    engine.add_request(shared, params(1))
    finish(engine)
    ids = [engine.add_request([*shared, index], params(6)) for index in range(2)]
    engine.step(closed=True)
    picture = take_picture(engine)
    shown = json.loads(json.dumps(picture_json(picture, read_engine(engine))))
    finish(engine)
    assert [one["id"].rsplit("/", 1)[0] for one in shown["largest"]] == ids
    assert (shown["held"], shown["shared"], shown["pages_per_cell"], len(shown["map"])) == (3, 1, 1, 8)
    colours = [MAP_SYMBOLS[OWNED + colour_of(f"{name}/0")] for name in ids]
    assert shown["map"].count("s") == 1
    assert sum(shown["map"].count(colour) for colour in set(colours)) == 2
    assert shown["map"].count("c") == shown["cached"]
    assert sum(shown["sizes"]["prompt"]) == sum(shown["finished"].values())


def test_a_large_pool_is_shown_in_squares_of_several_pages() -> None:
    pages = 50_000
    counts = [0, *[1] * 30_000, *[2] * 10_000, *[0] * 10_000]
    rows = [("a/0", "all", 1, 1, list(range(1, 30_001)))]
    picture = EnginePicture(
        taken=0.0, counts=counts, findable=list(range(45_001, 50_001)), rows=rows, finished={}, refused=0, times={}, sizes={},
        page_size=16, started=0.0,
    )  # fmt: skip
    cells, per_cell = page_cells(picture)
    assert len(cells) <= MAP_CELLS
    assert len(cells) * per_cell >= pages > (len(cells) - 1) * per_cell
    mine = MAP_SYMBOLS[OWNED + colour_of("a/0")]
    assert cells == "".join(sorted(cells, key=[mine, "s", ".", "c"].index)), "in the order of the pages"
    for symbol, share in ((mine, 0.6), ("s", 0.2), (".", 0.1), ("c", 0.1)):
        assert abs(cells.count(symbol) / len(cells) - share) < 0.005


def test_contiguity_is_the_share_of_steps_to_the_next_page() -> None:
    assert contiguity([]) == contiguity([[7]]) == contiguity([[1, 2, 3], [9]]) == 1.0
    assert contiguity([[1, 2, 4], [8, 7]]) == 1 / 3


def test_an_engine_of_another_process_shows_the_same(engine: Engine) -> None:
    async def main() -> dict[str, Any]:
        local = AsyncEngine(engine)
        here = EngineSocket(local, "tiny")
        await asyncio.to_thread(here.start)
        hello = asyncio.Event()
        remote = RemoteEngine(hello.set)
        ours, theirs = socket.socketpair()
        await asyncio.to_thread(here.add, theirs)
        connected = asyncio.create_task(remote.connect(ours))
        async with asyncio.timeout(60):
            await hello.wait()
            found = await remote.snapshot()
            memory = await remote.memory_map()
            await asyncio.to_thread(here.close, 5.0)
            await connected
        await asyncio.to_thread(local.stop)
        with pytest.raises(UnavailableError):
            await remote.snapshot()
        for question in (local.snapshot, local.memory_map):
            with pytest.raises(EngineError):
                await question()
        assert memory == engine.memory_map().to_json()
        return found

    now = read_engine(engine)
    found = asyncio.run(main())
    assert (found["launches"], found["output_tokens"], found["pages"]) == (now.launches, now.output_tokens, now.pages)


def test_what_a_preempted_prompt_had_not_computed_is_no_repetition() -> None:
    options: dict[str, Any] = {"max_sequences": 2, "row_buckets": (2,), "prefix_cache": False, "prefill_chunk": 2}
    engine = Scripted(None, kv_cache_bytes=9 * 16 * 2 * 2 * 4, decode_steps=1, **options).engine
    engine.add_request([1] * 15, params(60))
    engine.step(closed=True)
    engine.add_request([2] * 90, params(2))
    finish(engine)
    now = read_engine(engine)
    assert now.preemptions >= 1
    assert now.prompt_tokens_first_computed == 15 + 90
