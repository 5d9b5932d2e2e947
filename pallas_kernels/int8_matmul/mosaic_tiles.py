"""W8A8 for many tokens as a persistent Mosaic GPU kernel.

Owns the kernel. Must not know which configuration suits a shape.

Tokens are wgmma's rows. A CTA is one copy warpgroup, which keeps `stages` steps in flight and never drains between two tiles, and
two that multiply, each its own tokens of a tile. Tiles are walked in bands, so that those computed at a time have tokens and
weights in common. With `share > 1` the CTAs of a cluster take neighbouring columns and load the tokens once for all. Scales,
bias, residual and gate are applied to the int32 sums in registers.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_activation.xla import ACTIVATIONS
from pallas_kernels.int8_matmul.mosaic_tiles_plan import BLOCK, K_STEP, REGISTERS, STAGING, WARPGROUPS, TilesPlan
from pallas_kernels.matmul.mosaic_kernel import swizzled_tile
from pallas_kernels.matmul.mosaic_plan import COPY_REGISTERS

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

_AHEAD = 2  # pieces of the residual

_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@functools.partial(jax.jit, static_argnames=("plan", "activation", "out_dtype"))
def multiply(
    x: Array,
    w: Array,
    x_scale: Array,
    scale: Array,
    bias: Array | None,
    residual: Array | None,
    *,
    plan: TilesPlan,
    activation: str | None,
    out_dtype: DTypeLike,
) -> Array:
    """int8 x [T, in] times int8 w [pair * out, in] transposed, scaled, with what the arguments name applied: [T, out].

    T and `out` are multiples of 64, `in` of 128.
    """
    operands = {"x": x, "w": w, "x_scale": x_scale, "scale": scale, "bias": bias, "residual": residual}
    operands = {name: array for name, array in operands.items() if array is not None}
    return _Kernel(plan, activation, out_dtype, tuple(operands)).call(list(operands.values()))


class _Kernel:
    """Traces the kernel for one plan; holds nothing but what is static."""

    def __init__(self, plan: TilesPlan, activation: str | None, out_dtype: DTypeLike, operands: tuple[str, ...]) -> None:
        self.plan = plan
        self.config = plan.config
        self.activation = activation
        self.out_dtype = jnp.dtype(out_dtype)
        self.operands = operands

    def call(self, operands: list[Array]) -> Array:
        plan, config = self.plan, self.config
        released = {"num_arrivals": WARPGROUPS, "num_barriers": config.stages}
        # Tokens that one CTA loads land in its peers too, so a slot is free when all of them have read it.
        shared = config.share > 1
        empty = plgpu.ClusterBarrier(collective_axes=("peer",), **released) if shared else plgpu.Barrier(**released)
        return plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct((plan.tokens, plan.columns_out), self.out_dtype),
            grid=(plan.clusters,),
            grid_names=("group",),
            cluster=(config.share,) if shared else (),
            cluster_names=("peer",) if shared else (),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types={
                "tokens": swizzled_tile((config.stages, plan.tile_tokens, K_STEP), jnp.int8),
                "weights": swizzled_tile((config.stages, plan.pair * config.columns, K_STEP), jnp.int8),
                "staging": swizzled_tile((WARPGROUPS, STAGING, BLOCK, BLOCK), self.out_dtype),
                "full": plgpu.Barrier(num_arrivals=1 + plan.pair, num_barriers=config.stages),
                "empty": empty,
            },
            kernel_name="int8_matmul",
        )(*operands)

    def body(self, *refs: Any, **scratch: Any) -> None:
        named = {**dict(zip((*self.operands, "out"), refs, strict=True)), **scratch}
        plan = self.plan
        group = lax.axis_index("group")
        warpgroup = lax.axis_index("warpgroup")
        mine = lax.div(plan.tiles - 1 - group, plan.clusters) + 1

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            self._copy(named, group, mine * plan.steps)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")

            @pl.loop(0, mine)
            def _(index: Array) -> None:
                self._tile(named, warpgroup, index, *self._place(group + index * plan.clusters))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _place(self, tile: Array) -> tuple[Array, Array]:
        """First token and first column of this CTA's part of a tile: band after band, in each column by column."""
        plan, config = self.plan, self.config
        band = lax.div(tile, config.band * plan.column_tiles)
        width = lax.min(jnp.int32(config.band), plan.token_tiles - band * config.band)
        within = tile - band * (config.band * plan.column_tiles)
        token = band * config.band + lax.rem(within, width)
        column = lax.div(within, width) * config.share
        if config.share > 1:
            column = column + lax.axis_index("peer")
        return pl.multiple_of(token * plan.tile_tokens, BLOCK), pl.multiple_of(column * config.columns, BLOCK)

    def _copy(self, refs: dict[str, Any], group: Array, total: Array) -> None:
        """Loads step after step, tile after tile, as slots become free."""
        plan, config = self.plan, self.config

        def load(step: Array, slot: Array) -> None:
            token, column = self._place(group + lax.div(step, plan.steps) * plan.clusters)
            depth = pl.ds(pl.multiple_of(lax.rem(step, plan.steps) * K_STEP, K_STEP), K_STEP)
            plgpu.copy_gmem_to_smem(
                refs["x"].at[pl.ds(token, plan.tile_tokens), depth],
                refs["tokens"].at[slot],
                refs["full"].at[slot],
                collective_axes="peer" if config.share > 1 else None,
            )
            for half in range(plan.pair):  # the rows of up follow those of gate
                plgpu.copy_gmem_to_smem(
                    refs["w"].at[pl.ds(half * plan.columns_out + column, config.columns), depth],
                    refs["weights"].at[slot, pl.ds(half * config.columns, config.columns)],
                    refs["full"].at[slot],
                )

        @pl.loop(0, lax.min(total, config.stages))
        def _(step: Array) -> None:
            load(step, step)

        @pl.loop(config.stages, total)
        def _(step: Array) -> None:
            slot = lax.rem(step, config.stages)
            plgpu.barrier_wait(refs["empty"].at[slot])
            load(step, slot)

        # A CTA may not end while its peers still signal it, and each waiter must see every phase of a barrier.
        @pl.loop(lax.max(total - config.stages, 0), total)
        def _(step: Array) -> None:
            plgpu.barrier_wait(refs["empty"].at[lax.rem(step, config.stages)])

    def _tile(self, refs: dict[str, Any], warpgroup: Array, index: Array, token: Array, column: Array) -> None:
        plan, config = self.plan, self.config
        own = warpgroup * config.rows
        token = pl.multiple_of(token + own, BLOCK)
        # Of what lies beyond the last token or column the hardware stores nothing. Whatever stands in bounds is read for it.
        rows = [lax.min(token + at, plan.tokens - BLOCK) for at in range(0, config.rows, BLOCK)]
        columns = [lax.min(column + at, plan.columns_out - BLOCK) for at in range(0, config.columns, BLOCK)]
        # Before the products, which hide the latency.
        x_scales = [_load(refs["x_scale"], row, _BY_ROW) for row in rows]
        scales = [[_load(refs["scale"], half * plan.columns_out + at, _BY_COLUMN) for at in columns] for half in range(plan.pair)]
        sums = self._multiply(refs, own, index * plan.steps)
        pieces = list(itertools.product(range(len(rows)), range(len(columns))))
        # Two pieces of the residual are on their way while one is written: all would take more registers than there are.
        coming = (_load(refs["residual"], (rows[i], columns[j]), plgpu.Layout.WGMMA) for i, j in pieces)
        old = list(itertools.islice(coming, _AHEAD)) if "residual" in refs else []
        for piece, (i, j) in enumerate(pieces):
            values = []
            for half, total in enumerate(sums):
                part = total[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK].astype(jnp.float32)
                part = part * lax.broadcast_in_dim(x_scales[i], part.shape, [0])
                values.append(part * lax.broadcast_in_dim(scales[half][j], part.shape, [1]))
            value = values[0] if self.activation is None else ACTIVATIONS[self.activation](values[0]) * values[1]
            if "bias" in refs:
                bias = _load(refs["bias"], columns[j], _BY_COLUMN).astype(jnp.float32)
                value = value + lax.broadcast_in_dim(bias, value.shape, [1])
            if old:
                value = value + old.pop(0).astype(jnp.float32)
                old.extend(itertools.islice(coming, 1))
            staging = refs["staging"].at[warpgroup, lax.rem(index * (len(rows) * len(columns)) + piece, jnp.int32(STAGING))]
            plgpu.wait_smem_to_gmem(STAGING - 1, wait_read_only=True)
            staging[...] = value.astype(self.out_dtype)
            plgpu.commit_smem()
            starts = (token + i * BLOCK, column + j * BLOCK)
            place = tuple(pl.ds(pl.multiple_of(start, BLOCK), BLOCK) for start in starts)
            plgpu.copy_smem_to_gmem(staging, refs["out"].at[place])

    def _multiply(self, refs: dict[str, Any], own: Array, start: Array) -> list[Array]:
        """int32 sums [rows, columns] of this warpgroup's tokens, for each half of a pair."""
        plan, config = self.plan, self.config

        def steps(*accumulators: Any) -> list[Array]:
            @pl.loop(0, plan.steps)
            def _(i: Array) -> None:
                slot = lax.rem(start + i, config.stages)
                plgpu.barrier_wait(refs["full"].at[slot])
                left = refs["tokens"].at[slot, pl.ds(pl.multiple_of(own, BLOCK), config.rows)]
                for half, accumulator in enumerate(accumulators):
                    right = refs["weights"].at[slot, pl.ds(half * config.columns, config.columns)]
                    plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
                plgpu.wgmma_wait(plan.pair)  # all but this step's, so that the tensor core is busy during the next wait

                @pl.when(i > 0)
                def _() -> None:
                    plgpu.barrier_arrive(refs["empty"].at[lax.rem(start + i - 1, config.stages)])

            sums = [accumulator[...] for accumulator in accumulators]
            plgpu.barrier_arrive(refs["empty"].at[lax.rem(start + plan.steps - 1, config.stages)])
            return sums

        return list(pl.run_scoped(steps, *[plgpu.ACC((config.rows, config.columns), jnp.int32)] * plan.pair))


def _load(ref: Any, at: Any, layout: Any) -> Array:
    """A block from memory, 64 along each axis, straight into registers."""
    starts = at if isinstance(at, tuple) else (at,)
    block = tuple(pl.ds(pl.multiple_of(start, BLOCK), BLOCK) for start in starts)
    return plgpu.load(ref.at[block], layout=layout, optimized=False)
