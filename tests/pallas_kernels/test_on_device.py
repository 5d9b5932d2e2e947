"""What only a card can show: kernels whose CTAs run at once, in programs as the engine makes them. Run with `-m gpu`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.fused_layer import MEETINGS, LayerParams, NextParams, fused_layer

pytestmark = pytest.mark.gpu

LAYERS, STEPS, HIDDEN, MLP, QKV = 3, 2, 1024, 2816, 1536


def parameters(random):
    def normal(*shape):
        return jnp.asarray(random.standard_normal((LAYERS, *shape)) * shape[-1] ** -0.5, jnp.bfloat16)

    norm = jnp.asarray(random.uniform(0.5, 1.5, (LAYERS, HIDDEN)), jnp.float32)
    params = LayerParams(normal(HIDDEN, HIDDEN), None, norm, normal(2 * MLP, HIDDEN), None, normal(HIDDEN, MLP), None)
    return params, NextParams(norm, normal(QKV, HIDDEN), normal(QKV))


@functools.partial(jax.jit, static_argnames="implementation")
def steps(x, residual, params, following, *, implementation):
    """Two steps of three layers, the heads' outputs taken from q, k and v; fresh meetings a step."""
    tokens = len(x)

    def step(carry, _):
        x, residual = carry
        meetings = jnp.zeros((LAYERS * MEETINGS,), jnp.int32)
        for index in range(LAYERS):
            one, following_one = jax.tree.map(lambda a, index=index: a[index], (params, following))
            residual, qkv, meetings = fused_layer(
                x, residual, meetings, jnp.int32(index), one, following_one,
                activation="silu", eps=1e-5, implementation=implementation,
            )  # fmt: skip
            x = qkv[:tokens, :HIDDEN]
        rows = jnp.pad(residual[:tokens], ((0, 64 - tokens), (0, 0)), constant_values=jnp.nan)
        return (x, rows), None

    return jax.tree.map(lambda a: a[:tokens], lax.scan(step, (x, residual), None, length=STEPS)[0])


@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64])
def test_layers_in_a_row_and_again_in_a_loop(tokens):
    random = np.random.default_rng()
    params, following = parameters(random)
    x = jnp.asarray(random.standard_normal((tokens, HIDDEN)), jnp.bfloat16)
    residual = jnp.full((64, HIDDEN), jnp.nan, jnp.bfloat16).at[:tokens].set(random.standard_normal((tokens, HIDDEN)))
    got = steps(x, residual, params, following, implementation="mosaic")
    widened = jax.tree.map(lambda a: a.astype(jnp.float32), (x, residual, params, following))
    expected = steps(*widened, implementation="xla")
    for one, other in zip(got, expected, strict=True):
        one = one.astype(jnp.float32)
        assert jnp.isfinite(one).all()
        assert jnp.linalg.norm(one - other) < 0.05 * jnp.linalg.norm(other)
    for _ in range(100):  # no result depends on who arrives first
        again = steps(x, residual, params, following, implementation="mosaic")
        assert all((a == b).all() for a, b in zip(got, again, strict=True))
