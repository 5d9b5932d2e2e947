"""Dense matmuls through XLA's own dot, with what follows them as operations of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_activation.xla import gated

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

# On CPU, XLA's dot reads the weights at half speed when they are the right operand and the left has only a few rows: with
# the weights on the left, 2 to 32 tokens took 0.4 to 0.8 of the time (float32, weights of 1.8, 3.5 and 113 MB); one token
# and 64 or more took the same either way.
_FEW_TOKENS = range(2, 33)

MANY_TOKENS = 512
"""From so many on a product is rounded by the matmul itself. On a GPU one in float32 that is rounded afterwards may be written,
and read by what follows, at twice the size. Of fewer tokens a matmul may add partial sums, and these are to be float32."""

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def dense(x: Array, w: Array, bias: Array | None, *, out_dtype: DTypeLike | None, upcoming: Array | None = None) -> Array:
    """See `pallas_kernels.matmul.dense`. The hint is not taken: XLA has no way to give it."""
    del upcoming
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if x.shape[0] >= MANY_TOKENS and bias is None and out_dtype == x.dtype:
        return _dot(x, w, out_dtype)
    if x.shape[0] in _FEW_TOKENS:
        out = lax.platform_dependent(x, w, cpu=_weights_left, default=_tokens_left)
    else:
        out = _tokens_left(x, w)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(out_dtype)


def residual_dense(x: Array, w: Array, residual: Array, bias: Array | None, *, upcoming: Array | None = None) -> Array:
    """See `pallas_kernels.matmul.residual_dense`; the sum is that of `residual_rms_norm`."""
    out = dense(x, w, bias, out_dtype=None, upcoming=upcoming)
    if x.shape[0] >= MANY_TOKENS and out.dtype == residual.dtype:
        return out + residual  # the same number; written so, XLA may have the matmul itself add it
    return (residual.astype(jnp.float32) + out.astype(jnp.float32)).astype(residual.dtype)


def gated_dense(x: Array, w: Array, activation: str, *, upcoming: Array | None = None) -> Array:
    """See `pallas_kernels.matmul.gated_dense`."""
    return gated(dense(x, w, None, out_dtype=None, upcoming=upcoming), activation)


def _dot(left: Array, right: Array, out_dtype: DTypeLike = jnp.float32) -> Array:
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        _CONTRACT_LAST,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=out_dtype,
    )


def _tokens_left(x: Array, w: Array) -> Array:
    return _dot(x, w)


def _weights_left(x: Array, w: Array) -> Array:
    # The barrier keeps XLA from folding the transpose back into the dot, which would swap the operands again.
    return lax.optimization_barrier(_dot(w, x)).T
