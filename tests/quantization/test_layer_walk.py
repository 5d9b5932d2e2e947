"""The walk equals the program that serves, for each kind of layer, and gives what goes into each linear."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted_model import ScriptedModel
from tiny_models import CONFIGS, naive_logits, random_params

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import init_cache
from llmjax.model.registry import register_model
from llmjax.model.transformer import forward
from llmjax.quantization.layer_walk import (
    ROWS,
    Packed,
    check_walkable,
    embed,
    final_hidden,
    groups,
    linear_names,
    linear_params,
    pack,
    run_layer,
)
from llmjax.quantization.quantize import plan_quantization, quantize_params
from pallas_kernels.quantized import quantize

SAMPLES = [[5, 7, 11], list(range(3, 40)), [9], list(range(200, 220))]


def walked(params: Any, config: ModelConfig, packed: Packed) -> jax.Array:
    """Hidden states behind the final norm, padding included."""
    x = embed(params, packed, config=config)
    for index in range(config.num_layers):
        x, _ = run_layer(params, index, x, packed, config=config)
    return final_hidden(params, x, config=config)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("llama", "llama-dynamic")])  # no layer of their own
def test_the_walk_says_what_the_oracle_says(name: str) -> None:
    """For every kind of layer, in float32 against float64."""
    config = CONFIGS[name]
    params = random_params(config)
    got = np.asarray(walked(params, config, pack(SAMPLES)), np.float64)[: sum(map(len, SAMPLES))]
    head = params["embed" if config.tie_embeddings else "lm_head"]["weight"]
    want = np.concatenate([naive_logits(params, ids, config) for ids in SAMPLES])[:, : config.num_tokens]
    found = (got @ np.asarray(head, np.float64).T)[:, : config.num_tokens]
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-4)


MIXED = {"layers.0.attention": "float32", "layers.1.mlp.down": "float32", "embeddings": "int8", "head": "int8"}


@pytest.mark.parametrize(("name", "dtypes"), [("mixed-window", {}), ("llama", MIXED)])
def test_in_bfloat16_it_is_forward_to_the_bit(name: str, dtypes: dict[str, str]) -> None:
    """Also where weights are in other dtypes than the model, and its tables in int8."""
    config = CONFIGS[name].replace(dtype="bfloat16")
    params = random_params(config)
    if dtypes:
        params, config = quantize_params(params, config, plan_quantization(config, "w8a16", dtypes=dtypes))
    check_walkable(params, config)
    batch = pack(SAMPLES).batch
    cache = init_cache(config, num_pages=1 + len(batch.tokens) // 16 + ROWS, page_size=16)
    hidden, _ = jax.jit(forward, static_argnames=("config", "decode"))(params, batch, cache, config=config)
    tokens = sum(map(len, SAMPLES))
    got = np.asarray(walked(params, config, pack(SAMPLES)), np.float32)
    np.testing.assert_array_equal(got[:tokens], np.asarray(hidden, np.float32)[:tokens])


def test_inputs_are_those_of_the_linears() -> None:
    """From the inputs and the weights alone the residual stream is put together again."""
    config = CONFIGS["qwen2"]
    params = random_params(config)
    packed = pack(SAMPLES)
    x = embed(params, packed, config=config)
    for index in range(config.num_layers):
        behind, inputs = run_layer(params, index, x, packed, config=config)
        values = {given.name: np.asarray(given.x, np.float64) for given in inputs}
        assert list(values) == linear_names(config)[4 * index : 4 * index + 4]
        out = {name: value @ np.asarray(linear_params(params, name)["weight"], np.float64).T for name, value in values.items()}
        layer = f"layers.{index}."
        want = np.asarray(x, np.float64) + out[layer + "attention.out"] + out[layer + "mlp.down"]
        np.testing.assert_allclose(np.asarray(behind), want, rtol=1e-4, atol=1e-4)
        gate, up = np.split(out[layer + "mlp.gate_up"], 2, axis=1)
        np.testing.assert_allclose(values[layer + "mlp.down"], gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
        x = behind


def test_groups_hold_each_sample_once_within_their_bounds() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 200).tolist()
    found = list(groups(lengths, 64))
    assert [index for group in found for index in group] == list(range(200))
    assert all(sum(lengths[i] for i in group) <= 64 and len(group) <= ROWS for group in found)
    assert list(groups([100, 1, 1], 64)) == [range(0, 1), range(1, 3)]
    assert list(groups([1] * 17, 64)) == [range(0, 16), range(16, 17)]
    assert list(groups([], 64)) == []


def test_sixteen_samples_and_one_of_every_edge_length_fit() -> None:
    for samples in ([[1] * 17] * ROWS, [[1] * 64], [[1] * 65], [[1]]):
        batch, counted = pack(samples)
        tokens = sum(map(len, samples))
        assert int(counted.sum()) == tokens
        assert len(np.unique(np.asarray(batch.slot_mapping)[:tokens])) == tokens
        assert int(batch.page_table.max()) <= len(batch.tokens) // 16 + ROWS


def test_other_models_are_refused() -> None:
    config = CONFIGS["qwen2"]
    with pytest.raises(UnsupportedModelError, match=r"have no layers\.0\.attention\.qkv: only the decoder of"):
        check_walkable({"layers": {}}, config)
    register_model("like-qwen2", ScriptedModel())  # a forward of its own, whatever its parameters are called
    with pytest.raises(UnsupportedModelError, match="'like-qwen2' has a decoder of its own"):
        check_walkable(random_params(config), config.replace(family="like-qwen2"))
    params = random_params(config)
    params["layers"][1]["mlp"]["down"]["weight"] = quantize(jnp.ones((48, 80)))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.down: the weight is quantised already"):
        check_walkable(params, config)
