"""Models with int8 weights against a float64 decoder with what the weights stand for, and through the engine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_logits, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.model import transformer
from llmjax.model.batch import pack_sequences
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import cache_bytes_per_page, init_cache
from llmjax.model.mixed_layer import embed, multiply, project_normed
from llmjax.model.quantization import Quantization
from llmjax.model.transformer import forward, logits
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.scheduler import Scheduler
from pallas_kernels import tuning
from pallas_kernels.fused_layer import NextParams
from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.quantized import QuantizedTensor, dequantize, pack, quantize

W8A8 = Quantization("w8a8", (("some.weight", "int8"),))
MIXED = {"linear": "int8", "layers.1.attention": "float32", "mlp.down": "float32", "head": "int8", "embeddings": "int8"}


def quantised(
    name: str, scheme: Any, dtypes: dict[str, str] | None = None, num_layers: int = 2
) -> tuple[dict[str, Any], ModelConfig]:
    config = CONFIGS[name]
    config = config.replace(num_layers=num_layers, sliding_windows=config.sliding_windows[:num_layers])
    plan = plan_quantization(config, scheme, dtypes=dtypes or {"linear": "int8"})
    return quantize_params(random_params(config), config, plan)


@functools.partial(jax.jit, static_argnames="config")
def run(params: Any, batch: Any, cache: Any, config: ModelConfig) -> jax.Array:
    hidden, _ = forward(params, batch, cache, config=config)
    return logits(params, hidden, config=config)


def computed(params: dict[str, Any], config: ModelConfig, sequences: list[list[int]]) -> np.ndarray:
    batch, pages = pack_sequences(sequences, page_size=16)
    return np.asarray(run(params, batch, init_cache(config, num_pages=pages, page_size=16), config), np.float64)


def repacked(params: Any) -> Any:
    """As the weights lie on a GPU."""
    quantized = lambda leaf: isinstance(leaf, QuantizedTensor)  # noqa: E731
    return jax.tree.map(lambda leaf: pack(leaf) if quantized(leaf) else leaf, params, is_leaf=quantized)


@pytest.mark.parametrize(
    ("name", "scheme", "packed"),
    [("llama-9-3-tied", "w8a16", True), ("qwen3", "w8a8", False), ("mixed-window", "w8a8", True)],
)
def test_logits_are_those_of_the_weights_that_int8_stands_for(name: str, scheme: str, packed: bool) -> None:
    """Packed or not; with the tables, which are looked up and multiplied by, in int8 too where the weights are packed."""
    tables = {"head": "int8", "embeddings": "int8"} if packed else {}
    params, config = quantised(name, scheme, {"linear": "int8", **tables})
    sequences = [[int(i) for i in np.random.default_rng(7).integers(0, config.num_tokens, length)] for length in (19, 1, 34)]
    got = computed(repacked(params) if packed else params, config, sequences)
    real = slice(0, config.num_tokens)
    want = np.concatenate([naive_logits(params, ids, config) for ids in sequences])
    assert np.abs(got[:, real] - want[:, real]).max() < (2e-4 if scheme == "w8a16" else 3e-2) * np.abs(want[:, real]).max()
    unrounded = naive_logits(params, sequences[0], config.replace(quantization=None))[:, real]
    off = np.abs(got[:19, real] - unrounded).max()
    assert off < 1e-3 if scheme == "w8a16" else off > 3 * np.abs(got[:19, real] - want[:19, real]).mean()


@pytest.mark.parametrize(("name", "scheme"), [("llama", "w8a8"), ("llama-9-3-tied", "w8a16")])
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
    """A tied one is both."""
    random = np.random.default_rng(6)
    table = quantize(jnp.asarray(random.standard_normal((21, 32)), jnp.float32))
    wide, tokens = np.asarray(dequantize(table)), jnp.asarray([3, 20, 0, 3, 25])
    x = jnp.asarray(random.standard_normal((5, 32)), jnp.float32)
    for stored in (table, pack(table)):
        rows = embed(stored, tokens, jnp.dtype("bfloat16"))
        np.testing.assert_array_equal(np.asarray(rows), wide[[3, 20, 0, 3, 20]].astype(rows.dtype))
        product = multiply(x, stored, None, quantization=W8A8, out_dtype=jnp.float32)
        assert 0 < np.abs(np.asarray(product) - x @ wide.T).max() < 0.3
    assert multiply(x.astype(jnp.bfloat16), table, None, quantization=W8A8).dtype == jnp.bfloat16


def test_no_token_changes_another() -> None:
    """To the bit, in one batch shape: a token with a thousandfold activation stands beside the others."""
    params, config = quantised("llama", "w8a8", num_layers=1)
    loud = {**params, "embed": {"weight": params["embed"]["weight"].at[300].mul(1e4)}}
    quiet, beside = list(range(5, 25)), computed(loud, config, [list(range(5, 25)), [300] * 7])
    np.testing.assert_array_equal(beside[: len(quiet)], computed(loud, config, [quiet, [1] * 7])[: len(quiet)])
    lost = {**params, "embed": {"weight": params["embed"]["weight"].at[300].set(jnp.nan)}}
    beside = computed(lost, config, [quiet, [300] * 7])
    np.testing.assert_array_equal(beside[: len(quiet)], computed(loud, config, [quiet, [1] * 7])[: len(quiet)])
    assert np.isnan(beside[len(quiet) :]).all()


def test_the_table_of_the_device_says_how_few_tokens_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    x, weight = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((9, 32), (24, 32)))
    params = NextParams(jnp.ones(32), quantize(weight), None)
    monkeypatch.setattr(tuning, "lookup", lambda name, key: {"implementation": "w8a16"} if key["tokens"] <= 8 else None)
    exact, normed = np.asarray(x) @ np.asarray(dequantize(params.qkv)).T, rms_norm(x, params.norm, 1e-5)
    for few, product, want in (
        (8, multiply(x[:8], params.qkv, None, quantization=W8A8), exact[:8]),
        (9, multiply(x, params.qkv, None, quantization=W8A8), exact),
        (8, project_normed(x[:8], params, eps=1e-5, quantization=W8A8), (normed @ dequantize(params.qkv).T)[:8]),
        (9, project_normed(x, params, eps=1e-5, quantization=W8A8), normed @ dequantize(params.qkv).T),
    ):
        off = np.abs(np.asarray(product) - np.asarray(want)).max()
        assert off < 1e-4 if few == 8 else 1e-3 < off < 0.2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_layers_of_one_dtype_are_fused(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What int8 needs changes no float model: it goes where it went before."""
    config, taken = CONFIGS["qwen2"].replace(dtype=dtype), []
    for name in ("fused_layer", "mixed_layer"):
        way = getattr(transformer, name)
        monkeypatch.setattr(transformer, name, lambda *a, way=way, name=name, **k: (taken.append(name), way(*a, **k))[1])
    params = random_params(config)
    plan = plan_quantization(config, "w8a8", dtypes={"layers.1.mlp.down": "int8", "head": "int8"})
    batch, pages = pack_sequences([[1, 2, 3]], page_size=16)
    cache = init_cache(config, num_pages=pages, page_size=16)
    for values, of in ((params, config), quantize_params(params, config, plan)):
        jax.eval_shape(functools.partial(forward, config=of), values, batch, cache)
    assert taken == ["fused_layer", "fused_layer", "fused_layer", "mixed_layer"]


def test_an_int8_weight_needs_the_config_it_came_with() -> None:
    params, config = quantised("llama", "w8a8")
    with pytest.raises(ValueError, match="give the config that came with the parameters"):
        computed(params, config.replace(quantization=None), [[1, 2]])


PROMPTS = [[int(i) for i in np.random.default_rng(11).integers(0, 290, length)] for length in (1, 17, 30)]
OUTPUT = 7


def engine_for(params: Any, config: ModelConfig, **changes: Any) -> Engine:
    options = EngineConfig(
        max_context=64, page_size=16, kv_cache_bytes=9 * cache_bytes_per_page(config, 16), max_sequences=4,
        max_tokens_per_step=64, prefill_chunk=64, decode_steps=1, row_buckets=(4,), token_buckets=(64,), **changes,
    )  # fmt: skip
    return Engine(config, params, None, options)


def test_greedy_tokens_are_the_same_in_any_batch_and_in_any_chunks() -> None:
    params, config = quantised("qwen2", "w8a8", num_layers=1)
    engine = engine_for(params, config)
    first = generated(engine, PROMPTS)
    assert [tokens == greedy(params, ids, tokens, config) for ids, tokens in zip(PROMPTS, first, strict=True)] == [True] * 3
    for chunk in (64, 7):
        engine.pool.forget_all()
        engine.scheduler = Scheduler(dataclasses.replace(engine.config, prefill_chunk=chunk), engine.pool)
        assert generated(engine, PROMPTS) == first
        assert [generated(engine, [ids])[0] for ids in PROMPTS[::2]] == first[::2]
    assert engine.runner.compiles_after_ready == 0
    engine.update_params(jax.tree.map(jnp.copy, params))
    assert generated(engine, PROMPTS) == first


def greedy(params: Any, ids: list[int], tokens: list[int], config: ModelConfig) -> list[int]:
    """What float64 would have said after the prompt and after each of the tokens."""
    return [int(best) for best in naive_logits(params, ids + tokens[:-1], config)[len(ids) - 1 :].argmax(-1)]


@pytest.mark.slow
def test_programs_of_an_int8_model_are_kept(tmp_path: Any) -> None:
    params, config = quantised("llama", "w8a8", num_layers=1)
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
