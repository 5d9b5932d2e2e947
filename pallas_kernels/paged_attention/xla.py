"""Paged attention in plain JAX: the reference, the fallback, and what runs on CPU.

The packed queries are cut into tiles of one row each. Tiles are worked on in groups; for each group a loop walks over the
keys in chunks and keeps an online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022), so that neither
a full score matrix nor a whole gathered context ever exists. The bounds of both loops are data: the number of tiles there
really are, and from the start of the group's earliest window to the end of its longest context.

Chunks start at multiples of the chunk size, counted from the sequence's beginning, and a chunk of which a query sees
nothing leaves its sums exactly as they were. So a result does not depend on the other rows, nor on how a prompt was cut
(but for the last bit where a token comes alone: its matmuls have another shape).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_pages import QuantizedPages

if TYPE_CHECKING:
    from jax import Array


class Tiling(NamedTuple):
    """Sizes of the work units of one platform.

    Attributes:
        chunk: keys an iteration of the inner loop (rounded down to whole pages, at least one page).
        singles: rows with one query that are worked on together.
        tile: queries a tile for rows with more than one.
        tiles: such tiles that are worked on together.
        keys_left: for tiles of one query, whether the keys are the left operand of the score matmul.
    """

    chunk: int
    singles: int
    tile: int
    tiles: int
    keys_left: bool


# On CPU small groups, because a group pays for its longest member, and the few rows of a single query on the right, which
# is a tenth faster there; on GPU few and large kernels.
CPU = Tiling(chunk=128, singles=4, tile=64, tiles=1, keys_left=True)
GPU = Tiling(chunk=256, singles=256, tile=64, tiles=64, keys_left=False)

_FAR = jnp.iinfo(jnp.int32).max // 2  # beyond any position, and safe to add to one


@functools.partial(jax.jit, static_argnames=("scale", "soft_cap", "decode", "max_queries"))
def paged_attention(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    *,
    page_offset: int | Array,
    scale: float,
    window: int | Array,
    soft_cap: float,
    decode: bool,
    max_queries: int = 0,
    alibi_slopes: Array | None = None,
    relative_bias: Array | None = None,
) -> Array:
    """See `pallas_kernels.paged_attention.paged_attention`. Jitted so that a model lowers it once, not once a layer."""

    def on(tiling: Tiling) -> functools.partial[Array]:
        if max_queries:
            tiling = tiling._replace(tile=min(tiling.tile, max_queries))
        return functools.partial(_attention, scale=scale, soft_cap=soft_cap, single=decode or max_queries == 1, tiling=tiling)

    window = jnp.asarray(window, jnp.int32)
    reach = jnp.where(window > 0, window, _FAR)
    biases = Biases(alibi_slopes, relative_bias)
    operands = (q, k_cache, v_cache, page_table, seq_lens, query_starts, jnp.asarray(page_offset, jnp.int32), reach, biases)
    return lax.platform_dependent(*operands, cpu=on(CPU), default=on(GPU))


class Biases(NamedTuple):
    """What is added to the scores of a head by the distance of query and key.

    Attributes:
        slopes: [N], taken times the distance from the score; or None.
        table: [N, W], added by distance, the last for all beyond; or None.
    """

    slopes: Array | None
    table: Array | None


class _Tiles(NamedTuple):
    """Work units, one entry a tile [n]. Depends on the batch alone, so that XLA computes it once for all layers.

    Attributes:
        index: [n, tile] where in q each query is; T where there is none.
        last: [n, tile] the position of each query, the last key it sees; -1 where there is none.
        start, end: [n] the keys that at least one query sees; start is beyond end where there is no query.
        row: [n] the row whose pages hold the keys.
    """

    index: Array
    last: Array
    start: Array
    end: Array
    row: Array


def _attention(
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
    page_table: Array,
    seq_lens: Array,
    query_starts: Array,
    page_offset: Array,
    reach: Array,
    biases: Biases,
    *,
    scale: float,
    soft_cap: float,
    single: bool,
    tiling: Tiling,
) -> Array:
    tokens, rows = q.shape[0], page_table.shape[0]
    chunk_pages = max(1, tiling.chunk // k_cache.shape[2])
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % chunk_pages))) + page_offset
    counts = jnp.where(seq_lens > 0, jnp.diff(query_starts), 0)
    channels = k_cache.channels_of(page_offset) if isinstance(k_cache, QuantizedPages) else None
    if channels is not None:
        q = (q.astype(jnp.float32) * jnp.repeat(channels, q.shape[1] // channels.shape[0], axis=0)).astype(q.dtype)

    def attend(out: Array, selected: Array, tile: int, bound: int, group: int) -> Array:
        """Adds the queries of the selected rows to `out`: `bound` tiles at most, `group` of them at a time."""
        group = min(group, bound)
        groups = -(-bound // group)
        tiles, num_tiles = _cut(jnp.where(selected, counts, 0), seq_lens, query_starts, reach, tile, groups * group, tokens)

        def body(index: Array, out: Array) -> Array:
            part = _Tiles(*(lax.dynamic_slice_in_dim(x, index * group, group) for x in tiles))
            result = _attend_tiles(
                part,
                q,
                k_cache,
                v_cache,
                table,
                reach,
                biases,
                chunk_pages=chunk_pages,
                keys_left=tiling.keys_left and tile == 1,
                scale=scale,
                soft_cap=soft_cap,
            )
            return out.at[part.index].set(result.astype(out.dtype), mode="drop")

        if groups == 1:
            return body(jnp.int32(0), out)
        return lax.fori_loop(0, (num_tiles + group - 1) // group, body, out)

    # Rows with one query have tiles of their own: decoding rows in an extend launch must not pay for a wide tile.
    out = attend(jnp.zeros_like(q), counts == 1, 1, min(rows, tokens), tiling.singles)
    if single or tokens < 2:
        return out
    tile = min(tiling.tile, tokens)
    return attend(out, counts > 1, tile, tokens // tile + min(rows, tokens // 2), tiling.tiles)


def _cut(
    counts: Array, seq_lens: Array, query_starts: Array, reach: Array, tile: int, bound: int, tokens: int
) -> tuple[_Tiles, Array]:
    """Cuts the last counts[r] tokens of each row into tiles, row after row: the list [bound], and how many there are."""
    tile_counts = (counts + tile - 1) // tile
    ends = jnp.cumsum(tile_counts)
    number = jnp.arange(bound)
    row = jnp.searchsorted(ends, number, side="right", method="compare_all")
    live = row < ends.shape[0]
    row = jnp.where(live, row, 0)
    begin = (number - (ends - tile_counts)[row]) * tile
    count = jnp.where(live, jnp.minimum(counts[row] - begin, tile), 0)
    position = (seq_lens - counts)[row] + begin
    offsets = jnp.arange(tile)
    valid = offsets < count[:, None]
    tiles = _Tiles(
        index=jnp.where(valid, (query_starts[row] + begin)[:, None] + offsets, tokens),
        last=jnp.where(valid, position[:, None] + offsets, -1),
        start=jnp.where(live, jnp.maximum(position - reach + 1, 0), _FAR),
        end=jnp.where(live, position + count, 0),
        row=row,
    )
    return tiles, ends[-1]


def _attend_tiles(
    tiles: _Tiles,
    q: Array,
    k_cache: Array | QuantizedPages,
    v_cache: Array | QuantizedPages,
    table: Array,
    reach: Array,
    biases: Biases,
    *,
    chunk_pages: int,
    keys_left: bool,
    scale: float,
    soft_cap: float,
) -> Array:
    """Attention of some tiles: [n, tile, N, H] in float32."""
    heads, dim = q.shape[1:]
    dtype = q.dtype if isinstance(k_cache, QuantizedPages) else k_cache.dtype
    value_dtype = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype  # a weight times a scale may be too small for float16
    kv_heads = k_cache.shape[1]
    chunk = chunk_pages * k_cache.shape[2]
    (n, tile), group = tiles.index.shape, heads // kv_heads

    # Queries [n, K, tile * G, H]: the heads that share a kv head are rows of one matmul.
    queries = q.at[tiles.index].get(mode="fill", fill_value=0).reshape(n, tile, kv_heads, group, dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(n, kv_heads, tile * group, dim).astype(dtype)
    last = jnp.repeat(tiles.last, group, axis=1)[:, None, :, None]
    row_pages = table[tiles.row]

    def body(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        pages = lax.dynamic_slice_in_dim(row_pages, index * chunk_pages, chunk_pages, axis=1)
        keys = index * chunk + jnp.arange(chunk)
        key_rows, key_scale = _keys_or_values(k_cache, pages, dtype)
        if keys_left:  # the barrier keeps XLA from folding the transpose back into the dot
            scores = lax.optimization_barrier(_dot(key_rows, queries, contract=3)).swapaxes(2, 3) * scale
        else:
            scores = _dot(queries, key_rows, contract=3) * scale
        if key_scale is not None:
            scores = scores * key_scale[:, :, None, :]
        if soft_cap:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = _add_biases(scores, last - keys, biases)
        scores = jnp.where((keys <= last) & (keys > last - reach), scores, -jnp.inf)
        # A weight of 0 does not silence a NaN, so values that no query of the tile may see are zeroed themselves.
        owned = ((keys >= tiles.start[:, None]) & (keys < tiles.end[:, None]))[:, None, :, None]
        values, value_scale = _keys_or_values(v_cache, pages, value_dtype)
        if value_scale is None:
            values = jnp.where(owned, values, 0)

        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # nothing seen yet: keeps -inf - -inf out
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(peak - base)
        total = total * decay + _row_sum(weights)
        if value_scale is not None:  # the only part of a quantised value that can be NaN
            weights = weights * jnp.where(owned[..., 0], value_scale, 0)[:, :, None, :]
        acc = acc * decay[..., None] + _dot(weights.astype(values.dtype), values, contract=2)
        return new_peak, total, acc

    shape = (n, kv_heads, tile * group)
    empty = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    first_chunk, end_chunk = jnp.min(tiles.start) // chunk, (jnp.max(tiles.end) + chunk - 1) // chunk
    _, total, acc = lax.fori_loop(first_chunk, end_chunk, body, empty)
    result = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    return result.reshape(n, kv_heads, tile, group, dim).transpose(0, 2, 1, 3, 4).reshape(n, tile, heads, dim)


def _add_biases(scores: Array, distance: Array, biases: Biases) -> Array:
    """Biased scores [n, K, tile * G, chunk]; distance of queries and keys [n, 1, tile * G, chunk], negative where masked."""
    n, kv_heads, queries, chunk = scores.shape
    if biases.slopes is not None:
        slopes = biases.slopes.astype(jnp.float32).reshape(kv_heads, 1, -1)
        tile = queries // slopes.shape[2]
        scores = scores - jnp.broadcast_to(slopes, (kv_heads, tile, slopes.shape[2])).reshape(kv_heads, queries, 1) * distance
    if biases.table is not None:
        table = biases.table.astype(jnp.float32).reshape(kv_heads, -1, biases.table.shape[1])
        group = table.shape[1]
        place = jnp.clip(distance, 0, table.shape[2] - 1).reshape(n, queries // group, group, chunk)
        member = jnp.arange(group)[:, None]
        scores = scores + jnp.moveaxis(table[:, member, place], 0, 1).reshape(scores.shape)
    return scores


def _keys_or_values(cache: Array | QuantizedPages, pages: Array, dtype: jnp.dtype) -> tuple[Array, Array | None]:
    """Pages [n, c] of a cache as [n, K, c * page, H], and their scales [n, K, c * page] if they are quantised."""
    if isinstance(cache, QuantizedPages):
        return _gather(cache.qvalue, pages).astype(dtype), _gather(cache.scale, pages)
    return _gather(cache, pages), None


def _gather(cache: Array, pages: Array) -> Array:
    """Pages [n, c] of an array [LP, K, page, ...] as [n, K, c * page, ...], written in that order by the gather itself."""
    kv_heads, page, *rest = cache.shape[1:]
    offsets = (1, *range(3, 4 + len(rest)))
    numbers = lax.GatherDimensionNumbers(offset_dims=offsets, collapsed_slice_dims=(0,), start_index_map=(0,))
    sizes = (1, kv_heads, page, *rest)
    found = lax.gather(cache, pages[..., None], numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return found.reshape(pages.shape[0], kv_heads, -1, *rest)


def _row_sum(x: Array) -> Array:
    """Sum of the last axis by halving it. A reduction's order of additions may depend on the shape of the whole array: on CPU
    a row alone and the same row in a batch differed in the last bit."""
    while x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.sum(axis=-1)


def _dot(left: Array, right: Array, *, contract: int) -> Array:
    """Matmul of left's last axis with right's axis `contract`, batched over the first two, into float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    numbers = (((3,), (contract,)), ((0, 1), (0, 1)))
    return lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=jnp.float32)
