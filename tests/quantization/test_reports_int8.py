"""Reports B50 and B51 of other engines' INT8, as tests; B52 is in `test_gate_models.py` and `test_gate.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, random_params

from llmjax.quantization.forward_model import ForwardModel
from llmjax.quantization.gate import Limits, judge
from llmjax.quantization.plan import make_plan
from llmjax.quantization.quality import QualityData, Subject, measure_quality
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.quantization.sensitivity import measure_sensitivity
from pallas_kernels.int8_matmul import quantize_activations, w8a8, w8a16
from pallas_kernels.quantized import dequantize, quantize

CONFIG = CONFIGS["llama"].replace(num_layers=1, sliding_windows=())
BROKEN = "layers.0.mlp.down"


def step(values: np.ndarray, axis: int) -> np.ndarray:
    """The largest error that rounding to a scale along an axis may make."""
    return np.abs(values).max(axis=axis, keepdims=True) / 127 * 0.501 + 1e-30


@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 15), st.integers(0, 31), st.integers(0, 4), st.sampled_from([1.0, 1e-20, 1e4, 3e30])
)
def test_b50_zeros_stay_zeros_and_everything_finite(seed: int, channel: int, column: int, token: int, size: float) -> None:
    """A zero output channel, a zero input column and a token of zeros (padding): scales are not 0, and nothing is NaN."""
    random = np.random.default_rng(seed)
    w = random.standard_normal((16, 32)).astype(np.float32) * np.float32(size)
    x = random.standard_normal((5, 32)).astype(np.float32)
    w[channel], w[:, column], x[token] = 0, 0, 0
    q, (rounded, scale) = quantize(jnp.asarray(w)), quantize_activations(jnp.asarray(x))
    assert (np.asarray(q.scale) > 0).all()
    back = np.asarray(dequantize(q))
    assert np.isfinite(back).all()
    assert not back[channel].any()
    assert not back[:, column].any()
    assert (np.abs(back - w) <= step(w, 1)).all()
    for y in (w8a16(jnp.asarray(x), q, out_dtype=jnp.float32), w8a8(rounded, scale, q, out_dtype=jnp.float32)):
        assert np.isfinite(np.asarray(y)).all()
        assert not np.asarray(y)[token].any()
        assert not np.asarray(y)[:, channel].any()


def test_b51_an_outlier_token_changes_no_other_although_the_error_over_all_looks_fine() -> None:
    """Normal rows and one 6e4 times as large: with one scale for all, the error over all is small, and the normal rows are gone.

    Here each token has its own."""
    random = np.random.default_rng(0)
    w, x = random.standard_normal((16, 64)).astype(np.float32), random.standard_normal((8, 64)).astype(np.float32)
    x[3] *= 6e4
    normal = np.arange(8) != 3
    want, weight = x.astype(np.float64) @ w.T, quantize(jnp.asarray(w))
    one = np.rint(x / np.abs(x).max() * 127) * np.abs(x).max() / 127 @ np.asarray(dequantize(weight)).T
    ours = np.asarray(w8a8(*quantize_activations(jnp.asarray(x)), weight, out_dtype=jnp.float32), np.float64)

    def off(got: np.ndarray, rows: Any) -> float:
        return float(np.linalg.norm((got - want)[rows]) / np.linalg.norm(want[rows]))

    assert off(one, slice(None)) < 0.02
    assert off(one, normal) > 0.99
    assert off(ours, slice(None)) < 0.02
    assert off(ours, normal) < 0.02


def outliers() -> dict[str, Any]:
    """A model with one channel in front of its down projection that is thousands of times as large, and weighs as much less."""
    params = random_params(CONFIG)
    mlp = params["layers"][0]["mlp"]
    mlp["gate_up"]["weight"] = mlp["gate_up"]["weight"].at[CONFIG.mlp_size + 5].mul(1e4)
    mlp["down"]["weight"] = mlp["down"]["weight"].at[:, 5].mul(1e-4)
    return params


def test_b51_a_model_of_outliers_gets_mixed_precision_and_the_gate_reads_it_end_to_end() -> None:
    params = outliers()
    random = np.random.default_rng(1)
    seen, held = ([random.integers(0, CONFIG.vocab_size, 60).tolist() for _ in range(2)] for _ in range(2))
    found = measure_sensitivity(params, CONFIG, seen, scheme="w8a8", sequence_length=128, kl_samples=0)
    worst = max(found, key=lambda one: one.relative_l2)
    assert worst.name == BROKEN
    assert worst.relative_l2 > 10 * sorted(one.relative_l2 for one in found)[-2]
    plan = make_plan(found, scheme="w8a8", model_dtype=CONFIG.dtype, max_sensitivity=0.05)
    assert [name for name, decision in plan.linears.items() if decision.dtype != "int8"] == [BROKEN]

    limits = Limits(required=frozenset(), min_tokens=100)
    passed = {}
    for name, keep in (("blind", {}), ("planned", {BROKEN: CONFIG.dtype})):
        made, config = quantize_params(params, CONFIG, plan_quantization(CONFIG, "w8a8", keep=keep))
        sides = (Subject(ForwardModel(params, CONFIG)), Subject(ForwardModel(made, config)))
        verdict = judge(measure_quality(*sides, QualityData(held)), limits)
        passed[name] = verdict.passed
        assert verdict.passed or "kl" in verdict.refused
    assert passed == {"blind": False, "planned": True}


@pytest.mark.parametrize("value", [1e4, -1e4])
def test_a_single_weight_of_1e4_costs_its_own_channel_alone(value: float) -> None:
    w = np.random.default_rng(2).standard_normal((6, 32)).astype(np.float32)
    w[2, 9] = value
    error = np.abs(np.asarray(dequantize(quantize(jnp.asarray(w)))) - w)
    assert error[2, 9] < 1e-2
    assert (error <= step(w, 1)).all()
    assert error[[0, 1, 3, 4, 5]].max() < 0.02
