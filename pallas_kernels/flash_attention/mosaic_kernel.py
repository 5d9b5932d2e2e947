"""The Mosaic GPU kernel of flash attention for many queries a row, over contiguous or paged keys.

Owns the device code. What it computes with is decided in `mosaic`: it must not know how a plan is chosen, nor what a tuning
table is.

CTAs stay and take one unit of work after another, the longest first. One warpgroup copies; two compute, each on a query tile of
its own against the same blocks of keys, and take turns: while one multiplies, the other is at its softmax (Shah et al.,
FlashAttention-3, 2024). Blocks in which every query sees every key come first and are not masked; the order of blocks does not
matter to an online softmax (Milakov and Gimelshein, 2018), which is computed in base 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_sizes import LOG2E, TILE
from pallas_kernels.flash_attention.mosaic_plan import ALIGN, WARPGROUPS, Operands, Plan
from pallas_kernels.flash_attention.mosaic_work import Copier, Unit, Units
from pallas_kernels.online_softmax import NOTHING, ROWS, across, add_values, capped

if TYPE_CHECKING:
    from jax import Array

COPY_REGISTERS, COMPUTE_REGISTERS = 40, 232

_COLUMNS = plgpu.Layout.WGMMA.reduce(0)

_Carry = tuple[Any, Any, Any]


def attend(operands: Operands, plan: Plan, *, scale: float, soft_cap: float) -> tuple[Array, Array | None]:
    """The results [T, N, H], and the log-sum-exp in base 2 of each tile row [n, groups, WARPGROUPS, 64] if it is wanted.

    Only those entries are written that belong to a query of a tile.
    """
    present = [name for name, value in operands._asdict().items() if value is not None]
    outputs = {"out": jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)}
    if plan.lse:
        shape = (operands.tiles.shape[1], plan.groups, WARPGROUPS, TILE)
        outputs["lse"] = jax.ShapeDtypeStruct(shape, jnp.float32)

    swizzle = plgpu.find_swizzle(plan.head_dim * 16)
    tiled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    dtype = operands.k.dtype
    queries = (WARPGROUPS, TILE, plan.head_dim)
    block = plgpu.SMEM((plan.stages, plan.keys, plan.head_dim), dtype, transforms=tiled)
    # Results leave through memory that only whole tiles see tiled: no single row of those could be copied.
    whole, single = plgpu.SMEM(queries, dtype, transforms=tiled), plgpu.SMEM(queries, dtype)
    q_ring = plgpu.SMEM((plan.q_stages, *queries), dtype, transforms=tiled)
    ring_barrier = functools.partial(plgpu.Barrier, num_barriers=plan.stages)
    scratch: dict[str, Any] = {
        "k_ring": block,
        "v_ring": block,
        "tiles_memory": plgpu.RefUnion(q_ring, whole, single) if plan.q_stages == 1 else [q_ring, plgpu.RefUnion(whole, single)],
        "q_full": plgpu.Barrier(num_arrivals=WARPGROUPS * plan.heads, num_barriers=plan.q_stages),
        "q_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.q_stages),
        "k_full": ring_barrier(num_arrivals=plan.copies),
        "v_full": ring_barrier(num_arrivals=plan.copies),
        "k_free": ring_barrier(num_arrivals=WARPGROUPS),
        "v_free": ring_barrier(num_arrivals=WARPGROUPS),
        "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    if plan.interpreted:
        scratch["weights"] = plgpu.SMEM((WARPGROUPS, TILE, plan.keys), dtype)

    def body(*refs: Any, **buffers: Any) -> None:
        inputs = dict(zip(present, refs, strict=False))
        results = dict(zip(outputs, refs[len(present) :], strict=True))
        memory = buffers.pop("tiles_memory")
        q_ring, whole, single = memory if plan.q_stages == 1 else (memory[0], *memory[1])
        units = Units(plan, inputs)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            Copier(plan, inputs, buffers, q_ring).run(units)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _Warpgroup(plan, inputs, results, buffers, (q_ring, whole, single), warpgroup, scale, soft_cap).run(units)

    results = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="flash_attention",
    )(*(value for value in operands if value is not None))
    return results[0], results[1] if plan.lse else None


class _Warpgroup:
    """The program of one computing warpgroup, while it is traced."""

    def __init__(
        self,
        plan: Plan,
        inputs: dict[str, Any],
        results: dict[str, Any],
        buffers: dict[str, Any],
        tiles: tuple[Any, Any, Any],
        warpgroup: Array,
        scale: float,
        soft_cap: float,
    ) -> None:
        self.plan, self.inputs, self.results, self.buffers = plan, inputs, results, buffers
        self.q_ring, self.whole, self.single = tiles
        self.warpgroup, self.scale, self.soft_cap = warpgroup, scale, soft_cap

    def run(self, units: Units) -> None:
        def one_unit(index: Array, done: Array) -> Array:
            return self._work(units.unit(index), index, done)

        all_units = functools.partial(lax.fori_loop, jnp.int32(0), units.count, one_unit, jnp.int32(0))
        if self.plan.q_stages > 1:
            self._lagging(all_units)
        else:
            all_units()
        plgpu.wait_smem_to_gmem(0)

    def _lagging(self, compute: Callable[[], Any]) -> Any:
        """`compute` with one warpgroup half a turn behind: it meets the other once more in front, and that one behind.

        Over all units if the next queries can come before both are done with these; else the first one, which waits for them,
        would keep the other from finishing.
        """
        pl.when(self.warpgroup == 1)(self._take_turn)
        result = compute()
        pl.when(self.warpgroup == 0)(self._take_turn)
        return result

    def _take_turn(self) -> None:
        plgpu.barrier_arrive(self.buffers["turn"])
        plgpu.barrier_wait(self.buffers["turn"])

    def _work(self, unit: Unit, index: Array, done: Array) -> Array:
        """One unit; `done` blocks were used before it. Returns how many after it."""
        plan = self.plan
        slot = lax.rem(index, jnp.int32(plan.q_stages))
        rows = self._row_data(unit)
        plgpu.barrier_wait(self.buffers["q_full"].at[slot])
        queries = self.q_ring.at[slot, self.warpgroup]
        carry: _Carry = (
            plgpu.layout_cast(jnp.zeros((TILE, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((TILE,), NOTHING, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROWS),
        )
        step = functools.partial(self._step, unit, queries, rows, done)

        def all_steps() -> _Carry:
            whole: _Carry = lax.fori_loop(jnp.int32(0), unit.full, functools.partial(step, masked=False), carry)
            result: _Carry = lax.fori_loop(unit.full, unit.steps, functools.partial(step, masked=True), whole)
            return result

        acc, peak, total = all_steps() if plan.q_stages > 1 else self._lagging(all_steps)
        if plan.q_stages > 1:
            plgpu.barrier_arrive(self.buffers["q_free"].at[slot])
        if plan.lse:
            self.results["lse"][unit.tile, unit.group, self.warpgroup] = peak + jnp.log2(total)
        inverse = 1.0 / jnp.where(total > 0.0, total, 1.0)
        self._store(acc * across(inverse, acc.shape), unit)
        if plan.q_stages == 1:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.buffers["q_free"].at[slot])
        return done + unit.steps

    def _row_data(self, unit: Unit) -> dict[str, Array]:
        """What does not change from block to block: the position of each tile row, its slope, its bias from far away."""
        plan = self.plan
        row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROWS)
        token = row - lax.div(row, jnp.int32(plan.tokens)) * plan.tokens
        found = {"position": token + (unit.position + self.warpgroup * plan.tokens)}
        for name in ("slopes", "far"):
            if name in self.inputs:
                found[name] = plgpu.load(self.inputs[name].at[unit.group], layout=ROWS, optimized=False)
        return found

    def _step(
        self, unit: Unit, queries: Any, rows: dict[str, Array], done: Array, number: Array, carry: _Carry, *, masked: bool
    ) -> _Carry:
        """One block of keys."""
        plan = self.plan
        acc, peak, total = carry
        shape = (TILE, plan.keys)
        slot = lax.rem(done + number, jnp.int32(plan.stages))
        start = unit.start(number)
        plgpu.barrier_wait(self.buffers["k_full"].at[slot])

        def multiply(scores: Any) -> Array:
            plgpu.wgmma(scores, queries, self.buffers["k_ring"].at[slot].transpose((1, 0)))
            self._take_turn()  # the other one's values may follow
            return scores[...]

        scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(self.buffers["k_free"].at[slot])

        scores, factor, shift = self._biased(scores, unit, rows, start, masked)
        if masked:
            scores = jnp.where(self._visible(unit, rows["position"], start, shape), scores, -jnp.inf)
        highest = scores.max(axis=1) * factor
        new_peak = jnp.maximum(peak, highest if shift is None else highest + shift)
        decay = jnp.exp2(peak - new_peak)
        low = new_peak if shift is None else new_peak - shift
        weights = jnp.exp2(scores * factor - across(low, shape))
        total = total * decay + weights.sum(axis=1)
        acc = acc * across(decay, acc.shape)
        narrow = weights.astype(self.buffers["v_ring"].dtype)
        acc, total, new_peak, narrow = lax.optimization_barrier((acc, total, new_peak, narrow))

        plgpu.barrier_arrive(self.buffers["turn"])
        plgpu.barrier_wait(self.buffers["v_full"].at[slot])
        plgpu.barrier_wait(self.buffers["turn"])
        if masked:
            edge = (start < unit.seen) | (start + plan.keys > unit.length)
            pl.when(edge)(functools.partial(self._clean, unit, slot, start))
        acc = self._add_values(acc, narrow, slot)
        plgpu.barrier_arrive(self.buffers["v_free"].at[slot])
        return acc, new_peak, total

    def _biased(
        self, scores: Array, unit: Unit, rows: dict[str, Array], start: Array, masked: bool
    ) -> tuple[Array, float, Array | None]:
        """(scores, factor, shift): in units of log 2 a score is scores * factor, plus the shift of its row."""
        plan, shape = self.plan, scores.shape
        factor = self.scale * LOG2E
        if not self.soft_cap and len(rows) == 1:
            return scores, factor, None
        if self.soft_cap:
            scores = capped(scores, self.scale, self.soft_cap)
        else:
            scores = scores * factor
        if "slopes" in rows:
            # Slope times column would be the same in every block, so the compiler would keep it, and spill.
            column = plgpu.broadcasted_iota(jnp.int32, (plan.keys,), 0, layout=_COLUMNS).astype(jnp.float32)
            distance = across((start - rows["position"]).astype(jnp.float32), shape) + lax.broadcast_in_dim(column, shape, [1])
            scores = scores + across(rows["slopes"], shape) * distance
        if "far" in rows and masked:
            position = unit.position + self.warpgroup * plan.tokens
            place = lax.max(plan.strip_start - (position - start), jnp.int32(0))
            odd = lax.rem(place, jnp.int32(2))
            window = self.inputs["strips"].at[odd, unit.group, :, pl.ds(place - odd, plan.keys)]
            scores = scores + plgpu.load(window, layout=plgpu.Layout.WGMMA, optimized=False)
        elif "far" in rows:
            return scores, 1.0, rows["far"]
        return scores, 1.0, None

    def _visible(self, unit: Unit, position: Array, start: Array, shape: tuple[int, int]) -> Array:
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        low = lax.max(position - unit.reach + 1, jnp.broadcast_to(unit.pad, position.shape)) - start
        if self.plan.causal:
            high = position - start
        else:
            high = lax.min(position + (unit.reach - 1), jnp.broadcast_to(unit.length - 1, position.shape)) - start
        return (column <= across(high, shape)) & (column >= across(low, shape))

    def _add_values(self, acc: Array, weights: Array, slot: Array) -> Array:
        buffer = self.buffers["weights"].at[self.warpgroup] if self.plan.interpreted else None
        return add_values(acc, weights, self.buffers["v_ring"].at[slot], buffer)

    def _clean(self, unit: Unit, slot: Array, start: Array) -> None:
        """Zeroes the values of keys that the row does not own or that no query sees: a weight of 0 does not silence a NaN.

        Both warpgroups do so, because they never meet here; what the second one writes is what is there already.
        """
        plan = self.plan
        shape = (TILE, plan.head_dim)
        for first in range(0, plan.keys, TILE):
            part = self.buffers["v_ring"].at[slot, pl.ds(first, TILE)]
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + (start + first)
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where((key >= unit.seen) & (key < unit.length), values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()

    def _store(self, result: Array, unit: Unit) -> None:
        """Results [64, H] to where their tokens are; of the first and the last tile of a row only its own."""
        plan = self.plan
        out = self.results["out"]
        result = result.astype(out.dtype)
        before = self.warpgroup * plan.tokens
        token = pl.multiple_of(unit.first + before, ALIGN)
        dead, live = (lax.clamp(0, one - before, plan.tokens) for one in (unit.dead, unit.live))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(live - dead == plan.tokens)
        def _() -> None:
            self.whole[self.warpgroup] = result
            plgpu.commit_smem()
            for head in range(plan.heads):
                source = self.whole.at[self.warpgroup, pl.ds(head * plan.tokens, plan.tokens)]
                plgpu.copy_smem_to_gmem(source, out.at[pl.ds(token, plan.tokens), unit.head + head])

        @pl.when((live > dead) & (live - dead < plan.tokens))
        def _() -> None:
            _store_plain(self.single.at[self.warpgroup], result)
            plgpu.commit_smem()

            @pl.loop(dead, live)
            def _(one: Array) -> None:
                for head in range(plan.heads):
                    source = self.single.at[self.warpgroup, pl.ds(head * plan.tokens + one, 1)]
                    plgpu.copy_smem_to_gmem(source, out.at[pl.ds(token + one, 1), unit.head + head])


def _store_plain(ref: Any, value: Array) -> None:
    """`ref[...] = value` for memory without tiles, whatever the conflicts of its banks.

    From jax 0.12 on an assignment insists on none, and at head dim 256 the search for such a layout does not end.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
