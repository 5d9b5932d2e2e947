"""The int8 matmuls' references against float64, and what their signatures promise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.fused_norm import residual_rms_norm, residual_rms_norm_quantize, rms_norm, rms_norm_quantize
from pallas_kernels.gated_activation import gated
from pallas_kernels.int8_matmul import INT8_DENSE, int8_dense, quantize_activations, w8a8, w8a16
from pallas_kernels.quantized import QuantizedTensor, pack, quantize, unpack

ROUNDING = {"float32": 3e-7, "bfloat16": 2.0**-8}


@pytest.fixture
def draw():
    random = np.random.default_rng()

    def array(*shape, dtype="float32"):
        return jnp.asarray(random.standard_normal(shape), dtype)

    return array


def wide(x):
    return np.asarray(x, np.float64)


def weight(draw, out, depth, *, packed=False, axis=1):
    """With -128 in it, as files of others have it."""
    w = quantize(draw(out, depth), axis=axis)
    w = dataclasses.replace(w, qvalue=w.qvalue.at[:, 3:40:9].set(-128))
    return pack(w) if packed else w


def product(x, w):
    """float64 x @ w.T of what is stored."""
    return wide(x) @ (wide(unpack(w).qvalue) * wide(w.channel_scale)[:, None]).T


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("tokens", "packed", "axis"), [(1, False, 1), (5, True, 1), (40, False, None)])
def test_w8a16(draw, tokens, packed, axis, dtype):
    x, w, bias = draw(tokens, 96, dtype=dtype), weight(draw, 48, 96, packed=packed, axis=axis), draw(48, dtype=dtype)
    result = w8a16(x, w, bias)
    assert result.dtype == dtype
    right = product(x, w) + wide(bias)
    np.testing.assert_allclose(wide(result), right, rtol=ROUNDING[dtype], atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "packed", "axis"), [(1, False, 1), (5, True, 1), (40, False, None)])
def test_w8a8_rounds_in_the_documented_order(draw, tokens, packed, axis, out_dtype):
    """To the last bit: an exact sum, then one float32 rounding after the other."""
    w, bias = weight(draw, 48, 4096, packed=packed, axis=axis), draw(48)
    xq, x_scale = quantize_activations(draw(tokens, 4096))
    exact = np.asarray(xq, np.int64) @ np.asarray(unpack(w).qvalue, np.int64).T
    right = exact.astype(np.float32) * np.asarray(x_scale)[:, None] * np.asarray(w.channel_scale) + np.asarray(bias)
    result = w8a8(xq, x_scale, w, bias, out_dtype=out_dtype)
    np.testing.assert_array_equal(wide(result), wide(right.astype(jnp.dtype(out_dtype))))


def test_the_largest_sum_does_not_overflow():
    """127 * 127 * 14336 fits int32, and is what comes out."""
    ones = QuantizedTensor(jnp.full((16, 14336), -127, jnp.int8), jnp.float32(1))
    result = w8a8(jnp.full((3, 14336), 127, jnp.int8), jnp.ones(3), ones, out_dtype="float32")
    np.testing.assert_array_equal(wide(result), -127 * 127 * 14336)


def test_w8a8_is_near_what_was_not_quantised(draw):
    x, full = draw(64, 512), draw(48, 512)
    got = int8_dense(x, quantize(full), implementation="w8a8")
    right = wide(x) @ wide(full).T
    assert np.linalg.norm(wide(got) - right) < 0.02 * np.linalg.norm(right)


@pytest.mark.parametrize("way", ["w8a16", "w8a8"])
def test_residual_and_gate_are_the_separate_operations(draw, way):
    x, residual = draw(7, 64, dtype="bfloat16"), draw(7, 32, dtype="bfloat16")
    w, gate_up, bias = weight(draw, 32, 64), weight(draw, 96, 64), draw(32)
    plain = int8_dense(x, w, bias, implementation=way)
    total = (residual.astype(jnp.float32) + plain.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(wide(int8_dense(x, w, bias, residual=residual, implementation=way)), wide(total))
    separate = gated(int8_dense(x, gate_up, implementation=way), "silu")
    np.testing.assert_array_equal(wide(int8_dense(x, gate_up, activation="silu", implementation=way)), wide(separate))


def test_a_float32_residual_stays_float32(draw):
    x, w, residual = draw(3, 64, dtype="bfloat16"), weight(draw, 32, 64), draw(3, 32)
    result = w8a16(x, w, residual=residual)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, residual + w8a16(x, w).astype(jnp.float32))


def test_activations_are_quantised_token_by_token(draw):
    x = draw(6, 80).at[2, 5].set(1e4).at[4].set(0.0)
    xq, scale = quantize_activations(x)
    assert xq.dtype == jnp.int8
    assert scale.dtype == jnp.float32
    assert (np.abs(wide(xq) * wide(scale)[:, None] - wide(x)) <= 0.5001 * wide(scale)[:, None]).all()
    assert xq[2, 5] == 127
    assert scale[4] == 1
    assert not xq[4].any()
    alone = quantize_activations(x[:1])
    np.testing.assert_array_equal(xq[:1], alone[0])
    np.testing.assert_array_equal(scale[:1], alone[1])


def test_a_token_changes_no_other(draw):
    x, w = draw(6, 80), weight(draw, 32, 80)
    hurt = x.at[3].mul(1e6).at[3, 7].set(jnp.nan)
    others = np.arange(6) != 3
    for way in ("w8a16", "w8a8"):
        one, other = (wide(int8_dense(x, w, implementation=way)) for x in (x, hurt))
        np.testing.assert_array_equal(one[others], other[others])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("tokens", "width"), [(4, 96), (64, 1536)])
def test_a_token_with_nan_or_infinity_gives_no_number(draw, bad, dtype, tokens, width):
    """int8 cannot hold them: the scale has to, or a row that went wrong would go on with numbers that look right. (XLA's maximum
    keeps NaN in small arrays, and may lose it in large ones, on a CPU.)"""
    x, w = draw(tokens, width, dtype=dtype).at[1, 5].set(bad), weight(draw, 32, width)
    for quantised in (quantize_activations(x), rms_norm_quantize(x, jnp.ones(width), 1e-5)):
        finite = np.isfinite(w8a8(*quantised, w, out_dtype=dtype).astype("float32"))
        np.testing.assert_array_equal(finite, np.broadcast_to(np.arange(tokens)[:, None] != 1, finite.shape))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_fused_norm_is_the_norm_and_then_the_rounding(draw, dtype):
    x, residual, norm = draw(2, 3, 96, dtype=dtype), draw(2, 3, 96, dtype=dtype), draw(96)
    xq, scale = rms_norm_quantize(x, norm, 1e-5)
    right = quantize_activations(rms_norm(x, norm, 1e-5))
    np.testing.assert_array_equal(xq, right[0])
    np.testing.assert_array_equal(scale, right[1])
    xq, scale, total = residual_rms_norm_quantize(x, residual, norm, 1e-5)
    normed, expected_total = residual_rms_norm(x, residual, norm, 1e-5)
    np.testing.assert_array_equal(wide(total), wide(expected_total))
    np.testing.assert_array_equal(xq, quantize_activations(normed)[0])
    np.testing.assert_array_equal(scale, quantize_activations(normed)[1])


def test_without_a_table_weights_are_widened_and_activations_are_not_touched(draw):
    x, w = draw(5, 64), weight(draw, 32, 64)
    np.testing.assert_array_equal(int8_dense(x, w), w8a16(x, w))
    assert (int8_dense(x, w, implementation="w8a8") != w8a16(x, w)).any()


@pytest.mark.parametrize("way", ["w8a16", "w8a8"])
def test_the_table_chooses_the_way(draw, monkeypatch, way):
    x, w = draw(5, 64), weight(draw, 32, 64)
    implementation = INT8_DENSE.implementations[way]
    key = implementation.shape_key(x, w, None, None, activation=None, out_dtype=x.dtype)
    entry = {"key": {**key, "tokens": 8}, "implementation": way, "config": {}}
    monkeypatch.setattr(tuning, "entries", lambda name: (entry,) if name == "int8_dense" else ())
    np.testing.assert_array_equal(int8_dense(x, w), int8_dense(x, w, implementation=way))


def test_it_jits_with_weights_as_arguments(draw):
    x, w = draw(5, 64), weight(draw, 32, 64, packed=True)
    result = jax.jit(lambda x, w: int8_dense(x, w, upcoming=w))(x, w)
    np.testing.assert_allclose(result, int8_dense(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("int8_dense takes x", lambda x, w: int8_dense(x[:, :-1], w)),
        ("w8a16 takes x", lambda x, w: w8a16(x[0], w)),
        ("float32 with scales", lambda x, w: w8a16(x, QuantizedTensor(w.qvalue.astype("float32"), w.scale))),
        (r"scales \(31,\)", lambda x, w: w8a16(x, QuantizedTensor(w.qvalue, w.scale[:-1]))),
        (r"bias \(31,\)", lambda x, w: w8a16(x, w, jnp.ones(31))),
        (r"residual \(4, 32\)", lambda x, w: w8a16(x, w, residual=jnp.ones((4, 32)))),
        ("choose one of silu", lambda x, w: w8a16(x, w, activation="relu")),
        ("an even number", lambda x, w: w8a16(x, QuantizedTensor(w.qvalue[:-1], w.scale[:-1]), activation="silu")),
        ("exclude each other", lambda x, w: w8a16(x, w, residual=jnp.ones((5, 32)), out_dtype="float32")),
        ("bias in front", lambda x, w: w8a16(x, w, jnp.ones(32), activation="silu")),
        ("upcoming is a weight", lambda x, w: w8a16(x, w, upcoming=QuantizedTensor(w.qvalue[0], w.scale))),
        ("w8a8 takes int8", lambda x, w: w8a8(x, jnp.ones(5), w)),
        ("w8a8 takes int8", lambda x, w: w8a8(x.astype("int8"), jnp.ones(4), w)),
    ],
)
def test_what_does_not_fit_is_an_error(draw, message, call):
    with pytest.raises(ValueError, match=message):
        call(draw(5, 64), weight(draw, 32, 64))
