"""Buckets: few, rising, complete; and no accepted set of sizes leaves a request without a program (report B15)."""

from __future__ import annotations

import pytest
from fakes_scheduling import Simulation, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from llmjax.engine.config import EngineConfig
from llmjax.errors import ConfigError
from llmjax.scheduling.buckets import MAX_ROW_BUCKETS, MAX_TOKEN_BUCKETS, choose_row_buckets, choose_token_buckets, pick

CHOICES = [(choose_row_buckets, MAX_ROW_BUCKETS), (choose_token_buckets, MAX_TOKEN_BUCKETS)]


@pytest.mark.parametrize(
    ("largest", "rows", "tokens"),
    [
        (1, (1,), (1,)),
        (3, (1, 3), (3,)),
        (8, (1, 8), (8,)),
        (16, (1, 8, 16), (16,)),
        (64, (1, 8, 32, 64), (16, 64)),
        (100, (1, 8, 32, 64, 100), (16, 32, 100)),
        (256, (8, 32, 64, 128, 256), (16, 64, 256)),
        (2048, (8, 32, 128, 512, 2048), (64, 256, 512, 2048)),
        (8192, (8, 64, 256, 2048, 8192), (256, 512, 2048, 8192)),
    ],
)
def test_chosen_buckets(largest, rows, tokens):
    assert choose_row_buckets(largest) == rows
    assert choose_token_buckets(largest) == tokens


@pytest.mark.parametrize(("choose", "most"), CHOICES)
@given(largest=st.integers(1, 20_000))
def test_buckets_rise_end_at_the_largest_and_are_few(choose, most, largest):
    buckets = choose(largest)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] >= 1
    assert buckets[-1] == largest
    assert len(buckets) <= most


@pytest.mark.parametrize(("choose", "most"), CHOICES)
@pytest.mark.parametrize("largest", [1, 2, 5, 16, 17, 63, 64, 300])
def test_every_size_has_the_smallest_bucket_that_holds_it(choose, most, largest):
    buckets = choose(largest)
    for n in range(1, largest + 1):
        assert pick(buckets, n) == min(b for b in buckets if b >= n)


def test_sizes_outside_are_a_bug():
    for n in (0, 9):
        with pytest.raises(AssertionError):
            pick((1, 8), n)


def test_at_most_eighteen_programs_of_chosen_sizes():
    for rows in (1, 8, 64, 256, 1000):
        for budget in (rows, 2048, 8192):
            assert 2 * (len(choose_row_buckets(rows)) + len(choose_token_buckets(max(rows, budget)))) <= 18


def run(engine_config: EngineConfig, prompts: list[int]) -> None:
    config = engine_config.resolved(gpu=False, model_max_context=4096)
    sim = Simulation(
        max_sequences=config.max_sequences,
        max_tokens_per_step=config.max_tokens_per_step,
        prefill_chunk=config.prefill_chunk,
        decode_steps=config.decode_steps,
    )
    for i, prompt in enumerate(prompts):
        sim.add(make_request(f"r{i}", prompt, 3))
    sim.drain()
    for batch in sim.batches:
        pick(config.row_buckets, len(batch.rows))
        pick(config.token_buckets, batch.num_tokens)


def test_b15_prompt_beyond_budget_chunk_and_buckets_completes():
    run(EngineConfig(max_sequences=8, max_tokens_per_step=32, prefill_chunk=64, token_buckets=(16, 32)), [100])


def test_b15_buckets_that_do_not_reach_the_budget_are_refused():
    with pytest.raises(ConfigError, match=r"token_buckets must rise and end at max_tokens_per_step \(64\)"):
        EngineConfig(max_sequences=8, max_tokens_per_step=64, prefill_chunk=64, token_buckets=(16, 32))


@given(
    max_sequences=st.integers(1, 5),
    budget=st.integers(1, 12),
    chunk=st.integers(1, 14),
    steps=st.sampled_from([1, 2, 4]),
    buckets=st.lists(st.integers(1, 12), max_size=3),
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
@settings(max_examples=60)
def test_b15_every_accepted_combination_completes(max_sequences, budget, chunk, steps, buckets, prompts):
    try:
        config = EngineConfig(
            max_sequences=max_sequences,
            max_tokens_per_step=budget,
            prefill_chunk=chunk,
            decode_steps=steps,
            token_buckets=tuple(sorted({*buckets, budget})) if buckets else (),
        )
    except ConfigError:
        return
    run(config, prompts)
