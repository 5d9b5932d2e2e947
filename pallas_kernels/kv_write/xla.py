"""The cache write as XLA scatters, indexed by (page, offset): a flat index would overflow int32 in large caches."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pallas_kernels.quantized_pages import QuantizedPages, quantize_heads

if TYPE_CHECKING:
    from jax import Array


def write_kv[Cache: (Array, QuantizedPages)](
    k_cache: Cache, v_cache: Cache, k: Array, v: Array, pages: Array, offsets: Array
) -> tuple[Cache, Cache]:
    """See `pallas_kernels.kv_write.write_kv`."""
    return _write(k_cache, k, pages, offsets), _write(v_cache, v, pages, offsets)


def _write[Cache: (Array, QuantizedPages)](cache: Cache, values: Array, pages: Array, offsets: Array) -> Cache:
    if not isinstance(cache, QuantizedPages):
        return _put(cache, values, pages, offsets)
    qvalue, scale = quantize_heads(values, cache.channels_of(pages))
    return dataclasses.replace(
        cache, qvalue=_put(cache.qvalue, qvalue, pages, offsets), scale=_put(cache.scale, scale, pages, offsets)
    )


def _put(cache: Array, values: Array, pages: Array, offsets: Array) -> Array:
    at = cache.at[pages, :, offsets]
    return at.set(values.astype(cache.dtype), mode="drop", wrap_negative_indices=False)
