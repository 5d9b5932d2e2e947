"""Each block's error beside plain rounding's: 1 for plain rounding, 0 for nothing, many times as much where a head is lost."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from bench.gate_power import change, linears, rounded
from llmjax.quantization.block_errors import Weights, block_errors, comparable
from llmjax.quantization.quantize import plan_quantization, quantize_params

CONFIG = CONFIGS["qwen2"].replace(num_layers=2, sliding_windows=())  # with biases
RANDOM = np.random.default_rng(6)
TEXTS = [RANDOM.integers(0, CONFIG.num_tokens, size).tolist() for size in (40, 0, 1, 90)]
BLOCKS = ["layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"]


@functools.cache
def own() -> Weights:
    return Weights(random_params(CONFIG), CONFIG)


def lost(layer: int, head: int) -> Any:
    size = CONFIG.head_dim
    columns = slice(head * size, (head + 1) * size)
    return change(own().params, {(layer, "attention", "out")}, lambda w: w.at[:, columns].set(0))


def test_plain_rounding_is_one_and_nothing_is_nothing():
    plain, config = quantize_params(own().params, CONFIG, plan_quantization(CONFIG, "w8a8"))
    found = block_errors(own(), Weights(plain, config), TEXTS)
    assert list(found) == BLOCKS
    np.testing.assert_allclose(list(found.values()), 1, atol=1e-3)
    assert set(block_errors(own(), own(), TEXTS).values()) == {0.0}
    assert set(block_errors(own(), Weights(plain, config), []).values()) == {0.0}


def test_a_lost_head_shows_in_its_layer_alone_whatever_else_is_rounded():
    plain = change(lost(1, 2), set(linears(CONFIG)), lambda w: rounded(w, 1))
    found = block_errors(own(), Weights(plain, CONFIG), TEXTS)
    assert found["layers.1.attention"] > 10
    np.testing.assert_allclose([found["layers.0.attention"], found["layers.0.mlp"]], 1, atol=1e-3)


def test_errors_are_relative_to_what_the_block_gives_and_to_rounding():
    """One weight of one row more by d: the output is off by d * x there, by hand."""
    place, rows = (0, "mlp", "down"), (3, 5)
    changed = change(own().params, {place}, lambda w: w.at[rows].add(0.5))
    once = block_errors(own(), Weights(changed, CONFIG), TEXTS)
    twice = block_errors(own(), Weights(change(own().params, {place}, lambda w: w.at[rows].add(1.0)), CONFIG), TEXTS)
    assert [name for name, error in once.items() if error] == ["layers.0.mlp"]
    assert twice["layers.0.mlp"] == pytest.approx(2 * once["layers.0.mlp"], rel=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_no_number(value):
    broken = change(own().params, {(1, "mlp", "down")}, lambda w: w.at[0, 0].set(value))
    found = block_errors(own(), Weights(broken, CONFIG), TEXTS)
    assert not np.isfinite(found["layers.1.mlp"])
    assert found["layers.0.mlp"] == 0


def test_a_model_in_a_narrower_dtype_is_within_rounding():
    config = CONFIG.replace(dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim == 2 else leaf, own().params)
    found = block_errors(own(), Weights(params, config), TEXTS)
    assert all(0 < error < 1.5 for error in found.values()), found


def test_a_block_that_gives_nothing_has_no_error_and_one_that_gives_what_is_not_there_has():
    nothing = Weights(change(own().params, {(0, "mlp", "down")}, jnp.zeros_like), CONFIG)
    assert set(block_errors(nothing, nothing, TEXTS).values()) == {0.0}
    assert block_errors(nothing, own(), TEXTS)["layers.0.mlp"] > 10


def test_what_cannot_be_compared():
    plain, config = quantize_params(own().params, CONFIG, plan_quantization(CONFIG, "w8a16"))
    quantized = Weights(plain, config)
    shorter = Weights(own().params, CONFIG.replace(num_layers=1, sliding_windows=()))
    assert comparable(own(), quantized)
    assert comparable(own(), Weights(own().params, CONFIG.replace(dtype="bfloat16")))
    assert not comparable(quantized, own())
    assert not comparable(own(), shorter)
