"""Where the memory is, and that all of it comes back."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fakes_text import plain_byte_tokenizer
from scripted_model import CONTEXT, Scripted, ScriptedConfig
from tiny_models import CONFIGS, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.errors import EngineError
from llmjax.model.kv_cache import cache_bytes_per_page
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.page_map import PageUse

LONG = SamplingParams(max_tokens=60, temperature=0.0)


@pytest.fixture(scope="module")
def flat() -> Scripted:
    return Scripted(plain_byte_tokenizer())


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step(closed=True)


def test_pages_by_owner_age_and_sharing(flat: Scripted) -> None:
    engine = flat.engine
    flat.script([])
    prompt = list(range(40))
    engine.add_request(prompt, SamplingParams(max_tokens=1))
    finish(engine)
    empty = engine.memory_map()
    assert (empty.num_held, empty.num_kept, empty.num_shared) == (0, 2, 0)
    assert [use.owners for use in empty.pages] == [(), ()]
    assert all(use.findable for use in empty.pages)
    for name in ("a", "b"):
        engine.add_request([*prompt, 1], LONG, request_id=name)
    for _ in range(3):
        engine.step(closed=True)
    found = engine.memory_map()
    assert (found.num_held, found.num_shared) == (4, 2)
    assert found.num_pages == found.num_held + found.num_kept + found.num_empty == engine.pool.capacity
    shared = [use for use in found.pages if use.shared]
    assert [use.owners for use in shared] == [("a/0", "b/0")] * 2
    assert {use.holders for use in shared} == {2}
    own = [use for use in found.pages if not use.shared]
    assert sorted(use.owners for use in own) == [("a/0",), ("b/0",)]
    assert max(use.age for use in own) == 3
    assert min(use.age for use in shared) > 3
    engine.abort("a")
    assert {owner for use in engine.memory_map().pages for owner in use.owners} == {"a/0", "b/0"}, "a launch may touch them"
    finish(engine)
    assert engine.memory_map().num_held == 0


def test_device_memory_by_purpose_and_as_json(flat: Scripted) -> None:
    found = flat.engine.memory_map()
    page_bytes = cache_bytes_per_page(ScriptedConfig(), 16)
    assert found.page_bytes == page_bytes
    assert found.device.cache == page_bytes * flat.engine.pool.num_pages
    assert found.device.weights == CONTEXT * ScriptedConfig.vocab_size * 4
    assert found.device.state == sum(array.nbytes for array in jax.tree.leaves(flat.engine.runner.arrays[2]))
    assert found.device.temporaries == max(program.temp_bytes for program in flat.engine.programs)
    read = json.loads(json.dumps(found.to_json()))
    assert read["device"]["cache"] == found.device.cache
    assert len(read["pages"]) == len(found.pages)
    assert {"page", "owners", "holders", "age", "findable"} == set(read["pages"][0])


def test_a_page_costs_little_to_be_told(flat: Scripted) -> None:
    """It is done beside an engine that runs, in the same interpreter: calls of Python functions, a page."""
    found = flat.engine.memory_map()
    pages = tuple(PageUse(page, ("a/0", "b/0"), 2, 7, True) for page in range(200))
    calls: list[str] = []
    many = dataclasses.replace(found, pages=pages)
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        told = many.to_json()
    finally:
        sys.setprofile(None)
    assert told == json.loads(json.dumps(dataclasses.asdict(many)))
    assert len(calls) < 2 * len(pages)


def test_leaks_are_told(flat: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    engine = flat.engine
    flat.script([])
    assert engine.find_leaks() == []
    engine.add_request([1], LONG)
    with pytest.raises(EngineError, match="only while nothing runs"):
        engine.find_leaks()
    pages = engine.pool.allocate(3)
    with caplog.at_level(logging.ERROR):
        finish(engine)
    assert f"nothing runs, but 3 of {engine.pool.capacity} pages are held by no request" in caplog.text
    array = jnp.zeros((1000,), jnp.float32)
    told = engine.find_leaks()
    assert told[0] == f"3 of {engine.pool.capacity} pages are held by no request"
    assert told[1] == "arrays of 4000 bytes more are alive than when the engine became ready"
    engine.pool.free(pages)
    del array
    assert engine.find_leaks() == []


def random_request(rng: random.Random, vocab: int) -> tuple[list[int], SamplingParams]:
    start = [7] * rng.choice([0, 0, 16, 40])
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.randint(1, 12),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**63),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logprobs=rng.choice([None, 0, 5]),
        prompt_logprobs=rng.choice([None] * 5 + [1]),
        stop_token_ids=[rng.randrange(vocab)],
        cache_salt=rng.choice([None, None, "salt"]),
    )
    return start + [rng.randrange(vocab) for _ in range(rng.choice([1, 15, 16, 17, rng.randint(2, 60)]))], params


def check_churn(count: int) -> None:
    """Requests of random shapes, some aborted, some preempted, some with NaN: all pages and all device memory come back (B30)."""
    config = CONFIGS["llama"]
    params: dict[str, Any] = random_params(config)
    params["embed"]["weight"] = params["embed"]["weight"].at[100].set(jnp.nan)
    options = EngineConfig(
        max_context=128, kv_cache_bytes=25 * cache_bytes_per_page(config, 16), max_sequences=8, max_tokens_per_step=64,
        prefill_chunk=48, decode_steps=2, row_buckets=(8,), token_buckets=(64,),
    )  # fmt: skip
    engine = Engine(config, params, None, options)
    rng = random.Random()
    names = []
    for index in range(count):
        prompt, sampling = random_request(rng, config.num_tokens)
        names.append(engine.add_request(prompt, sampling))
        if rng.random() < 0.1:
            engine.abort(rng.choice(names))
        for _ in range(rng.choice([0, 0, 1, 4])):
            engine.step(closed=True)
        if index % 50 == 0:
            engine.scheduler.check_integrity()
    finish(engine)
    assert engine.find_leaks() == []
    assert engine.pool.num_free == engine.pool.capacity
    engine.pool.forget_all()
    assert engine.memory_map().num_empty == engine.pool.capacity
    assert sum(engine.stats.finished.values()) == count
    assert engine.stats.prompt_tokens_cached > 0
    assert engine.runner.compiles_after_ready == 0


def test_b30_everything_comes_back_after_a_hundred_requests() -> None:
    check_churn(100)


@pytest.mark.slow
def test_b30_everything_comes_back_after_a_thousand_requests() -> None:
    check_churn(1000)
