"""The matmuls' references against float64, and what their signatures promise. `dense` alone is in test_dense_ops."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fused_norm import residual_rms_norm
from pallas_kernels.gated_activation import gated
from pallas_kernels.matmul import dense, gated_dense, residual_dense
from pallas_kernels.matmul.xla import MANY_TOKENS

ROUNDING = {"float32": 2e-7, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture
def draw():
    random = np.random.default_rng(20)

    def array(*shape, dtype="float32"):
        return jnp.asarray(random.standard_normal(shape), dtype)

    return array


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("tokens", [1, 5, 40, MANY_TOKENS])
def test_residual_dense(draw, tokens, dtype):
    x, w = draw(tokens, 96, dtype=dtype), draw(48, 96, dtype=dtype)
    residual, bias = draw(tokens, 48, dtype=dtype), draw(48, dtype=dtype)
    result = residual_dense(x, w, residual, bias)
    product = wide(x) @ wide(w).T + wide(bias)
    assert result.dtype == dtype
    # Two roundings: one of the product, one of the sum. The product's may be far larger than the sum.
    bound = ROUNDING[dtype] * (2 * np.abs(product) + np.abs(wide(residual))) + 1e-5
    assert (np.abs(wide(result) - product - wide(residual)) <= bound).all()


@pytest.mark.parametrize("tokens", [7, MANY_TOKENS])
def test_residual_dense_is_the_sum_that_the_norm_takes(draw, tokens):
    """Bit for bit: replacing one by the other changes no token."""
    x, w, residual = (draw(*shape, dtype="bfloat16") for shape in ((tokens, 96), (48, 96), (tokens, 48)))
    _, total = residual_rms_norm(dense(x, w), residual, jnp.ones(48, jnp.bfloat16), 1e-5)
    np.testing.assert_array_equal(wide(residual_dense(x, w, residual)), wide(total))


def test_a_float32_residual_stays_float32(draw):
    x, w, residual = draw(3, 64, dtype="bfloat16"), draw(32, 64, dtype="bfloat16"), draw(3, 32)
    result = residual_dense(x, w, residual)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(wide(result), wide(residual + dense(x, w).astype(jnp.float32)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_dense_is_the_two_operations(draw, activation):
    x, w = draw(5, 96, dtype="bfloat16"), draw(64, 96, dtype="bfloat16")
    result = gated_dense(x, w, activation)
    np.testing.assert_array_equal(wide(result), wide(gated(dense(x, w), activation)))


def test_gated_dense_against_float64(draw):
    x, w = draw(5, 96), draw(64, 96)
    gate, up = np.split(wide(x) @ wide(w).T, 2, axis=-1)
    np.testing.assert_allclose(wide(gated_dense(x, w)), gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


def test_the_hint_is_no_operand(draw):
    """Of any size, and full of NaN: nothing of it reaches the result."""
    x, w, poison = draw(5, 64), draw(32, 64), jnp.full((7, 3), jnp.nan)
    np.testing.assert_array_equal(dense(x, w, upcoming=poison), dense(x, w))
    np.testing.assert_array_equal(gated_dense(x, w, upcoming=poison), gated_dense(x, w))
    residual = draw(5, 32)
    np.testing.assert_array_equal(residual_dense(x, w, residual, upcoming=poison), residual_dense(x, w, residual))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("residual_dense takes x", lambda x, w: residual_dense(x, w[:, :-1], jnp.ones((5, 32)))),
        ("does not fit x", lambda x, w: residual_dense(x, w, jnp.ones((4, 32)))),
        ("bias", lambda x, w: residual_dense(x, w, jnp.ones((5, 32)), jnp.ones(31))),
        ("gated_dense takes x", lambda x, w: gated_dense(x[0], w)),
        ("choose one of silu", lambda x, w: gated_dense(x, w, "relu")),
        ("an even number", lambda x, w: gated_dense(x, w[:-1])),
        ("upcoming is a weight", lambda x, w: dense(x, w, upcoming=jnp.ones(3))),
    ],
)
def test_what_does_not_fit_is_an_error(draw, message, call):
    with pytest.raises(ValueError, match=message):
        call(draw(5, 64), draw(32, 64))
