"""What the Mosaic kernel of paged attention is launched with: static sizes, operands, and the layout of a query tile.

Owns how query heads and tokens are arranged as rows of a tile, and per-row data in that order. Must not know how sizes are
chosen (`mosaic`) nor what the device does with them (`mosaic_kernel`).

A tile row is (query token, kv head of the group, query head of the kv head), each token padded to a multiple of 8 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels.attention_sizes import LOG2E, TILE

if TYPE_CHECKING:
    from jax import Array


class Plan(NamedTuple):
    """The static sizes of a launch.

    Attributes:
        groups: groups of kv heads, each with CTAs of its own. heads: kv heads of a group. members: query heads of a kv head.
        page: tokens of a page. block: keys of a block, of each head: some pages, or a part of one.
        queries: query tokens of a CTA. parts: CTAs among which the queries of a row are divided.
        rows: tile rows of a query token, heads * members rounded up to 8.
        tiles: query tiles of 64 rows, each with a warpgroup of its own.
        head_dim: H.
        stages: blocks in flight, of each member of a team. splits: CTAs among which the keys of a row are divided; their
            results are left to the caller.
        copier: a warpgroup of its own issues the copies; otherwise the only compute warpgroup does.
        team: warpgroups that divide a split among them and add up their results in shared memory.
        by_row: row r has its query at q[r].
        longest_first: there are more CTAs than run at once, and those of the longest rows are started first.
        bias_width: distances with a relative bias of their own; 0 if there is none.
        quantized: keys and values are int8, with a scale for each row of a block.
        interpreted: runs in the interpreter, which has no wgmma with an operand in registers.
    """

    groups: int
    heads: int
    members: int
    page: int
    block: int
    queries: int
    parts: int
    rows: int
    tiles: int
    head_dim: int
    stages: int
    splits: int
    copier: bool
    team: int
    by_row: bool
    longest_first: bool
    bias_width: int
    quantized: bool
    interpreted: bool

    @property
    def few_heads(self) -> bool:
        """Whether the query heads of a group are fewer than a copy brings."""
        return self.heads * self.members < 8

    @property
    def pages(self) -> int:
        """Pages in which the keys of a block lie."""
        return max(1, self.block // self.page)

    @property
    def copies(self) -> int:
        """Places in the pool from which a block of keys or values comes."""
        return self.pages if self.block >= self.page else self.heads

    @property
    def block_rows(self) -> int:
        """Rows of a K or V block in shared memory."""
        return self.block * self.heads

    @property
    def used_rows(self) -> int:
        """Tile rows that hold queries, the padding of each token included."""
        return self.queries * self.rows

    @property
    def warpgroups(self) -> int:
        """Those that compute: one a query tile, or the members of a team."""
        return max(self.tiles, self.team)

    @property
    def threads(self) -> int:
        """All warpgroups."""
        return self.warpgroups + self.copier

    @property
    def strip_start(self) -> int:
        """Where in a strip of `bias_strips` the distance of a CTA's first query to itself lies."""
        return self.bias_width + self.block

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, but for the barriers."""
        block = self.block_rows * self.head_dim
        ring = 2 * self.team * self.stages * block * (1 if self.quantized else 2)
        widened = self.team * (block * 2 + 2 * self.stages * self.block_rows * 4) if self.quantized else 0
        results = (self.tiles + self.team - 1) * TILE * self.head_dim * 4
        return max(ring, results) + widened + self.tiles * TILE * self.head_dim * 2 + (self.team - 1) * 2 * TILE * 4

    def pieces(self, tile: int) -> list[tuple[int, int, int, int]]:
        """(row of the tile, query, first of its heads, heads) of the queries in a tile, in order; padding left out."""
        first, end = tile * TILE, min((tile + 1) * TILE, self.used_rows)
        found = []
        row = first
        while row < end:
            query, head = divmod(row, self.rows)
            count = min(self.heads * self.members - head, end - row)
            if count > 0:
                found.append((row - first, query, head, count))
            row = min((query + 1) * self.rows, end)
        return found


class Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
        q: query heads in order: [T * groups, heads * members, H] if those are fewer than eight; else [T * groups * rows, H], with
            rows of zeros behind those of each group.
        k, v: [LP * K * page, H].
        page_table: [R, M]. seq_lens: [R]. query_starts: [R + 1].
        page_offset, window: [1] int32.
        order: [R] int32, see `longest_first`; or None.
        slopes: [groups, tiles * 64] float32, see `slope_rows`; or None.
        bias: [2, K, tiles * 64, X] float32, see `bias_strips`; or None. heads is 1 then.
        k_scale, v_scale: [LP * K * page] float32, of int8 k and v; or None.
    """

    q: Array
    k: Array
    v: Array
    page_table: Array
    seq_lens: Array
    query_starts: Array
    page_offset: Array
    window: Array
    order: Array | None
    slopes: Array | None
    bias: Array | None
    k_scale: Array | None
    v_scale: Array | None


class Partials(NamedTuple):
    """Results of the splits, float32.

    Attributes:
        acc: [R, groups * parts, splits, rows, H] sums of weighted values.
        stats: [R, groups * parts, splits, 2, tiles * 64] the largest score, in base 2, and the sum of weights.
    """

    acc: Array
    stats: Array


def longest_first(seq_lens: Array) -> Array:
    """The rows in falling order of their lengths [R], of equal ones the first first: [R] int32.

    CTAs start in the order of their numbers as others end, and a row takes as long as it is long: one that starts last would be
    waited for (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """
    row = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    longer = seq_lens > seq_lens[:, None]
    place = (longer | ((seq_lens == seq_lens[:, None]) & (row < row[:, None]))).sum(axis=1, dtype=jnp.int32)
    # Compared with every place, where a sort would be kernels of its own.
    return jnp.where(place == row[:, None], row, 0).sum(axis=1, dtype=jnp.int32)


def slope_rows(slopes: Array, plan: Plan) -> Array:
    """ALiBi slopes [N] of each tile row, times log2(e): [groups, tiles * 64]."""
    return slopes.astype(jnp.float32)[_heads(plan)] * LOG2E


def bias_strips(bias: Array, plan: Plan) -> Array:
    """Relative biases [N, W] as strips, times log2(e), of which each block reads a window: [2, K, tiles * 64, X].

    In strip[0] of query j, place x holds the bias at distance strip_start + j - x, so that moving a block by a key moves its
    window by a place. Windows start at even places, because two neighbours are read at once: strip[1] is shifted by one.
    """
    size = plan.strip_start + plan.queries + plan.block
    place = jnp.arange(size + size % 2) + jnp.arange(2)[:, None]
    query = jnp.arange(plan.tiles * TILE) // plan.rows
    distance = jnp.clip(plan.strip_start + query[:, None] - place[:, None, :], 0, plan.bias_width - 1)
    return bias.astype(jnp.float32)[_heads(plan)[:, :, None], distance[:, None]] * LOG2E


def _heads(plan: Plan) -> Array:
    """The query head of each tile row, [groups, tiles * 64]; of padding, any."""
    heads = plan.heads * plan.members
    member = jnp.minimum(jnp.arange(plan.tiles * TILE) % plan.rows, heads - 1)
    return jnp.arange(plan.groups)[:, None] * heads + member
