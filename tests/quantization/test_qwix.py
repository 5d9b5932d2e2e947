"""qwix, another library's quantisation, as an oracle. `requirements-models.lock` has it; without it these are skipped.

Its scale is absmax / 127.5 and codes may be -128, so that codes differ; what they stand for must not, by more than one step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.quantization.quantize import quantize_weight
from pallas_kernels.int8_matmul import quantize_activations, w8a8, w8a16
from pallas_kernels.quantized import dequantize

qarray = pytest.importorskip("qwix._src.core.qarray", reason="needs qwix")


def theirs(values: Any, axes: tuple[int, ...]) -> np.ndarray:
    """What qwix makes of an array, with a scale for each place along these axes."""
    how = qarray.HowToQuantize(qtype="int8", channelwise_axes=axes, calibration_method="absmax")
    return np.asarray(qarray.dequantize(qarray.quantize(jnp.asarray(values), how)), np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("granularity", "axes"), [("channel", (0,)), ("tensor", ())])
def test_weights_stand_for_the_same_within_a_step(granularity: Any, axes: tuple[int, ...], dtype: str) -> None:
    random = np.random.default_rng(0)
    w = random.standard_normal((96, 257)) * np.exp(random.standard_normal((96, 1)))
    w[3], w[4], w[5, 7] = 0, 0.5, 1e4
    weight = jnp.asarray(w, dtype)
    wide = np.asarray(weight, np.float32)  # what qwix gets: in bfloat16 its scales would be rounded to that as well
    ours = np.asarray(dequantize(quantize_weight(weight, (96,), granularity), "float32"), np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True) if axes else np.abs(wide).max()
    assert (np.abs(ours - theirs(wide, axes)) <= largest / 127 * 1.001).all()
    assert np.abs(ours - theirs(wide, axes)).max() > 0
    if axes:
        assert not ours[3].any()
        assert not theirs(wide, axes)[3].any()


def _of_rows(got: np.ndarray, want: np.ndarray) -> float:
    """Mean relative error of a token."""
    return float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).mean())


def test_activations_and_products_too() -> None:
    """A scale a token; products are as far from float64 as qwix's, and no further."""
    random = np.random.default_rng(1)
    x = random.standard_normal((33, 160)).astype(np.float32) * np.exp(2 * random.standard_normal((33, 1))).astype(np.float32)
    w = random.standard_normal((48, 160)).astype(np.float32)
    codes, scale = quantize_activations(jnp.asarray(x))
    ours = np.asarray(codes, np.float64) * np.asarray(scale, np.float64).reshape(-1, 1)
    assert (np.abs(ours - theirs(x, (0,))) <= np.abs(x).max(axis=1, keepdims=True) / 127 * 1.001).all()
    weight = quantize_weight(jnp.asarray(w), (48,))
    want = x.astype(np.float64) @ w.T.astype(np.float64)
    for got, other in (
        (w8a16(jnp.asarray(x), weight, out_dtype=jnp.float32), x.astype(np.float64) @ theirs(w, (0,)).T),
        (w8a8(codes, scale, weight, out_dtype=jnp.float32), theirs(x, (0,)) @ theirs(w, (0,)).T),
    ):
        errors = [_of_rows(np.asarray(side, np.float64), want) for side in (got, other)]
        assert errors[0] < 1.05 * errors[1]
        assert errors[0] > 0
