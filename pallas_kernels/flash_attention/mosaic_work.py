"""The work of a CTA of flash attention: which tile of queries comes when, which keys it sees, and all copies into shared memory.

Owns that, as traced by `mosaic_kernel`. Must not know what is computed from queries, keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_sizes import FAR
from pallas_kernels.flash_attention.mosaic_plan import ALIGN, WARPGROUPS, Plan

if TYPE_CHECKING:
    from jax import Array


class Units:
    """The units of work of one CTA, a unit being a tile of tokens and a group of heads.

    They are dealt out back and forth, so that no CTA always gets the longer one of two. `count` is this CTA's share.
    """

    def __init__(self, plan: Plan, inputs: dict[str, Any]) -> None:
        self.plan, self.inputs = plan, inputs
        self.cta = lax.axis_index("cta")
        total = inputs["count"][0] * plan.groups
        rounds = lax.div(total, jnp.int32(plan.ctas))
        last = self._place(rounds) < total - rounds * plan.ctas
        self.count = rounds + jnp.where(last, 1, 0)

    def unit(self, index: Array) -> Unit:
        """This CTA's unit of a number."""
        return Unit(self.plan, self.inputs, index * self.plan.ctas + self._place(index))

    def _place(self, index: Array) -> Array:
        return jnp.where(lax.rem(index, jnp.int32(2)) == 0, self.cta, self.plan.ctas - 1 - self.cta)


class Unit:
    """One unit of work.

    Attributes:
        tile, group: in order of work. kv_head, head: its kv head, and the first of its query heads.
        first, dead, live, row: as in `Tiles`.
        pad: keys in front of the row's own that are copied with them, because copies begin at multiples of ALIGN. All that
            follows counts keys from there.
        position: where a query at `first` stands among its row's keys. length: behind the row's last key.
        reach: keys that a query sees before it, itself included.
        seen: the first key that a query sees.
        steps, full: blocks of keys, and those of them in which every query sees every key (and, if there is a relative bias,
            from so far that all have the same); these come first.
    """

    def __init__(self, plan: Plan, inputs: dict[str, Any], number: Array) -> None:
        self.plan, self.inputs = plan, inputs
        groups, keys = jnp.int32(plan.groups), jnp.int32(plan.keys)
        self.tile = lax.div(number, groups)
        self.group = number - self.tile * groups
        self.head = self.group * plan.heads
        self.kv_head = lax.div(self.group, jnp.int32(plan.groups // plan.kv_heads))
        self.first, self.dead, self.live, position, self.row, length = (inputs["tiles"][field, self.tile] for field in range(6))
        self.pad = jnp.int32(0) if plan.page else lax.rem(inputs["places"][self.row], jnp.int32(ALIGN))
        self.position, self.length = position + self.pad, length + self.pad
        window = inputs["window"][0]
        self.reach = jnp.where(window > 0, lax.min(window, jnp.int32(FAR)), FAR)
        zero = jnp.int32(0)

        query = self.position + self.dead
        self.seen = lax.max(query + 1 - self.reach, self.pad)
        last = self.position + self.live  # behind the last query
        end = last if plan.causal else lax.min(last - 1 + self.reach, self.length)
        self._first = lax.div(self.seen, keys)
        self._end = lax.div(end + (keys - 1), keys)
        # The window of the tile's last query decides where full blocks begin, that of its first where they end.
        begin = lax.div(lax.max(self.position + plan.tile_tokens - self.reach, self.pad) + (keys - 1), keys)
        whole = query + 1 if plan.causal else lax.min(query + self.reach, self.length)
        whole = lax.max(whole - (plan.bias_width - 1), zero) if plan.bias_width else whole
        self._full = lax.clamp(self._first, begin, self._end)
        self.full = lax.max(lax.min(lax.div(whole, keys), self._end) - self._full, zero)
        self.steps = lax.max(self._end - self._first, jnp.int32(1))  # a unit of none would break the warpgroups' turns

    def start(self, step: Array) -> Array:
        """The first key of a step's block, counted from the beginning of the row."""
        before = self._full - self._first  # blocks in front of the full ones
        rest = step - self.full
        other = self._first + rest + jnp.where(rest >= before, self.full, 0)
        return jnp.where(rest < 0, self._full + step, other) * self.plan.keys


class Copier:
    """The warpgroup that issues all copies into shared memory, in the order in which the others need them."""

    def __init__(self, plan: Plan, inputs: dict[str, Any], buffers: dict[str, Any], q_ring: Any) -> None:
        self.plan, self.inputs, self.buffers, self.q_ring = plan, inputs, buffers, q_ring

    def run(self, units: Units) -> None:
        plan = self.plan

        def one_unit(index: Array, done: Array) -> Array:
            unit = units.unit(index)
            self._fetch_queries(unit, index)

            def step(number: Array, starts: tuple[Array, ...]) -> tuple[Array, ...]:
                later = self._places(unit, number + 1)  # takes as long as a copy, so it is read ahead
                slot = lax.rem(done + number, jnp.int32(plan.stages))
                for name in ("k", "v"):
                    pl.when(done + number >= plan.stages)(lambda name=name: self._wait(f"{name}_free", slot))
                    self._fetch(name, unit, starts, slot)
                return later

            lax.fori_loop(jnp.int32(0), unit.steps, step, self._places(unit, jnp.int32(0)))
            return done + unit.steps

        done = lax.fori_loop(jnp.int32(0), units.count, one_unit, jnp.int32(0))

        # Every waiter must have seen every phase of a barrier.
        @pl.loop(lax.max(done - plan.stages, jnp.int32(0)), done)
        def _(number: Array) -> None:
            for name in ("k", "v"):
                self._wait(f"{name}_free", lax.rem(number, jnp.int32(plan.stages)))

        @pl.loop(lax.max(units.count - plan.q_stages, jnp.int32(0)), units.count)
        def _(index: Array) -> None:
            self._wait("q_free", lax.rem(index, jnp.int32(plan.q_stages)))

    def _wait(self, name: str, slot: Array) -> None:
        plgpu.barrier_wait(self.buffers[name].at[slot])

    def _fetch_queries(self, unit: Unit, index: Array) -> None:
        """Queries behind the last of the tile are computed in vain: they hold what lies there, and nothing of one tile row
        reaches another."""
        plan = self.plan
        slot = lax.rem(index, jnp.int32(plan.q_stages))
        pl.when(index >= plan.q_stages)(lambda: self._wait("q_free", slot))
        for warpgroup in range(WARPGROUPS):
            for head in range(plan.heads):
                first = pl.multiple_of(unit.first + warpgroup * plan.tokens, ALIGN)
                source = self.inputs["q"].at[pl.ds(first, plan.tokens), unit.head + head]
                target = self.q_ring.at[slot, warpgroup, pl.ds(head * plan.tokens, plan.tokens)]
                plgpu.copy_gmem_to_smem(source, target, self.buffers["q_full"].at[slot])

    def _places(self, unit: Unit, step: Array) -> tuple[Array, ...]:
        """Where the parts of a block begin: a row of the keys, or of the pool for each page."""
        plan, places = self.plan, self.inputs["places"]
        start = unit.start(step)
        if not plan.page:
            return (places[unit.row] - unit.pad + start,)
        first, last = lax.div(start, jnp.int32(plan.page)), places.shape[1] - 1
        ids = [places[unit.row, lax.clamp(0, first + page, last)] for page in range(plan.copies)]
        offset = self.inputs["page_offset"][0]
        return tuple(((one + offset) * plan.kv_heads + unit.kv_head) * plan.page for one in ids)

    def _fetch(self, name: str, unit: Unit, starts: tuple[Array, ...], slot: Array) -> None:
        plan = self.plan
        ring, full = self.buffers[f"{name}_ring"], self.buffers[f"{name}_full"].at[slot]
        if not plan.page:
            source = self.inputs[name].at[pl.ds(pl.multiple_of(starts[0], ALIGN), plan.keys), unit.kv_head]
            plgpu.copy_gmem_to_smem(source, ring.at[slot], full)
            return
        for index, start in enumerate(starts):
            source = self.inputs[name].at[pl.ds(pl.multiple_of(start, ALIGN), plan.page)]
            plgpu.copy_gmem_to_smem(source, ring.at[slot, pl.ds(index * plan.page, plan.page)], full)
