"""Writes the keys and values of new tokens into the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.kv_write import xla
from pallas_kernels.quantized_pages import QuantizedPages, check_cache

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

WRITE_KV = Operation("write_kv", xla.write_kv)


def write_kv(
    k_cache: Float[Array, "LP K page H"] | QuantizedPages,
    v_cache: Float[Array, "LP K page H"] | QuantizedPages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Int[Array, "T"],
    offsets: Int[Array, "T"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "LP K page H"] | QuantizedPages, Float[Array, "LP K page H"] | QuantizedPages]:
    """Puts token t's key and value at `cache[pages[t], :, offsets[t]]`; gives the two caches, quantised ones as they came.

    Page ids already contain the layer's offset. Padding tokens point at the null page, where several may collide: what
    ends up there is unspecified. Pages or offsets out of range are dropped.

    The write is in place if the caches are donated and nothing reads the old ones afterwards. XLA decides that from data
    dependencies alone: inside one program, whatever reads a cache must feed into the next value written to it (as the
    attention of a layer feeds the keys of the next), else the whole cache is copied.
    Raises ValueError when the shapes do not fit.
    """
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(f"write_kv: caches must have one shape [LP, K, page, H], got {k_cache.shape} and {v_cache.shape}")
    for cache in (k_cache, v_cache):
        check_cache("write_kv", cache)
    tokens = pages.shape[0]
    expected = (tokens, k_cache.shape[1], k_cache.shape[3])
    if k.shape != expected or v.shape != expected or offsets.shape != (tokens,):
        raise ValueError(f"write_kv: k, v must be {expected} and offsets {(tokens,)}, got {k.shape}, {v.shape}, {offsets.shape}")
    return WRITE_KV(k_cache, v_cache, k, v, pages, offsets, implementation=implementation)
