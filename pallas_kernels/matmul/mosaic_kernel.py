"""The Mosaic GPU kernel that streams weights past a few tokens.

Owns the kernel: its ring of weight tiles, the sum over splits of the contraction, the epilogue. Must not know which
configuration suits a shape, nor what the kernel is measured against.

Weights are wgmma's left operand and tokens its right (swap-AB), so that a handful of tokens pays for 8 columns, not for 64
rows. A CTA is one copy warpgroup and `rows * columns * depth` compute warpgroups. The copy warpgroup keeps `stages` steps in
flight and never drains between two tiles. With `splits > 1` the CTAs of a cluster take a slice of the contraction each and
exchange their sums through distributed shared memory, every one finishing a part of the tile's tokens. With `share > 1` CTAs
of a cluster take neighbouring rows and load the tokens once for all. With `depth > 1` the warpgroups of a CTA divide a step's
contraction, and the first ones add up.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_activation.xla import ACTIVATIONS
from pallas_kernels.matmul.mosaic_plan import AHEAD_BOX, COPY_REGISTERS, K_BLOCK, ROW_BLOCK, TOKEN_BLOCK, Plan

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

_MANY_REGISTERS = 64  # of a thread; from here on the copy warpgroup hands its own over


def _swizzled(itemsize: int, width: int) -> tuple[Any, ...]:
    """Tiles of 8 lines, each as long as a swizzle that divides the width (128, 64 or 32 bytes)."""
    line = next(line for line in (128, 64, 32) if width * itemsize % line == 0)
    return plgpu.TilingTransform((8, line // itemsize)), plgpu.SwizzleTransform(line)


def swizzled_tile(shape: tuple[int, ...], dtype: DTypeLike, *, width: int | None = None) -> Any:
    """Shared memory that loads fill and wgmma reads, parts of it `width` wide."""
    transforms = _swizzled(jnp.dtype(dtype).itemsize, shape[-1] if width is None else width)
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)


@functools.partial(jax.jit, static_argnames=("plan", "activation", "out_dtype"))
def stream(
    x: Array,
    w: Array,
    bias: Array | None,
    residual: Array | None,
    upcoming: Array | None,
    *,
    plan: Plan,
    activation: str | None,
    out_dtype: DTypeLike,
) -> Array:
    """x [T, in] times w [pair * out, in] transposed, bfloat16, with what the arguments name added: [planes, T, out].

    There is one plane, or one for each split where "after" leaves the sum to the caller; those come without an epilogue.
    T is at most 8 or a multiple of 8; `in` and `out` are multiples of 64, the sizes of `upcoming` of those of AHEAD_BOX.
    """
    operands = {"x": x, "w": w, "bias": bias, "residual": residual, "upcoming": upcoming}
    operands = {name: array for name, array in operands.items() if array is not None}
    return StreamKernel(plan, activation, out_dtype, tuple(operands)).call(list(operands.values()), x.shape[0])


class StreamKernel:
    """Traces the kernel for one plan; holds nothing but what is static. Other kinds of weights and tokens are subclasses."""

    weight_dtype: DTypeLike = jnp.bfloat16
    token_dtype: DTypeLike = jnp.bfloat16
    sum_dtype: DTypeLike = jnp.float32

    def __init__(self, plan: Plan, activation: str | None, out_dtype: DTypeLike, operands: tuple[str, ...]) -> None:
        self.plan = plan
        self.config = plan.config
        self.activation = activation
        self.out_dtype = jnp.dtype(out_dtype)
        self.operands = operands
        self.biased = "bias" in operands
        self.residual = "residual" in operands

    def call(self, operands: list[Array], tokens: int) -> Array:
        plan, config = self.plan, self.config
        ring = (config.stages,)
        planes = config.splits if config.reduce == "after" else 1
        out_types = [jax.ShapeDtypeStruct((planes, tokens, plan.rows_out), self.out_dtype)]
        out_lines = _swizzled(self.out_dtype.itemsize, ROW_BLOCK)
        scratch = {
            "weights": swizzled_tile(
                (*ring, plan.pair * plan.tile_rows, config.block_k), self.weight_dtype, width=plan.block_each
            ),
            "tokens": swizzled_tile((*ring, plan.tokens, config.block_k), self.token_dtype, width=plan.block_each),
            "staging": plgpu.SMEM((plan.finishers, plan.store, ROW_BLOCK), self.out_dtype, transforms=out_lines),
            "full": plgpu.Barrier(num_arrivals=plan.pair + 1, num_barriers=config.stages),
            "empty": self._ring_barrier(),
            **self.more_scratch(),
        }
        if self.residual:
            scratch["residual_here"] = plgpu.Barrier(num_barriers=plan.finishers)
        if config.depth > 1:
            scratch["partial"] = plgpu.SMEM(plan.partial_shape, self.sum_dtype, transforms=_swizzled(4, plan.tokens_each))
            scratch["summed"] = plgpu.Barrier(num_arrivals=config.depth - 1, num_barriers=plan.finishers)
            scratch["taken"] = plgpu.Barrier(num_barriers=plan.finishers)
        if plan.split_in_cluster:
            among_splits = {"collective_axes": ("split",), "num_barriers": plan.finishers}
            scratch["read"] = plgpu.ClusterBarrier(**among_splits)
            if config.reduce == "cluster":
                scratch["inbox"] = plgpu.SMEM(plan.inbox_shape, self.sum_dtype, transforms=_swizzled(4, plan.piece))
                # One for all warpgroups: a store to a peer signals the wrong one of several (jax 0.11 adds its place twice).
                scratch["arrived"] = plgpu.Barrier(num_arrivals=config.splits * plan.pair * plan.finishers)
            else:
                mail_shape = (plan.clusters * config.share, plan.parts, *plan.inbox_shape)
                out_types.append(jax.ShapeDtypeStruct(mail_shape, self.sum_dtype))
                scratch["arrived"] = plgpu.ClusterBarrier(**among_splits)
        clustered = config.cluster_size > 1
        after = config.splits if config.reduce == "after" else 1
        out, *_ = plgpu.kernel(
            self.body,
            out_type=out_types,
            grid=(plan.clusters * after,),
            grid_names=("group",),
            cluster=(config.cluster_size // config.share, config.share) if clustered else (),
            cluster_names=("split", "peer") if clustered else (),
            num_threads=plan.warpgroups + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            kernel_name="stream_matmul",
        )(*operands)
        return out

    def more_scratch(self) -> dict[str, Any]:
        """What a subclass needs beside the ring."""
        return {}

    def scaled(self, refs: dict[str, Any], totals: list[Array], row: Array, token: Array) -> list[Array]:
        """Sums [64, piece] of each half of a pair in float32, as an epilogue takes them; `row` and `token` are the output's."""
        del refs, row, token
        return totals

    def _ring_barrier(self) -> plgpu.Barrier | plgpu.ClusterBarrier:
        count = {"num_arrivals": self.plan.warpgroups, "num_barriers": self.config.stages}
        # Tokens that one CTA loads land in its peers too, so a slot is free when all of them have read it.
        return plgpu.ClusterBarrier(collective_axes=("peer",), **count) if self.config.share > 1 else plgpu.Barrier(**count)

    def body(self, *refs: Any, **scratch: Any) -> None:
        names = (*self.operands, "out", "mail")[: len(refs)]
        self._walk({**dict(zip(names, refs, strict=True)), **scratch})

    def _walk(self, refs: dict[str, Any]) -> None:
        plan, config = self.plan, self.config
        group = lax.axis_index("group")
        if config.reduce == "after":
            split, first = lax.rem(group, config.splits), lax.div(group, config.splits)
        else:
            split = lax.axis_index("split") if plan.split_in_cluster else jnp.int32(0)
            first = group
        peer = lax.axis_index("peer") if config.share > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup")
        mine = lax.div(plan.tiles - 1 - first, plan.clusters) + 1

        def row_of(tile_index: Array) -> Array:
            """First output row of this CTA's tile."""
            tile = first + tile_index * plan.clusters
            return pl.multiple_of((tile * config.share + peer) * plan.tile_rows, ROW_BLOCK)

        # One compute warpgroup may have 240 registers a thread anyway.
        many = plan.registers >= _MANY_REGISTERS and plan.warpgroups > 1

        @pl.when(warpgroup == plan.warpgroups)
        def _() -> None:
            if many:
                plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            self._copy(refs, row_of, split, mine * plan.steps, (first * config.splits + split) * config.share + peer)

        @pl.when(warpgroup < plan.warpgroups)
        def _() -> None:
            if many:
                plgpu.set_max_registers(plan.compute_registers, action="increase")
            self._compute(refs, row_of, split, peer, warpgroup, mine)

    def _copy(self, refs: dict[str, Any], row_of: Any, split: Array, total: Array, cta: Array) -> None:
        """Loads step after step, tile after tile, as slots become free."""
        plan, config = self.plan, self.config
        rows = plan.tile_rows

        def load(step: Array | int, slot: Array | int) -> None:
            row = row_of(lax.div(step, plan.steps))
            k = pl.multiple_of((split * plan.steps + lax.rem(step, plan.steps)) * config.block_k, K_BLOCK)
            depth = pl.ds(k, config.block_k)
            for half in range(plan.pair):  # the rows of up follow those of gate
                plgpu.copy_gmem_to_smem(
                    refs["w"].at[pl.ds(half * plan.rows_out + row, rows), depth],
                    refs["weights"].at[slot, pl.ds(half * rows, rows)],
                    refs["full"].at[slot],
                )
            plgpu.copy_gmem_to_smem(
                refs["x"].at[pl.ds(0 * row, plan.tokens), depth],  # a traced start, as rows beyond the last token read as zero
                refs["tokens"].at[slot],
                refs["full"].at[slot],
                collective_axes="peer" if config.share > 1 else None,
            )

        @pl.loop(0, lax.min(total, config.stages))
        def _(step: Array) -> None:
            load(step, step)

        @pl.loop(config.stages, total)
        def _(step: Array) -> None:
            slot = lax.rem(step, config.stages)
            plgpu.barrier_wait(refs["empty"].at[slot])
            load(step, slot)

        if "upcoming" in self.operands:
            self._look_ahead(refs["upcoming"], cta)

        # A CTA may not end while its peers still signal it, and each waiter must see every phase of a barrier.
        @pl.loop(lax.max(total - config.stages, 0), total)
        def _(step: Array) -> None:
            plgpu.barrier_wait(refs["empty"].at[lax.rem(step, config.stages)])

    def _look_ahead(self, upcoming: Any, cta: Array) -> None:
        """Asks for this CTA's share of the next weights in the cache, so that memory does not idle between two kernels.

        The boxes of a row lie evenly along it, so that every split of the next kernel finds some of its own.
        """
        plan, config = self.plan, self.config
        ctas = plan.clusters * config.splits * config.share
        rows, depth = (size // block for size, block in zip(upcoming.shape, AHEAD_BOX, strict=True))
        along = max(1, min(depth, config.ahead * ctas // rows))  # boxes of a row
        for i in range(config.ahead):
            box = i * ctas + cta
            row, column = lax.div(box, along), lax.rem(box, along) * (depth // along)

            @pl.when(row < rows)
            def _(row: Array = row, column: Array = column) -> None:
                starts = (pl.multiple_of(at * size, size) for at, size in zip((row, column), AHEAD_BOX, strict=True))
                plgpu.async_prefetch(upcoming.at[tuple(map(pl.ds, starts, AHEAD_BOX))])

    def _compute(self, refs: dict[str, Any], row_of: Any, split: Array, peer: Array, warpgroup: Array, mine: Array) -> None:
        plan, config = self.plan, self.config
        block = lax.rem(warpgroup, config.rows) * ROW_BLOCK
        finisher = warpgroup if config.depth == 1 else lax.rem(warpgroup, plan.finishers)
        token = lax.div(finisher, config.rows) * plan.tokens_each
        token = pl.multiple_of(token, TOKEN_BLOCK)

        finishes = split < plan.parts if plan.split_in_cluster else jnp.bool_(True)
        plane = split if config.reduce == "after" else 0

        @pl.loop(0, mine)
        def _(tile_index: Array) -> None:
            row = pl.multiple_of(row_of(tile_index) + block, ROW_BLOCK)
            start = pl.multiple_of(token + split * plan.part, TOKEN_BLOCK) if plan.split_in_cluster else token
            if self.residual:
                fetches = finishes & (row < plan.rows_out)

                @pl.when(fetches if config.depth == 1 else fetches & (warpgroup == finisher))
                def _() -> None:
                    self._fetch_residual(refs, warpgroup, self._place(row, start, 0))

            sums = self.multiply(refs, warpgroup, block, token, tile_index * plan.steps)
            if config.depth > 1:
                self._leave(refs, sums, warpgroup, finisher, tile_index)

                @pl.when(warpgroup == finisher)
                def _() -> None:
                    self._finish(
                        refs,
                        self._gathered(refs, sums, finisher, tile_index < mine - 1),
                        warpgroup,
                        row,
                        start,
                        plane,
                        fetched=True,
                    )

                return
            if not plan.split_in_cluster:
                self._finish(refs, sums, warpgroup, row, start, plane, fetched=True)
                return
            for at in range(0, plan.part, plan.piece):
                last = at + plan.piece == plan.part

                @pl.when((tile_index > 0) | (at > 0))
                def _() -> None:
                    plgpu.barrier_wait(refs["read"].at[warpgroup])

                mail = self._send(refs, sums, at, split, peer, warpgroup)

                @pl.when(finishes)
                def _(at: int = at, mail: Any = mail) -> None:
                    if config.reduce == "cluster":
                        plgpu.barrier_wait(refs["arrived"])
                    totals = [
                        functools.reduce(
                            jnp.add,
                            (plgpu.load(mail.at[s, half, warpgroup], layout=plgpu.Layout.WGMMA) for s in range(config.splits)),
                        )
                        for half in range(plan.pair)
                    ]
                    self._finish(refs, totals, warpgroup, row, start + at, plane, fetched=at == 0)

                # One thread signals for all of its warpgroup: they have read by then, as each store joined them. The very last
                # signal would reach CTAs that may have ended.
                @pl.when((tile_index < mine - 1) | jnp.bool_(not last))
                def _() -> None:
                    plgpu.barrier_arrive(refs["read"].at[warpgroup])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _leave(self, refs: dict[str, Any], sums: list[Array], warpgroup: Array, finisher: Array, tile_index: Array) -> None:
        """Those behind the first along the contraction leave it their sums, once it has taken those of the tile before."""

        @pl.when(warpgroup > finisher)
        def _() -> None:
            @pl.when(tile_index > 0)
            def _() -> None:
                plgpu.barrier_wait(refs["taken"].at[finisher])

            place = lax.div(warpgroup, self.plan.finishers) - 1
            for half, total in enumerate(sums):
                refs["partial"][place, half, finisher] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs["summed"].at[finisher])

    def _gathered(self, refs: dict[str, Any], sums: list[Array], finisher: Array, more: Array) -> list[Array]:
        """The sums over all of a step's contraction, added in its order. If there are `more` tiles, others wait for room."""
        plgpu.barrier_wait(refs["summed"].at[finisher])
        totals = [
            functools.reduce(
                jnp.add,
                (
                    plgpu.load(refs["partial"].at[place, half, finisher], layout=plgpu.Layout.WGMMA)
                    for place in range(self.config.depth - 1)
                ),
                total,
            )
            for half, total in enumerate(sums)
        ]
        plgpu.commit_smem()  # all of the warpgroup have read

        @pl.when(more)
        def _() -> None:
            plgpu.barrier_arrive(refs["taken"].at[finisher])

        return totals

    def part_of_step(self, warpgroup: Array) -> Any:
        """What of a step's contraction is a warpgroup's."""
        if self.config.depth == 1:
            return slice(None)
        first = lax.div(warpgroup, self.plan.finishers) * self.plan.block_each
        return pl.ds(pl.multiple_of(first, self.plan.k_block), self.plan.block_each)

    def multiply(self, refs: dict[str, Any], warpgroup: Array, block: Array, token: Array, start: Array) -> list[Array]:
        """The sums of this warpgroup over its share of this CTA's slice: [64, tokens_each] for each half of a pair."""
        plan, config, deep = self.plan, self.config, self.part_of_step(warpgroup)

        def steps(*accumulators: Any) -> list[Array]:
            @pl.loop(0, plan.steps)
            def _(i: Array) -> None:
                slot = lax.rem(start + i, config.stages)
                plgpu.barrier_wait(refs["full"].at[slot])
                right = refs["tokens"].at[slot, pl.ds(token, plan.tokens_each), deep].transpose((1, 0))
                for half, accumulator in enumerate(accumulators):
                    left = pl.ds(pl.multiple_of(half * plan.tile_rows + block, ROW_BLOCK), ROW_BLOCK)
                    plgpu.wgmma(accumulator, refs["weights"].at[slot, left, deep], right)
                plgpu.wgmma_wait(plan.pair)  # all but this step's, so that the tensor core is busy during the next wait

                @pl.when(i > 0)
                def _() -> None:
                    plgpu.barrier_arrive(refs["empty"].at[lax.rem(start + i - 1, config.stages)])

            sums = [accumulator[...] for accumulator in accumulators]
            plgpu.barrier_arrive(refs["empty"].at[lax.rem(start + plan.steps - 1, config.stages)])
            return sums

        return pl.run_scoped(steps, *self.accumulators())

    def accumulators(self) -> list[Any]:
        return [plgpu.ACC((ROW_BLOCK, self.plan.tokens_each), self.sum_dtype)] * self.plan.pair

    def _send(self, refs: dict[str, Any], sums: list[Array], at: int, split: Array, peer: Array, warpgroup: Array) -> Any:
        """Gives each finishing CTA the piece at `at` of its part of this CTA's sums; returns what holds those sent to this
        one."""
        plan, config = self.plan, self.config
        here = lax.axis_index("group") * config.share + peer
        for to in range(plan.parts):
            for half, total in enumerate(sums):
                part = total[:, to * plan.part + at : to * plan.part + at + plan.piece]
                if config.reduce == "cluster":
                    plgpu.async_store_smem(
                        part,
                        refs["inbox"].at[split, half, warpgroup],
                        refs["arrived"],
                        cluster_idx=jnp.int32(to),
                        cluster_dim="split",
                        optimized=False,
                    )
                else:
                    refs["mail"][here, to, split, half, warpgroup] = part
        if config.reduce == "cluster":
            return refs["inbox"]
        plgpu.barrier_arrive(refs["arrived"].at[warpgroup])
        plgpu.barrier_wait(refs["arrived"].at[warpgroup])
        return refs["mail"].at[here, lax.min(split, plan.parts - 1)]

    def _finish(
        self, refs: dict[str, Any], totals: list[Array], warpgroup: Array, row: Array, token: Array, plane: Any, *, fetched: bool
    ) -> None:
        """Applies the epilogue in float32 and writes [piece, 64] of the output, rounded once. The first residual may have
        been fetched."""
        plan = self.plan

        # The last tile may reach beyond the last row.
        @pl.when(row < plan.rows_out)
        def _() -> None:
            sums = self.scaled(refs, totals, row, token)
            value = sums[0] if self.activation is None else ACTIVATIONS[self.activation](sums[0]) * sums[1]
            if self.biased:
                bias = plgpu.load(refs["bias"].at[pl.ds(row, ROW_BLOCK)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                value = value + lax.broadcast_in_dim(bias.astype(jnp.float32), value.shape, [0])
            staging = refs["staging"].at[warpgroup]
            turned = staging.transpose((1, 0))
            for at in range(0, plan.piece, plan.store):
                place = self._place(row, token, at)
                piece = plgpu.layout_cast(value[:, at : at + plan.store], plgpu.Layout.WGMMA_TRANSPOSED)
                if self.residual:
                    if at > 0 or not fetched:
                        self._fetch_residual(refs, warpgroup, place)
                    plgpu.barrier_wait(refs["residual_here"].at[warpgroup])
                    old = plgpu.load(turned, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
                    piece = piece + old.astype(jnp.float32)
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                turned[...] = piece.astype(self.out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, refs["out"].at[(plane, *place)])

    def _place(self, row: Array, token: Array, at: int) -> tuple[Any, Any]:
        """Where the tokens written together lie in [T, out], `at` tokens behind the first of this part."""
        start = pl.multiple_of(token + at, TOKEN_BLOCK)
        return pl.ds(start, self.plan.store), pl.ds(row, ROW_BLOCK)

    def _fetch_residual(self, refs: dict[str, Any], warpgroup: Array, place: tuple[Any, Any]) -> None:
        """Loads it to where the output is going to be staged, once that has been stored."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.copy_gmem_to_smem(refs["residual"].at[place], refs["staging"].at[warpgroup], refs["residual_here"].at[warpgroup])
