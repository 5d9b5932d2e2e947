"""The Mosaic GPU kernel that norms and quantises: a CTA of 128 threads a token, whose row stays in their registers.

Owns the kernel. Must not know which configuration suits a shape.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized import LARGEST

if TYPE_CHECKING:
    from jax import Array


@functools.partial(jax.jit, static_argnames=("eps", "vector"))
def norm_quantize(x: Array, residual: Array | None, weight: Array, *, eps: float, vector: int) -> tuple[Array, ...]:
    """bfloat16 x [T, D], added to the residual stream if there is one, normed, rounded to bfloat16, and that as int8 [T, D] with
    a float32 scale [T]; and the new residual stream [T, D]. D is a multiple of 128 * vector."""
    tokens, hidden = x.shape
    out_type = [jax.ShapeDtypeStruct((tokens, hidden), jnp.int8), jax.ShapeDtypeStruct((tokens,), jnp.float32)]
    if residual is not None:
        out_type.append(jax.ShapeDtypeStruct((tokens, hidden), residual.dtype))
    operands = [x, weight] if residual is None else [x, weight, residual]

    def body(*refs: Any) -> None:
        x_ref, weight_ref, *residual_ref = refs[: len(operands)]
        qvalue_ref, scale_ref, *total_ref = refs[len(operands) :]
        token = lax.axis_index("token")

        def load(ref: Any) -> Array:
            return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED((hidden,), vec_size=vector), optimized=False)

        row = load(x_ref.at[token])
        factors = load(weight_ref)
        wide = row.astype(jnp.float32)
        if total_ref:
            total = (load(residual_ref[0].at[token]).astype(jnp.float32) + wide).astype(jnp.bfloat16)
            total_ref[0][token] = total
            wide = total.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.sum(wide * wide) * (1.0 / hidden) + eps) * factors
        normed = wide.astype(jnp.bfloat16).astype(jnp.float32)
        scale = jnp.max(jnp.abs(normed)) * jnp.float32(1 / LARGEST)
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.float32(1), scale)  # NaN stays, for int8 cannot say it
        qvalue_ref[token] = jnp.round(normed / scale).astype(jnp.int32).astype(jnp.int8)
        scale_ref[token] = scale

    return tuple(
        plgpu.kernel(body, out_type=out_type, grid=(tokens,), grid_names=("token",), kernel_name="norm_quantize")(*operands)
    )
