"""`deterministic: true`: the same tokens and logprobs to the bit, alone or in a crowd (on a CPU; the schedule is the same)."""

from __future__ import annotations

import random

import pytest
from tiny_models import CONFIGS, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.sampling_params import SamplingParams

MODEL = "llama"


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = CONFIGS[MODEL]
    options = EngineConfig(
        max_context=128, max_sequences=4, max_tokens_per_step=64, prefill_chunk=16, decode_steps=3, deterministic=True
    )
    return Engine(config, random_params(config), None, options)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        engine.scheduler.check_integrity()
    return done


def bits(output: RequestOutput) -> list[object]:
    (choice,) = output.outputs
    return [choice.token_ids, choice.finish_reason, choice.cumulative_logprob, choice.logprobs, output.prompt_logprobs]


def request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    ids = [rng.randrange(CONFIGS[MODEL].num_tokens) for _ in range(rng.choice([1, 15, 16, 17, 32, rng.randint(2, 60)]))]
    greedy = rng.random() < 0.5
    params = SamplingParams(
        max_tokens=rng.randint(1, 20),
        temperature=0.0 if greedy else rng.uniform(0.2, 2.0),
        top_p=1.0 if greedy else rng.choice([1.0, 0.8]),
        seed=rng.randrange(2**63),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        stop_token_ids=[rng.randrange(CONFIGS[MODEL].num_tokens) for _ in range(3)],
        ignore_eos=True,
    )
    return ids, params


def test_the_programs_are_one_of_each_kind(engine: Engine) -> None:
    assert [program.name for program in engine.programs] == [
        "reset 8 rows", "wipe 16 pages", "decode 4 rows x 3 steps", "extend 16 tokens", "score 16 tokens",
    ]  # fmt: skip


@pytest.mark.parametrize("neighbours", [1, 3])
def test_b24_deterministic_mode_is_bitwise(neighbours: int, engine: Engine) -> None:
    ids = list(range(5, 40))
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    alone = engine.add_request(ids, params)
    want = finish(engine)[alone]
    engine.scheduler.forget_prefixes()  # or the prompt would not be computed beside its neighbours
    for row in range(neighbours):
        engine.add_request([row + 1] * (9 + 20 * row), SamplingParams(max_tokens=9 + row))
        engine.step(closed=True)
    beside = engine.add_request(ids, params)
    assert bits(finish(engine)[beside]) == bits(want)


def test_a_prefix_that_is_found_changes_no_bit(engine: Engine) -> None:
    """Lengths around the chunk; the answer of the first time is part of a later prompt."""
    ids = [random.randrange(CONFIGS[MODEL].num_tokens) for _ in range(60)]
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True)
    lengths = (16, 17, 31, 32, 33, 60)
    want = []
    for length in lengths:
        engine.scheduler.forget_prefixes()
        engine.add_request(ids[:length], params, request_id="cold")
        want.append(finish(engine)["cold"])
    assert [output.num_cached_tokens for output in want] == [0] * len(lengths)
    found = []
    for length, cold in zip(lengths, want, strict=True):
        for row in range(2):
            engine.add_request([row] * 20, SamplingParams(max_tokens=5))
        engine.add_request(ids[:length], params, request_id="warm")
        warm = finish(engine)["warm"]
        assert bits(warm) == bits(cold)
        found.append(warm.num_cached_tokens)
    assert found == [0, 16, 16, 16, 32, 48]
    turn = ids + want[-1].outputs[0].token_ids
    outputs = []
    for _ in range(2):
        engine.add_request(turn, params, request_id="turn")
        outputs.append(finish(engine)["turn"])
        assert outputs[-1].num_cached_tokens == (48 if len(outputs) == 1 else 64)
    engine.scheduler.forget_prefixes()
    engine.add_request(turn, params, request_id="turn")
    assert [bits(output) for output in outputs] == [bits(finish(engine)["turn"])] * 2


def test_random_arrivals_change_no_bit(engine: Engine) -> None:
    rng = random.Random()
    requests = [request(rng) for _ in range(14)]
    alone = []
    for ids, params in requests:
        engine.add_request(ids, params, request_id="alone")
        alone.append(bits(finish(engine)["alone"]))
    engine.scheduler.forget_prefixes()
    order = list(range(len(requests)))
    rng.shuffle(order)
    done = {}
    for index in order:
        engine.add_request(*requests[index], request_id=str(index))
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
    done |= finish(engine)
    assert [bits(done[str(index)]) for index in range(len(requests))] == alone
    assert engine.runner.compiles_after_ready == 0
