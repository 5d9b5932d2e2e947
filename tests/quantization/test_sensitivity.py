"""Sensitivity against float64: the errors of each linear's output, and of the model's distribution."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, log_softmax, naive_logits, random_params

from llmjax.errors import ConfigError, ModelError, NonFiniteError
from llmjax.model.kv_cache import init_cache
from llmjax.model.transformer import forward, logits
from llmjax.quantization.layer_walk import embed, linear_names, linear_params, pack, run_layer
from llmjax.quantization.plan import LinearSensitivity, make_plan, ranked
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.quantization.sensitivity import measure_sensitivity

CONFIG = CONFIGS["qwen2"]  # with biases, and rows of padding in the vocabulary
SAMPLES = [[5, 7, 11], list(range(3, 40)), [9], list(range(200, 220))]


def rounded(x: np.ndarray, axis: int | None) -> np.ndarray:
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale


def naive(params: dict[str, Any], config: Any) -> np.ndarray:
    return np.concatenate([naive_logits(params, ids, config)[:, : config.num_tokens] for ids in SAMPLES])


def exact_inputs(params: dict[str, Any], config: Any) -> dict[str, np.ndarray]:
    packed = pack(SAMPLES)
    x, found = embed(params, packed, config=config), {}
    for index in range(config.num_layers):
        x, inputs = run_layer(params, index, x, packed, config=config)
        found |= {given.name: np.asarray(given.x, np.float64)[: sum(map(len, SAMPLES))] for given in inputs}
    return found


def by_matrix(weight: np.ndarray, name: str) -> np.ndarray:
    """A scale for each of q, k and v, and of gate and up."""
    heads, groups = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    cuts = {"qkv": [heads, heads + groups], "gate_up": [CONFIG.mlp_size]}.get(name.rpartition(".")[2], [])
    return np.concatenate([rounded(part, None) for part in np.split(weight, cuts)])


@pytest.mark.parametrize(("scheme", "weights"), [("w8a16", "channel"), ("w8a8", "tensor")])
def test_each_linear_alone(scheme: Any, weights: Any) -> None:
    params = random_params(CONFIG)
    found = measure_sensitivity(params, CONFIG, SAMPLES, scheme=scheme, weights=weights, sequence_length=64)
    assert [one.name for one in found] == linear_names(CONFIG)
    inputs = exact_inputs(params, CONFIG)
    for one in found:
        weight = np.asarray(linear_params(params, one.name)["weight"], np.float64)
        x = inputs[one.name]
        want = x @ weight.T
        near_weight = by_matrix(weight, one.name) if weights == "tensor" else rounded(weight, 1)
        near = (rounded(x, 1) if scheme == "w8a8" else x) @ near_weight.T
        assert one.relative_l2 == pytest.approx(np.linalg.norm(want - near) / np.linalg.norm(want), rel=2e-3)
        cosine = (want * near).sum() / np.linalg.norm(want) / np.linalg.norm(near)
        assert one.cosine == pytest.approx(cosine, abs=2e-6)
        assert one.weights == weight.size


@pytest.mark.parametrize(
    ("scheme", "weights", "name"),
    [("w8a16", "channel", "layers.0.mlp.down"), ("w8a8", "tensor", "layers.0.attention.qkv")],
)
def test_kl_is_that_of_the_model_that_is_served(scheme: Any, weights: Any, name: str) -> None:
    """In bfloat16: the model with one linear made int8 by `quantize_params`, run by its own forward."""
    config = CONFIG.replace(dtype="bfloat16", num_layers=1, sliding_windows=())
    params = random_params(config)
    found = {one.name: one.kl for one in measure_sensitivity(params, config, SAMPLES, scheme=scheme, weights=weights)}
    run = jax.jit(forward, static_argnames="config")
    batch = pack(SAMPLES).batch
    cache = init_cache(config, num_pages=1 + len(batch.tokens) // 16 + 16, page_size=16)

    def log_probabilities(params: Any, config: Any) -> np.ndarray:
        hidden, _ = run(params, batch, cache, config=config)
        out = np.asarray(logits(params, hidden, config=config), np.float64)
        return log_softmax(out[: sum(map(len, SAMPLES)), : config.num_tokens])

    p = log_probabilities(params, config)
    plan = plan_quantization(config, scheme, dtypes={f"{name}.weight": "int8"})
    q = log_probabilities(*quantize_params(params, config, plan, granularity=weights))
    assert found[name] == pytest.approx((np.exp(p) * (p - q)).sum(1).mean(), rel=1e-3)


def test_kl_is_that_of_the_models() -> None:
    params = random_params(CONFIG)
    found = measure_sensitivity(params, CONFIG, SAMPLES, scheme="w8a16", sequence_length=64)
    log_p = log_softmax(naive(params, CONFIG))
    for one in found:
        changed = copy.deepcopy(params)
        node = linear_params(changed, one.name)
        node["weight"] = rounded(np.asarray(node["weight"], np.float64), 1)
        log_q = log_softmax(naive(changed, CONFIG))
        want = float((np.exp(log_p) * (log_p - log_q)).sum(1).mean())
        assert one.kl == pytest.approx(want, rel=0.02), one.name
        assert one.kl > 0


def test_kl_of_some_samples_is_that_of_their_group() -> None:
    params = random_params(CONFIG)
    samples = [[*range(1, 41)], [*range(5, 45)]]  # two groups
    first = measure_sensitivity(params, CONFIG, samples[:1], scheme="w8a8", sequence_length=64)
    some = measure_sensitivity(params, CONFIG, samples, scheme="w8a8", sequence_length=64, kl_samples=1)
    assert [one.kl for one in some] == [one.kl for one in first]
    assert all(one.relative_l2 != two.relative_l2 for one, two in zip(some, first, strict=True))
    none = measure_sensitivity(params, CONFIG, samples, scheme="w8a8", sequence_length=64, kl_samples=0)
    assert [one.kl for one in none] == [None] * len(first)
    assert [one.relative_l2 for one in none] == [one.relative_l2 for one in some]


def test_an_outlier_is_found_and_stays_in_high_precision() -> None:
    """One input channel of one linear carries values of 1e4: with a scale a token, all others round to nothing."""
    config = CONFIG
    params = random_params(config)
    gate_up = params["layers"][1]["mlp"]["gate_up"]["weight"]
    params["layers"][1]["mlp"]["gate_up"]["weight"] = gate_up.at[3].multiply(30.0).at[80 + 3].multiply(30.0)
    down = params["layers"][1]["mlp"]["down"]["weight"]
    params["layers"][1]["mlp"]["down"]["weight"] = down.at[:, 3].multiply(1e-3)
    found = measure_sensitivity(params, config, SAMPLES, scheme="w8a8", sequence_length=64)
    worst = ranked(found)[0]
    assert worst.name == "layers.1.mlp.down"
    assert worst.kl == max(one.kl for one in found)
    plan = make_plan(found, scheme="w8a8", model_dtype="float32", max_sensitivity=0.05)
    assert set(linear_names(config)) - set(plan.quantised) == {"layers.1.mlp.down"}


def test_zeros_are_exact() -> None:
    config = CONFIG
    params = random_params(config)
    node = params["layers"][0]["mlp"]["down"]
    node["weight"] = jnp.zeros_like(node["weight"])
    found = {one.name: one for one in measure_sensitivity(params, config, SAMPLES[:1], scheme="w8a8")}
    assert found["layers.0.mlp.down"] == LinearSensitivity("layers.0.mlp.down", 0.0, 1.0, 0.0, 48 * 80)


def test_what_cannot_be_measured_is_refused() -> None:
    config = CONFIG
    params = random_params(config)
    with pytest.raises(ConfigError, match="no sample with a token"):
        measure_sensitivity(params, config, [[]], scheme="w8a8")
    with pytest.raises(ConfigError, match="w8a16, w8a8"):
        measure_sensitivity(params, config, SAMPLES, scheme="w4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kl_samples at least 0, got 0 and None"):
        measure_sensitivity(params, config, SAMPLES, scheme="w8a8", sequence_length=0)
    params["layers"][1]["mlp"]["down"]["weight"] = params["layers"][1]["mlp"]["down"]["weight"].at[2, 3].set(jnp.nan)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down\.weight: 1 values are NaN or infinite, the first at \[2, 3\]"):
        measure_sensitivity(params, config, SAMPLES, scheme="w8a8")
    params = random_params(config)
    params["embed"]["weight"] = params["embed"]["weight"].at[7].set(jnp.inf)
    with pytest.raises(NonFiniteError, match=r"layers\.0\.attention\.qkv"):
        measure_sensitivity(params, config, SAMPLES, scheme="w8a8")
