"""Whatever the engine does to be fast, the tokens are those of computing each request alone from scratch (float32, CPU)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from tiny_models import CONFIGS, log_softmax, naive_greedy, naive_logits, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.model.kv_cache import cache_bytes_per_page
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.scheduler import Scheduler

LENGTHS = (1, 15, 16, 17, 33, 40, 5)
OUTPUT = 22


@dataclasses.dataclass(frozen=True)
class Path:
    """One way to run the same requests."""

    page_size: int = 16
    decode_steps: int = 1
    tight: bool = False  # a pool that forces preemption
    many_buckets: bool = False


FACTORS: dict[str, tuple[Any, ...]] = {
    "page_size": (16, 32, 64),
    "prefill_chunk": (64, 1, 7),
    "decode_steps": (1, 3),
    "tight": (False, True),
    "arrival": ("together", "staggered", "alone", "reversed"),
}


# Four engines vary what is compiled; each then runs every chunk size in every order of arrival. All combinations: `slow`.
SOME = [
    Path(page_size=16, decode_steps=1, tight=True, many_buckets=True),
    Path(page_size=16, decode_steps=3, tight=False, many_buckets=False),
    Path(page_size=32, decode_steps=3, tight=True, many_buckets=False),
    Path(page_size=64, decode_steps=1, tight=False, many_buckets=False),
]


@functools.cache
def requests(model: str) -> list[tuple[list[int], SamplingParams]]:
    random = np.random.default_rng(3)
    vocab = CONFIGS[model].num_tokens
    greedy = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, logprobs=2)
    sampled = SamplingParams(
        max_tokens=OUTPUT, temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2, ignore_eos=True, logprobs=0
    )
    return [
        ([int(i) for i in random.integers(0, vocab, length)], greedy if index % 3 else sampled)
        for index, length in enumerate(LENGTHS)
    ]


def engine_for(model: str, path: Path) -> Engine:
    config = CONFIGS[model]
    longest = -(-(max(LENGTHS) + OUTPUT) // path.page_size)
    pages = 1 + (longest + 1 if path.tight else len(LENGTHS) * longest)
    engine_config = EngineConfig(
        max_context=128, page_size=path.page_size, kv_cache_bytes=pages * cache_bytes_per_page(config, path.page_size),
        max_sequences=4, max_tokens_per_step=64, prefill_chunk=64, decode_steps=path.decode_steps,
        row_buckets=(1, 2, 4) if path.many_buckets else (4,), token_buckets=(8, 64) if path.many_buckets else (64,),
    )  # fmt: skip
    return Engine(config, random_params(config), None, engine_config)


def run(engine: Engine, model: str, arrival: str) -> list[RequestOutput]:
    todo = list(enumerate(requests(model)))
    if arrival == "reversed":
        todo.reverse()
    done: dict[str, RequestOutput] = {}

    def steps(count: int | None) -> None:
        while engine.has_unfinished and (count is None or count > 0):
            for output in engine.step(closed=True):
                if output.finished:
                    done[output.request_id] = output
            engine.scheduler.check_integrity()
            count = None if count is None else count - 1

    for index, (ids, params) in todo:
        engine.add_request(ids, params, request_id=str(index))
        steps({"together": 0, "reversed": 0, "staggered": 2, "alone": None}[arrival])
    steps(None)
    assert engine.pool.num_used == 0
    return [done[str(index)] for index in range(len(LENGTHS))]


@functools.cache
def reference(model: str) -> list[RequestOutput]:
    return run(engine_for(model, Path()), model, "alone")


def check(engine: Engine, model: str, arrival: str) -> None:
    got = run(engine, model, arrival)
    for one, want in zip(got, reference(model), strict=True):
        assert one.outputs[0].token_ids == want.outputs[0].token_ids
        np.testing.assert_allclose(
            [p.chosen.logprob for p in one.outputs[0].logprobs or []],
            [p.chosen.logprob for p in want.outputs[0].logprobs or []],
            atol=1e-4,
        )
    assert engine.runner.compiles_after_ready == 0


@pytest.mark.parametrize("model", list(CONFIGS))
def test_the_reference_path_equals_full_recompute(model: str) -> None:
    config = CONFIGS[model]
    params = random_params(config)
    for (ids, sampling), output in zip(requests(model), reference(model), strict=True):
        tokens = output.outputs[0].token_ids
        if sampling.greedy:
            assert tokens == naive_greedy(params, ids, config, OUTPUT)
        logprobs = log_softmax(naive_logits(params, [*ids, *tokens], config)[len(ids) - 1 : -1])
        for step, position in enumerate(output.outputs[0].logprobs or []):
            assert position.chosen.logprob == pytest.approx(logprobs[step, tokens[step]], abs=1e-4)
            assert position.chosen.rank == 1 + int((logprobs[step] > logprobs[step, tokens[step]]).sum())
            for place, other in enumerate(position.top):
                assert other.logprob == pytest.approx(np.sort(logprobs[step])[-1 - place], abs=1e-4)


def check_chunks_and_arrivals(model: str, path: Path) -> None:
    engine = engine_for(model, path)
    for chunk, arrival in itertools.product(FACTORS["prefill_chunk"], FACTORS["arrival"]):
        # The chunk size is the scheduler's alone: the compiled programs serve all of them.
        engine.pool.forget_all()  # every prompt is computed in chunks of this size
        engine.scheduler = Scheduler(dataclasses.replace(engine.config, prefill_chunk=chunk), engine.pool)
        check(engine, model, arrival)
    if path.tight and path.page_size == 16:
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("path", SOME, ids=str)
def test_pairs_of_paths(path: Path) -> None:
    check_chunks_and_arrivals("llama-9-3-tied", path)


@pytest.mark.slow
@pytest.mark.parametrize("tight", FACTORS["tight"])
@pytest.mark.parametrize("decode_steps", FACTORS["decode_steps"])
@pytest.mark.parametrize("page_size", FACTORS["page_size"])
def test_the_full_matrix(page_size: int, decode_steps: int, tight: bool) -> None:
    many_buckets = tight == (decode_steps == 1)
    check_chunks_and_arrivals("mixed-window", Path(page_size, decode_steps, tight, many_buckets))


@pytest.mark.slow
@pytest.mark.parametrize("path", SOME[:1], ids=str)
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama-dynamic"])
def test_pairs_of_paths_of_other_families(model: str, path: Path) -> None:
    check_chunks_and_arrivals(model, path)
