"""What the Mosaic kernel of flash attention is launched with: static sizes, operands, and the layout of a query tile.

Owns how query heads and tokens are arranged as rows of a tile, and per-row data in that order. Must not know how sizes are
chosen (`mosaic`) nor what the device does with them (`mosaic_kernel`).

A CTA works on `WARPGROUPS` tiles of 64 rows; a row of a tile is (query head of a kv head, token): heads that share a kv head
lie in one tile, so that a short row of the batch does not pay for 64 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels.attention_sizes import FAR, LOG2E, TILE
from pallas_kernels.flash_attention.tiles import Tiles

if TYPE_CHECKING:
    from jax import Array

ALIGN = 8
"""Rows of device memory that are copied to where wgmma reads begin at multiples of it."""

WARPGROUPS = 2
"""That compute; they take turns at the tensor core."""


class Plan(NamedTuple):
    """The static sizes of a launch.

    Attributes:
        heads: query heads of a tile, all of one kv head. groups: N / heads, the work units of a tile of tokens.
        kv_heads: K. head_dim: H.
        keys: keys of a block. stages: blocks in flight. q_stages: query tiles in flight.
        page: tokens of a page; 0 if the keys are contiguous.
        causal: as in the operation.
        bias_width: distances with a relative bias of their own; 0 if there is none.
        lse: whether the log-sum-exp is wanted.
        ctas: that stay, each taking one unit of work after another.
        interpreted: runs in the interpreter, which has no wgmma with an operand in registers.
    """

    heads: int
    groups: int
    kv_heads: int
    head_dim: int
    keys: int
    stages: int
    q_stages: int
    page: int
    causal: bool
    bias_width: int
    lse: bool
    ctas: int
    interpreted: bool

    @property
    def tokens(self) -> int:
        """Query tokens of a warpgroup."""
        return TILE // self.heads

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a CTA."""
        return WARPGROUPS * self.tokens

    @property
    def copies(self) -> int:
        """Copies that bring a block of keys or values."""
        return self.keys // self.page if self.page else 1

    @property
    def strip_start(self) -> int:
        """Where in a strip of `bias_strips` the distance of a warpgroup's first query to itself lies."""
        return self.bias_width + self.keys

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, but for the barriers. With one query tile in flight the results leave through its memory."""
        tile = WARPGROUPS * TILE * self.head_dim * 2
        return 2 * self.stages * self.keys * self.head_dim * 2 + tile * (1 if self.q_stages == 1 else self.q_stages + 1)


class Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
        q: [T, N, H]. k, v: [S, K, H], or the pool as [LP * K * page, H]. T and S are multiples of ALIGN.
        tiles: [6, n] int32, `Tiles` in the order in which they are worked on. count: [1], how many are real.
        places: [R] where a row's keys begin, or the page table [R, M].
        window, page_offset: [1] int32.
        slopes: [groups, 64] float32, see `slope_rows`; or None.
        strips, far: see `bias_strips`; or None.
    """

    q: Array
    k: Array
    v: Array
    tiles: Array
    count: Array
    places: Array
    window: Array
    page_offset: Array
    slopes: Array | None
    strips: Array | None
    far: Array | None


def ordered(tiles: Tiles, causal: bool) -> Array:
    """Tiles [6, n], the one that sees most keys first, so that the last ones to be worked on are the shortest. A window makes
    them alike, whatever the order."""
    seen = tiles.position + tiles.live if causal else tiles.length
    return jnp.stack(tiles)[:, jnp.argsort(jnp.where(tiles.live > 0, -seen, FAR))]


def slope_rows(slopes: Array, plan: Plan) -> Array:
    """ALiBi slopes [N] of each tile row, times log2(e): [groups, 64]."""
    return jnp.repeat(slopes.astype(jnp.float32).reshape(plan.groups, plan.heads), plan.tokens, axis=1) * LOG2E


def bias_strips(bias: Array, plan: Plan) -> tuple[Array, Array]:
    """Relative biases [N, W], times log2(e), for each tile row: strips [2, groups, 64, X] of which a block reads a window, and
    the bias of all distances from W - 1 on [groups, 64].

    In strip[0] of token t, place x holds the bias at distance strip_start + t - x, so that moving a block by a key moves its
    window by a place. Windows start at even places, because two neighbours are read at once: strip[1] is shifted by one.
    """
    size = plan.strip_start + plan.tile_tokens + plan.keys
    place = jnp.arange(size + size % 2) + jnp.arange(2)[:, None]
    token = jnp.arange(plan.tokens)
    distance = jnp.clip(plan.strip_start + token[:, None] - place[:, None, :], 0, plan.bias_width - 1)
    bias = bias.astype(jnp.float32) * LOG2E
    strips = jnp.moveaxis(bias[:, distance], 0, 1)  # [2, N, tokens, X]
    far = jnp.repeat(bias[:, -1].reshape(plan.groups, plan.heads), plan.tokens, axis=1)
    return strips.reshape(2, plan.groups, TILE, -1), far
