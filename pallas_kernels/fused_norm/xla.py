"""RMSNorm in plain JAX; XLA fuses it into the operations around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import quantize_tokens

if TYPE_CHECKING:
    from jax import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """See `pallas_kernels.fused_norm.rms_norm`."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def residual_rms_norm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See `pallas_kernels.fused_norm.residual_rms_norm`."""
    total = (residual.astype(jnp.float32) + x.astype(jnp.float32)).astype(residual.dtype)
    return rms_norm(total, weight, eps).astype(x.dtype), total


def rms_norm_quantize(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See `pallas_kernels.fused_norm.rms_norm_quantize`."""
    return quantize_tokens(rms_norm(x, weight, eps))


def residual_rms_norm_quantize(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.fused_norm.residual_rms_norm_quantize`."""
    normed, total = residual_rms_norm(x, residual, weight, eps)
    return *quantize_tokens(normed), total
