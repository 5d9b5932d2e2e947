"""A CTA's place in the work of paged attention, and its copies into shared memory, as traced by `mosaic_kernel`.

Owns which keys a CTA reads, where they lie in the pool and when their copies start. Must not know what is computed from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_sizes import FAR
from pallas_kernels.paged_attention.mosaic_plan import Plan

if TYPE_CHECKING:
    from jax import Array


class Work:
    """The share of one CTA.

    Attributes:
        row, group, split: the request, the group of kv heads and the share of the keys; place, its index in partial results.
        member: of the CTA's team, which divides the split.
        first_token, live: the first query of the CTA in q, and how many there are.
        position: of that query in its sequence. reach: keys that a query sees, itself included.
        seen, end: the keys that at least one query sees, [seen, end).
        first, steps: the first block of this split, or of the member's share of it, and how many it has. Where there are fewer
            blocks than shares, the first ones get one each.
        busy: whether the split has any.
    """

    def __init__(self, plan: Plan, inputs: dict[str, Any], buffers: dict[str, Any]) -> None:
        self.plan, self.inputs, self.buffers = plan, inputs, buffers
        (self.k_ring, self.v_ring), (self.results_stage, *lent) = buffers["ring"]
        self.lent = lent[0] if lent else None
        self.member: Array | int = lax.axis_index("warpgroup") if plan.team > 1 else 0

        self.row, self.split = lax.axis_index("row"), lax.axis_index("split")
        if plan.longest_first:
            self.row = inputs["order"][self.row]
        group = lax.axis_index("group")
        self.group = group if plan.parts == 1 else lax.div(group, jnp.int32(plan.parts))
        first_query = jnp.int32(0) if plan.parts == 1 else lax.rem(group, jnp.int32(plan.parts)) * plan.queries
        self.place = (self.row, group, self.split)

        length = inputs["seq_lens"][self.row]
        if plan.by_row:
            self.first_token, self.live = self.row, jnp.int32(1)
            self.position = length - 1
        else:
            start = inputs["query_starts"][self.row]
            count = inputs["query_starts"][self.row + 1] - start
            self.first_token = start + first_query
            self.live = jnp.where(length > 0, jnp.clip(count - first_query, 0, plan.queries), 0)
            self.position = length - count + first_query
        # Keys seen by at least one query; the blocks in which they lie; this split's share of those.
        window = inputs["window"][0]
        self.reach = jnp.where(window > 0, window, FAR)
        self.page_offset = inputs["page_offset"][0]
        self.seen = lax.max(self.position + 1 - self.reach, jnp.int32(0))
        self.end = self.position + self.live
        first = lax.div(self.seen, jnp.int32(plan.block))
        blocks = lax.max(lax.div(self.end + (plan.block - 1), jnp.int32(plan.block)) - first, jnp.int32(0))
        blocks = jnp.where(self.live > 0, blocks, 0)
        shares = lax.max(lax.min(blocks, jnp.int32(plan.splits * plan.team)), jnp.int32(1))

        def begin(share: Array) -> Array:
            return lax.div(blocks * lax.min(share, shares), shares)

        share = self.split * plan.team + self.member
        self.steps = begin(share + 1) - begin(share)
        self.first = first + begin(share)
        self.busy = begin(self.split * plan.team) < blocks

    def slot(self, step: Array | int) -> Array | int:
        """Where in the rings a block of this member lies."""
        within = step % self.plan.stages if isinstance(step, int) else lax.rem(step, jnp.int32(self.plan.stages))
        return within if self.plan.team == 1 else self.member * self.plan.stages + within

    def page_starts(self, step: Array) -> tuple[Array, ...]:
        """Where the pages of a block begin in the pool, in rows. Read ahead of their use: it takes as long as a copy."""
        plan = self.plan
        first = lax.div((self.first + step) * plan.block, jnp.int32(plan.page))
        last = self.inputs["page_table"].shape[1] - 1
        ids = (self.inputs["page_table"][self.row, lax.min(first + page, jnp.int32(last))] for page in range(plan.pages))
        return tuple(((one + self.page_offset) * plan.groups + self.group) * (plan.heads * plan.page) for one in ids)

    def fetch(self, name: str, step: Array | int, pages: tuple[Array, ...], slot: Array | int) -> None:
        """Starts the copies of a block of keys or values: one box a page, or one a head if a page has several blocks."""
        plan = self.plan
        ring, full = {"k": (self.k_ring, self.buffers["k_full"]), "v": (self.v_ring, self.buffers["v_full"])}[name]
        if plan.block >= plan.page:
            rows, starts = plan.heads * plan.page, pages
        else:
            within = lax.rem(self.first + step, jnp.int32(plan.page // plan.block)) * plan.block
            rows, starts = plan.block, [pages[0] + head * plan.page + within for head in range(plan.heads)]
        for index, start in enumerate(starts):
            source = self.inputs[name].at[pl.ds(pl.multiple_of(start, 8), rows)]
            place = pl.ds(index * rows, rows)
            plgpu.copy_gmem_to_smem(source, ring.at[slot, place], full.at[slot])
            if plan.quantized:
                scales = self.inputs[f"{name}_scale"].at[pl.ds(pl.multiple_of(start, 16), rows)]
                plgpu.copy_gmem_to_smem(scales, self.buffers[f"{name}_scales"].at[slot, place], full.at[slot])

    def fetch_first(self) -> None:
        """Starts the copies of the first blocks, as many as fit. All their page ids are read before the first copy."""
        ids = [self.page_starts(jnp.int32(step)) for step in range(self.plan.stages)]
        for step in range(self.plan.stages):

            @pl.when(step < self.steps)
            def _(step: int = step) -> None:
                self.fetch("k", step, ids[step], self.slot(step))
                self.fetch("v", step, ids[step], self.slot(step))

    def copy_all(self) -> None:
        """The copying warpgroup."""
        stages = self.plan.stages
        if self.plan.tiles > 1:
            plgpu.set_max_registers(40, action="decrease")
        self.fetch_first()

        def step(index: Array, ids: tuple[Array, ...]) -> tuple[Array, ...]:
            slot = self.slot(index)
            later = self.page_starts(index + 1)
            for name in ("k", "v"):
                plgpu.barrier_wait(self.buffers[f"{name}_free"].at[slot])
                self.fetch(name, index, ids, slot)
            return later

        lax.fori_loop(jnp.int32(stages), self.steps, step, self.page_starts(jnp.int32(stages)))

        @pl.loop(lax.max(self.steps - stages, jnp.int32(0)), self.steps)
        def _(index: Array) -> None:
            slot = self.slot(index)
            plgpu.barrier_wait(self.buffers["k_free"].at[slot])
            plgpu.barrier_wait(self.buffers["v_free"].at[slot])

    def fetch_queries(self) -> None:
        """All query tokens of the CTA. Queries behind the row's last, heads behind the group's last and tile rows behind those
        are computed in vain: they hold what lies there, and nothing of one tile row reaches another."""
        plan = self.plan
        last = self.inputs["q"].shape[0] // (plan.groups * (1 if plan.few_heads else plan.rows)) - 1
        for index in range(plan.queries):
            entry = lax.min(self.first_token + index, jnp.int32(last)) * plan.groups + self.group
            if plan.few_heads:  # a traced start, as rows beyond the last head read as zero
                source = self.inputs["q"].at[entry, pl.ds(0 * entry, plan.rows)]
            else:
                source = self.inputs["q"].at[pl.ds(entry * plan.rows, plan.rows)]
            target = self.buffers["q_tile"].at[pl.ds(index * plan.rows, plan.rows)]
            plgpu.copy_gmem_to_smem(source, target, self.buffers["q_full"])
