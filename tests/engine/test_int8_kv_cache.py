"""An engine whose keys and values are int8: what it computes, through chunks, prefixes, preemption and launches of several steps.

The oracle is the float64 decoder with keys and values rounded token by token, written here in NumPy once more.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, log_softmax, naive_logits, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import ConfigError
from llmjax.model.key_channels import key_channels
from llmjax.model.kv_cache import KVCache, cache_bytes_per_page, init_cache, page_arrays, zero_pages
from llmjax.sampling_params import SamplingParams
from pallas_kernels.quantized import pack, quantize
from pallas_kernels.quantized_pages import QuantizedPages

CONFIG = CONFIGS["qwen2"]
PAGE, PAGES, ROWS = 16, 21, 4
BROKEN = 100  # the token whose embedding is NaN
BIASED = {1: 40.0, 14: -20.0}  # channels of the first key head with a bias, as some models have it


@functools.cache
def params() -> dict[str, Any]:
    made = random_params(CONFIG)
    first = CONFIG.num_heads * CONFIG.head_dim
    for layer in made["layers"].values():
        linear = layer["attention"]["qkv"]
        for channel, size in BIASED.items():
            linear["bias"] = linear["bias"].at[first + channel].set(size)
    weight = made["embed"]["weight"].at[BROKEN].set(np.nan)
    return made | {"embed": {"weight": weight}}


@functools.cache
def sound_params() -> dict[str, Any]:
    return params() | {"embed": {"weight": params()["embed"]["weight"].at[BROKEN].set(0.0)}}


@pytest.fixture(scope="module")
def engine() -> Engine:
    options = EngineConfig(
        max_context=128, page_size=PAGE, kv_cache_dtype="int8", max_sequences=ROWS, max_tokens_per_step=64, prefill_chunk=32,
        kv_cache_bytes=(1 + PAGES) * cache_bytes_per_page(CONFIG, PAGE, "int8"), decode_steps=3, row_buckets=(ROWS,),
        token_buckets=(64,),
    )  # fmt: skip
    return Engine(CONFIG, params(), None, options)


def ids(length: int) -> list[int]:
    """The same in every run: a rounding in another order may take another step of int8."""
    drawn = np.random.default_rng(length).integers(0, CONFIG.num_tokens - 1, length)
    return [int(token) + int(token >= BROKEN) for token in drawn]


def greedy(limit: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True, logit_bias={BROKEN: -100.0}, **options)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    assert engine.runner.compiles_after_ready == 0
    return done


def rounded(x: np.ndarray, channels: np.ndarray | float) -> np.ndarray:
    scale = np.abs(x / channels).max(-1, keepdims=True) / 127
    return np.round(x / channels / scale) * scale * channels


def oracle(tokens: list[int]) -> np.ndarray:
    channels = np.asarray(key_channels(sound_params(), CONFIG), np.float64)
    return log_softmax(
        naive_logits(sound_params(), tokens, CONFIG, lambda layer, k, v: (rounded(k, channels[layer]), rounded(v, 1.0)))
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_logprobs_are_those_of_rounded_keys_and_values(engine: Engine, length: int) -> None:
    """Of a prompt, in chunks, and of what follows, in launches of three steps."""
    engine.add_request(ids(length), greedy(9, logprobs=0, prompt_logprobs=0), request_id="a")
    output = finish(engine)["a"]
    tokens = [*ids(length), *output.outputs[0].token_ids]
    found = [one.chosen.logprob for one in [*(output.prompt_logprobs or [None])[1:], *(output.outputs[0].logprobs or [])] if one]
    assert len(found) == length - 1 + 9
    exact = log_softmax(naive_logits(sound_params(), tokens, CONFIG))[np.arange(length + 8), tokens[1:]]
    want = oracle(tokens)[np.arange(length + 8), tokens[1:]]
    assert np.abs(np.asarray(found) - want).max() < 0.02
    if length > 1:
        assert np.abs(want - exact).max() > 0.02  # it is rounded,
        assert np.abs(want - exact).mean() < 0.3  # and not to rubbish


def test_prefixes_neighbours_and_preemption_do_not_change_tokens(engine: Engine) -> None:
    """A token's scale is its own, so that it is the same however it comes into the cache."""
    engine.scheduler.forget_prefixes()
    prompts = [ids(40)[:30] + ids(length) for length in (20, 33, 48, 60)]
    alone = []
    for prompt in prompts:
        engine.scheduler.forget_prefixes()
        name = engine.add_request(prompt, greedy(40))
        alone.append(finish(engine)[name].outputs[0].token_ids)
    before = engine.stats.preemptions
    names = [engine.add_request(prompt, greedy(40)) for prompt in prompts]  # together they need more than 21 pages
    together = finish(engine)
    assert [together[name].outputs[0].token_ids for name in names] == alone
    assert engine.stats.preemptions > before
    again = engine.add_request(prompts[2], greedy(40))
    output = finish(engine)[again]
    assert output.outputs[0].token_ids == alone[2]
    assert output.num_cached_tokens >= 48


def test_a_row_that_meets_nan_ends_alone_and_leaves_no_nan(engine: Engine) -> None:
    engine.scheduler.forget_prefixes()
    sound = engine.add_request(ids(20), greedy(12))
    right = finish(engine)[sound].outputs[0].token_ids
    bad = engine.add_request([*ids(5), BROKEN, *ids(50)], greedy(12))
    sound = engine.add_request(ids(20), greedy(12))
    done = finish(engine)
    assert done[bad].outputs[0].finish_reason == "error"
    assert done[sound].outputs[0].token_ids == right
    fill = [engine.add_request(ids(70 + row), greedy(30)) for row in range(ROWS)]  # every page, those of the bad row too
    assert all(one.outputs[0].finish_reason == "length" for one in finish(engine).values()), fill
    for pages in engine.runner.arrays[1]:
        assert isinstance(pages, QuantizedPages)
        scale = np.asarray(pages.scale).reshape(CONFIG.num_layers, 1 + PAGES, -1)
        assert np.isfinite(scale[:, 1:]).all()


def test_memory_is_counted(engine: Engine) -> None:
    """The plan, the map and the arrays agree: a page is a byte for each value and four for each token's head."""
    page = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * PAGE * (CONFIG.head_dim + 4)
    assert engine.memory.page_bytes == engine.memory_map().page_bytes == cache_bytes_per_page(CONFIG, PAGE, "int8") == page
    assert engine.memory.num_pages == 1 + PAGES
    _, cache, state = engine.runner.arrays
    held = sum(array.nbytes for array in jax.tree.leaves((cache, state)))
    assert held == engine.memory.pool + engine.memory.state


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_page_beside_a_draft_models_is_the_sum_of_both(dtype: str | None) -> None:
    caches = [init_cache(CONFIG, num_pages=3, page_size=PAGE, dtype=one) for one in (dtype, None)]
    planned = cache_bytes_per_page(CONFIG, PAGE, dtype) + cache_bytes_per_page(CONFIG, PAGE)
    assert sum(array.nbytes for array in page_arrays(tuple(caches))) == 3 * planned


def test_wiped_pages_are_zero_and_keep_the_channels() -> None:
    cache = init_cache(CONFIG, num_pages=4, page_size=PAGE, dtype="int8")
    shape = cache.k.shape
    assert isinstance(cache.k, QuantizedPages)
    dirty = QuantizedPages(jnp.full(shape, 5, jnp.int8), jnp.full(shape[:3], jnp.nan), cache.k.channels)
    wiped = zero_pages(KVCache(dirty, dirty), jnp.array([2, 0, 2]), num_layers=CONFIG.num_layers)
    for pages in wiped:
        assert isinstance(pages, QuantizedPages)
        assert np.isnan(pages.scale).any(axis=(1, 2)).tolist() == [False, True, False, True] * CONFIG.num_layers
        assert not pages.qvalue[2].any()
        np.testing.assert_array_equal(pages.channels, cache.k.channels)


def test_channels_follow_the_bias_and_the_weights() -> None:
    found = np.asarray(key_channels(params(), CONFIG))
    assert found.shape == (CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim)
    np.testing.assert_array_equal(np.exp2(np.round(np.log2(found))), found)
    assert (found.max(axis=-1) == 1).all()
    half = CONFIG.head_dim // 2
    np.testing.assert_array_equal(found[..., :half], found[..., half:])  # a pair is rotated: it has one factor
    large = sorted({channel % half for channel in BIASED})
    assert (found[:, 0, large[0]] == 1).all()
    assert (found[:, 0, large[1]] == 0.5).all()
    assert np.delete(found[:, 0, :half], large, axis=-1).max() < 0.1
    assert found[:, 1].min() > 0.1


def test_channels_of_normed_keys_of_int8_weights_and_of_bad_ones() -> None:
    config = CONFIGS["qwen3"]
    made = random_params(config)
    attention = made["layers"][0]["attention"]
    attention["k_norm"] = {"weight": attention["k_norm"]["weight"].at[3].set(64.0)}
    found = np.asarray(key_channels(made, config))
    assert (found[0, :, [3, 11]] == 1).all()
    assert np.delete(found[0], [3, 11], axis=-1).max() < 0.1
    linear = attention["qkv"]
    for weight in (quantize(linear["weight"]), pack(quantize(linear["weight"]))):
        attention["qkv"] = {"weight": weight}
        np.testing.assert_array_equal(key_channels(made, config), found)
    for bad in (np.nan, np.inf, 0.0):
        attention["qkv"] = {"weight": jnp.full(linear["weight"].shape, bad)}
        assert (np.asarray(key_channels(made, config))[0] == 1).all()


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be int8, or None for the model's dtype, got 'int4'"):
        EngineConfig(kv_cache_dtype="int4")
