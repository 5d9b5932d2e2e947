"""Public bug reports about sampling, logprobs and the life of a request, at engine level."""

from __future__ import annotations

import collections
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fakes_text import EOS_ID, plain_byte_tokenizer
from scripted_model import Scripted, ScriptedConfig
from tiny_models import CONFIGS, log_softmax, naive_greedy, random_params

from llmjax.engine.config import MAX_PROGRAMS, EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.llm import LLM
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import ConfigError, ContextLengthError, NonFiniteError, RequestError
from llmjax.sampling_params import SamplingParams

V = ScriptedConfig.vocab_size


@pytest.fixture(scope="module")
def flat() -> Scripted:
    """Every token equally likely at each position, but for what a test scripts."""
    return Scripted(plain_byte_tokenizer())


def collect(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        for output in engine.step(closed=True):
            if output.finished:
                done[output.request_id] = output
        engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    return done


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-8, 1e-38])
def test_b18_tiny_temperatures_are_greedy(flat: Scripted, temperature: float) -> None:
    table = np.zeros((4, V), np.float32)
    table[:, 7], table[:, 9], table[:, 5] = 60.0, 60.0, 59.9
    table[:, 20] = -np.inf
    flat.logits(table)
    output, _ = flat.run(SamplingParams(temperature=temperature, max_tokens=3, logprobs=0))
    assert output.outputs[0].token_ids == [7, 7, 7]
    assert np.isfinite(output.outputs[0].cumulative_logprob)


def test_b21_equal_seeds_give_equal_outputs_whatever_the_row(flat: Scripted) -> None:
    flat.script([])
    params = SamplingParams(seed=11, max_tokens=12)
    for index in range(6):
        flat.engine.add_request([1], params if index % 2 else SamplingParams(max_tokens=9), request_id=str(index))
    together = collect(flat.engine)
    alone, _ = flat.run(params)
    for index in (1, 3, 5):
        assert together[str(index)].outputs[0].token_ids == alone.outputs[0].token_ids


def test_b22_without_a_seed_outputs_differ(flat: Scripted) -> None:
    flat.script([])
    texts = {tuple(flat.run(SamplingParams(max_tokens=12))[0].outputs[0].token_ids) for _ in range(4)}
    for _ in range(8):
        flat.engine.add_request([1], SamplingParams(max_tokens=12))
    texts |= {tuple(output.outputs[0].token_ids) for output in collect(flat.engine).values()}
    assert len(texts) == 12


def test_b23_choices_differ_and_are_reproducible(flat: Scripted) -> None:
    flat.script([])
    params = SamplingParams(n=4, seed=5, max_tokens=10)
    first, second = (flat.run(params)[0] for _ in range(2))
    choices = [tuple(choice.token_ids) for choice in first.outputs]
    assert len(set(choices)) == 4
    assert choices == [tuple(choice.token_ids) for choice in second.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    unseeded = flat.run(SamplingParams(n=4, max_tokens=10))[0]
    assert len({tuple(choice.token_ids) for choice in unseeded.outputs}) == 4
    fewer = flat.run(SamplingParams(n=2, seed=5, max_tokens=10))[0]
    assert [tuple(choice.token_ids) for choice in fewer.outputs] == choices[:2]  # choice i is a function of (seed, i)


def test_b25_one_logprob_entry_a_token_with_bytes_of_the_text(flat: Scripted) -> None:
    text = "h\u00e9\U0001f525"
    flat.script([*text.encode(), EOS_ID])
    output, _ = flat.run(SamplingParams(temperature=0.0, logprobs=5))
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [entry.chosen.token_id for entry in choice.logprobs] == choice.token_ids
    assert b"".join(entry.chosen.bytes for entry in choice.logprobs[:-1]).decode() == text == choice.text
    for entry in choice.logprobs:
        assert len(entry.top) == 5
        assert entry.top[0] == entry.chosen


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
def test_b27_logprobs_are_raw_unless_processed_is_asked(flat: Scripted, temperature: float) -> None:
    random = np.random.default_rng(4)
    table = random.normal(size=(3, V)).astype(np.float32)
    table[:, 260:] = -np.inf
    flat.logits(table)
    fields: dict[str, Any] = {"temperature": temperature, "top_k": 3, "max_tokens": 3, "seed": 1, "logprobs": 4}
    raw = flat.run(SamplingParams(**fields))[0].outputs[0]
    processed = flat.run(SamplingParams(**fields, logprobs_mode="processed"))[0].outputs[0]
    assert raw.token_ids == processed.token_ids
    want = log_softmax(table.astype(np.float64))
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    for step, token in enumerate(raw.token_ids):
        assert raw.logprobs[step].chosen.logprob == pytest.approx(want[step, token], abs=1e-4)
        kept = np.argsort(table[step])[-3:]
        scaled = table[step, kept].astype(np.float64) / temperature
        of_three = dict(zip(kept, log_softmax(scaled), strict=True))
        assert processed.logprobs[step].chosen.logprob == pytest.approx(of_three[token], abs=1e-4)
        assert {other.token_id for other in processed.logprobs[step].top} <= set(kept)


def test_penalties_and_bias_change_what_is_sampled(flat: Scripted) -> None:
    table = np.zeros((8, V), np.float32)
    table[:, 65], table[:, 66], table[:, 67] = 3.0, 2.0, 1.5
    flat.logits(table)

    def tokens(**fields: Any) -> list[int]:
        return flat.run(SamplingParams(temperature=0.0, max_tokens=4, **fields))[0].outputs[0].token_ids

    assert tokens() == [65, 65, 65, 65]
    assert tokens(presence_penalty=1.2) == [65, 66, 65, 65]  # 3 | 1.8 2 | 1.8 0.8 1.5 ...
    assert tokens(frequency_penalty=1.2) == [65, 66, 65, 67]  # 3 | 1.8 2 | 1.8 0.8 1.5 | 0.6 0.8 1.5
    assert tokens(repetition_penalty=2.0) == [65, 66, 65, 65]  # 3 | 1.5 2 | 1.5 1 1.5 -> the lower id
    assert tokens(logit_bias={68: 4.0}) == [68, 68, 68, 68]
    seen = flat.run(SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=2.0), [65, 1])[0]
    assert seen.outputs[0].token_ids == [66]  # the prompt counts


def test_b16_b28_cancelled_waiting_requests_never_run() -> None:
    config = CONFIGS["llama"]
    engine = Engine(
        config,
        random_params(config),
        None,
        EngineConfig(max_context=128, max_sequences=1, max_tokens_per_step=64, row_buckets=(1,), token_buckets=(64,)),
    )
    ids = [engine.add_request(list(range(60)), SamplingParams(max_tokens=3, temperature=0.0)) for _ in range(20)]
    engine.step(closed=True)
    for request_id in ids[1:]:
        engine.abort(request_id)
    assert engine.scheduler.num_waiting == 0
    outputs = collect(engine)
    assert collections.Counter(output.outputs[0].finish_reason for output in outputs.values()) == {"abort": 19, "length": 1}
    assert engine.stats.prompt_tokens_computed == 60
    engine.abort("no such request")


def test_b30_nothing_leaks_over_many_mixed_requests(flat: Scripted) -> None:
    flat.script([*b"some text", EOS_ID])
    random = np.random.default_rng(0)
    alive: list[str] = []
    live = _live_bytes()
    for index in range(1000):
        params = [
            SamplingParams(temperature=0.0, max_tokens=int(random.integers(1, 9))),
            SamplingParams(temperature=0.0, stop="e t"),
            SamplingParams(n=3, max_tokens=4),
            SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0),
        ][index % 4]
        alive.append(flat.engine.add_request([1] * int(random.integers(1, 40)), params))
        if index % 7 == 0:
            flat.engine.abort(alive[int(random.integers(0, len(alive)))])
        flat.engine.step(closed=True)
    collect(flat.engine)
    assert _live_bytes() == live
    assert not flat.engine.scheduler.has_unfinished
    assert flat.engine.runner.compiles_after_ready == 0


def test_a_stop_string_inside_a_launch_of_several_steps_frees_everything(flat: Scripted) -> None:
    flat.script(list(b"abcdefgh"))
    output, _ = flat.run(SamplingParams(temperature=0.0, stop="c", max_tokens=30))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("ab", list(b"abc"))
    collect(flat.engine)


def test_b41_overflow_in_float16_is_told_at_start_with_its_layer() -> None:
    config = CONFIGS["llama"].replace(dtype="float16")
    params = random_params(config)
    params["layers"][1]["mlp_norm"]["weight"] = params["layers"][1]["mlp_norm"]["weight"] * 1e5
    with pytest.raises(NonFiniteError, match=r"layer 1 .*float16.*bfloat16 or float32"):
        Engine(
            config,
            params,
            None,
            EngineConfig(max_context=64, max_sequences=1, max_tokens_per_step=16, row_buckets=(1,), token_buckets=(16,)),
        )


def test_a_row_with_nan_ends_alone(flat: Scripted) -> None:
    table = np.zeros((30, V), np.float32)
    table[:, 65] = 9.0
    table[10:] = np.nan
    flat.logits(table)
    good = flat.engine.add_request([1], SamplingParams(temperature=0.0, max_tokens=8))
    bad = flat.engine.add_request([1] * 8, SamplingParams(temperature=0.0, max_tokens=8))
    outputs = collect(flat.engine)
    assert outputs[good].outputs[0].token_ids == [65] * 8
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert "NaN" in (outputs[bad].outputs[0].error or "")
    assert outputs[bad].outputs[0].token_ids == [65] * 3


def test_b57_b58_a_pool_for_one_and_a_half_requests() -> None:
    config = CONFIGS["llama"]
    params = random_params(config)
    options: dict[str, Any] = {
        "max_context": 64,
        "max_sequences": 4,
        "max_tokens_per_step": 20,
        "row_buckets": (4,),
        "token_buckets": (20,),
    }
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    engine = Engine(config, params, None, EngineConfig(**options, kv_cache_bytes=8 * page_bytes, decode_steps=4))
    prompts = [[(7 * i + row) % 300 for i in range(17)] for row in range(4)]
    pieces: dict[str, list[int]] = collections.defaultdict(list)
    for row, ids in enumerate(prompts):
        engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), request_id=str(row))
    while engine.has_unfinished:
        for output in engine.step(closed=True):
            pieces[output.request_id] += output.new_token_ids[0]
        engine.scheduler.check_integrity()
        assert engine.pool.num_used <= 7
    assert engine.stats.preemptions > 0
    for row, ids in enumerate(prompts):
        assert pieces[str(row)] == naive_greedy(params, ids, config, 40)
    with pytest.raises(ContextLengthError, match="max_context 64"):
        engine.add_request([1] * 64, SamplingParams())


def test_b78_no_option_compiles_after_ready(flat: Scripted) -> None:
    flat.script([])
    live = _live_bytes()
    variants: list[dict[str, Any]] = [
        {"logprobs": 20},
        {"prompt_logprobs": 3},
        {"n": 3},
        {"seed": 1},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": -1.0},
        {"logit_bias": {3: 5.0}},
        {"stop": "x", "min_tokens": 2},
        {"stop_token_ids": [3]},
        {"ignore_eos": True},
        {"logprobs": 1, "logprobs_mode": "processed"},
    ]
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 100):
        for fields in variants:
            flat.engine.add_request([1] * length, SamplingParams(**{"max_tokens": 5} | fields))
    collect(flat.engine)
    assert flat.engine.runner.compiles_after_ready == 0
    assert len(flat.engine.programs) <= MAX_PROGRAMS
    assert _live_bytes() == live  # nothing on the device grows while serving


def _live_bytes() -> int:
    import gc

    import jax

    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_prompt_logprobs_equal_the_functional_forward_over_chunks() -> None:
    config = CONFIGS["qwen3"]
    params = random_params(config)
    llm = LLM(
        params=params,
        config=config,
        max_context=128,
        max_sequences=2,
        max_tokens_per_step=24,
        prefill_chunk=10,
        row_buckets=(2,),
        token_buckets=(24,),
    )
    ids = [int(i) for i in np.random.default_rng(1).integers(0, config.vocab_size, 45)]
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, logprobs=0))
    from llmjax import forward, init_cache, logits, pack_sequences

    batch, pages = pack_sequences([ids], page_size=16)
    hidden, _ = forward(params, batch, init_cache(config, num_pages=pages, page_size=16), config=config)
    want = log_softmax(np.asarray(logits(params, hidden, config=config), np.float64))
    assert output.prompt_logprobs is not None
    for position, entry in enumerate(output.prompt_logprobs):
        if position:
            assert entry is not None
            assert entry.chosen.logprob == pytest.approx(want[position - 1, ids[position]], abs=1e-4)
            assert entry.top[0].logprob == pytest.approx(want[position - 1].max(), abs=1e-4)
    chosen = output.outputs[0].logprobs
    assert chosen is not None
    assert chosen[0].chosen.logprob == pytest.approx(want[-1].max(), abs=1e-4)


def test_update_params_is_used_by_the_next_token_and_checked(flat: Scripted) -> None:
    flat.script([65] * 20)
    request_id = flat.engine.add_request([1], SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(3):
        flat.engine.step(closed=True)
    flat.script([66] * 20)
    tokens = collect(flat.engine)[request_id].outputs[0].token_ids
    switch = tokens.index(66)
    assert 0 < switch < 20
    assert tokens == [65] * switch + [66] * (20 - switch)
    with pytest.raises(Exception, match="tree structure"):
        flat.engine.update_params({"other": jnp.zeros(3)})


def test_what_llm_refuses(flat: Scripted) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        LLM()
    with pytest.raises(ConfigError, match="belong together"):
        LLM(params={})
    with pytest.raises(ConfigError, match="no option 'max_seqs'"):
        LLM(params={}, config=ScriptedConfig(), max_seqs=3)
    with pytest.raises(ConfigError, match="lower it"):
        Engine(ScriptedConfig(), {}, None, EngineConfig(max_context=4096))
    flat.engine.add_request(np.array([1]), SamplingParams(), request_id="twice")
    with pytest.raises(RequestError, match="in use"):
        flat.engine.add_request([1], SamplingParams(), request_id="twice")
    collect(flat.engine)
