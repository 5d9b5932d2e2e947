"""The weight-streaming kernel of `matmul` for int8 weights: what is multiplied, and where the scales come in.

Owns the two products. Ring, splits and epilogues are those of `matmul.mosaic_kernel`. Must not know which configuration suits a
shape.

W8A16 widens weights to bfloat16 in registers, from which wgmma takes its left operand: int8 to bfloat16 is exact, and nothing but
int8 ever lies in shared memory. Packed weights are loaded in the order in which wgmma wants them; others are shuffled. W8A8
multiplies int8 as it lies in shared memory and adds in int32, over splits too, so its sums are exact.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_kernel import StreamKernel, swizzled_tile
from pallas_kernels.matmul.mosaic_plan import ROW_BLOCK, Plan
from pallas_kernels.quantized import reorder

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike


@functools.partial(jax.jit, static_argnames=("plan", "activation", "out_dtype", "packed", "interpreted"))
def stream(
    x: Array,
    w: Array,
    x_scale: Array | None,
    scale: Array | None,
    bias: Array | None,
    residual: Array | None,
    upcoming: Array | None,
    *,
    plan: Plan,
    activation: str | None,
    out_dtype: DTypeLike,
    packed: bool,
    interpreted: bool,
) -> Array:
    """x [T, in] times int8 w [pair * out, in] transposed, with what the arguments name applied: [planes, T, out].

    bfloat16 x as it is, its sums float32; int8 x in the order of w's columns, its sums int32. Planes and sizes as in
    `matmul.mosaic_kernel.stream`: those of "after" are plain sums, and come without scales. x_scale holds T rounded up to 8,
    `scale` a float32 a row of w.
    """
    operands = {
        "x": x, "w": w, "x_scale": x_scale, "scale": scale, "bias": bias, "residual": residual, "upcoming": upcoming,
    }  # fmt: skip
    operands = {name: array for name, array in operands.items() if array is not None}
    if x.dtype == jnp.int8:
        kernel: _Int8Kernel = _W8A8(plan, activation, out_dtype, tuple(operands))
    else:
        kernel = _W8A16(plan, activation, out_dtype, tuple(operands))
        kernel.packed, kernel.interpreted = packed, interpreted
    return kernel.call(list(operands.values()), x.shape[0])


class _Int8Kernel(StreamKernel):
    weight_dtype = jnp.int8

    def scaled(self, refs: dict[str, Any], totals: list[Array], row: Array, token: Array) -> list[Array]:
        totals = [total.astype(jnp.float32) for total in totals] if "scale" in refs else totals
        if "x_scale" in refs:
            at = pl.ds(token, totals[0].shape[1])
            factor = plgpu.load(refs["x_scale"].at[at], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            totals = [total * lax.broadcast_in_dim(factor, total.shape, [1]) for total in totals]
        if "scale" not in refs:  # XLA adds the sums, and scales them then
            return totals
        factors = [
            plgpu.load(
                refs["scale"].at[pl.ds(half * self.plan.rows_out + row, ROW_BLOCK)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            for half in range(len(totals))
        ]
        return [total * lax.broadcast_in_dim(factor, total.shape, [0]) for total, factor in zip(totals, factors, strict=True)]


class _W8A8(_Int8Kernel):
    token_dtype = jnp.int8
    sum_dtype = jnp.int32


class _W8A16(_Int8Kernel):
    packed: bool
    interpreted: bool

    def more_scratch(self) -> dict[str, Any]:
        """The interpreter multiplies only what lies in shared memory: there a place for widened weights."""
        if not self.interpreted:
            return {}
        return {"widened": swizzled_tile((self.plan.warpgroups, ROW_BLOCK, self.plan.block_each), jnp.bfloat16)}

    def multiply(self, refs: dict[str, Any], warpgroup: Array, block: Array, token: Array, start: Array) -> list[Array]:
        """As of `StreamKernel`, but each step waits for its products: registers that wgmma reads must not be written, and with
        products in flight they were (wrong numbers on an H200). Other warpgroups fill the gaps."""
        plan, config, deep = self.plan, self.config, self.part_of_step(warpgroup)

        def steps(*accumulators: Any) -> list[Array]:
            @pl.loop(0, plan.steps)
            def _(i: Array) -> None:
                slot = lax.rem(start + i, config.stages)
                plgpu.barrier_wait(refs["full"].at[slot])
                right = refs["tokens"].at[slot, pl.ds(token, plan.tokens_each), deep].transpose((1, 0))
                for half, accumulator in enumerate(accumulators):
                    rows = pl.ds(pl.multiple_of(half * plan.tile_rows + block, ROW_BLOCK), ROW_BLOCK)
                    left = self._widened(refs["weights"].at[slot, rows, deep])
                    if self.interpreted:
                        refs["widened"][warpgroup] = left
                        plgpu.commit_smem()
                        left = refs["widened"].at[warpgroup]
                    plgpu.wgmma(accumulator, left, right)
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(refs["empty"].at[slot])

            return [accumulator[...] for accumulator in accumulators]

        return pl.run_scoped(steps, *self.accumulators())

    def _widened(self, weights: Any) -> Array:
        """int8 [64, block_k] as bfloat16, in registers as wgmma wants its left operand."""
        wide = plgpu.load(weights, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(jnp.bfloat16)
        if not self.packed:
            return plgpu.layout_cast(wide, plgpu.Layout.WGMMA)
        return reorder(wide) if self.interpreted else _relabelled(wide)


def _relabelled(wide: Array) -> Array:
    """bfloat16 of packed columns in the layout they were loaded in, which is wgmma's but for the order of registers: each of
    four neighbours is two of two."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_2X,),
        return_type=plgpu.ShapeDtypeStruct(wide.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def relabel(_: Any, loaded: Any) -> Any:
        registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(loaded.shape), dtype=object)
        for (tile, block, *others), register in np.ndenumerate(loaded.registers):
            for half in range(2):
                place = (tile, block * 2 + half, *others[:-1])
                registers[place] = mgpu_utils.vector_slice(register, slice(2 * half, 2 * half + 2))
        return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)

    return relabel(wide)
