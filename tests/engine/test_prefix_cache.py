"""With the prefix cache on, every token is the one without it (float32, CPU), whatever was found and whatever was lost."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_model import Scripted
from tiny_models import CONFIGS, clear_prompt, naive_greedy, random_params

from llmjax.engine import launch_pack
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import RequestError
from llmjax.model.kv_cache import cache_bytes_per_page
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.scheduler import Scheduler

MODEL = "mixed-window"  # a layer that sees all, and one that sees 17 tokens
PAGES = 24
OUTPUT = 4
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, logprobs=2)


@functools.cache
def params() -> dict[str, Any]:
    return random_params(CONFIGS[MODEL])


def make_engine(page_size: int = 16) -> Engine:
    config = CONFIGS[MODEL]
    options = EngineConfig(
        max_context=192, page_size=page_size, kv_cache_bytes=(1 + PAGES) * cache_bytes_per_page(config, page_size),
        max_sequences=4, max_tokens_per_step=64, prefill_chunk=48, decode_steps=3, row_buckets=(4,), token_buckets=(64,),
    )  # fmt: skip
    engine = Engine(config, params(), None, options)
    engine.runner._cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), engine.runner._cache)
    return engine


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    return make_engine()


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """Nothing found yet, and NaN wherever nobody writes."""
    return use(shared_engine, prefix_cache=True)


def use(engine: Engine, *, prefix_cache: bool) -> Engine:
    """The same programs with another scheduler."""
    engine.pool.forget_all()
    engine.scheduler = Scheduler(dataclasses.replace(engine.config, prefix_cache=prefix_cache), engine.pool)
    return engine


def ids(length: int) -> list[int]:
    return [random.randrange(CONFIGS[MODEL].num_tokens) for _ in range(length)]


def clear(length: int, behind: Sequence[int] = (), weights: dict[str, Any] | None = None) -> list[int]:
    """Random ids behind these, whose greedy continuation no rounding changes."""
    return clear_prompt(params() if weights is None else weights, CONFIGS[MODEL], length, OUTPUT, behind=behind)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    return done


def run(engine: Engine, prompt: list[int], sampling: SamplingParams = GREEDY) -> RequestOutput:
    name = engine.add_request(prompt, sampling)
    return finish(engine)[name]


def tokens(output: RequestOutput) -> list[list[int]]:
    return [choice.token_ids for choice in output.outputs]


def logprobs(output: RequestOutput) -> np.ndarray:
    return np.array([entry.chosen.logprob for choice in output.outputs for entry in choice.logprobs or []])


def check_b53(engine: Engine) -> None:
    page = engine.config.page_size
    for length in sorted({15, 16, 17, 31, 32, 33, 48, 2 * page, 2 * page + 1}):
        prompt = clear(length)
        want = naive_greedy(params(), prompt, CONFIGS[MODEL], OUTPUT)
        first = run(engine, prompt)
        for again in (run(engine, prompt), run(engine, prompt)):
            assert tokens(again) == tokens(first) == [want]
            assert again.num_cached_tokens == (length - 1) // page * page
            np.testing.assert_allclose(logprobs(again), logprobs(first), atol=1e-4)
        other = clear(5, prompt)
        longer = run(engine, other)
        assert tokens(longer) == [naive_greedy(params(), other, CONFIGS[MODEL], OUTPUT)]
        assert longer.num_cached_tokens == length // page * page
    assert engine.runner.compiles_after_ready == 0


def test_b53_same_tokens_on_a_hit(engine: Engine) -> None:
    check_b53(engine)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [32, 64])
def test_b53_with_larger_pages(page_size: int) -> None:
    check_b53(make_engine(page_size))


def test_b53_same_tokens_after_the_pages_were_lost(engine: Engine) -> None:
    prompt = clear(40)
    first = run(engine, prompt)
    for _ in range(3):
        engine.add_request(ids(180), SamplingParams(max_tokens=8))
    finish(engine)
    again = run(engine, prompt)
    assert (again.num_cached_tokens, tokens(again)) == (0, tokens(first))


def test_b54_beyond_the_window(engine: Engine) -> None:
    prompt = clear(80)
    outputs = [run(engine, prompt) for _ in range(4)]
    assert [tokens(output) for output in outputs] == [[naive_greedy(params(), prompt, CONFIGS[MODEL], OUTPUT)]] * 4
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 64, 64]


def test_b55_a_whole_prompt_that_is_there(engine: Engine) -> None:
    prompt = clear(32)
    assert [run(engine, prompt).num_cached_tokens for _ in range(2)] == [0, 16]
    assert tokens(run(engine, prompt)) == [naive_greedy(params(), prompt, CONFIGS[MODEL], OUTPUT)]


def test_b56_the_hit_rate_counts_tokens(engine: Engine) -> None:
    system = ids(100)
    prompts = [[*system, *ids(7)] for _ in range(20)]
    before = engine.stats.prompt_tokens_computed
    run(engine, prompts[0])
    for prompt in prompts[1:]:
        engine.add_request(prompt, GREEDY)
    found = [output.num_cached_tokens for output in finish(engine).values()]
    assert found == [96] * 19
    stats = engine.stats
    assert (stats.prompt_tokens_queried, stats.prompt_tokens_cached) == (20 * 107, 19 * 96)
    assert stats.prefix_hit_rate == 19 * 96 / (20 * 107)
    assert stats.prompt_tokens_computed - before == 20 * 107 - 19 * 96


def test_b32_an_interrupted_turn_is_found(engine: Engine) -> None:
    prompt = ids(100)
    name = engine.add_request(prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    text: list[int] = []
    while len(text) < 10:
        for output in engine.step(closed=True):
            text += output.new_token_ids[0]
    engine.abort(name)
    finish(engine)
    turn = clear(5, [*prompt, *text])
    again = run(engine, turn)
    assert again.num_cached_tokens >= (len(prompt) + len(text) - 1) // 16 * 16
    assert tokens(again) == [naive_greedy(params(), turn, CONFIGS[MODEL], OUTPUT)]


def mixture(rng: random.Random, starts: list[list[int]]) -> tuple[list[int], SamplingParams]:
    greedy = rng.random() < 0.4
    sampling = SamplingParams(
        n=rng.choice([1, 1, 1, 3]),
        max_tokens=rng.randint(1, 24),
        temperature=0.0 if greedy else rng.uniform(0.5, 1.5),
        seed=rng.randrange(2**63),
        repetition_penalty=rng.choice([1.0, 1.4]),
        presence_penalty=rng.choice([0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        min_tokens=rng.choice([0, 1]),
        logprobs=0,
        prompt_logprobs=rng.choice([None, None, None, 1]),
        cache_salt=rng.choice([None, None, "mine"]),
        ignore_eos=True,
    )
    return [*rng.choice(starts), *ids(rng.randint(1, 20))], sampling


def test_a_mixture_with_penalties_choices_salts_and_preemption_equals_the_engine_without(engine: Engine) -> None:
    rng = random.Random()
    starts = [ids(length) for length in (16, 33, 64, 70)]
    requests = [mixture(rng, starts) for _ in range(16)]
    requests += [([*prompt, 3], sampling) for prompt, sampling in requests[:4]]
    results: list[list[RequestOutput]] = []
    cached = 0
    for prefix_cache in (False, True):
        use(engine, prefix_cache=prefix_cache)
        done: dict[str, RequestOutput] = {}
        for index, (prompt, sampling) in enumerate(requests):
            engine.add_request(prompt, sampling, request_id=str(index))
            for _ in range(rng.randint(0, 4)):
                done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        done |= finish(engine)
        results.append([done[str(index)] for index in range(len(requests))])
        cached = engine.scheduler.prefix_tokens[1]
    for without, found in zip(*results, strict=True):
        assert tokens(found) == tokens(without)
        np.testing.assert_allclose(logprobs(found), logprobs(without), atol=1e-4)
        assert (found.prompt_logprobs is None) == (without.prompt_logprobs is None)
        for one, other in zip(found.prompt_logprobs or [], without.prompt_logprobs or [], strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or abs(one.chosen.logprob - other.chosen.logprob) < 1e-4
    assert cached > 0


@pytest.mark.parametrize("a_call", [3, launch_pack.SEEN_A_RESET])
def test_tokens_that_are_found_count_for_penalties(a_call: int, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's counts are those of a prompt that was computed; also when they take several calls."""
    monkeypatch.setattr(launch_pack, "SEEN_A_RESET", a_call)
    prompt = [*ids(30), *([7] * 9), *ids(1)]
    sampling = dataclasses.replace(GREEDY, frequency_penalty=1.5, repetition_penalty=1.2, max_tokens=4)
    counts = []
    for _ in range(2):
        output = run(engine, prompt, sampling)
        counts.append(np.asarray(engine.runner._state.counts[0]))
    assert output.num_cached_tokens == 32
    np.testing.assert_array_equal(counts[1], counts[0])
    assert (counts[0] != 0).sum() >= len(set(prompt))


def test_new_weights_find_nothing_of_the_old(engine: Engine) -> None:
    new = random_params(CONFIGS[MODEL], seed=5)
    prompt = clear(40, weights=new)
    run(engine, prompt)
    running = engine.add_request([*prompt, 5], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        engine.step(closed=True)
    engine.update_params(new)
    try:
        text = finish(engine)[running].outputs[0].token_ids
        for again in (prompt, clear(1, [*prompt, 5, *text], new), prompt):
            assert tokens(run(engine, again)) == [naive_greedy(new, again, CONFIGS[MODEL], OUTPUT)]
    finally:
        engine.update_params(params())


def test_salts_are_checked(engine: Engine) -> None:
    for bad in ("", 5, "x" * 1025):
        with pytest.raises(RequestError, match="cache_salt must be a string of 1 to 1024 characters"):
            SamplingParams(cache_salt=bad)  # type: ignore[arg-type]
    prompt = ids(40)
    found = [
        run(engine, prompt, dataclasses.replace(GREEDY, cache_salt=salt)).num_cached_tokens for salt in (None, "\ud800", None)
    ]
    assert found == [0, 0, 32]


@pytest.mark.parametrize(("options", "state", "found"), [({"prefix_cache": False}, "off", 0), ({}, "on", 32)])
def test_the_switch_and_what_the_log_says_of_it(
    options: dict[str, Any], state: str, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        flat = Scripted(None, **options)
    assert f"prefix cache {state}" in caplog.text
    sampling = SamplingParams(max_tokens=2)
    assert [flat.run(sampling, list(range(40)))[0].num_cached_tokens for _ in range(2)] == [0, found]
    assert flat.engine.pool.num_kept == found // 16
