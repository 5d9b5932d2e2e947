"""Flash attention in plain JAX: the reference, the fallback, and what runs on CPU.

Tiles of queries of one row each are worked on one after the other; for each a loop walks over the keys it sees in chunks and
keeps an online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022). The bounds of both loops are data.

Owns the forward pass and what `xla_gradient` shares with it: how a tile and a chunk are read and scored. Must not know of
pages: keys are contiguous.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.tiles import Tiles, cut, reach_of

if TYPE_CHECKING:
    from jax import Array


class Biases(NamedTuple):
    """What is added to the scores; None where there is none.

    Attributes:
        slopes: [N], taken times the distance from the score.
        table: [N, W], by distance.
        mask: [1 or N, T, S].
    """

    slopes: Array | None
    table: Array | None
    mask: Array | None


class Rows(NamedTuple):
    """query_starts and key_starts int32 [R + 1], window int32 []; what nothing is differentiated by."""

    query_starts: Array
    key_starts: Array
    window: Array


class Blocks(NamedTuple):
    """Queries of a tile and keys of a chunk."""

    tile: int
    chunk: int


CPU = Blocks(tile=64, chunk=128)
GPU = Blocks(tile=256, chunk=512)  # few and large kernels


def on_platform(function: Any, *operands: Any) -> Any:
    """`function(*operands, blocks=...)` with the blocks of the platform that it is compiled for."""
    cpu, other = (functools.partial(function, blocks=blocks) for blocks in (CPU, GPU))
    return lax.platform_dependent(*operands, cpu=cpu, default=other)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "soft_cap", "return_lse"))
def flash_attention(
    q: Array, k: Array, v: Array, biases: Biases, rows: Rows, *, causal: bool, scale: float, soft_cap: float, return_lse: bool
) -> Any:
    """See `pallas_kernels.flash_attention.flash_attention`. Jitted so that a model lowers it once, not once a layer."""
    out, lse = on_platform(functools.partial(_forward, causal=causal, scale=scale, soft_cap=soft_cap), q, k, v, biases, rows)
    return (out, lse) if return_lse else out


def _forward(
    q: Array, k: Array, v: Array, biases: Biases, rows: Rows, *, causal: bool, scale: float, soft_cap: float, blocks: Blocks
) -> tuple[Array, Array]:
    walk = Walk(q, k, biases, rows, causal=causal, scale=scale, soft_cap=soft_cap, blocks=blocks)

    def one_tile(index: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = walk.tile(index)
        queries = walk.read(q, tile)

        def one_chunk(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, acc = carry
            chunk = walk.chunk(tile, number)
            scores, _ = walk.score(queries, walk.slice(k, chunk), tile, chunk)
            new_peak = jnp.maximum(peak, scores.max(axis=-1))
            base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)  # nothing seen yet: keeps -inf - -inf out
            weights = jnp.exp(scores - base[..., None])
            decay = jnp.exp(peak - base)
            values = walk.slice(v, chunk)
            return (
                new_peak,
                total * decay + weights.sum(axis=-1),
                acc * decay[..., None] + dot("kgtc,ckh->kgth", weights.astype(values.dtype), values),
            )

        shape = (walk.kv_heads, walk.group, walk.size)
        empty = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1])))
        peak, total, acc = lax.fori_loop(tile.first_chunk, tile.end_chunk, one_chunk, empty)
        out = acc / jnp.where(total == 0, 1.0, total)[..., None]
        lse = peak + jnp.log(total)  # -inf where nothing was seen
        parts = (walk.packed(out).astype(q.dtype), walk.packed(lse))
        return tuple(all_.at[tile.index].set(part, mode="drop") for all_, part in zip(results, parts, strict=True))

    nothing = (jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32))
    return lax.fori_loop(0, walk.count, one_tile, nothing)


class Tile(NamedTuple):
    """A tile while it is worked on.

    Attributes:
        index: [tile] where its queries are in the packed ones; T where there is none.
        position: [tile] of each query among its row's keys.
        lowest, end: [tile] the keys of its row that each query sees, [lowest, end); none where there is no query.
        start: where the row's keys begin in the packed ones. seen, unseen: the keys that at least one query sees, [seen, unseen).
        first_chunk, end_chunk: the chunks of the row's keys in which those lie.
    """

    index: Array
    position: Array
    lowest: Array
    end: Array
    start: Array
    seen: Array
    unseen: Array
    first_chunk: Array
    end_chunk: Array


class Chunk(NamedTuple):
    """Some keys.

    Attributes:
        at: the first of them, as an index into the packed keys.
        keys: [chunk] their numbers within the row, -1 for those that belong to an earlier chunk or to another row.
        owned: [chunk] whether at least one query of the tile may see the key.
    """

    at: Array
    keys: Array
    owned: Array


class Walk:
    """The order in which tiles and chunks are visited, and how they are read; made while tracing, holds nothing else.

    Attributes:
        size: queries of a tile. span: keys of a chunk. count: tiles, a traced int32.
        kv_heads, group: K and N / K.
    """

    def __init__(
        self, q: Array, k: Array, biases: Biases, rows: Rows, *, causal: bool, scale: float, soft_cap: float, blocks: Blocks
    ) -> None:
        self.tokens, heads = q.shape[:2]
        self.keys, self.kv_heads = k.shape[:2]
        self.group = heads // self.kv_heads
        self.size, self.span = min(blocks.tile, self.tokens), min(blocks.chunk, self.keys)
        self.causal, self.scale, self.soft_cap = causal, scale, soft_cap
        self.biases, self.starts, self.reach = biases, rows.key_starts, reach_of(rows.window)
        self.dtype = k.dtype
        tiles, self.count = cut(rows.query_starts, jnp.diff(rows.key_starts), self.size, self.tokens)
        self.tiles: Tiles = tiles

    def tile(self, index: Array) -> Tile:
        """The tile of a number."""
        first, _, live, position, row, length = (lax.dynamic_index_in_dim(x, index, keepdims=False) for x in self.tiles)
        offsets = jnp.arange(self.size, dtype=jnp.int32)
        valid = offsets < live
        positions = position + offsets
        lowest = jnp.maximum(positions - self.reach + 1, 0)
        end = positions + 1 if self.causal else jnp.minimum(positions + self.reach, length)
        seen, unseen = lowest[0], end[live - 1]
        return Tile(
            index=jnp.where(valid, first + offsets, self.tokens),
            position=positions,
            lowest=jnp.where(valid, lowest, 0),
            end=jnp.where(valid, end, 0),
            start=self.starts[row],
            seen=seen,
            unseen=unseen,
            first_chunk=seen // self.span,
            end_chunk=(unseen + self.span - 1) // self.span,
        )

    def chunk(self, tile: Tile, number: Array) -> Chunk:
        """The chunk of a number, counted from the beginning of the row's keys."""
        begin = tile.start + number * self.span
        at = jnp.clip(begin, 0, self.keys - self.span)  # the last one would reach beyond the packed keys
        packed = at + jnp.arange(self.span, dtype=jnp.int32)
        keys = jnp.where(packed >= begin, packed - tile.start, -1)
        return Chunk(at, keys, (keys >= tile.seen) & (keys < tile.unseen))

    def read(self, x: Array, tile: Tile) -> Array:
        """The tile's part of [T, N, ...] as [K, G, tile, ...], in the dtype of the keys; zeros where there is no query."""
        found = x.at[tile.index].get(mode="fill", fill_value=0).astype(self.dtype)
        return jnp.moveaxis(found.reshape(self.size, self.kv_heads, self.group, *x.shape[2:]), 0, 2)

    def packed(self, x: Array) -> Array:
        """[K, G, tile, ...] as [tile, N, ...]."""
        return jnp.moveaxis(x, 2, 0).reshape(self.size, -1, *x.shape[3:])

    def slice(self, x: Array, chunk: Chunk) -> Array:
        """Keys or values [chunk, K, H]; zeros where no query may look: a weight of 0 does not silence a NaN."""
        found = lax.dynamic_slice_in_dim(x, chunk.at, self.span)
        return jnp.where(chunk.owned[:, None, None], found, 0)

    def score(self, queries: Array, keys: Array, tile: Tile, chunk: Chunk) -> tuple[Array, Array | None]:
        """Scores [K, G, tile, chunk] with everything added, -inf where a query does not see a key; and their derivative by the
        scaled products of q and k if there is a cap."""
        scores = dot("kgth,ckh->kgtc", queries, keys) * self.scale
        slope = None
        if self.soft_cap:
            bent = jnp.tanh(scores / self.soft_cap)
            scores, slope = self.soft_cap * bent, 1 - bent * bent
        if self.biases.slopes is not None:
            slopes = self.biases.slopes.astype(jnp.float32).reshape(self.kv_heads, self.group, 1, 1)
            scores = scores - slopes * self.distance(tile, chunk)
        if self.biases.table is not None:
            table = self.biases.table.astype(jnp.float32)
            scores = scores + table[:, self.place(tile, chunk)].reshape(scores.shape)
        if self.biases.mask is not None:
            mask = self.mask_of(self.biases.mask, tile, chunk).astype(jnp.float32)
            scores = scores + mask.reshape(-1 if len(mask) > 1 else 1, self.group if len(mask) > 1 else 1, *mask.shape[1:])
        visible = (chunk.keys >= tile.lowest[:, None]) & (chunk.keys < tile.end[:, None])
        return jnp.where(visible, scores, -jnp.inf), slope

    def distance(self, tile: Tile, chunk: Chunk) -> Array:
        """|query position - key position| as float32 [tile, chunk]."""
        return jnp.abs(tile.position[:, None] - chunk.keys).astype(jnp.float32)

    def place(self, tile: Tile, chunk: Chunk) -> Array:
        """Which entry of the relative bias belongs to a query and a key: [tile, chunk]."""
        assert self.biases.table is not None
        width = self.biases.table.shape[1]
        middle = 0 if self.causal else width // 2
        return jnp.clip(tile.position[:, None] - chunk.keys + middle, 0, width - 1)

    def mask_of(self, mask: Array, tile: Tile, chunk: Chunk) -> Array:
        """The tile's and the chunk's part of a mask: [1 or N, tile, chunk]."""
        columns = lax.dynamic_slice_in_dim(mask, chunk.at, self.span, axis=2)
        return columns.at[:, tile.index].get(mode="fill", fill_value=0)


def dot(formula: str, left: Array, right: Array) -> Array:
    """A contraction into float32; float32 operands are multiplied as such."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(formula, left, right, precision=precision, preferred_element_type=jnp.float32)
