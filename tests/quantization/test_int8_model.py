"""Models with int8 weights against a float64 decoder with what the weights stand for, and through the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_greedy, naive_logits, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.model.batch import pack_sequences
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import cache_bytes_per_page, init_cache
from llmjax.model.mixed_layer import multiply, project_normed
from llmjax.model.quantization import Quantization
from llmjax.model.transformer import forward, logits
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.scheduler import Scheduler
from pallas_kernels import tuning
from pallas_kernels.fused_layer import NextParams
from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.quantized import QuantizedTensor, dequantize, pack, quantize

SCHEMES = ("w8a16", "w8a8")
MIXED = {"linear": "int8", "layers.1.attention": "float32", "mlp.down": "float32", "head": "int8", "embeddings": "int8"}


def quantised(name: str, scheme: Any, dtypes: dict[str, str] | None = None) -> tuple[dict[str, Any], ModelConfig]:
    config = CONFIGS[name]
    plan = plan_quantization(config, scheme, dtypes=dtypes or {"linear": "int8"})
    return quantize_params(random_params(config), config, plan)


def computed(params: dict[str, Any], config: ModelConfig, sequences: list[list[int]]) -> np.ndarray:
    batch, pages = pack_sequences(sequences, page_size=16)
    cache = init_cache(config, num_pages=pages, page_size=16)

    @jax.jit
    def run(params: Any, cache: Any) -> jax.Array:
        hidden, _ = forward(params, batch, cache, config=config)
        return logits(params, hidden, config=config)

    return np.asarray(run(params, cache), np.float64)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama-9-3-tied", "qwen3", "mixed-window"])
def test_logits_are_those_of_the_weights_that_int8_stands_for(name: str, scheme: str) -> None:
    params, config = quantised(name, scheme)
    sequences = [[int(i) for i in np.random.default_rng(7).integers(0, config.num_tokens, length)] for length in (19, 1, 34)]
    got = computed(params, config, sequences)
    real = slice(0, config.num_tokens)
    want = np.concatenate([naive_logits(params, ids, config) for ids in sequences])
    assert np.abs(got[:, real] - want[:, real]).max() < (2e-4 if scheme == "w8a16" else 3e-2) * np.abs(want[:, real]).max()
    unrounded = naive_logits(params, sequences[0], config.replace(quantization=None))[:, real]
    off = np.abs(got[:19, real] - unrounded).max()
    assert off < 1e-3 if scheme == "w8a16" else off > 3 * np.abs(got[:19, real] - want[:19, real]).mean()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "llama-9-3-tied"])
def test_layers_of_several_dtypes_and_int8_tables(name: str, scheme: str) -> None:
    config = CONFIGS[name].replace(dtype="bfloat16")
    rules = MIXED | ({"embeddings": "float32"} if config.tie_embeddings else {})
    params, config = quantize_params(random_params(config), config, plan_quantization(config, scheme, dtypes=rules))
    kinds = dict(config.quantization.weights)
    assert kinds["layers.1.attention.qkv.weight"] == kinds["layers.0.mlp.down.weight"] == "float32"
    assert isinstance(params["layers"][0]["attention"]["qkv"]["weight"], QuantizedTensor)
    ids = [int(i) for i in np.random.default_rng(8).integers(0, config.num_tokens, 30)]
    got, want = computed(params, config, [ids]), naive_logits(params, ids, config)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_an_embedding_in_int8_is_looked_up_and_multiplied_by() -> None:
    config = CONFIGS["llama-9-3-tied"]
    plan = plan_quantization(config, "w8a16", dtypes={"embeddings": "int8"})
    params, config = quantize_params(random_params(config), config, plan)
    ids = [3, 300, 0, 7]
    np.testing.assert_allclose(computed(params, config, [ids]), naive_logits(params, ids, config), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_weights_are_the_same_model(scheme: str) -> None:
    params, config = quantised("llama", scheme, {"linear": "int8", "head": "int8", "embeddings": "int8"})
    packed = jax.tree.map(
        lambda leaf: pack(leaf) if isinstance(leaf, QuantizedTensor) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor),
    )
    ids = list(range(20, 40))
    np.testing.assert_allclose(computed(packed, config, [ids]), computed(params, config, [ids]), rtol=1e-4, atol=1e-4)


def test_no_token_changes_another() -> None:
    """To the bit, in one batch shape: a token with a thousandfold activation stands beside the others."""
    params, config = quantised("llama", "w8a8")
    loud = {**params, "embed": {"weight": params["embed"]["weight"].at[300].mul(1e4)}}
    quiet, beside = list(range(5, 25)), computed(loud, config, [list(range(5, 25)), [300] * 7])
    np.testing.assert_array_equal(beside[: len(quiet)], computed(loud, config, [quiet, [1] * 7])[: len(quiet)])


def test_the_table_of_the_device_says_how_few_tokens_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    x, weight = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((9, 32), (24, 32)))
    params, w8a8 = NextParams(jnp.ones(32), quantize(weight), None), Quantization("w8a8", (("some.weight", "int8"),))
    monkeypatch.setattr(tuning, "lookup", lambda name, key: {"implementation": "w8a16"} if key["tokens"] <= 8 else None)
    exact, normed = np.asarray(x) @ np.asarray(dequantize(params.qkv)).T, rms_norm(x, params.norm, 1e-5)
    for few, product, want in (
        (8, multiply(x[:8], params.qkv, None, quantization=w8a8), exact[:8]),
        (9, multiply(x, params.qkv, None, quantization=w8a8), exact),
        (8, project_normed(x[:8], params, eps=1e-5, quantization=w8a8), (normed @ dequantize(params.qkv).T)[:8]),
        (9, project_normed(x, params, eps=1e-5, quantization=w8a8), normed @ dequantize(params.qkv).T),
    ):
        off = np.abs(np.asarray(product) - np.asarray(want)).max()
        assert off < 1e-4 if few == 8 else 1e-3 < off < 0.2


def test_an_int8_weight_needs_the_config_it_came_with() -> None:
    params, config = quantised("llama", "w8a8")
    with pytest.raises(ValueError, match="give the config that came with the parameters"):
        computed(params, config.replace(quantization=None), [[1, 2]])


PROMPTS = [[int(i) for i in np.random.default_rng(11).integers(0, 290, length)] for length in (1, 17, 30)]
OUTPUT = 7


def engine_for(params: Any, config: ModelConfig, **changes: Any) -> Engine:
    options = EngineConfig(
        max_context=64, page_size=16, kv_cache_bytes=9 * cache_bytes_per_page(config, 16), max_sequences=4,
        max_tokens_per_step=64, prefill_chunk=64, decode_steps=3, row_buckets=(4,), token_buckets=(64,), **changes,
    )  # fmt: skip
    return Engine(config, params, None, options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_tokens_are_the_same_in_any_batch_and_in_any_chunks(scheme: str) -> None:
    params, config = quantised("qwen2", scheme)
    engine = engine_for(params, config)
    want = [naive_greedy(params, ids, config, OUTPUT) for ids in PROMPTS]
    for chunk in (64, 7):
        engine.pool.forget_all()
        engine.scheduler = Scheduler(dataclasses.replace(engine.config, prefill_chunk=chunk), engine.pool)
        assert generated(engine, PROMPTS) == want
        assert [generated(engine, [ids])[0] for ids in PROMPTS[::2]] == want[::2]
    assert engine.runner.compiles_after_ready == 0
    engine.update_params(jax.tree.map(jnp.copy, params))
    assert generated(engine, PROMPTS) == want


@pytest.mark.slow
def test_programs_of_an_int8_model_are_kept(tmp_path: Any) -> None:
    params, config = quantised("llama", "w8a8")
    first = generated(engine_for(params, config, compile_cache=str(tmp_path)), PROMPTS)
    again = engine_for(params, config, compile_cache=str(tmp_path))
    assert {program.source for program in again.programs} == {"store"}
    assert generated(again, PROMPTS) == first


def generated(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    names = [engine.add_request(ids, params) for ids in prompts]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_unfinished:
        for news in engine.step():
            tokens[news.request_id] += news.new_token_ids[0]
    return [tokens[name] for name in names]
