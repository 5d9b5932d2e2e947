"""The Mosaic GPU kernel that norms, rotates and writes into the cache.

Owns the device code. Must not know how a plan is chosen, nor what a tuning table is.

A CTA takes one token and some of its heads. A head is loaded as its two halves, in one layout, so that the elements of a rotated
pair lie in one thread, and the sum of squares of a head in the lanes of one warp: nothing goes through shared memory. All loads
of a CTA are issued before the first result is needed, so that a call waits for memory once. Stores go straight to where
attention reads: the page and the slot of the token.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rope_kv_write.mosaic import Cut, Plan

if TYPE_CHECKING:
    from jax import Array

WARPS, LANES = 4, 32  # of a CTA, of a warp


@functools.partial(jax.jit, static_argnames=("plan", "eps"))
def rotate_and_write(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    cos: Array,
    sin: Array,
    pages: Array,
    offsets: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    page_offset: Array,
    *,
    plan: Plan,
    eps: float,
) -> tuple[Array, Array, Array]:
    """Queries and the caches, as `rope_kv_write` gives them. Jitted so that a model lowers the kernel once, not once a layer.

    page_offset: int32 [1].
    """
    (tokens,), head_dim = pages.shape, k_cache.shape[3]
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    rows = qkv.reshape(qkv.shape[0], -1, head_dim)
    place = (pages.astype(jnp.int32), offsets.astype(jnp.int32), page_offset)
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)

    def body(*refs: Any) -> None:
        _Cta(refs, eps, has_norms=bool(norms)).run(plan)

    q = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, plan.queries.count, head_dim), qkv.dtype),
        grid=(tokens, plan.ctas),
        grid_names=("token", "part"),
    )(rows, cos, sin, *place, *norms, k_ref, v_ref)
    return q, jax.freeze(k_ref), jax.freeze(v_ref)


class _Cta:
    """The program of one CTA, while it is traced.

    Attributes:
        token: of the CTA. page, offset: where its keys and values go. inside: whether that is in the cache.
        tables: what queries and keys are multiplied by, each [H/2] in device memory: cos, sin, and both halves of the norm's
            weight if there is one.
    """

    def __init__(self, refs: tuple[Any, ...], eps: float, *, has_norms: bool) -> None:
        self.rows, cos, sin, pages, offsets, page_offset, *norms, k_cache, v_cache, q = refs
        self.queries, self.keys, self.values, self.eps = q, k_cache, v_cache, eps
        half = q.shape[2] // 2
        self.columns = (pl.ds(0, half), pl.ds(half, half))
        self.token = lax.axis_index("token")
        self.page, self.offset = pages[self.token] + page_offset[0], offsets[self.token]
        last_page, _, last_slot, _ = k_cache.shape
        self.inside = (self.page >= 0) & (self.page < last_page) & (self.offset >= 0) & (self.offset < last_slot)
        rotation = (cos.at[self.token], sin.at[self.token])
        weights = [[norm.at[columns] for columns in self.columns] for norm in norms] if has_norms else [[], []]
        self.tables = [(*rotation, *weight) for weight in weights]

    def run(self, plan: Plan) -> None:
        part = lax.axis_index("part")
        queries, keys = plan
        first_value = queries.ctas + keys.ctas

        @pl.when(part < queries.ctas)
        def _() -> None:
            self._work(queries, part, 0, self.tables[0], self.queries.at[self.token])

        @pl.when((part >= queries.ctas) & (part < first_value))
        def _() -> None:
            self._work(keys, part - queries.ctas, queries.count, self.tables[1], self.keys)

        @pl.when(part >= first_value)
        def _() -> None:
            self._work(keys, part - first_value, queries.count + keys.count, (), self.values)

    def _work(self, cut: Cut, part: Array, first: int, tables: tuple[Any, ...], target: Any) -> None:
        """The CTA's heads of one kind, which begins with head `first` of a row of q, k and v; without tables they are copied.

        Where they go is a token's rows [heads, H], or the token's slot in a cache [LP, K, page, H]. That there is such a slot is
        asked last: its place and the heads are under way together.
        """
        layout = head_layout(cut.heads, self.columns[0].size)
        factors = [_load(table, layout.reduce(0)) for table in tables]
        starts = [lax.min((part * cut.pieces + piece) * cut.heads, cut.count - cut.heads) for piece in range(cut.pieces)]
        pieces = []
        for start in starts:
            row = self.rows.at[self.token, pl.ds(first + start, cut.heads)]
            pieces.append([_load(row.at[:, columns], layout) for columns in self.columns])
        if factors:
            pieces = [self._rotated(halves, *factors) for halves in pieces]

        def store(target: Any) -> None:
            for start, halves in zip(starts, pieces, strict=True):
                for columns, half in zip(self.columns, halves, strict=True):
                    _store(target(pl.ds(start, cut.heads)).at[:, columns], half)

        if len(target.shape) == 2:
            store(lambda heads: target.at[heads])
        else:
            pl.when(self.inside)(lambda: store(lambda heads: target.at[self.page, heads, self.offset]))

    def _rotated(self, halves: list[Array], *tables: Array) -> list[Array]:
        """Both halves of some heads, normed if there is a norm, and rotated."""
        first, second = (half.astype(jnp.float32) for half in halves)
        dtype, (heads, half) = halves[0].dtype, first.shape
        cos, sin, *norm = (lax.broadcast_in_dim(table, (heads, half), [1]) for table in tables)
        if norm:
            squares = (first * first + second * second).sum(axis=1)
            factor = lax.broadcast_in_dim(lax.rsqrt(squares / (2 * half) + self.eps), (heads, half), [0])
            first, second = (
                (x * factor * weight).astype(dtype).astype(jnp.float32) for x, weight in zip((first, second), norm, strict=True)
            )
        return [(first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)]


def head_layout(heads: int, half: int) -> Any:
    """A register layout [heads, H/2], `heads` a power of two, in which a head lies in the lanes of one warp.

    Where there are fewer heads than a CTA has room for, several threads hold the same elements, and store them alike.
    """
    vector = 4 if half % 32 == 0 else 2  # elements that a thread holds side by side
    vectors = half // vector
    lanes = min(LANES, vectors & -vectors)  # that hold a head: a power of two, as it must divide a warp
    lane_heads = min(heads, LANES // lanes)
    warp_heads = min(heads // lane_heads, WARPS)
    layout = mgpu.TiledLayout(
        plgpu.Tiling(((warp_heads * lane_heads, lanes * vector), (lane_heads, lanes * vector), (vector,))),
        warp_dims=(-5, plgpu.Replicated(WARPS // warp_heads)),
        lane_dims=(-3, -2, plgpu.Replicated(LANES // (lane_heads * lanes))),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(ref: Any, value: Array) -> None:
    """From JAX 0.12 on a store that leaves parts of sectors, as these do, must say that it means to."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
