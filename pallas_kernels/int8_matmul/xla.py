"""INT8 matmuls through XLA's own dot, with what follows them as operations of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_activation.xla import gated
from pallas_kernels.matmul import xla as matmul
from pallas_kernels.quantized import QuantizedTensor, reorder, unpack

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def w8a16(
    x: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
) -> Array:
    """See `pallas_kernels.int8_matmul.w8a16`. The hint is not taken: XLA has no way to give it."""
    del upcoming
    # The weights are exact in x's dtype, and the sums float32: scaling them is the only rounding before the epilogue.
    sums = matmul.dense(x, unpack(w).qvalue.astype(x.dtype), None, out_dtype=jnp.float32)
    return epilogue(sums * w.channel_scale, bias, residual, activation=activation, out_dtype=out_dtype)


def w8a8(
    xq: Array,
    x_scale: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
) -> Array:
    """See `pallas_kernels.int8_matmul.w8a8`. The hint is not taken."""
    del upcoming
    if w.packed:
        xq = reorder(xq)
    sums = lax.dot_general(xq, w.qvalue, _CONTRACT_LAST, preferred_element_type=jnp.int32)
    scaled = sums.astype(jnp.float32) * x_scale[:, None] * w.channel_scale
    return epilogue(scaled, bias, residual, activation=activation, out_dtype=out_dtype)


def epilogue(sums: Array, bias: Array | None, residual: Array | None, *, activation: str | None, out_dtype: DTypeLike) -> Array:
    """What follows float32 sums, rounded between one operation and the next as separate operations do."""
    if bias is not None:
        sums = sums + bias.astype(jnp.float32)
    out = sums.astype(out_dtype)
    if activation is not None:
        return gated(out, activation)
    if residual is not None:
        return (residual.astype(jnp.float32) + out.astype(jnp.float32)).astype(residual.dtype)
    return out
