"""The cache write as XLA scatters, indexed by (page, offset): a flat index would overflow int32 in large caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array


def write_kv(k_cache: Array, v_cache: Array, k: Array, v: Array, pages: Array, offsets: Array) -> tuple[Array, Array]:
    """See `pallas_kernels.kv_write.write_kv`."""
    return _write(k_cache, k, pages, offsets), _write(v_cache, v, pages, offsets)


def _write(cache: Array, values: Array, pages: Array, offsets: Array) -> Array:
    at = cache.at[pages, :, offsets]
    return at.set(values.astype(cache.dtype), mode="drop", wrap_negative_indices=False)
