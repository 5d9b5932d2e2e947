"""A decoder layer's matmuls on NVIDIA GPUs: what the persistent kernel serves, and how it deals out the work.

Owns the configuration, the plan that follows from it and the shapes; the device code is `mosaic_kernel`. Must not know what was
measured: `tuning` keeps that, and dispatch asks it.
"""

from __future__ import annotations

import contextlib
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
SLOT = 128  # rows of boxes a slot of shared memory holds, 16 KiB
SLOTS = 14  # of shared memory; the barriers lie in what they leave
ACTIVATIONS = ("silu", "gelu_tanh")
MEETINGS = 3  # grid-wide barriers in a layer
MIN_STAGES = 4  # slots of weights below which the ring is no use
MAX_X_STAGES = 16


class Config(NamedTuple):
    """How the kernel is cut.

    Attributes:
        ctas: CTAs, one a multiprocessor. They wait for each other, so all must be resident at once: nothing else that stays may
            run on the device beside the kernel.
        x_slots: slots of shared memory for activations; weights take the others.
        boxes: pieces of the contraction that one copy brings, at most: a copy is one instruction, and narrow columns would
            else be bound by how many of them can be issued.
        ahead: slots of weights behind those the ring holds that are asked for in the L2 cache, once a matmul, when its
            first ones fill the ring: memory has something to do while the CTAs meet for longer than the ring lasts.
    """

    ctas: int = 132
    x_slots: int = 3
    boxes: int = 8
    ahead: int = 0


class Phase(NamedTuple):
    """One matmul.

    Attributes:
        columns: of the result; of each part, where gate and up are parts of one matmul.
        width: columns a CTA owns, of each part. The last CTA moves back where the columns run out, and computes some again.
        parts: 2 for gate and up, else 1.
        boxes: boxes [width, 64] of weights a slot of the ring holds, and of as many a step of activations.
        steps: steps that make a contraction.
        x_stages: steps of activations there is room for.
    """

    columns: int
    width: int
    parts: int
    boxes: int
    steps: int
    x_stages: int

    @property
    def rows(self) -> int:
        """Rows of as many boxes side by side as a slot of shared memory holds."""
        return SLOT // self.boxes

    @property
    def owners(self) -> int:
        """CTAs that have columns."""
        return -(-self.columns // self.width)


def make_phase(columns: int, contraction: int, tokens: int, config: Config, *, parts: int = 1) -> Phase:
    """Cuts a matmul. `columns` and `tokens` are multiples of 8, `contraction` of 64.

    Raises:
        UnsupportedShape: there is no room for a CTA's columns, or for the activations.
    """
    width = 8 * -(-columns // (8 * config.ctas))
    if width > SLOT:
        raise UnsupportedShape(f"{columns} columns are more than {config.ctas} CTAs can hold, {SLOT} each")
    total, x_rows = contraction // STEP, config.x_slots * SLOT
    fitting = [b for b in (1, 2, 4, 8) if b <= config.boxes and b * width <= SLOT and total % b == 0 and 2 * b * tokens <= x_rows]
    if not fitting or config.x_slots > SLOTS - MIN_STAGES:
        raise UnsupportedShape(f"{config.x_slots} slots of {SLOTS} do not leave room for both {tokens} tokens and the weights")
    boxes = fitting[-1]
    return Phase(columns, width, parts, boxes, total // boxes, min(MAX_X_STAGES, x_rows // (boxes * tokens)))


def plan_phases(key: Mapping[str, int | str], config: Config) -> tuple[Phase, ...]:
    """Output projection, gate and up, down, and the next layer's q, k, v where there is one; of a `shape_key`."""
    hidden, mlp, attention, next_size = (int(key[name]) for name in ("hidden", "mlp", "attention", "next"))
    cut = functools.partial(make_phase, tokens=padded(int(key["tokens"])), config=config)
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
    """Configurations worth timing, the one by rule first: room for two steps of the widest copy, and then some."""
    tokens = padded(int(key["tokens"]))
    by_rule = 3 if tokens <= 16 else 4 if tokens <= 32 else 6
    found: dict[tuple[tuple[Phase, ...], int], Config] = {}
    ways = ((8, 0, 0), (8, -1, 0), (8, 1, 0), (8, 0, 4), (8, 0, 8), (8, 2, 0), (4, 0, 0), (2, 0, 0), (2, 0, 8), (1, 0, 0))
    for boxes, more, ahead in ways:
        config = Config(x_slots=by_rule + more, boxes=boxes, ahead=ahead)
        with contextlib.suppress(UnsupportedShape):
            found.setdefault((plan_phases(key, config), ahead), config)
    return list(found.values())


def padded(tokens: int) -> int:
    """Rows of activations that are copied."""
    return -(-tokens // 8) * 8


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
        config = next(iter(candidates(key)), Config())  # where none fits, the plan says why
    phases = plan_phases(key, config)
    cores = tuning.cores()
    if cores is not None and config.ctas > cores:
        raise UnsupportedShape(f"{config.ctas} CTAs must be resident at once, the device has {cores} multiprocessors")
    if hidden % phases[0].width or phases[0].owners % 8:
        raise UnsupportedShape(f"a hidden size of {hidden} cannot be dealt out to {config.ctas} CTAs evenly")
    attention = jnp.pad(attention, ((0, padded(tokens) - tokens), (0, 0)))
    residual = jnp.pad(residual[:TOKENS], ((0, max(0, TOKENS - residual.shape[0])), (0, 0)))
    from pallas_kernels.fused_layer.mosaic_kernel import run_layer  # imports Mosaic, which takes seconds: only where it is used

    new, qkv, meetings = run_layer(
        attention, residual, meetings, layer, params, following,
        phases=phases, activation=activation, eps=eps, config=config, interpreted=tuning.target() is None,
    )  # fmt: skip
    return new, qkv if following else None, meetings
