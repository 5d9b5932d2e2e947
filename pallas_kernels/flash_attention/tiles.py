"""Packed queries cut into tiles of one row each: what every implementation of flash attention walks over.

Owns where a tile's queries lie and which keys they see. Must not know what is computed from them, nor where keys are stored:
positions count from the beginning of a row's keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

FAR = 1 << 29
"""Beyond any position, and safe to add to one or to subtract from one."""


class Tiles(NamedTuple):
    """Work units, one entry a tile: int32 [n]. Those behind the last real one have no queries and no keys.

    Attributes:
        first: the first query of the tile, as an index into the packed queries. live: how many it has.
        position: where the first query stands among its row's keys.
        row: the row. length: its keys.
    """

    first: Array
    live: Array
    position: Array
    row: Array
    length: Array


def bound(tokens: int, rows: int, tile: int) -> int:
    """The most tiles that `tokens` queries of `rows` rows can need."""
    return max(1, tokens // tile + min(rows, tokens))


def cut(query_starts: Array, lengths: Array, tile: int, tokens: int) -> tuple[Tiles, Array]:
    """Cuts the queries of each row into tiles of `tile`, row after row; returns them, `bound` many, and how many are real.

    The last query of a row stands at its last key. A row without keys has no tiles.
    """
    counts = jnp.where(lengths > 0, jnp.diff(query_starts), 0)
    tile_counts = (counts + tile - 1) // tile
    ends = jnp.cumsum(tile_counts)
    number = jnp.arange(bound(tokens, len(lengths), tile), dtype=jnp.int32)
    row = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    real = row < len(lengths)
    row = jnp.where(real, row, 0)
    begin = (number - (ends - tile_counts)[row]) * tile
    tiles = Tiles(
        first=jnp.where(real, query_starts[row] + begin, 0),
        live=jnp.where(real, jnp.minimum(counts[row] - begin, tile), 0),
        position=jnp.where(real, (lengths - counts)[row] + begin, 0),
        row=row,
        length=jnp.where(real, lengths[row], 0),
    )
    return tiles, ends[-1]


def reach_of(window: int | Array) -> Array:
    """Keys that a window reaches, the query's own included; FAR if it is 0."""
    window = jnp.asarray(window, jnp.int32)
    return jnp.where(window > 0, jnp.minimum(window, FAR), FAR)
