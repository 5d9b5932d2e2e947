"""Dense matmul through XLA's own dot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

# On CPU, XLA's dot reads the weights at half speed when they are the right operand and the left has only a few rows: with
# the weights on the left, 2 to 32 tokens took 0.4 to 0.8 of the time (float32, weights of 1.8, 3.5 and 113 MB); one token
# and 64 or more took the same either way.
_FEW_TOKENS = range(2, 33)

_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def dense(x: Array, w: Array, bias: Array | None, *, out_dtype: DTypeLike | None) -> Array:
    """See `pallas_kernels.matmul.dense`."""
    if x.shape[0] in _FEW_TOKENS:
        out = lax.platform_dependent(x, w, cpu=_weights_left, default=_tokens_left)
    else:
        out = _tokens_left(x, w)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype if out_dtype is None else out_dtype)


def _dot(left: Array, right: Array) -> Array:
    exact = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        _CONTRACT_LAST,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _tokens_left(x: Array, w: Array) -> Array:
    return _dot(x, w)


def _weights_left(x: Array, w: Array) -> Array:
    # The barrier keeps XLA from folding the transpose back into the dot, which would swap the operands again.
    return lax.optimization_barrier(_dot(w, x)).T
