"""The Mosaic GPU kernel of paged attention for few queries a row.

Owns the device code. What it computes with is decided in `mosaic`: it must not know how a plan is chosen, nor what a tuning
table is.

One CTA takes one row (a request), one group of kv heads and one share of the row's keys; where rows are few, a team of
warpgroups divides that share once more. A page of the pool, seen as
[K * page, H], holds the keys of several heads one after another, so that one TMA box brings `heads` heads of a page; a block
is one such box or more (where pages are large, a part of each head's keys). The queries of all those heads are rows of one
tile, so that one wgmma gives the scores of all of them against the block, and those where the head of the query is not the
head of the key are masked: their weights are exactly zero, and the sum over all rows of the V block is exact. wgmma wants 64
rows anyway; a tile of one head would be mostly padding.

The online softmax is that of Milakov and Gimelshein (2018) as used by FlashAttention (Dao et al., 2022), in base 2; the split
of one row's keys over several CTAs is that of Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_sizes import FAR, LOG2E, TILE
from pallas_kernels.online_softmax import NOTHING, ROWS, across, add_values, capped
from pallas_kernels.paged_attention.mosaic_plan import Operands, Partials, Plan
from pallas_kernels.paged_attention.mosaic_work import Work

if TYPE_CHECKING:
    from jax import Array


def attend(operands: Operands, plan: Plan, tokens: int, *, scale: float, soft_cap: float) -> Array | Partials:
    """Attention of all rows: [T * groups, heads * members, H] if there is one split, else partials.

    Only those entries of the result are written that belong to a query of a row with tokens; with `by_row` all are.
    """
    present = [name for name, value in operands._asdict().items() if value is not None]
    grid = (operands.page_table.shape[0], plan.groups * plan.parts)
    whole = jax.ShapeDtypeStruct((tokens * plan.groups, plan.heads * plan.members, plan.head_dim), operands.q.dtype)
    partials = Partials(
        jax.ShapeDtypeStruct((*grid, plan.splits, plan.used_rows, plan.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((*grid, plan.splits, 2, plan.tiles * TILE), jnp.float32),
    )
    outputs: dict[str, Any] = {"out": whole} if plan.splits == 1 else partials._asdict()

    block = (plan.team * plan.stages, plan.block_rows, plan.head_dim)
    dtype, tiled = operands.q.dtype, _tiled(plan.head_dim, 16)
    pages = plgpu.SMEM(block, operands.k.dtype, transforms=_tiled(plan.head_dim, 8 if plan.quantized else 16))
    results: list[Any] = [plgpu.SMEM((plan.tiles * TILE, plan.head_dim), operands.q.dtype if plan.splits == 1 else jnp.float32)]
    lent = (plan.team - 1, TILE, plan.head_dim)
    if plan.team > 1:
        results.append(plgpu.SMEM(lent, jnp.float32, transforms=_tiled(plan.head_dim, 32)))
    scratch: dict[str, Any] = {
        "q_tile": plgpu.SMEM((plan.tiles * TILE, plan.head_dim), dtype, transforms=tiled),
        # The results leave through the memory of the blocks, which are all used up by then.
        "ring": plgpu.RefUnion(
            [pages, pages],
            results,
        ),
        "q_full": plgpu.Barrier(num_arrivals=plan.queries),
        "k_full": plgpu.Barrier(num_arrivals=plan.copies * (1 + plan.quantized), num_barriers=block[0]),
        "v_full": plgpu.Barrier(num_arrivals=plan.copies * (1 + plan.quantized), num_barriers=block[0]),
    }
    if plan.quantized:
        scratch["widened"] = plgpu.SMEM((plan.team * plan.block_rows, plan.head_dim), dtype, transforms=tiled)
        scratch["k_scales"] = scratch["v_scales"] = plgpu.SMEM(block[:2], jnp.float32)
    if plan.copier:
        scratch["k_free"] = plgpu.Barrier(num_arrivals=plan.tiles, num_barriers=plan.stages)
        scratch["v_free"] = plgpu.Barrier(num_arrivals=plan.tiles, num_barriers=plan.stages)
    if plan.warpgroups > 1:
        scratch["together"] = plgpu.Barrier(num_arrivals=plan.warpgroups)
    if plan.team > 1:
        scratch["lent_stats"] = plgpu.SMEM((plan.team - 1, 2, TILE), jnp.float32)
    if plan.interpreted:
        scratch["weights"] = plgpu.SMEM((plan.warpgroups * TILE, plan.block_rows), dtype)

    def body(*refs: Any, **buffers: Any) -> None:
        inputs = dict(zip(present, refs, strict=False))
        _Cta(plan, inputs, dict(zip(outputs, refs[len(present) :], strict=True)), buffers, scale=scale, soft_cap=soft_cap).run()

    result = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(*grid, plan.splits),
        grid_names=("row", "group", "split"),
        num_threads=plan.threads if plan.threads > 1 else None,
        thread_name="warpgroup" if plan.threads > 1 else None,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*(value for value in operands if value is not None))
    return result[0] if "out" in outputs else Partials(*result)


class _Cta(Work):
    """The program of one CTA, while it is traced: what its warpgroups do."""

    def __init__(
        self,
        plan: Plan,
        inputs: dict[str, Any],
        results: dict[str, Any],
        buffers: dict[str, Any],
        *,
        scale: float,
        soft_cap: float,
    ) -> None:
        super().__init__(plan, inputs, buffers)
        self.results, self.scale, self.soft_cap = results, scale, soft_cap

    def run(self) -> None:
        if self.plan.splits == 1:
            self._work()
            return
        pl.when(self.busy)(self._work)
        pl.when(jnp.logical_not(self.busy))(self._store_nothing)

    def _work(self) -> None:
        plan = self.plan
        if not plan.copier:
            self._compute(0)
            return
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == plan.tiles)(self.copy_all)
        pl.when(warpgroup < plan.tiles)(functools.partial(self._compute, warpgroup))

    # ---- softmax

    def _compute(self, tile: Array | int) -> None:
        plan = self.plan
        if plan.copier and plan.tiles > 1:
            plgpu.set_max_registers(232, action="increase")
        if plan.warpgroups == 1:
            self.fetch_queries()
        else:
            pl.when(tile + self.member == 0)(self.fetch_queries)
        stages = plan.stages
        ids: tuple[Array, ...] = ()
        if not plan.copier:
            self.fetch_first()
            ids = self.page_starts(jnp.int32(stages))

        shape = (TILE, plan.block_rows)
        own = _multiple(tile * TILE, TILE)
        offsets, last, slope = self._row_data(shape, own)
        plgpu.barrier_wait(self.buffers["q_full"])
        q_tile = self.buffers["q_tile"].at[pl.ds(own, TILE)]

        def refill(name: str, index: Array, slot: Array, ids: tuple[Array, ...]) -> None:
            if plan.copier:
                plgpu.barrier_arrive(self.buffers[f"{name}_free"].at[slot])
                return

            @pl.when(index + stages < self.steps)
            def _() -> None:
                self.fetch(name, index + stages, ids, slot)

        def step(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            acc, peak, total, ids = carry
            later = () if plan.copier else self.page_starts(index + stages + 1)
            slot = self.slot(index)
            base = (self.first + index) * plan.block
            plgpu.barrier_wait(self.buffers["k_full"].at[slot])
            keys, scale = self.k_ring.at[slot], None
            if plan.quantized:
                keys, scale = self._widened("k", slot)
                refill("k", index, slot, ids)

            def multiply(scores: Any) -> Array:
                plgpu.wgmma(scores, q_tile, keys.transpose((1, 0)))
                return scores[...]

            scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
            if scale is None:
                refill("k", index, slot, ids)
            else:
                scores = scores * lax.broadcast_in_dim(scale, shape, [1])
            scores = self._biased(scores, base, offsets, last, slope, tile)
            limit = last + (1 - base)
            seen = (offsets < across(limit, shape)) & (offsets >= across(limit - self.reach, shape))
            scores = jnp.where(seen, scores, -jnp.inf)

            new_peak = jnp.maximum(peak, scores.max(axis=1))
            decay = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores - across(new_peak, shape))
            total = total * decay + weights.sum(axis=1)
            acc = acc * across(decay, acc.shape)

            plgpu.barrier_wait(self.buffers["v_full"].at[slot])
            values, scale = self.v_ring.at[slot], None
            if plan.quantized:
                values, scale = self._widened("v", slot)
                refill("v", index, slot, ids)
                # A weight of 0 does not silence a scale that is NaN, as those of free slots may be.
                weights = jnp.where(seen, weights * lax.broadcast_in_dim(scale, shape, [1]), 0.0)
            else:
                edge = (base < self.seen) | (base + plan.block > self.end)
                pl.when(edge)(functools.partial(self._clean, slot, base, tile))
            acc = self._add_values(acc, weights.astype(q_tile.dtype), values, own)
            if scale is None:
                refill("v", index, slot, ids)
            return acc, new_peak, total, later

        empty = (
            plgpu.layout_cast(jnp.zeros((TILE, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE,), NOTHING, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROWS),
            ids,
        )
        acc, peak, total, _ = lax.fori_loop(jnp.int32(0), self.steps, step, empty)
        self._meet()  # behind it nobody reads the rings
        if plan.team == 1:
            self._store(acc, peak, total, tile, own)
            return
        pl.when(self.member > 0)(functools.partial(self._lend, acc, peak, total))
        self._meet()
        pl.when(self.member == 0)(lambda: self._store(*self._with_lent(acc, peak, total), tile, own))

    def _lend(self, acc: Array, peak: Array, total: Array) -> None:
        """Leaves a member's partial result to the first of the team."""
        place = self.member - 1
        self.lent.at[place][...] = acc
        self.buffers["lent_stats"][place, 0] = peak
        self.buffers["lent_stats"][place, 1] = total

    def _with_lent(self, acc: Array, peak: Array, total: Array) -> tuple[Array, Array, Array]:
        """The partial result of the whole team."""
        stats = self.buffers["lent_stats"]
        for place in range(self.plan.team - 1):
            one, sum_of_one = (plgpu.load(stats.at[place, which], layout=ROWS, optimized=False) for which in (0, 1))
            both = jnp.maximum(peak, one)
            keep, take = jnp.exp2(peak - both), jnp.exp2(one - both)
            values = plgpu.load(self.lent.at[place], layout=plgpu.Layout.WGMMA)
            acc = acc * across(keep, acc.shape) + values * across(take, acc.shape)
            peak, total = both, total * keep + sum_of_one * take
        return acc, peak, total

    def _store(self, acc: Array, peak: Array, total: Array, tile: Array | int, own: Array | int) -> None:
        if self.plan.splits > 1:
            self._store_partial(acc, peak, total, tile, own)
            return
        inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
        self._store_whole(acc * across(inverse, acc.shape), tile, own)

    def _row_data(self, shape: tuple[int, int], own: Array | int) -> tuple[Array, Array, Array | None]:
        """What does not change from block to block: the offset of each key in its block, far away where the key's head is not
        the query's; the last key that each tile row sees; its ALiBi slope."""
        plan = self.plan

        def head_and_query(layout: Any, size: tuple[int, ...]) -> tuple[Array, Array]:
            index = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=layout) + own
            query = lax.div(index, jnp.int32(plan.rows))
            return lax.div(index - query * plan.rows, jnp.int32(plan.members)), query

        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        offsets = column
        if plan.heads > 1:
            head, offsets = self._head_and_key(column)
            offsets = jnp.where(head == head_and_query(plgpu.Layout.WGMMA, shape)[0], offsets, FAR)
        _, query = head_and_query(ROWS, (TILE,))
        slope = None
        if "slopes" in self.inputs:
            slope = plgpu.load(self.inputs["slopes"].at[self.group, pl.ds(own, TILE)], layout=ROWS, optimized=False)
        return offsets, query + self.position, slope

    def _head_and_key(self, row: Array) -> tuple[Array, Array]:
        """The head, of the group, and the key, of the block, in a row of a block: (page, head, key of the page)."""
        plan = self.plan
        piece = min(plan.page, plan.block)
        box = lax.div(row, jnp.int32(plan.heads * piece))
        in_box = row - box * (plan.heads * piece)
        head = lax.div(in_box, jnp.int32(piece))
        return head, box * piece + in_box - head * piece

    def _biased(self, scores: Array, base: Array, offsets: Array, last: Array, slope: Array | None, tile: Array | int) -> Array:
        """Scaled, capped and biased scores, in units of log 2."""
        plan, shape = self.plan, scores.shape
        if self.soft_cap:
            scores = capped(scores, self.scale, self.soft_cap)
        else:
            scores = scores * (self.scale * LOG2E)
        if slope is not None:
            distance = offsets.astype(jnp.float32) + across((base - last).astype(jnp.float32), shape)
            scores = scores + across(slope, shape) * distance
        if "bias" in self.inputs:
            strips = self.inputs["bias"]
            start = lax.max(plan.strip_start - (self.position - base), jnp.int32(0))
            odd = lax.rem(start, jnp.int32(2))
            window = strips.at[odd, self.group, pl.ds(tile * TILE, TILE), pl.ds(start - odd, plan.block)]
            scores = scores + plgpu.load(window, layout=plgpu.Layout.WGMMA, optimized=False)
        return scores

    def _widened(self, name: str, slot: Array) -> tuple[Any, Array]:
        """A block of int8 keys or values as bfloat16, and the scale of each of its rows. What was copied is free then."""
        ring = self.k_ring if name == "k" else self.v_ring
        rows = self.plan.block_rows
        widened = self.buffers["widened"].at[pl.ds(_multiple(self.member * rows, TILE), rows)]
        for first in range(0, rows, TILE):
            piece = pl.ds(first, TILE)
            values = plgpu.load(ring.at[slot, piece], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            widened[piece] = values.astype(widened.dtype)
        scale = plgpu.load(self.buffers[f"{name}_scales"].at[slot], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        plgpu.commit_smem()
        return widened, scale

    def _add_values(self, acc: Array, weights: Array, values: Any, own: Array | int) -> Array:
        buffer = None
        if self.plan.interpreted:
            first = own if self.plan.team == 1 else _multiple(self.member * TILE, TILE)
            buffer = self.buffers["weights"].at[pl.ds(first, TILE)]
        return add_values(acc, weights, values, buffer)

    def _clean(self, slot: Array, base: Array, tile: Array | int) -> None:
        """Zeroes the values of keys that no query sees: a weight of 0 does not silence a NaN."""
        plan = self.plan

        def clean() -> None:
            for first in range(0, plan.block_rows, TILE):
                part = self.v_ring.at[slot, pl.ds(first, TILE)]
                shape = (TILE, plan.head_dim)
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first
                key = base + self._head_and_key(row)[1]
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                zero = jnp.zeros((), values.dtype)
                part[...] = jnp.where((key >= self.seen) & (key < self.end), values, zero)
            plgpu.commit_smem()

        if plan.tiles == 1:
            clean()
        else:
            pl.when(tile == 0)(clean)
            self._meet()

    def _meet(self) -> None:
        """Waits until all compute warpgroups are here."""
        if self.plan.warpgroups > 1:
            plgpu.barrier_arrive(self.buffers["together"])
            plgpu.barrier_wait(self.buffers["together"])

    # ---- results

    def _each_tile(self, tile: Array | int, store: Any) -> None:
        if self.plan.tiles == 1:
            store(0)
            return
        for index in range(self.plan.tiles):
            pl.when(tile == index)(functools.partial(store, index))

    def _store_whole(self, result: Array, tile: Array | int, own: Array | int) -> None:
        """Results [64, H] to where their tokens are."""
        plan, out, stage = self.plan, self.results["out"], self.results_stage
        stage[pl.ds(own, TILE)] = result.astype(out.dtype)
        plgpu.commit_smem()

        def store(index: int) -> None:
            for row, query, head, heads in plan.pieces(index):
                source = stage.at[pl.ds(index * TILE + row, heads)]
                entry = (self.first_token + query) * plan.groups + self.group
                target = out.at[entry, pl.ds(head, heads)]
                pl.when(query < self.live)(functools.partial(plgpu.copy_smem_to_gmem, source, target))

        self._each_tile(tile, store)
        plgpu.wait_smem_to_gmem(0)

    def _store_partial(self, acc: Array, peak: Array, total: Array, tile: Array | int, own: Array | int) -> None:
        stats = self.results["stats"].at[self.place]
        stats[0, pl.ds(own, TILE)] = peak
        stats[1, pl.ds(own, TILE)] = total
        stage = self.results_stage
        stage[pl.ds(own, TILE)] = acc
        plgpu.commit_smem()

        def store(index: int) -> None:
            rows = min(TILE, self.plan.used_rows - index * TILE)
            place = pl.ds(index * TILE, rows)
            plgpu.copy_smem_to_gmem(stage.at[place], self.results["acc"].at[self.place].at[place])

        self._each_tile(tile, store)
        plgpu.wait_smem_to_gmem(0)

    def _store_nothing(self) -> None:
        """A split without keys: nobody reads its accumulator."""
        plan = self.plan
        warpgroup = lax.axis_index("warpgroup") if plan.threads > 1 else jnp.int32(0)

        @pl.when(warpgroup < plan.tiles)
        def _() -> None:
            stats, own = self.results["stats"].at[self.place], pl.ds(_multiple(warpgroup * TILE, TILE), TILE)
            stats[0, own] = plgpu.layout_cast(jnp.full((TILE,), NOTHING, jnp.float32), ROWS)
            stats[1, own] = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROWS)


def _tiled(width: int, bits: int) -> tuple[Any, ...]:
    """Shared memory as the copy engine and wgmma want it, rows of `width` values of `bits` bits."""
    swizzle = plgpu.find_swizzle(width * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def _multiple(x: Array | int, of: int) -> Array | int:
    return x if isinstance(x, int) else pl.multiple_of(x, of)
