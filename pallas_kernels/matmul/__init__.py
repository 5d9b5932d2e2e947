"""Dense matmuls against weights stored as [out, in]: both operands contract over their last axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.matmul import xla

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float

DENSE = Operation("dense", xla.dense)


def dense(
    x: Float[Array, "T in"],
    w: Float[Array, "out in"],
    bias: Float[Array, "out"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "T out"]:
    """x @ w.T + bias, accumulated in float32 whatever the dtypes, returned as `out_dtype` (default: x's).

    The bias is added before rounding to `out_dtype`. float32 operands are multiplied as float32 on every platform (no
    TF32). Raises ValueError when the shapes do not fit.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"dense takes x [T, in] and w [out, in], got {x.shape} and {w.shape}")
    if bias is not None and bias.shape != (w.shape[0],):
        raise ValueError(f"dense: bias {bias.shape} does not fit w {w.shape}")
    return DENSE(x, w, bias, out_dtype=out_dtype, implementation=implementation)
