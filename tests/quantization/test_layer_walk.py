"""The walk equals the program that serves, for each kind of layer, and gives what goes into each linear."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_logits, random_params

from llmjax.errors import UnsupportedModelError
from llmjax.model.batch import pack_sequences
from llmjax.model.kv_cache import init_cache
from llmjax.model.transformer import forward, logits
from llmjax.quantization.layer_walk import (
    ROWS,
    check_walkable,
    embed,
    final_hidden,
    groups,
    linear_names,
    linear_params,
    pack,
    run_layer,
)
from pallas_kernels.quantized import quantize

SAMPLES = [[5, 7, 11], list(range(3, 40)), [9], list(range(200, 220))]


@pytest.mark.parametrize("name", ["llama-9-3-tied", "qwen2", "qwen3", "mixed-window"])
def test_the_walk_equals_forward(name: str) -> None:
    config = CONFIGS[name]
    params = random_params(config)
    packed = pack(SAMPLES)
    x = embed(params, packed)
    for index in range(config.num_layers):
        x, _ = run_layer(params, index, x, packed, config=config)
    got = np.asarray(logits(params, final_hidden(params, x, config=config), config=config))[: sum(map(len, SAMPLES))]
    want = np.concatenate([naive_logits(params, ids, config) for ids in SAMPLES])
    np.testing.assert_allclose(got[:, : config.num_tokens], want[:, : config.num_tokens], rtol=2e-4, atol=2e-4)


def test_in_bfloat16_it_is_forward_to_the_bit() -> None:
    config = CONFIGS["mixed-window"].replace(dtype="bfloat16")
    params = random_params(config)
    packed = pack(SAMPLES)
    x = embed(params, packed)
    for index in range(config.num_layers):
        x, _ = run_layer(params, index, x, packed, config=config)
    batch, pages = pack_sequences(SAMPLES, page_size=16)
    cache = init_cache(config, num_pages=pages, page_size=16)
    hidden, _ = jax.jit(forward, static_argnames=("config", "decode"))(params, batch, cache, config=config)
    got = np.asarray(final_hidden(params, x, config=config)[: len(hidden)], np.float32)
    np.testing.assert_array_equal(got, np.asarray(hidden, np.float32))


def test_inputs_are_those_of_the_linears() -> None:
    """From the inputs and the weights alone the residual stream is put together again."""
    config = CONFIGS["qwen2"]
    params = random_params(config)
    packed = pack(SAMPLES)
    x = embed(params, packed)
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
    with pytest.raises(UnsupportedModelError, match="only decoders of"):
        check_walkable({"layers": {}}, config)
    params = random_params(config)
    params["layers"][1]["mlp"]["down"]["weight"] = quantize(jnp.ones((48, 80)))
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.down: the weight is quantised already"):
        check_walkable(params, config)
