"""Packed queries cut into tiles of one row each: what every implementation of flash attention walks over.

Owns where a tile's queries lie and which keys they see. Must not know what is computed from them, nor where keys are stored:
positions count from the beginning of a row's keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels.attention_sizes import FAR

if TYPE_CHECKING:
    from jax import Array


class Tiles(NamedTuple):
    """Work units, one entry a tile: int32 [n]. Those behind the last real one have no queries and no keys.

    Attributes:
        first: where the tile begins in the packed queries. dead, live: its queries are first + dead .. first + live - 1.
        position: where a query at `first` stands among its row's keys; negative if there is none so early.
        row: the row. length: its keys.
    """

    first: Array
    dead: Array
    live: Array
    position: Array
    row: Array
    length: Array


def bound(tokens: int, rows: int, tile: int, align: int = 1) -> int:
    """The most tiles that `tokens` queries of `rows` rows can need."""
    rows = min(rows, tokens)
    return max(1, (tokens + rows * (align - 1)) // tile + rows)


def cut(query_starts: Array, lengths: Array, tile: int, tokens: int, align: int = 1) -> tuple[Tiles, Array]:
    """Cuts the queries of each row into tiles of `tile`, row after row; returns them, `bound` many, and how many are real.

    Tiles begin at multiples of `align`, which divides `tile`; so the first one of a row may hold queries of the row before,
    which are dead in it. The last query of a row stands at its last key. A row without keys has no tiles.
    """
    skipped = query_starts[:-1] % align
    counts = jnp.where(lengths > 0, jnp.diff(query_starts), 0)
    ends_in_row = jnp.where(counts > 0, counts + skipped, 0)
    tile_counts = (ends_in_row + tile - 1) // tile
    ends = jnp.cumsum(tile_counts)
    number = jnp.arange(bound(tokens, len(lengths), tile, align), dtype=jnp.int32)
    row = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    real = row < len(lengths)
    row = jnp.where(real, row, 0)
    begin = (number - (ends - tile_counts)[row]) * tile
    fields = {
        "first": (query_starts[:-1] - skipped)[row] + begin,
        "dead": jnp.where(begin == 0, skipped[row], 0),
        "live": jnp.minimum(ends_in_row[row] - begin, tile),
        "position": (lengths - ends_in_row)[row] + begin,
        "row": row,
        "length": lengths[row],
    }
    return Tiles(**{name: jnp.where(real, field, 0) for name, field in fields.items()}), ends[-1]


def reach_of(window: int | Array) -> Array:
    """Keys that a window reaches, the query's own included; FAR if it is 0."""
    window = jnp.asarray(window, jnp.int32)
    return jnp.where(window > 0, jnp.minimum(window, FAR), FAR)
