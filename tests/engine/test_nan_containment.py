"""A row that meets NaN ends alone: neighbours keep their tokens; nobody finds its pages, and they are zeroed before reuse."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_greedy, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.model.kv_cache import cache_bytes_per_page
from llmjax.sampling_params import SamplingParams

MODEL = "llama"
BROKEN = 100  # the token whose embedding is NaN
PAGE, PAGES = 16, 20
GREEDY = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True, logprobs=0, logit_bias={BROKEN: -100.0})


@functools.cache
def sound_params() -> dict[str, Any]:
    return random_params(CONFIGS[MODEL])


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    config = CONFIGS[MODEL]
    weight = sound_params()["embed"]["weight"].at[BROKEN].set(np.nan)
    options = EngineConfig(
        max_context=128, page_size=PAGE, kv_cache_bytes=(1 + PAGES) * cache_bytes_per_page(config, PAGE),
        max_sequences=4, max_tokens_per_step=64, prefill_chunk=32, decode_steps=3, row_buckets=(4,), token_buckets=(64,),
    )  # fmt: skip
    return Engine(config, sound_params() | {"embed": {"weight": weight}}, None, options)


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.scheduler.forget_prefixes()
    return shared_engine


def ids(length: int) -> list[int]:
    """Nothing that is broken."""
    return [random.choice([token for token in range(CONFIGS[MODEL].num_tokens) if token != BROKEN]) for _ in range(length)]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    return done


def run(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    name = engine.add_request(prompt, params)
    return finish(engine)[name]


def nan_pages(engine: Engine) -> set[int]:
    """Pages that hold NaN in some layer, but for the null page."""
    broken = set()
    for array in engine.runner.arrays[1]:
        bad = np.isnan(np.asarray(array)).any(axis=(1, 2, 3)).reshape(CONFIGS[MODEL].num_layers, -1)
        broken |= {int(page) for page in np.flatnonzero(bad.any(0))}
    return broken - {0}


def check_tokens(output: RequestOutput) -> None:
    """The first tokens are those of the whole sequence computed anew with sound weights (which know no bias)."""
    want = naive_greedy(sound_params(), output.prompt_token_ids, CONFIGS[MODEL], 3)
    want = want[: want.index(BROKEN)] if BROKEN in want else want
    assert output.outputs[0].token_ids[: len(want)] == want


@pytest.mark.parametrize("place", [0, 16, 31, 39])
def test_a_broken_prompt_ends_alone(place: int, engine: Engine) -> None:
    prompts = [ids(length) for length in (1, 16, 37)]
    alone = [run(engine, prompt).outputs[0] for prompt in prompts]
    engine.scheduler.forget_prefixes()
    corrupted = engine.stats.corrupted
    bad = ids(40)
    bad[place] = BROKEN
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts[:2]]
    name = engine.add_request(bad, GREEDY)
    names.append(engine.add_request(prompts[2], GREEDY))
    done = finish(engine)
    (choice,) = done[name].outputs
    assert (choice.finish_reason, choice.token_ids) == ("error", [])
    assert "NaN" in (choice.error or "")
    assert engine.stats.corrupted == corrupted + 1
    for neighbour, want in zip(names, alone, strict=True):
        (got,) = done[neighbour].outputs
        assert got.token_ids == want.token_ids
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-4)


def test_a_token_that_breaks_the_row_while_it_decodes(engine: Engine) -> None:
    """It is sampled, computed in a launch of several steps, and the row ends; the one beside goes on."""
    prompt = ids(20)
    want = run(engine, prompt).outputs[0].token_ids
    name = engine.add_request(ids(20), dataclasses.replace(GREEDY, logit_bias={BROKEN: 100.0}))
    beside = engine.add_request(prompt, GREEDY)
    done = finish(engine)
    assert (done[name].outputs[0].finish_reason, done[name].outputs[0].token_ids) == ("error", [BROKEN])
    assert done[beside].outputs[0].token_ids == want


def test_pages_are_zeroed_before_anyone_gets_them(engine: Engine) -> None:
    bad = [*ids(50), BROKEN, *ids(20)]
    assert run(engine, bad).outputs[0].finish_reason == "error"
    assert nan_pages(engine), "nobody has asked for them yet"
    check_tokens(run(engine, ids(100)))
    assert not nan_pages(engine)
    assert engine.runner.compiles_after_ready == 0


def test_what_was_computed_before_the_nan_is_found_by_nobody(engine: Engine) -> None:
    start = ids(64)
    assert run(engine, [*start, BROKEN]).outputs[0].finish_reason == "error"
    again = run(engine, [*start, 1])
    assert again.num_cached_tokens == 0
    check_tokens(again)


def test_a_shared_prefix_survives_a_row_that_breaks_behind_it(engine: Engine) -> None:
    start = ids(48)
    want = run(engine, [*start, 1]).outputs[0].token_ids
    reader = engine.add_request([*start, 1], GREEDY)
    bad = engine.add_request([*start, BROKEN], GREEDY)
    late = engine.add_request([*start, 1], GREEDY)
    done = finish(engine)
    assert done[bad].outputs[0].finish_reason == "error"
    assert done[reader].outputs[0].token_ids == done[late].outputs[0].token_ids == want
    run(engine, ids(5))
    assert not nan_pages(engine)


def test_a_broken_prompt_stops_at_its_first_bad_chunk(engine: Engine) -> None:
    before = engine.stats.launches
    assert run(engine, [BROKEN, *ids(120)]).outputs[0].finish_reason == "error"
    assert engine.stats.launches - before == 2, "the chunk that was bad, and the one launched before it was read"


def test_a_page_that_went_bad_is_computed_again(engine: Engine) -> None:
    """NaN appears in a cached page (as by a fault): the first to read it ends with an error, the next computes it anew."""
    prompt = ids(40)
    want = run(engine, prompt).outputs[0].token_ids
    uses = [use.page for use in engine.memory_map().pages if use.findable]
    engine.runner._cache = jax.tree.map(lambda array: array.at[np.array(uses)].set(np.nan), engine.runner._cache)
    broken = run(engine, prompt)
    assert (broken.outputs[0].finish_reason, broken.num_cached_tokens) == ("error", 32)
    again = run(engine, prompt)
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, want)


def test_nan_in_the_prompts_scores_alone_is_contained(engine: Engine) -> None:
    bad = [*ids(20), BROKEN]
    output = run(engine, bad, SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert output.outputs[0].finish_reason == "error"
    run(engine, ids(5))
    assert not nan_pages(engine)
