"""INT8 matmuls on Hopper that stream weights past a few tokens: which calls the kernel serves.

Owns the checks and the tuning keys. Must not know how the kernel works inside, nor what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.int8_matmul import choice
from pallas_kernels.matmul.mosaic import IN_KERNEL, bias_kind, boxed, check_config, epilogue, padded
from pallas_kernels.matmul.mosaic_plan import MAX_TOKENS, ROW_BLOCK, TOKEN_BLOCK, Config, default_config, make_plan
from pallas_kernels.quantized import reorder

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from pallas_kernels.quantized import QuantizedTensor

MAX_WIDENED_TOKENS = 128
"""A thread has no registers for the sums of gate and up of more, beside the weights that it widens."""

_LINE = 128  # int8 elements of a swizzled line, which a row of weights is a multiple of


def w8a16(
    x: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
    config: Config | None = None,
) -> Array:
    """See `pallas_kernels.int8_matmul.w8a16`; rounded once. Raises UnsupportedShape with the reason where it cannot serve."""
    key = w8a16_key(x, w, bias, residual, activation=activation, out_dtype=out_dtype)
    return _run(key, config, x, None, w, bias, residual, activation, out_dtype, upcoming)


def w8a8(
    xq: Array,
    x_scale: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
    config: Config | None = None,
) -> Array:
    """See `pallas_kernels.int8_matmul.w8a8`; rounded once. Raises UnsupportedShape with the reason where it cannot serve."""
    key = w8a8_key(xq, x_scale, w, bias, residual, activation=activation, out_dtype=out_dtype)
    xq = reorder(xq) if w.packed else xq
    return _run(key, config, xq, x_scale, w, bias, residual, activation, out_dtype, upcoming)


def w8a16_key(
    x: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
) -> dict[str, int | str]:
    """Key of a `w8a16` call in the tuning table; the hint is no part of it. UnsupportedShape as `w8a16`."""
    del upcoming
    if x.dtype != jnp.bfloat16:
        raise UnsupportedShape(f"the kernel multiplies bfloat16 by int8, not {x.dtype}")
    _check_few(x, MAX_WIDENED_TOKENS)
    return {**served_key(x, w, bias, residual, activation, out_dtype), "operands": "w8a16"}


def w8a8_key(
    xq: Array,
    x_scale: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
) -> dict[str, int | str]:
    """Key of a `w8a8` call in the tuning table; the hint is no part of it. UnsupportedShape as `w8a8`."""
    del x_scale, upcoming
    _check_few(xq, MAX_TOKENS)
    return {**served_key(xq, w, bias, residual, activation, out_dtype), "operands": "w8a8"}


def served_key(
    x: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    activation: str | None,
    out_dtype: DTypeLike,
) -> dict[str, int | str]:
    """The key that both have in common, for what a kernel takes."""
    key = choice.shape_key(x, w, bias, residual, activation=activation, out_dtype=out_dtype)
    if key["in"] == 0 or int(key["in"]) % _LINE:
        raise UnsupportedShape(f"the weights' inner size {key['in']} is not a multiple of {_LINE}")
    if key["out"] == 0 or int(key["out"]) % ROW_BLOCK:
        raise UnsupportedShape(f"the output's size {key['out']} is not a multiple of {ROW_BLOCK}")
    if key["out_dtype"] not in ("bfloat16", "float32"):
        raise UnsupportedShape(f"out_dtype is {key['out_dtype']}; bfloat16 and float32 are written")
    if residual is not None and residual.dtype != jnp.bfloat16:
        raise UnsupportedShape(f"the residual is {residual.dtype}; the kernel adds bfloat16")
    if activation not in (None, *IN_KERNEL):
        raise UnsupportedShape(f"activation {activation!r} does not lower in a kernel; {', '.join(IN_KERNEL)} do")
    bias_kind(bias)
    return key


def _check_few(x: Array, most: int) -> None:
    if not 1 <= x.shape[0] <= most:
        raise UnsupportedShape(f"{x.shape[0]} tokens; the kernel takes 1 to {most}")


def _run(
    key: Mapping[str, int | str],
    config: Config | None,
    x: Array,
    x_scale: Array | None,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None,
) -> Array:
    config = default_config(key) if config is None else config
    check_config(key, config)
    tokens = x.shape[0]
    out_dtype = out_dtype if residual is None else residual.dtype
    if tokens > TOKEN_BLOCK:  # the hardware reads zeros beyond the last of fewer; but for scales, which no copy brings
        x, residual = padded(x), padded(residual)
    x_scale = padded(x_scale)
    hint = boxed(None if upcoming is None else upcoming.qvalue)
    options = {"plan": make_plan(key, config), "packed": w.packed, "interpreted": tuning.target() is None}
    from pallas_kernels.int8_matmul.mosaic_stream import stream  # only where a kernel is wanted: it takes a second to import

    if config.reduce != "after":
        args = (x, w.qvalue, x_scale, w.channel_scale, bias, residual, hint)
        return stream(*args, activation=activation, out_dtype=out_dtype, **options)[0, :tokens]
    sum_dtype = jnp.float32 if x_scale is None else jnp.int32
    sums = stream(x, w.qvalue, None, None, None, None, hint, activation=None, out_dtype=sum_dtype, **options).sum(0)
    sums = sums.astype(jnp.float32)
    if x_scale is not None:
        sums = sums * x_scale[: len(sums), None]
    return epilogue(sums * w.channel_scale, bias, residual, activation).astype(out_dtype)[:tokens]
