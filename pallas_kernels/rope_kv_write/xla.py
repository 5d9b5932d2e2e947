"""Norms, rotation and cache write as the operations in a row, which XLA fuses as it can; and the rotation alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.kv_write import write_kv

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


def rope_kv_write(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    offsets: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    *,
    page_offset: int | Array,
    eps: float,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rope_kv_write.rope_kv_write`."""
    (tokens,), (_, kv_heads, _, head_dim) = pages.shape, k_cache.shape
    kv_size = kv_heads * head_dim
    q_size = qkv.shape[1] - 2 * kv_size
    parts = jnp.split(qkv[:tokens], [q_size, q_size + kv_size], axis=-1)
    q, k, v = (part.reshape(tokens, -1, head_dim) for part in parts)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    return q, *write_kv(k_cache, v_cache, k, v, pages + page_offset, offsets)


def apply_rope(x: Float[Array, "T heads H"], cos: Float[Array, "T H2"], sin: Float[Array, "T H2"]) -> Float[Array, "T heads H"]:
    """Rotate each head's pairs (i, i + H/2) ("rotate half", as Hugging Face lays out weights). float32 inside, dtype of x out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
