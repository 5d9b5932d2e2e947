"""The matmuls of a decoder layer as one persistent Mosaic GPU kernel.

Each CTA owns some columns of every matmul's result, with the whole contraction: what stands between two matmuls (residual
addition, norm, gate, bias) happens in its registers, and a grid-wide barrier is all that separates one matmul from the next.
A warpgroup of its own streams the weights through a ring in shared memory. It waits for nothing but room, so the ring fills
with the next matmul's weights while the others meet at the barrier, and the memory system stays busy.

A norm's division is moved behind the matmul that reads it: x * weight goes into the matmul, the row's factor
1 / sqrt(mean(x^2) + eps) multiplies the result. So the factor is needed a whole matmul later than its sums are made.

Tokens are wgmma's rows, of which there are always 64. Those beyond the batch compute on whatever lies in shared memory;
rows do not mix, so it reaches no result.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_layer.mosaic import MEETINGS, SLOTS, STEP, TOKENS, Config, Phase

if TYPE_CHECKING:
    from jax import Array

    from pallas_kernels.fused_layer import LayerParams, NextParams

_ASKED = 256  # columns of a request to the L2 cache, at most: no more are taken, and only the card would say so
_SWIZZLE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class _Plan(NamedTuple):
    tokens: int
    phases: tuple[Phase, ...]
    activation: str
    eps: float
    has_bias: bool
    config: Config
    only: int | None  # interpreter: run one phase alone; no grid-wide barrier exists there

    @property
    def stages(self) -> int:
        """Slots of weights."""
        return SLOTS - self.config.x_slots


def _meet(count: int, *, wait: bool) -> Any:
    """Grid barrier on one int32 that starts at 0: either arrive, or wait until `count` warpgroups have arrived.

    What a warpgroup wrote before it arrived can be read, by loads and by the copy engine, behind the wait.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def arrive(_: Any, ref: Any) -> None:
        mgpu_utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def await_all(_: Any, ref: Any) -> None:
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(ref)).wait(count, decrement=False, memory_scope="gpu")
        mgpu_utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

    return await_all if wait else arrive


@functools.partial(jax.jit, static_argnames=("phases", "activation", "eps", "config", "interpreted"))
def run_layer(
    attention: Array,
    residual: Array,
    meetings: Array,
    layer: Array,
    params: LayerParams,
    following: NextParams | None,
    *,
    phases: tuple[Phase, ...],
    activation: str,
    eps: float,
    config: Config,
    interpreted: bool,
) -> tuple[Array, Array, Array]:
    """The kernel. Jitted so that a model lowers it once, not once a layer.

    interpreted: for Pallas's interpreter, whose CTAs run one after the other and could not meet: one kernel a matmul.
    """
    tokens, (hidden, mlp), dtype = attention.shape[0], params.down.shape, residual.dtype
    out_type = (
        jax.ShapeDtypeStruct((TOKENS, hidden), dtype),  # the residual stream
        jax.ShapeDtypeStruct((TOKENS, phases[-1].columns), dtype),  # the next layer's q, k, v
        jax.ShapeDtypeStruct((TOKENS, hidden), dtype),  # in between: the stream in the middle of the layer
        jax.ShapeDtypeStruct((TOKENS, hidden), dtype),  # in between: the stream times the norm's weight
        jax.ShapeDtypeStruct((TOKENS, mlp), dtype),  # in between: behind the gate
        jax.ShapeDtypeStruct((2, TOKENS, phases[0].owners), jnp.float32),  # in between: sums of squares
    )
    # One memory, seen by each matmul as rows of as many boxes as it copies at once: activations first, then the ring of weights.
    views = [plgpu.SMEM((SLOTS * p.rows, p.boxes * STEP), jnp.bfloat16, transforms=_SWIZZLE) for p in phases]
    stages, x_stages = SLOTS - config.x_slots, max(p.x_stages for p in phases)
    barriers = [plgpu.Barrier(num_barriers=n) for n in (stages, stages, x_stages, x_stages)]  # full and empty, of each ring
    scratch = [plgpu.RefUnion(*views), *barriers]
    w_next, next_norm, bias = params.out, params.norm, None  # unused, behind the last layer
    if following is not None:
        w_next, next_norm, bias = following.qkv, following.norm, following.qkv_bias
    plan = _Plan(tokens, phases, activation, eps, bias is not None, config, None)
    added = jnp.zeros((8,), jnp.float32) if bias is None else bias.astype(jnp.float32)
    weights = (params.out, params.gate_up, params.down, w_next)
    operands = (attention, residual, (layer * MEETINGS).reshape(1), *weights, params.norm, next_norm, added)

    def run(plan: _Plan, meetings_ref: Any, *state: Any) -> Any:
        return plgpu.kernel(
            functools.partial(_body, plan),
            out_type=out_type if plan.only is None else (),
            grid=(config.ctas,),
            grid_names=("cta",),
            num_threads=3,
            thread_name="wg",
            scratch_types=scratch,
        )(*operands, meetings_ref, *state)

    meetings_ref = jax.new_ref(meetings)
    if not interpreted:
        new_residual, out, *_ = run(plan, meetings_ref)
        return new_residual, out, jax.freeze(meetings_ref)
    state = [jax.new_ref(jnp.full(t.shape, jnp.nan, t.dtype)) for t in out_type]
    for only in range(len(phases)):
        run(plan._replace(only=only), meetings_ref, *state)
    return jax.freeze(state[0]), jax.freeze(state[1]), meetings


def _body(plan: _Plan, *refs: Any) -> None:
    (attention, residual, first, w_out, w_gate_up, w_down, w_next, mlp_norm, next_norm, bias, meetings, *rest) = refs
    new_residual, out, middle, x, gated, squares, memory, w_full, w_empty, x_full, x_empty = rest
    views = tuple(memory)
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    phases = [(i, p) for i, p in enumerate(plan.phases) if plan.only in (None, i)]
    base = first[0]

    def meet(number: int, *, wait: bool) -> None:
        if plan.only is None:
            _meet(plan.config.ctas, wait=wait)(meetings.at[base + number])

    @pl.when(wg == 0)
    def _() -> None:
        count = jnp.int32(0)
        for i, phase in phases:
            _copy_weights(plan, phase, cta, count, (w_out, w_gate_up, w_down, w_next)[i], views[i], w_full, w_empty)
            count = count + _steps(phase, cta) * phase.parts
        _drain(count, w_empty, plan.stages)

    @pl.when(wg == 1)
    def _() -> None:
        for i, phase in phases:
            if i:
                meet(i - 1, wait=True)  # behind it nobody reads the room of earlier activations
            _copy_activations(plan, phase, cta, (attention, x, gated, x)[i], views[i], x_full, x_empty)
            _drain(_steps(phase, cta), x_empty, phase.x_stages)

    @pl.when(wg == 2)
    def _() -> None:
        count = jnp.int32(0)
        for i, phase in phases:
            if i:
                meet(i - 1, wait=True)

            @pl.when(cta < phase.owners)
            def _(i: int = i, phase: Phase = phase, count: Array = count) -> None:
                multiply = functools.partial(_multiply, plan, phase, count, views[i], w_full, w_empty, x_full, x_empty)
                at = (slice(None), pl.ds(_first_column(phase, cta), phase.width))
                if i == 0:
                    _add_to_stream(plan, cta, at, multiply, residual, mlp_norm, middle, x, squares.at[0])
                elif i == 1:
                    _gate(plan, at, multiply, squares.at[0], gated)
                elif i == 2:
                    _add_to_stream(plan, cta, at, multiply, middle, next_norm, new_residual, x, squares.at[1])
                else:
                    _scale(plan, at, multiply, squares.at[1], bias, out)

            count = count + _steps(phase, cta) * phase.parts
            if i < len(plan.phases) - 1:
                meet(i, wait=False)


def _first_column(phase: Phase, cta: Array) -> Array:
    return pl.multiple_of(lax.min(cta * phase.width, jnp.int32(phase.columns - phase.width)), 8)


def _steps(phase: Phase, cta: Array) -> Array:
    """Steps that a CTA goes through in a phase; each takes one of activations and `parts` slots of weights."""
    return jnp.where(cta < phase.owners, phase.steps, 0)


def _drain(count: Array, empty: Any, stages: int) -> None:
    @pl.loop(lax.max(count - stages, jnp.int32(0)), count)
    def _(c: Array) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(c, jnp.int32(stages))])


def _await_room(c: Array, empty: Any, stages: int) -> Array:
    slot = lax.rem(c, jnp.int32(stages))

    @pl.when(c >= stages)
    def _() -> None:
        plgpu.barrier_wait(empty.at[slot])

    return slot


def _weight_rows(plan: _Plan, phase: Phase, slot: Array) -> Any:
    """Where in a matmul's view of the memory a slot of weights lies."""
    return pl.ds(pl.multiple_of((plan.config.x_slots + slot) * phase.rows, 8), phase.width)


def _x_row(plan: _Plan, slot: Array) -> Array:
    """Where a step of activations begins. A matmul reads 64 rows from there, of which it needs the first."""
    return pl.multiple_of(slot * plan.tokens, 8)


def _copy_weights(plan: _Plan, phase: Phase, cta: Array, count: Array, source: Any, view: Any, full: Any, empty: Any) -> None:
    """A CTA's weights of one matmul into the ring, behind `count` slots of others."""
    first, slots = _first_column(phase, cta), _steps(phase, cta) * phase.parts

    def piece(at: Array, begin: int, length: int) -> Any:
        """`length` of the contraction's columns of a slot, from its column `begin` on."""
        step, part = lax.div(at, jnp.int32(phase.parts)), lax.rem(at, jnp.int32(phase.parts))
        rows = pl.ds(first + part * phase.columns, phase.width)
        return source.at[rows, pl.ds(step * (phase.boxes * STEP) + begin, length)]

    @pl.loop(0, slots)
    def _(at: Array) -> None:
        slot = _await_room(count + at, empty, plan.stages)
        whole = piece(at, 0, phase.boxes * STEP)
        plgpu.copy_gmem_to_smem(whole, view.at[_weight_rows(plan, phase, slot)], full.at[slot])
        if plan.config.ahead:

            @pl.when(at == plan.stages - 1)
            def _() -> None:
                @pl.loop(at + 1, lax.min(at + 1 + plan.config.ahead, slots))
                def _(later: Array) -> None:
                    for begin in range(0, phase.boxes * STEP, _ASKED):
                        plgpu.async_prefetch(piece(later, begin, min(_ASKED, phase.boxes * STEP)))


def _copy_activations(plan: _Plan, phase: Phase, cta: Array, source: Any, view: Any, full: Any, empty: Any) -> None:
    @pl.loop(0, _steps(phase, cta))
    def _(step: Array) -> None:
        slot = _await_room(step, empty, phase.x_stages)
        k = pl.ds(step * (phase.boxes * STEP), phase.boxes * STEP)
        rows = pl.ds(_x_row(plan, slot), plan.tokens)
        plgpu.copy_gmem_to_smem(source.at[pl.ds(0, plan.tokens), k], view.at[rows], full.at[slot])


def _multiply(
    plan: _Plan, phase: Phase, count: Array, view: Any, w_full: Any, w_empty: Any, x_full: Any, x_empty: Any
) -> list[Array]:
    """A CTA's columns of one matmul, float32 [64, width] of each part."""

    def scope(*accs: Any) -> list[Array]:
        def release(at: Array) -> None:
            """Gives slot `at` back, and the activations with it if no other part reads them."""
            plgpu.barrier_arrive(w_empty.at[lax.rem(count + at, jnp.int32(plan.stages))])

            @pl.when(lax.rem(at, jnp.int32(phase.parts)) == phase.parts - 1)
            def _() -> None:
                step = lax.div(at, jnp.int32(phase.parts))
                plgpu.barrier_arrive(x_empty.at[lax.rem(step, jnp.int32(phase.x_stages))])

        @pl.loop(0, phase.steps)
        def _(step: Array) -> None:
            x_slot = lax.rem(step, jnp.int32(phase.x_stages))
            plgpu.barrier_wait(x_full.at[x_slot])
            for part, acc in enumerate(accs):
                at = step * phase.parts + part
                slot = lax.rem(count + at, jnp.int32(plan.stages))
                plgpu.barrier_wait(w_full.at[slot])
                weights = view.at[_weight_rows(plan, phase, slot)]
                plgpu.wgmma(acc, view.at[pl.ds(_x_row(plan, x_slot), TOKENS)], weights.transpose((1, 0)))
                plgpu.wgmma_wait(1)  # given back one slot late, so that a product overlaps the next wait
                pl.when(at > 0)(functools.partial(release, at - 1))

        results = [acc[...] for acc in accs]
        release(jnp.int32(phase.steps * phase.parts - 1))
        return results

    return list(pl.run_scoped(scope, *[plgpu.ACC((TOKENS, phase.width), jnp.float32)] * phase.parts))


def _load(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(plan: _Plan, ref: Any, value: Array, layout: Any = plgpu.Layout.WGMMA) -> None:
    """Stores rows of a result. Each warp holds 16 of them, and those without a token keep theirs: nobody reads them, and the
    others at the next meeting would wait for them."""
    if plan.only is not None:
        ref[...] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_: Any, target: Any, rows: Any) -> None:
        arith = mgpu_utils.arith
        first = arith.muli(arith.andi(mgpu_utils.warp_idx(sync=False), _i32(3)), _i32(16))
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, first, _i32(plan.tokens))):
            rows.store_untiled(target, optimized=False)

    store(ref, value)


def _i32(value: int) -> Any:
    return mgpu_utils.c(value, mgpu_utils.ir.IntegerType.get_signless(32))


def _add_to_stream(
    plan: _Plan, cta: Array, at: Any, multiply: Any, stream: Any, norm: Any, new_stream: Any, x: Any, squares: Any
) -> None:
    """Residual addition, and what the next matmul reads: the stream times the norm's weight; and sums of squares."""
    old = _load(stream.at[at], plgpu.Layout.WGMMA)
    weight = _load(norm.at[at[1]], plgpu.Layout.WGMMA.reduce(0))
    [result] = multiply()
    new = (result + old.astype(jnp.float32)).astype(stream.dtype)
    _store(plan, new_stream.at[at], new)
    wide = new.astype(jnp.float32)
    _store(plan, x.at[at], (wide * lax.broadcast_in_dim(weight, wide.shape, [1])).astype(x.dtype))
    _store(plan, squares.at[:, cta], (wide * wide).sum(axis=1), plgpu.Layout.WGMMA.reduce(1))


def _factor(plan: _Plan, squares: Any) -> Array:
    """The norm's factor of each token, float32 [64]."""
    return lax.rsqrt(_load(squares, plgpu.Layout.WGMMA).sum(axis=1) * (1.0 / plan.phases[0].columns) + plan.eps)


def _gate(plan: _Plan, at: Any, multiply: Any, squares: Any, gated: Any) -> None:
    factor = _factor(plan, squares)
    gate, up = multiply()
    factor = lax.broadcast_in_dim(factor, gate.shape, [0])
    _store(plan, gated.at[at], (_ACTIVATIONS[plan.activation](gate * factor) * (up * factor)).astype(gated.dtype))


def _scale(plan: _Plan, at: Any, multiply: Any, squares: Any, bias: Any, out: Any) -> None:
    factor = _factor(plan, squares)
    added = _load(bias.at[at[1]], plgpu.Layout.WGMMA.reduce(0)) if plan.has_bias else None
    [result] = multiply()
    result = result * lax.broadcast_in_dim(factor, result.shape, [0])
    if added is not None:
        result = result + lax.broadcast_in_dim(added, result.shape, [1])
    _store(plan, out.at[at], result.astype(out.dtype))


_LOG2_E = 1.4426950408889634


def _silu(x: Array) -> Array:
    return x / (1.0 + jnp.exp2(x * -_LOG2_E))


def _gelu_tanh(x: Array) -> Array:
    """x * sigmoid(2 y), which is 0.5 x (1 + tanh y)."""
    return x / (1.0 + jnp.exp2((x + 0.044715 * x * x * x) * (-2 * 0.7978845608028654 * _LOG2_E)))


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}
