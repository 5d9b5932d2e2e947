"""From a layer's joint projection to its attention: norms and rotates queries and keys, writes keys and values to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.quantized_pages import QuantizedPages, check_cache
from pallas_kernels.rope_kv_write import mosaic, xla

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

ROPE_KV_WRITE = Operation("rope_kv_write", xla.rope_kv_write)
ROPE_KV_WRITE.register(
    "mosaic",
    mosaic.rope_kv_write,
    shape_key=mosaic.shape_key,
    config_type=mosaic.Config,
    candidates=mosaic.candidates,
    untuned=True,
)

apply_rope = xla.apply_rope


def rope_kv_write(
    qkv: Float[Array, "R Q"],
    k_cache: Float[Array, "LP K page H"] | QuantizedPages,
    v_cache: Float[Array, "LP K page H"] | QuantizedPages,
    cos: Float[Array, "T H2"],
    sin: Float[Array, "T H2"],
    pages: Int[Array, "T"],
    offsets: Int[Array, "T"],
    q_norm: Float[Array, "H"] | None = None,
    k_norm: Float[Array, "H"] | None = None,
    *,
    page_offset: int | Int[Array, ""],
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "LP K page H"] | QuantizedPages, Float[Array, "LP K page H"] | QuantizedPages]:
    """Queries ready for attention, and the caches with the keys and values of T new tokens.

    A row of `qkv` is N query heads, K key heads and K value heads of H, side by side (Q = (N + 2 K) H). Queries and keys are
    normed if there are norms (RMSNorm over each head), then rotated. Token t's key and value go to
    `cache[pages[t] + page_offset, :, offsets[t]]`.

    Args:
        qkv: at least T rows, of which the first T are read.
        cos, sin: float32 tables for `apply_rope`; H2 = H / 2.
        pages, offsets: where a token lies. Padding tokens point at the null page, where several may collide: what ends up there
            is unspecified. What is out of range is dropped.
        q_norm, k_norm: float32 weights; both or none.
        page_offset: added to every page id; layer * P when one array holds the pages of all layers. May be traced.
        eps: of the norms.
        implementation: name of an implementation, None to choose.

    Computed in float32; a normed head is rounded to qkv's dtype before it is rotated, and what is rotated again after. Queries
    have qkv's dtype, keys and values the caches': what goes into quantised pages is rounded to qkv's dtype first.

    The write is in place under the conditions of `pallas_kernels.kv_write.write_kv`: the caches are donated, and what reads them
    feeds into the next value written to them.
    Raises ValueError when the shapes do not fit each other, or when one norm is given without the other.
    """
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(f"rope_kv_write: caches must have one shape [LP, K, page, H], got {k_cache.shape} and {v_cache.shape}")
    for cache in (k_cache, v_cache):
        check_cache("rope_kv_write", cache)
    (tokens,), (_, kv_heads, _, head_dim) = pages.shape, k_cache.shape
    if qkv.ndim != 2 or qkv.shape[0] < tokens or qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"rope_kv_write: qkv must be [T or more, (N + 2 K) H] with T {tokens}, K {kv_heads}, H {head_dim}, got {qkv.shape}"
        )
    half = (tokens, head_dim // 2)
    if head_dim % 2 or cos.shape != half or sin.shape != half or offsets.shape != (tokens,):
        raise ValueError(
            f"rope_kv_write: cos, sin must be [T, H / 2] and offsets [T], with T {tokens} and H {head_dim}, "
            f"got {cos.shape}, {sin.shape}, {offsets.shape}"
        )
    if (q_norm is None) != (k_norm is None) or any(norm is not None and norm.shape != (head_dim,) for norm in (q_norm, k_norm)):
        shapes = " and ".join("none" if norm is None else str(norm.shape) for norm in (q_norm, k_norm))
        raise ValueError(f"rope_kv_write: q_norm and k_norm must both be [H] with H {head_dim}, or none, got {shapes}")
    return ROPE_KV_WRITE(
        qkv,
        k_cache,
        v_cache,
        cos,
        sin,
        pages,
        offsets,
        q_norm,
        k_norm,
        page_offset=page_offset,
        eps=eps,
        implementation=implementation,
    )
