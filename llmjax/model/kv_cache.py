"""The paged KV cache on the device: two arrays for all layers, and where a token's keys and values lie in them.

A page holds `page_size` consecutive tokens of one row, for one layer: the page with id p of layer l is entry
`l * P + p`. Page 0 of every layer is the null page: padding is written there, and nothing read from it counts (it
may hold NaN, so a weight of 0 is not enough).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NULL_PAGE = 0


class CacheShape(Protocol):
    """What a model's config must tell for its cache to be made (`ModelConfig` does)."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class KVCache(NamedTuple):
    """Keys and values of all layers, each [L * P, K, page_size, H]. Steps take it donated and return it: the caller's
    old arrays are dead afterwards."""

    k: Float[Array, "LP K page H"]
    v: Float[Array, "LP K page H"]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.k.shape[2])


def init_cache(config: CacheShape, *, num_pages: int, page_size: int) -> KVCache:
    """A cache of zeros with `num_pages` pages a layer, the null page included, on the default device."""
    shape = (config.num_layers * num_pages, config.num_kv_heads, page_size, config.head_dim)
    dtype = jnp.dtype(config.dtype)
    zeros = jax.jit(lambda: KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
    return zeros()


PAGES_A_WIPE = 16
"""Pages that one launch of `zero_pages` takes."""


def zero_pages(cache: KVCache, pages: Int[Array, "n"], *, num_layers: int) -> KVCache:
    """The cache with these pages zeroed in every layer; page 0, to fill up a list, does no harm. `cache` is to be donated."""
    layers = jnp.arange(num_layers, dtype=pages.dtype)[:, None] * (cache.k.shape[0] // num_layers)
    entries = (layers + pages).reshape(-1)
    return KVCache(*(array.at[entries].set(0) for array in cache))


def cache_bytes_per_page(config: CacheShape, page_size: int) -> int:
    """Bytes one page takes over all layers, keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(config.dtype).itemsize
