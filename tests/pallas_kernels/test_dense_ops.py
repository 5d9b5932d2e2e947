"""Norms, gated activations and matmuls against float64, and the shapes that their signatures promise."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Float, Int, Int8, TypeCheckError, jaxtyped

from pallas_kernels.fused_norm import residual_rms_norm, residual_rms_norm_quantize, rms_norm, rms_norm_quantize
from pallas_kernels.gated_activation import gated
from pallas_kernels.int8_matmul import int8_dense, quantize_activations, w8a8, w8a16
from pallas_kernels.kv_write import write_kv
from pallas_kernels.matmul import dense
from pallas_kernels.matmul.xla import MANY_TOKENS
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import RAGGED_DECODE, RAGGED_EXTEND, make_inputs
from pallas_kernels.quantized import dequantize, quantize
from pallas_kernels.rope_kv_write import rope_kv_write

ROUNDING = {"float32": 2e-7, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def draw(seed, *shape, dtype="float32", scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rms_norm(dtype):
    x, weight = draw(0, 5, 48, dtype=dtype), draw(1, 48, dtype=dtype)
    result = rms_norm(x, weight, 1e-5)
    right = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5) * wide(weight)
    assert result.dtype == dtype
    np.testing.assert_allclose(wide(result), right, rtol=4 * ROUNDING[dtype])


def test_rms_norm_squares_in_float32():
    """Squares of 300 overflow float16 and those of 1e-4 vanish in it."""
    for size in (300.0, 1e-4):
        x = jnp.full((1, 64), size, jnp.float16)
        np.testing.assert_allclose(wide(rms_norm(x, jnp.ones(64, jnp.float16), 0.0)), 1.0, rtol=1e-3)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_residual_rms_norm(dtype):
    x, residual, weight = draw(0, 5, 48, dtype=dtype), draw(1, 5, 48, dtype=dtype), draw(2, 48, dtype=dtype)
    normed, total = residual_rms_norm(x, residual, weight, 1e-5)
    assert normed.dtype == total.dtype == dtype
    np.testing.assert_allclose(wide(total), wide(x) + wide(residual), rtol=ROUNDING[dtype], atol=1e-7)
    np.testing.assert_array_equal(wide(normed), wide(rms_norm(total, weight, 1e-5)))


def test_residual_keeps_its_own_dtype():
    normed, total = residual_rms_norm(draw(0, 2, 8, dtype="bfloat16"), draw(1, 2, 8), draw(2, 8, dtype="bfloat16"), 1e-5)
    assert (normed.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated(activation, dtype):
    gate_up = draw(0, 3, 4, 30, dtype=dtype, scale=3.0)
    gate, up = np.split(wide(gate_up), 2, axis=-1)
    erf = np.vectorize(math.erf)
    right = (
        up
        * {
            "silu": gate / (1 + np.exp(-gate)),
            "gelu": gate * (1 + erf(gate / np.sqrt(2))) / 2,
            "gelu_tanh": gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2,
        }[activation]
    )
    result = gated(gate_up, activation)
    assert result.dtype == dtype
    np.testing.assert_allclose(wide(result), right, rtol=8 * ROUNDING[dtype], atol=1e-5)  # 1 + tanh cancels


def test_gated_refuses_other_activations_and_odd_widths():
    with pytest.raises(ValueError, match="activation 'relu'; choose one of silu, gelu, gelu_tanh"):
        gated(jnp.zeros((2, 4)), "relu")
    with pytest.raises(ValueError, match="must be even, got 5"):
        gated(jnp.zeros((2, 5)))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("tokens", [1, 2, 32, 33, MANY_TOKENS - 1, MANY_TOKENS])
def test_dense(tokens, dtype):
    x, w, bias = draw(0, tokens, 40, dtype=dtype), draw(1, 24, 40, dtype=dtype), draw(2, 24, dtype=dtype)
    right = wide(x) @ wide(w).T
    assert dense(x, w).dtype == dtype
    np.testing.assert_allclose(wide(dense(x, w, bias, out_dtype="float32")), right + wide(bias), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(wide(dense(x, w)), right, rtol=4 * ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_product_of_many_tokens_is_nowhere_in_float32(dtype):
    """Unless it is asked for, or a bias has to be added before it is rounded. A sum of 16-bit terms would lose half of them."""
    x, w, bias = draw(0, MANY_TOKENS, 40, dtype=dtype), draw(1, 24, 40, dtype=dtype), draw(2, 24, dtype=dtype)
    for arguments, out_dtype, inside in (((x, w), None, dtype), ((x, w), "float32", "float32"), ((x, w, bias), None, "float32")):
        text = str(jax.make_jaxpr(functools.partial(dense, out_dtype=out_dtype))(*arguments))
        (line,) = [line for line in text.splitlines() if "preferred_element_type" in line]
        assert f"preferred_element_type={inside}" in line
    ones = jnp.ones((MANY_TOKENS, 1024), dtype)
    np.testing.assert_array_equal(wide(dense(ones, ones[:2])), 1024.0)


def test_dense_accumulates_in_float32():
    x = jnp.ones((3, 4096), jnp.float16)
    np.testing.assert_array_equal(wide(dense(x, jnp.full((2, 4096), 30.0, jnp.float16), out_dtype="float32")), 4096 * 30.0)


def test_dense_gives_a_token_the_same_in_any_bucket():
    """To rounding: few and many tokens take different ways through XLA on CPU."""
    x, w = draw(0, 64, 40), draw(1, 24, 40)
    whole = wide(dense(x, w))
    for tokens in (1, 5, 32, 40):
        np.testing.assert_allclose(wide(dense(x[:tokens], w)), whole[:tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("x", "w", "bias"), [((2, 3), (4, 5), None), ((3,), (4, 3), None), ((2, 3), (4, 3), (3,))])
def test_dense_refuses_shapes_that_do_not_fit(x, w, bias):
    with pytest.raises(ValueError, match="dense"):
        dense(jnp.zeros(x), jnp.zeros(w), None if bias is None else jnp.zeros(bias))


X, ROW, CACHE, SLOTS = jnp.zeros((2, 2)), jnp.zeros(2), jnp.zeros((2, 1, 4, 2)), jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize(
    "call",
    [
        lambda name: rms_norm(X, ROW, 1e-5, implementation=name),
        lambda name: residual_rms_norm(X, X, ROW, 1e-5, implementation=name),
        lambda name: gated(X, implementation=name),
        lambda name: dense(X, X, implementation=name),
        lambda name: write_kv(CACHE, CACHE, CACHE[:, :, 0], CACHE[:, :, 0], SLOTS, SLOTS, implementation=name),
        lambda name: rope_kv_write(
            jnp.zeros((2, 6)), CACHE, CACHE, X[:, :1], X[:, :1], SLOTS, SLOTS, page_offset=0, eps=1e-5, implementation=name
        ),
        lambda name: paged_attention(
            CACHE[:, :, 0],
            CACHE,
            CACHE,
            X.astype(int),
            SLOTS,
            jnp.arange(3),
            page_offset=0,
            scale=1,
            decode=True,
            implementation=name,
        ),
    ],
    ids=["rms_norm", "residual_rms_norm", "gated", "dense", "write_kv", "rope_kv_write", "paged_attention"],
)
def test_every_operation_takes_an_implementation_by_name(call):
    call("xla")
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        call("cuda")


def checked(function):
    """The function with its annotated shapes checked at every call. They are strings that name types which only a type
    checker imports, so they are resolved here."""
    namespace = {**function.__globals__, "Array": jax.Array, "Float": Float, "Int": Int, "Int8": Int8}
    namespace |= {"DTypeLike": object, "Activation": str}
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {name: eval(hint, namespace) for name, hint in function.__annotations__.items()}
    return jaxtyped(copy, typechecker=beartype)


def test_signatures_tell_the_truth_about_shapes():
    x, weight = draw(0, 4, 6), draw(1, 6)
    checked(rms_norm)(x, weight, 1e-5)
    checked(residual_rms_norm)(x, x, weight, 1e-5)
    checked(gated)(x, "silu")
    checked(dense)(x, draw(2, 5, 6), draw(3, 5), out_dtype="float32")
    checked(write_kv)(CACHE, CACHE, CACHE[:, :, 0], CACHE[:, :, 0], SLOTS, SLOTS)
    w = checked(quantize)(draw(2, 5, 6))
    checked(dequantize)(w)
    checked(w8a8)(*checked(quantize_activations)(x), w, draw(3, 5), residual=draw(4, 4, 5))
    checked(w8a16)(x, w, draw(3, 5), out_dtype="bfloat16")
    checked(int8_dense)(x, checked(quantize)(draw(2, 8, 6), axis=None), activation="silu")
    checked(rms_norm_quantize)(x, weight, 1e-5)
    checked(residual_rms_norm_quantize)(x, x, weight, 1e-5)
    rotated = functools.partial(checked(rope_kv_write), page_offset=jnp.int32(0), eps=1e-5)
    rotated(jnp.zeros((3, 10)), CACHE, CACHE, X[:, :1], X[:, :1], SLOTS, SLOTS, ROW, ROW)
    for case in (RAGGED_DECODE, RAGGED_EXTEND):
        inputs, offset = make_inputs(case)
        attention = functools.partial(checked(paged_attention), page_offset=offset, scale=1.0, decode=case.decode)
        jax.eval_shape(lambda *arrays, attention=attention: attention(*arrays, window=arrays[4][0]), *inputs)
    with pytest.raises(TypeCheckError):
        checked(rms_norm)(x, draw(1, 5), 1e-5)
