"""Several decode steps a launch: rows that end in the middle, page boundaries, a full pool. Tokens are those of a full recompute.

Every page is NaN before a request owns it, the null page too.
"""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import pytest
from tiny_models import CONFIGS, clear_prompt, naive_greedy, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import ConfigError, EngineError
from llmjax.sampling_params import SamplingParams

MODEL, PAGE, STEPS, ROWS, LONGEST = "llama-mqa-rope", 16, 4, 4, 9
LENGTHS = (1, 15, 16, 17, 31)  # the first step of a launch is the last of a page, the first of the next, ...


@functools.cache
def prompt(length: int) -> list[int]:
    return clear_prompt(random_params(CONFIGS[MODEL]), CONFIGS[MODEL], length, 2 * PAGE + 4)  # the most that a test asks for


@functools.cache
def recomputed(length: int) -> list[int]:
    return naive_greedy(random_params(CONFIGS[MODEL]), prompt(length), CONFIGS[MODEL], LONGEST)


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = CONFIGS[MODEL]
    options = EngineConfig(
        max_context=64, page_size=PAGE, max_sequences=ROWS, max_tokens_per_step=64, decode_steps=STEPS,
        row_buckets=(ROWS,), token_buckets=(64,),
    )  # fmt: skip
    made = Engine(config, random_params(config), None, options)
    made.runner._cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), made.runner._cache)
    return made


def greedy(limit: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
    return done


def test_every_length_ends_at_every_step_of_a_launch(engine: Engine) -> None:
    cases = [(length, limit) for length in LENGTHS for limit in range(1, LONGEST + 1)]
    random.Random().shuffle(cases)
    for length, limit in cases:
        engine.add_request(prompt(length), greedy(limit), request_id=f"{length} {limit}")
    done = finish(engine)
    for length, limit in cases:
        assert done[f"{length} {limit}"].outputs[0].token_ids == recomputed(length)[:limit], (length, limit)
    assert engine.pool.num_used == 0
    assert engine.runner.compiles_after_ready == 0


def test_a_stop_id_ends_a_row_in_the_middle_and_no_other(engine: Engine) -> None:
    engine.add_request(prompt(17), greedy(LONGEST), request_id="beside")
    for place in range(LONGEST):
        engine.add_request(prompt(15), greedy(LONGEST, stop_token_ids=[recomputed(15)[place]]), request_id=str(place))
    done = finish(engine)
    for place in range(LONGEST):
        stop = recomputed(15)[place]
        output = done[str(place)].outputs[0]
        assert output.token_ids == recomputed(15)[: recomputed(15).index(stop) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert done["beside"].outputs[0].token_ids == recomputed(17)


@pytest.mark.parametrize("left", [4, 5])
def test_a_full_pool(left: int, engine: Engine) -> None:
    """Two rows of three pages in a pool of less than six: launches of K steps do not fit, then a row is preempted."""
    limit = 2 * PAGE + 4
    want = {n: naive_greedy(random_params(CONFIGS[MODEL]), prompt(n), CONFIGS[MODEL], limit) for n in (1, 9)}
    taken = engine.pool.allocate(engine.pool.num_free - left)
    before = engine.stats.preemptions
    try:
        for length in want:
            engine.add_request(prompt(length), greedy(limit), request_id=str(length))
        assert {int(name): output.outputs[0].token_ids for name, output in finish(engine).items()} == want
        assert engine.pool.num_free == left
        assert engine.stats.preemptions == before + 1
    finally:
        engine.pool.free(taken)


def test_a_backlog_runs_k_steps_a_launch(engine: Engine) -> None:
    """Twelve requests for four rows: fewer than half as many launches as with one step each."""
    before = engine.stats.launches
    for index in range(12):
        engine.add_request(prompt(1), greedy(LONGEST), request_id=str(index))
    done = finish(engine)
    assert all(output.outputs[0].token_ids == recomputed(1) for output in done.values())
    assert engine.stats.launches - before < 12 // ROWS * LONGEST / 2


def test_an_idle_engine_takes_another_policy_with_the_same_programs(engine: Engine) -> None:
    """Full lengths reserved: fewer rows at once, the same tokens, nothing compiled; refused while something runs."""
    with pytest.raises(ConfigError, match="row_buckets cannot be changed"):
        engine.set_policy(row_buckets=(1,))
    held = engine.pool.allocate(engine.pool.num_free - 6)  # each request has a page at first, and four in the end
    most, tokens = {}, {}
    for reserve in (False, True):
        engine.set_policy(reserve_full_length=reserve)
        names = [engine.add_request(prompt(15), SamplingParams(max_tokens=40, temperature=0.0)) for _ in range(4)]
        with pytest.raises(EngineError, match="while nothing runs"):
            engine.set_policy(reserve_full_length=False)
        most[reserve], done = 0, {}
        while engine.has_unfinished:
            done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
            most[reserve] = max(most[reserve], engine.scheduler.num_running)
            assert engine.pool.num_used <= engine.scheduler.num_reserved_pages <= engine.pool.capacity
        tokens[reserve] = [done[name].outputs[0].token_ids for name in names]
        assert any(done[name].num_preemptions for name in names) is not reserve
    engine.set_policy(reserve_full_length=False)
    engine.pool.free(held)
    assert most == {False: 3, True: 1}
    assert tokens[True] == tokens[False]
    assert tokens[True][0][:LONGEST] == recomputed(15)
    assert engine.runner.compiles_after_ready == 0
