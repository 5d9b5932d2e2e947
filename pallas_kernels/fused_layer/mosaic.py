"""A decoder layer's matmuls on NVIDIA GPUs: what the persistent kernel serves, and how it deals out the work.

Owns the configuration, the plan that follows from it and the shapes; the device code is `mosaic_kernel`. Must not know what was
measured: `tuning` keeps that, and dispatch asks it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.dispatch import UnsupportedShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from pallas_kernels.fused_layer import LayerParams, NextParams

TOKENS = 64  # rows of the residual stream, whatever the batch
STEP = 64  # contraction length of a box: as many bfloat16 as a swizzled row holds
SLOT = 128  # rows of weights a slot of the ring holds
ACTIVATIONS = ("silu", "gelu_tanh")
MEETINGS = 3  # grid-wide barriers in a layer
SHARED_BYTES = 226 * 1024
MIN_STAGES = 4  # slots of weights below which the ring is no use


class Config(NamedTuple):
    """How the kernel is cut.

    Attributes:
        ctas: CTAs, one a multiprocessor. They wait for each other, so all must be resident at once: nothing else that stays may
            run on the device beside the kernel.
        x_stages: steps of activations in flight; weights take what room is left.
    """

    ctas: int = 132
    x_stages: int = 8


class Phase(NamedTuple):
    """One matmul.

    Attributes:
        columns: of the result; of each part, where gate and up are parts of one matmul.
        width: columns a CTA owns, of each part. The last CTA moves back where the columns run out, and computes some again.
        parts: 2 for gate and up, else 1.
        boxes: boxes [width, 64] of weights a slot of the ring holds.
        steps: slots that make a contraction.
    """

    columns: int
    width: int
    parts: int
    boxes: int
    steps: int

    @property
    def owners(self) -> int:
        """CTAs that have columns."""
        return -(-self.columns // self.width)


def make_phase(columns: int, contraction: int, *, parts: int = 1, ctas: int) -> Phase:
    """Cuts a matmul for `ctas` CTAs. `columns` and `contraction` are multiples of 8 and 64."""
    width = 8 * -(-columns // (8 * ctas))
    if width > SLOT:
        raise UnsupportedShape(f"{columns} columns are more than {ctas} CTAs can hold, {SLOT} each")
    total = contraction // STEP
    boxes = max(b for b in range(1, SLOT // width + 1) if total % b == 0)
    return Phase(columns, width, parts, boxes, total // boxes)


def plan_phases(key: Mapping[str, int | str], ctas: int) -> tuple[Phase, ...]:
    """Output projection, gate and up, down, and the next layer's q, k, v where there is one; of a `shape_key`."""
    hidden, mlp, attention, next_size = (int(key[name]) for name in ("hidden", "mlp", "attention", "next"))
    cut = functools.partial(make_phase, ctas=ctas)
    phases = (cut(hidden, attention), cut(mlp, hidden, parts=2), cut(hidden, mlp))
    return (*phases, cut(next_size, hidden)) if next_size else phases


def shape_key(
    attention: Array,
    residual: Array,
    meetings: Array,
    layer: Array,
    params: LayerParams,
    following: NextParams | None,
    *,
    activation: str,
    eps: float,
) -> dict[str, int | str]:
    """What a call is tuned by. UnsupportedShape for what the kernel never serves."""
    del meetings, layer, eps
    (tokens, heads), (hidden, mlp) = attention.shape, params.down.shape
    arrays = (attention, residual, params.out, params.gate_up, params.down, *((following.qkv,) if following else ()))
    if any(a.dtype != jnp.bfloat16 for a in arrays):
        raise UnsupportedShape("activations and weights must be bfloat16")
    if any(bias is not None for bias in (params.out_bias, params.gate_up_bias, params.down_bias)):
        raise UnsupportedShape("only q, k and v may have a bias")
    if activation not in ACTIVATIONS:
        raise UnsupportedShape(f"no activation {activation!r}")
    next_size = 0 if following is None else following.qkv.shape[0]
    return {
        "tokens": tokens, "attention": heads, "hidden": hidden, "mlp": mlp, "next": next_size, "activation": activation,
    }  # fmt: skip


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """Configurations worth timing, the one by rule first."""
    tokens, phases = _padded(int(key["tokens"])), plan_phases(key, Config().ctas)
    fitting = [n for n in (8, 6, 5, 4, 3, 2) if stages_of(phases, tokens, n) >= MIN_STAGES]
    return [Config(x_stages=n) for n in fitting]


def _padded(tokens: int) -> int:
    return -(-tokens // 8) * 8


def x_rows_of(phases: tuple[Phase, ...], tokens: int, x_stages: int) -> int:
    return x_stages * max(p.boxes for p in phases) * tokens + TOKENS


def stages_of(phases: tuple[Phase, ...], tokens: int, x_stages: int) -> int:
    """Slots of weights there is room for."""
    return (SHARED_BYTES - x_rows_of(phases, tokens, x_stages) * STEP * 2) // (SLOT * STEP * 2)


def fused_layer(
    attention: Array,
    residual: Array,
    meetings: Array,
    layer: Array,
    params: LayerParams,
    following: NextParams | None,
    *,
    activation: str,
    eps: float,
    config: Config | None = None,
) -> tuple[Array, Array | None, Array]:
    """See `pallas_kernels.fused_layer.fused_layer`; its results have 64 rows."""
    key = shape_key(attention, residual, meetings, layer, params, following, activation=activation, eps=eps)
    tokens, hidden = attention.shape[0], int(key["hidden"])
    if tokens > TOKENS:
        raise UnsupportedShape(f"at most {TOKENS} tokens, got {tokens}")
    sizes = [int(key[name]) for name in ("hidden", "mlp", "attention", "next")]
    if any(size % STEP for size in sizes[:3]) or sizes[3] % 8:
        raise UnsupportedShape(f"sizes must be multiples of {STEP}, got {sizes}")
    if config is None:
        found = candidates(key)
        if not found:
            raise UnsupportedShape(f"no room for the activations of {tokens} tokens beside the weights")
        config = found[0]
    phases = plan_phases(key, config.ctas)
    cores = tuning.cores()
    if cores is not None and config.ctas > cores:
        raise UnsupportedShape(f"{config.ctas} CTAs must be resident at once, the device has {cores} multiprocessors")
    if stages_of(phases, _padded(tokens), config.x_stages) < MIN_STAGES:
        raise UnsupportedShape(f"{config.x_stages} steps of activations leave no room for weights")
    if hidden % phases[0].width or phases[0].owners % 8:
        raise UnsupportedShape(f"a hidden size of {hidden} cannot be dealt out to {config.ctas} CTAs evenly")
    attention = jnp.pad(attention, ((0, _padded(tokens) - tokens), (0, 0)))
    residual = jnp.pad(residual[:TOKENS], ((0, max(0, TOKENS - residual.shape[0])), (0, 0)))
    from pallas_kernels.fused_layer.mosaic_kernel import run_layer  # imports Mosaic, which takes seconds: only where it is used

    new, qkv, meetings = run_layer(
        attention, residual, meetings, layer, params, following,
        phases=phases, activation=activation, eps=eps, config=config, interpreted=tuning.target() is None,
    )  # fmt: skip
    return new, qkv if following else None, meetings
