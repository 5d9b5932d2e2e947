"""The backward pass of flash attention in plain JAX, for every implementation of the forward pass.

Scores are computed again block by block from the log-sum-exp (Dao et al., FlashAttention, 2022, algorithm 4), so memory grows
with the operands only. Owns that; how blocks are read and scored is `xla.Walk`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.xla import Biases, Blocks, Chunk, Rows, Tile, Walk, dot, on_platform

if TYPE_CHECKING:
    from jax import Array


class Gradients(NamedTuple):
    """By each differentiable operand, in its dtype and shape; of biases those that are there."""

    q: Array
    k: Array
    v: Array
    biases: Biases


@functools.partial(jax.jit, static_argnames=("causal", "scale", "soft_cap"))
def gradients(
    q: Array,
    k: Array,
    v: Array,
    biases: Biases,
    rows: Rows,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    *,
    causal: bool,
    scale: float,
    soft_cap: float,
) -> Gradients:
    """Gradients of a scalar by the operands, from those by the results, `d_out` [T, N, H] and `d_lse` [T, N] or None.

    `out` and `lse` are the results. Sums over queries are float32.
    """
    # The derivative of a softmax subtracts from each gradient their mean under the weights, which is <out, d_out>; that of the
    # log-sum-exp is the weights themselves.
    mean = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)
    if d_lse is not None:
        mean = mean - d_lse
    compute = functools.partial(_gradients, causal=causal, scale=scale, soft_cap=soft_cap)
    found: Gradients = on_platform(compute, q, k, v, biases, rows, lse, mean, d_out)
    return jax.tree.map(lambda gradient, operand: gradient.astype(operand.dtype), found, Gradients(q, k, v, biases))


def _gradients(
    q: Array,
    k: Array,
    v: Array,
    biases: Biases,
    rows: Rows,
    lse: Array,
    mean: Array,
    d_out: Array,
    *,
    causal: bool,
    scale: float,
    soft_cap: float,
    blocks: Blocks,
) -> Gradients:
    walk = Walk(q, k, biases, rows, causal=causal, scale=scale, soft_cap=soft_cap, blocks=blocks)

    def one_tile(index: Array, found: Gradients) -> Gradients:
        tile = walk.tile(index)
        queries, d_results = walk.read(q, tile), walk.read(d_out, tile)
        # Float32 whatever the keys' dtype: what is read beside the tile's queries is 0 there.
        own_lse, own_mean = (_read_scalar(walk, x, tile) for x in (lse, mean))
        base = jnp.where(own_lse == -jnp.inf, 0.0, own_lse)[..., None]

        def one_chunk(number: Array, carry: tuple[Array, Gradients]) -> tuple[Array, Gradients]:
            d_queries, found = carry
            chunk = walk.chunk(tile, number)
            keys, values = walk.slice(k, chunk), walk.slice(v, chunk)
            scores, slope = walk.score(queries, keys, tile, chunk)
            hidden = scores == -jnp.inf  # a NaN of this row must not reach the keys of the next one
            weights = jnp.where(hidden, 0, jnp.exp(scores - base))
            d_weights = dot("kgth,ckh->kgtc", d_results, values)
            d_scores = jnp.where(hidden, 0, weights * (d_weights - own_mean[..., None]))
            d_biases = _add_biases(walk, found.biases, d_scores, tile, chunk)
            if slope is not None:
                d_scores = d_scores * slope
            d_scores = (d_scores * scale).astype(keys.dtype)
            d_queries = d_queries + dot("kgtc,ckh->kgth", d_scores, keys)
            found = Gradients(
                q=found.q,
                k=_add(found.k, dot("kgtc,kgth->ckh", d_scores, queries), chunk),
                v=_add(found.v, dot("kgtc,kgth->ckh", weights.astype(keys.dtype), d_results), chunk),
                biases=d_biases,
            )
            return d_queries, found

        d_queries, found = lax.fori_loop(
            tile.first_chunk, tile.end_chunk, one_chunk, (jnp.zeros(queries.shape, jnp.float32), found)
        )
        return found._replace(q=found.q.at[tile.index].set(walk.packed(d_queries), mode="drop"))

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), Gradients(q, k, v, biases))
    return lax.fori_loop(0, walk.count, one_tile, nothing)


def _read_scalar(walk: Walk, x: Array, tile: Tile) -> Array:
    """One float32 a query and head: [K, G, tile]."""
    found = x.at[tile.index].get(mode="fill", fill_value=0)
    return jnp.moveaxis(found.reshape(walk.size, walk.kv_heads, walk.group), 0, 2)


def _add(total: Array, part: Array, chunk: Chunk) -> Array:
    """Adds to the chunk's part of [S, K, H]."""
    size = len(chunk.keys)
    return lax.dynamic_update_slice_in_dim(total, lax.dynamic_slice_in_dim(total, chunk.at, size) + part, chunk.at, axis=0)


def _add_biases(walk: Walk, found: Biases, d_scores: Array, tile: Tile, chunk: Chunk) -> Biases:
    """Adds what the scores [K, G, tile, chunk] of a block contribute."""
    slopes, table, mask = found
    per_head = d_scores.reshape(-1, *d_scores.shape[2:])
    if slopes is not None:
        slopes = slopes - (per_head * walk.distance(tile, chunk)).sum(axis=(1, 2))
    if table is not None:
        table = table.at[:, walk.place(tile, chunk)].add(per_head)
    if mask is not None:
        part = per_head if len(mask) > 1 else per_head.sum(axis=0, keepdims=True)
        columns = lax.dynamic_slice_in_dim(mask, chunk.at, walk.span, axis=2).at[:, tile.index].add(part, mode="drop")
        mask = lax.dynamic_update_slice_in_dim(mask, columns, chunk.at, axis=2)
    return Biases(slopes, table, mask)
