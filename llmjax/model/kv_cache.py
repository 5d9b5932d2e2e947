"""The paged KV cache on the device: two arrays for all layers, and where a token's keys and values lie in them.

A page holds `page_size` consecutive tokens of one row, for one layer: the page with id p of layer l is entry
`l * P + p`. Page 0 of every layer is the null page: padding is written there, and nothing read from it counts (it
may hold NaN, so a weight of 0 is not enough).

In int8 each of the two is a `QuantizedPages`: a token's head has a scale of its own, and a layer's keys have factors for their
channels. Models need not know: `rope_kv_write`, `write_kv` and `paged_attention` take either.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_pages import QuantizedPages

NULL_PAGE = 0
INT8 = "int8"
SCALE_BYTES = 4  # a float32 for each token's head of int8 pages


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

    k: Float[Array, "LP K page H"] | QuantizedPages
    v: Float[Array, "LP K page H"] | QuantizedPages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.k.shape[2])


def init_cache(config: CacheShape, *, num_pages: int, page_size: int, dtype: str | None = None) -> KVCache:
    """A cache of zeros with `num_pages` pages a layer, the null page included, on the default device.

    `dtype` None takes the model's; "int8" makes quantised pages, the factors of the keys' channels all one (see
    `with_key_channels`).
    """
    shape = (config.num_layers * num_pages, config.num_kv_heads, page_size, config.head_dim)

    def quantized(channels: Float[Array, "L K H"] | None) -> QuantizedPages:
        return QuantizedPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:3], jnp.float32), channels)

    def zeros() -> KVCache:
        if dtype == INT8:
            ones = jnp.ones((config.num_layers, config.num_kv_heads, config.head_dim), jnp.float32)
            return KVCache(quantized(ones), quantized(None))
        of = jnp.dtype(config.dtype if dtype is None else dtype)
        return KVCache(jnp.zeros(shape, of), jnp.zeros(shape, of))

    return jax.jit(zeros)()


def with_key_channels(cache: KVCache, channels: Float[Array, "L K H"]) -> KVCache:
    """An int8 cache, in which nothing was written yet, with other factors for the channels of its keys."""
    assert isinstance(cache.k, QuantizedPages)
    return cache._replace(k=dataclasses.replace(cache.k, channels=channels))


def page_arrays(caches: Any) -> list[Array]:
    """The arrays of a cache, or of a tree of several, of which each page has its part."""
    leaves = jax.tree.leaves(caches, is_leaf=lambda leaf: isinstance(leaf, QuantizedPages))
    parts = [(leaf.qvalue, leaf.scale) if isinstance(leaf, QuantizedPages) else (leaf,) for leaf in leaves]
    return [array for arrays in parts for array in arrays]


PAGES_A_WIPE = 16
"""Pages that one launch of `zero_pages` takes."""


def zero_pages(cache: KVCache, pages: Int[Array, "n"], *, num_layers: int) -> KVCache:
    """The cache with these pages zeroed in every layer; page 0, to fill up a list, does no harm. `cache` is to be donated."""
    layers = jnp.arange(num_layers, dtype=pages.dtype)[:, None] * (cache.k.shape[0] // num_layers)
    entries = (layers + pages).reshape(-1)

    def zeroed(pages: Array | QuantizedPages) -> Array | QuantizedPages:
        if isinstance(pages, QuantizedPages):
            return dataclasses.replace(pages, qvalue=pages.qvalue.at[entries].set(0), scale=pages.scale.at[entries].set(0))
        return pages.at[entries].set(0)

    return KVCache(*map(zeroed, cache))


def cache_bytes_per_page(config: CacheShape, page_size: int, dtype: str | None = None) -> int:
    """Bytes one page takes over all layers, keys and values; `dtype` as in `init_cache`."""
    head = config.head_dim + SCALE_BYTES if dtype == INT8 else config.head_dim * jnp.dtype(dtype or config.dtype).itemsize
    return 2 * config.num_layers * config.num_kv_heads * page_size * head


def bytes_beside_pages(config: CacheShape, dtype: str | None = None) -> int:
    """Bytes of a cache that do not grow with its pages: the factors of the channels of int8 keys."""
    return config.num_layers * config.num_kv_heads * config.head_dim * 4 if dtype == INT8 else 0
