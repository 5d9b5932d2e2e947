"""Steps of an online softmax on tiles in registers, as the Mosaic kernels of attention trace them.

The softmax is that of Milakov and Gimelshein (2018), in base 2. Must not know where keys lie or which of them are seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_sizes import LOG2E

if TYPE_CHECKING:
    from jax import Array

NOTHING = -1e30
"""The running maximum before anything was seen: finite, so that a masked score (-inf) has weight 0 and never gives NaN."""

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""One value a row of a tile."""


def across(x: Array, shape: tuple[int, int]) -> Array:
    """One value a row, repeated over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def capped(scores: Array, scale: float, cap: float) -> Array:
    """cap * tanh(scores * scale / cap), in units of log 2."""
    # tanh(x) as 1 - 2 / (exp(2 x) + 1): the hardware's own tanh is off by up to 5e-4.
    power = jnp.exp2(scores * (2 * LOG2E * scale / cap))
    return (LOG2E * cap) - (2 * LOG2E * cap) / (power + 1.0)


def add_values(acc: Array, weights: Array, values: Any, buffer: Any) -> Array:
    """acc + weights @ values, `values` in shared memory; float32 [64, H].

    buffer: None on a device. The interpreter multiplies only what lies in shared memory: there a place for the weights.
    """
    if buffer is None:
        return pl.run_state(lambda result: plgpu.wgmma(result, weights, values))(plgpu.ACC.init(acc))
    buffer[...] = weights
    plgpu.commit_smem()

    def product(result: Any) -> Array:
        plgpu.wgmma(result, buffer, values)
        return result[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
