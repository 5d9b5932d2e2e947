"""What is measured of a model before it is made, against the models themselves and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import CONFIGS, log_softmax, naive_logits, random_params

from llmjax.errors import ConfigError
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.layer_walk import embed, linear_names, linear_params, pack, run_layer
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.quantization.sensitivity import measure_sensitivity
from llmjax.quantization.smoothing import smooth
from llmjax.quantization.variants import Variant, mean_nll, output_errors
from pallas_kernels.quantized import QuantizedTensor, dequantize

CONFIG = CONFIGS["qwen2"]  # with biases, and rows of padding in the vocabulary
SAMPLES = [[5, 7, 11], list(range(3, 40)), [9], list(range(200, 220))]  # packed they have one shape, whole or cut
NAMES = linear_names(CONFIG)
INT8 = dict.fromkeys(NAMES, "int8")


def exact_nll(params: dict[str, Any], limit: int) -> float:
    told = []
    for ids in (sample[:limit] for sample in SAMPLES):
        logprobs = log_softmax(naive_logits(params, ids, CONFIG)[:, : CONFIG.num_tokens])
        told += [-logprobs[place, token] for place, token in enumerate(ids[1:])]
    return float(np.mean(told))


def test_perplexity_is_that_of_the_model_it_becomes() -> None:
    """Float, and with some linears int8, cut at the limit; samples of one token have nothing to tell."""
    params = random_params(CONFIG)
    for limit in (64, 17):
        got = mean_nll(Variant(params, {}), CONFIG, SAMPLES, scheme="w8a16", limit=limit)
        assert got == pytest.approx(exact_nll(params, limit), rel=3e-6)
    some = {name: "int8" for name in NAMES if "mlp" in name} | {"layers.1.mlp.down": "bfloat16"}
    plan = plan_quantization(CONFIG, "w8a16", dtypes={"mlp": "int8"}, keep={"layers.1.mlp.down": "bfloat16"})
    made = _float64(quantize_params(params, CONFIG, plan)[0])
    got = mean_nll(Variant(params, some), CONFIG, SAMPLES, scheme="w8a16", limit=64)
    assert got == pytest.approx(exact_nll(made, 64), rel=3e-6)
    assert got != pytest.approx(exact_nll(params, 64), rel=3e-6)
    with pytest.raises(ConfigError, match="no sample with enough tokens"):
        mean_nll(Variant(params, {}), CONFIG, [[3], []], scheme="w8a16", limit=64)


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(node) for name, node in tree.items()}
    return dequantize(tree, "float32") if isinstance(tree, QuantizedTensor) else tree.astype("float32")


def test_one_linear_alone_is_off_by_its_sensitivity_and_what_lies_behind_by_what_it_passes_on() -> None:
    params = random_params(CONFIG)
    (found,) = (
        one
        for one in measure_sensitivity(params, CONFIG, SAMPLES, scheme="w8a8", sequence_length=64, kl_samples=0)
        if one.name == NAMES[3]
    )
    none, alone = (
        output_errors(Variant(params, dtypes), CONFIG, SAMPLES, scheme="w8a8", limit=64) for dtypes in ({}, {NAMES[3]: "int8"})
    )
    assert none == dict.fromkeys(NAMES, 0.0)
    assert [alone[name] for name in NAMES[:3]] == [0.0] * 3
    assert alone[NAMES[3]] == pytest.approx(found.relative_l2, rel=1e-3)
    assert all(alone[name] > 1e-4 for name in NAMES[4:])


def test_errors_are_those_of_the_quantised_model() -> None:
    """Inputs are what comes of the layers before; compared with products in float64. All-equal rows and zeros do no harm."""
    params = random_params(CONFIG)
    first = params["layers"][0]["mlp"]["down"]
    first["weight"] = first["weight"].at[3].set(0).at[4].set(0.5)
    made, config = quantize_params(params, CONFIG, plan_quantization(CONFIG, "w8a16"))
    packed, tokens = pack(SAMPLES), sum(map(len, SAMPLES))
    want = got = embed(params, packed, config=CONFIG)
    errors = output_errors(Variant(params, INT8), CONFIG, SAMPLES, scheme="w8a16", limit=64)
    for index in range(CONFIG.num_layers):
        want, given = run_layer(params, index, want, packed, config=CONFIG)
        got, own = run_layer(made, index, got, packed, config=config)
        for (name, x), (_, z) in zip(given, own, strict=True):
            weight = np.asarray(linear_params(params, name)["weight"], np.float64)
            near = np.asarray(dequantize(linear_params(made, name)["weight"], "float32"), np.float64)
            y = np.asarray(x, np.float64)[:tokens] @ weight.T
            off = np.asarray(z, np.float64)[:tokens] @ near.T - y
            assert errors[name] == pytest.approx(np.linalg.norm(off) / np.linalg.norm(y), rel=2e-3), name


def test_smoothing_makes_the_error_of_outliers_smaller() -> None:
    """A channel of outliers in front of a linear: rounding loses the others; smoothed, it does not."""
    params = random_params(CONFIG)
    norm = params["layers"][0]["mlp_norm"]
    norm["weight"] = norm["weight"].at[7].mul(200)
    column = params["layers"][0]["mlp"]["gate_up"]
    column["weight"] = column["weight"].at[:, 7].mul(1 / 200)
    seen = calibrate(params, CONFIG, SAMPLES, CalibrateSettings(sequence_length=64))
    smoothed = smooth(params, CONFIG, seen)
    variants = (Variant(params, INT8), Variant(smoothed, INT8))
    before, after = (output_errors(variant, CONFIG, SAMPLES, scheme="w8a8", limit=64) for variant in variants)
    name = "layers.0.mlp.gate_up"
    assert before[name] > 3 * after[name]


def test_infinity_is_told_as_such() -> None:
    params = random_params(CONFIG)
    params["layers"][1]["mlp"]["down"]["weight"] = params["layers"][1]["mlp"]["down"]["weight"].at[0, 0].set(np.inf)
    errors = output_errors(Variant(params, {}), CONFIG, SAMPLES, scheme="w8a16", limit=64)
    assert errors["layers.1.mlp.down"] == np.inf
    assert errors["layers.1.mlp.gate_up"] == 0
