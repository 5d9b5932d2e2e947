"""Decode-shaped matmuls on Hopper: which calls the kernel serves, and which configurations are worth timing for a shape.

Owns the checks, the tuning keys, and a rough model of the device that orders configurations. Must not know how the kernel
works inside, nor what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.gated_activation.xla import ACTIVATIONS
from pallas_kernels.matmul.mosaic_plan import (
    AHEAD_BOX,
    K_BLOCK,
    MAX_CLUSTER,
    MAX_TOKENS,
    ROW_BLOCK,
    SHARED_BYTES,
    TOKEN_BLOCK,
    Config,
    default_config,
    make_plan,
)

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

IN_KERNEL = ("silu", "gelu_tanh")  # activations that lower; the error function does not


def dense(
    x: Array,
    w: Array,
    bias: Array | None,
    *,
    out_dtype: DTypeLike | None,
    upcoming: Array | None = None,
    config: Config | None = None,
) -> Array:
    """See `pallas_kernels.matmul.dense`. Raises UnsupportedShape with the reason where the kernel cannot serve."""
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    return _run(dense_key(x, w, bias, out_dtype=out_dtype), config, x, w, upcoming, bias=bias, out_dtype=out_dtype)


def residual_dense(
    x: Array, w: Array, residual: Array, bias: Array | None, *, upcoming: Array | None = None, config: Config | None = None
) -> Array:
    """See `pallas_kernels.matmul.residual_dense`. The result is rounded once."""
    key = residual_key(x, w, residual, bias)
    return _run(key, config, x, w, upcoming, bias=bias, residual=residual, out_dtype=residual.dtype)


def gated_dense(x: Array, w: Array, activation: str, *, upcoming: Array | None = None, config: Config | None = None) -> Array:
    """See `pallas_kernels.matmul.gated_dense`. Gate and up stay in float32 and only the product is rounded."""
    return _run(gated_key(x, w, activation), config, x, w, upcoming, activation=activation, out_dtype=x.dtype)


def dense_key(
    x: Array, w: Array, bias: Array | None, *, out_dtype: DTypeLike | None, upcoming: Array | None = None
) -> dict[str, int | str]:
    """Key of a `dense` call in the tuning table; the hint is no part of it. UnsupportedShape as `dense`."""
    del upcoming
    key = _key(x, w, w.shape[0])
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise UnsupportedShape(f"out_dtype is {out_dtype}; bfloat16 and float32 are written")
    return {**key, "bias": bias_kind(bias), "out_dtype": out_dtype.name}


def residual_key(
    x: Array, w: Array, residual: Array, bias: Array | None, *, upcoming: Array | None = None
) -> dict[str, int | str]:
    """Key of a `residual_dense` call in the tuning table. UnsupportedShape as `residual_dense`."""
    del upcoming
    if residual.dtype != jnp.bfloat16:
        raise UnsupportedShape(f"the residual is {residual.dtype}; the kernel adds bfloat16")
    return {**_key(x, w, w.shape[0]), "bias": bias_kind(bias), "residual": residual.dtype.name}


def gated_key(x: Array, w: Array, activation: str, *, upcoming: Array | None = None) -> dict[str, int | str]:
    """Key of a `gated_dense` call in the tuning table. UnsupportedShape as `gated_dense`."""
    del upcoming
    if activation not in IN_KERNEL:
        raise UnsupportedShape(f"activation {activation!r} does not lower in a kernel; {', '.join(IN_KERNEL)} do")
    return {**_key(x, w, w.shape[0] // 2), "activation": activation}


def _run(
    key: Mapping[str, int | str],
    config: Config | None,
    x: Array,
    w: Array,
    upcoming: Array | None,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    out_dtype: DTypeLike,
) -> Array:
    config = default_config(key) if config is None else config
    check_config(key, config)
    plan = make_plan(key, config)
    tokens = x.shape[0]
    # The hardware reads zeros beyond the last of up to 8 tokens; more come in eights, so a ragged rest is padded by a pass.
    if tokens > TOKEN_BLOCK:
        x, residual = padded(x), padded(residual)
    upcoming = boxed(upcoming)
    from pallas_kernels.matmul.mosaic_kernel import stream  # only where a kernel is wanted: it takes a second to import

    if config.reduce == "after":
        sums = stream(x, w, None, None, upcoming, plan=plan, activation=None, out_dtype=jnp.float32).sum(0)
        return epilogue(sums, bias, residual, activation).astype(out_dtype)[:tokens]
    return stream(x, w, bias, residual, upcoming, plan=plan, activation=activation, out_dtype=out_dtype)[0, :tokens]


def padded(array: Array | None) -> Array | None:
    """With rows of zeros up to a multiple of 8."""
    if array is None or array.shape[0] % TOKEN_BLOCK == 0:
        return array
    return jnp.pad(array, ((0, -array.shape[0] % TOKEN_BLOCK), *((0, 0),) * (array.ndim - 1)))


def boxed(upcoming: Array | None) -> Array | None:
    """The hint, if it is of a shape that can be asked for; others are not worth a case."""
    if upcoming is None or any(size % box for size, box in zip(upcoming.shape, AHEAD_BOX, strict=True)):
        return None
    return upcoming


def epilogue(sums: Array, bias: Array | None, residual: Array | None, activation: str | None) -> Array:
    """What the kernel does to its sums, for those that XLA added."""
    if activation is not None:
        gate, up = jnp.split(sums, 2, axis=-1)
        sums = ACTIVATIONS[activation](gate) * up
    for term in (bias, residual):
        sums = sums if term is None else sums + term.astype(jnp.float32)
    return sums


def _key(x: Array, w: Array, out: int) -> dict[str, int | str]:
    """The part of a key that all operations share, for operands that the kernel takes."""
    tokens, depth = x.shape
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise UnsupportedShape(f"the kernel multiplies bfloat16, not {x.dtype} by {w.dtype}")
    if not 1 <= tokens <= MAX_TOKENS:
        raise UnsupportedShape(f"{tokens} tokens; the kernel takes 1 to {MAX_TOKENS}")
    if depth == 0 or depth % K_BLOCK:
        raise UnsupportedShape(f"the weights' inner size {depth} is not a multiple of {K_BLOCK}")
    if out == 0 or out % ROW_BLOCK:
        raise UnsupportedShape(f"the output's size {out} is not a multiple of {ROW_BLOCK}")
    return {"tokens": tokens, "in": depth, "out": out}


def bias_kind(bias: Array | None) -> str:
    if bias is None:
        return "none"
    if bias.dtype not in (jnp.bfloat16, jnp.float32):
        raise UnsupportedShape(f"the bias is {bias.dtype}; the kernel adds bfloat16 or float32")
    return bias.dtype.name


def check_config(key: Mapping[str, int | str], config: Config) -> None:
    """Raises UnsupportedShape where a configuration, perhaps tuned for more tokens, does not fit a call."""
    plan = make_plan(key, config)
    if config.cluster_size > MAX_CLUSTER or config.block_k % (plan.k_block * config.depth):
        raise UnsupportedShape(f"{config} has clusters of more than {MAX_CLUSTER} or an odd block")
    if config.depth > 1 and plan.split_in_cluster:
        raise UnsupportedShape(f"{config} divides the contraction among warpgroups and in a cluster; one of them at a time")
    if plan.shared_bytes > SHARED_BYTES:
        raise UnsupportedShape(f"{config} takes {plan.shared_bytes} bytes of shared memory, {SHARED_BYTES} are there")
    if plan.tokens // TOKEN_BLOCK % config.share:
        raise UnsupportedShape(f"{plan.tokens} tokens do not divide among {config.share} CTAs in blocks of {TOKEN_BLOCK}")
